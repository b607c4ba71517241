"""State dicts of the prepared form meet LightningModules that are not prepared."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from qlightning.callbacks.base import quantizing_callbacks
from qlightning.errors import ConfigError
from qlightning.graph import facts, is_prepared, prepare, unprepare
from qlightning.graph.selection import leave_in_float
from qlightning.graph.state import is_prepared_key
from qlightning.nn.quantized import has_int8_layers


def meet(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Prepares the float parts of a module as the facts of a state dict say, before it is loaded.

    A hook of ``load_state_dict``. What stands in int8 is left alone. Where a state dict of the prepared form has
    lost its facts (averages of weights), a callback of the Trainer says how to prepare; without one it is loaded
    without its ranges, with a warning.

    Raises:
        ConfigError: The module is prepared with other settings (lists the differences), or the state dict is that of an
            int8 model. Nothing is loaded.
    """
    has_int8 = has_int8_layers(module)
    if not has_int8 and (layer := _int8_layer(state_dict, prefix)):
        raise ConfigError(
            f"This state dict is that of an int8 model (layer {layer}). It holds no ranges of activations, so that "
            f"{type(module).__name__} cannot be made from it. Load the checkpoint or the state dict of the prepared "
            "model."
        )
    found = facts.read(state_dict, prefix)
    prepared = []
    try:
        for path, saved in found.items():
            target = _submodule(module, path)
            if target is None or has_int8_layers(target):
                continue
            if (own := facts.of(target)) is not None:
                check_same(saved, own, path or type(module).__name__)
            elif not is_prepared(target):
                qconfig, backend, mode = facts.settings(saved)
                prepared.append(prepare(target, qconfig, backend=backend, mode=mode))
                check_same(saved, facts.of(target) or saved, path or type(module).__name__)
            if facts.of(target) is not None:
                leave_in_float(target, facts.float_choice(saved))
    except BaseException:
        for target in prepared:
            unprepare(target)
        raise
    if found or is_prepared(module) or has_int8:
        return
    if any(key.startswith(prefix) and is_prepared_key(key) for key in state_dict):
        ours = quantizing_callbacks(getattr(module, "_trainer", None))
        if ours:
            ours[0].prepare_for_checkpoint(module)
        else:
            _drop(module, state_dict, prefix)


def check_same(saved: facts.Facts, own: facts.Facts, name: str) -> None:
    """Checks that a module is prepared as the one was that a state dict comes from.

    Raises:
        ConfigError: It is not; lists the differences.
    """
    if other := facts.differences(saved, own):
        raise ConfigError(
            f"{name} was quantized with other settings where this checkpoint was saved: {'; '.join(other)}. Use the "
            "same settings here, evaluate it without a callback, or load it first and unprepare() the nets."
        )


def _int8_layer(state_dict: dict[str, Any], prefix: str) -> str | None:
    """The name of an int8 layer in a state dict, if there is one."""
    names = (key.removesuffix(".codes") for key in state_dict if key.startswith(prefix) and key.endswith(".codes"))
    return next((name for name in names if {f"{name}.scale", f"{name}.zero_point"} <= state_dict.keys()), None)


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None  # load_state_dict says what is missing


def _drop(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    names = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
    ours = [key for key in state_dict if is_prepared_key(key) and key.removeprefix(prefix) not in names]
    for key in ours:
        del state_dict[key]
    if ours:
        warnings.warn(
            f"{type(module).__name__} gets the float weights of a state dict of the prepared form; its {len(ours)} "
            "entries with ranges are left out, as it does not say how the model was prepared. Prepare the model first "
            "to load them, too.",
            stacklevel=2,
        )
