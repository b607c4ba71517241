"""The state dict of a prepared model: it says how the model was prepared, and a float one can be loaded as well."""

from __future__ import annotations

from typing import Any

from torch import nn

from qlightning.fake_quantize import fake_quantizers
from qlightning.graph import facts
from qlightning.graph.bind import GRAPH_MODULES

_OURS = frozenset({GRAPH_MODULES, "weight_fake_quant"})


def is_prepared_key(key: str) -> bool:
    """Whether a key of a state dict is one that ``prepare`` has added to the float ones."""
    return not _OURS.isdisjoint(key.split("."))


def attach(model: nn.Module) -> None:
    """Lets the state dicts of a prepared model carry its facts, and lets it take float ones."""
    detach(model)
    model.register_state_dict_post_hook(_write_facts)
    model.register_load_state_dict_pre_hook(_accept_float)


def detach(model: nn.Module) -> None:
    """Undoes :func:`attach`."""
    for key in [key for key, hook in model._state_dict_hooks.items() if hook is _write_facts]:
        del model._state_dict_hooks[key]
    loading = model._load_state_dict_pre_hooks
    for key in [key for key, hook in loading.items() if getattr(hook, "hook", None) is _accept_float]:
        del loading[key]


def _write_facts(module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    if (found := facts.of(module)) is not None:  # a converted copy has the hook, too
        local_metadata[facts.KEY] = found


def _accept_float(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Lets a float state dict leave the module without ranges: those that it had belong to other weights."""
    if facts.of(module) is None or any(key.startswith(prefix) and is_prepared_key(key) for key in state_dict):
        return
    for name, fq in fake_quantizers(module):
        fq.reset()
        state_dict.update({f"{prefix}{name}.{key}": value for key, value in fq.state_dict().items()})
