"""An instance of the float model, made ready for the weights of a file."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qlightning.errors import ConfigError


def template(model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a float model that can be quantized whatever its own weights are, as others will take their place.

    It is on the CPU. What its state dict holds has the dtypes of the file, or float32, with zeros in the place of what
    is on the meta device, of NaN and of infinity.

    Args:
        model: The model; left as it is.
        tensors: The state dict of the file.

    Raises:
        ConfigError: It has values on the meta device that are in no state dict, so that nobody knows them.
    """
    copied = copy.deepcopy(model)
    made: dict[int, Tensor] = {}  # a tensor that several modules share stays one
    with torch.no_grad():
        for path, module in copied.named_modules():
            start = f"{path}." if path else ""
            for values in (module._parameters, module._buffers, vars(module)):
                for name, value in values.items():
                    if not isinstance(value, Tensor):
                        continue
                    if values is vars(module) or name in module._non_persistent_buffers_set:
                        _check(value, f"{start}{name}")
                    else:
                        own = made.setdefault(id(value), _usable(value, tensors.get(f"{start}{name}")))
                        values[name] = own
    return copied


def _check(value: Tensor, path: str) -> None:
    if value.is_meta:
        raise ConfigError(
            f"model: {path} is on the meta device and in no state dict, so that its values are not known. Build the "
            "model on the CPU."
        )


def _usable(value: Tensor, stored: Tensor | None) -> Tensor:
    usable = torch.zeros(value.shape, dtype=value.dtype, device="cpu") if value.is_meta else value.detach().cpu()
    if value.is_floating_point():
        usable = usable.to(torch.float32 if stored is None else stored.dtype)
        if not bool(usable.isfinite().all()):
            usable = usable.nan_to_num(0.0, 0.0, 0.0)
    return nn.Parameter(usable, value.requires_grad) if isinstance(value, nn.Parameter) else usable
