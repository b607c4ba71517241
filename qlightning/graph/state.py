"""State dicts: of a prepared model, which say how it was prepared and may be float ones; and of an int8 model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qlightning.errors import ConfigError
from qlightning.fake_quantize import fake_quantizers
from qlightning.graph import facts
from qlightning.graph.bind import GRAPH_MODULES
from qlightning.nn.quantized import QuantizedLayer

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


def guard(int8: nn.Module) -> None:
    """Lets an int8 model take no state dict but its own: its ranges are constants of its graph, and in none."""
    detach(int8)
    int8.register_load_state_dict_pre_hook(_refuse_others)


def _refuse_others(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, QuantizedLayer)]
    for name, layer in layers:
        for key, own in layer.state_dict().items():
            other = state_dict.get(f"{prefix}{name}.{key}" if name else f"{prefix}{key}")
            if isinstance(other, Tensor) and not torch.equal(other.to(own.device), own):
                raise ConfigError(
                    f"{name or type(module).__name__}: this int8 model takes no other weights, as its ranges would "
                    "stay its own. Load the state dict of the prepared model into a prepared model, and convert that."
                )


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
