"""Weights from a file into a float model."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from qlightning.errors import ConfigError

_Net = TypeVar("_Net", bound=nn.Module)
SUFFIXES = (".safetensors", ".ckpt", ".pt", ".pth")


def is_weights_file(weights: str | Path) -> bool:
    """Tells a path (by its ending, a separator or because it exists) from a name such as ``IMAGENET1K_V1``."""
    path = Path(weights)
    return path.suffix in SUFFIXES or len(path.parts) > 1 or path.exists()


def load_weights(net: _Net, path: str | Path) -> _Net:
    """Loads the weights of a file into a float model, in place.

    Args:
        net: The model; every parameter and buffer of it must be in the file, with its shape.
        path: A ``.safetensors`` file, a state dict saved by ``torch.save``, or a Lightning checkpoint, of which the
            ``net.`` entries count. Quantization state of a QAT checkpoint is left out: its weights are float weights.

    Returns:
        ``net``.

    Raises:
        ConfigError: The file is missing, not a file of weights, or made for another model.
    """
    path = Path(path).expanduser()
    state = _read(path)
    wanted = net.state_dict()
    missing = [key for key in wanted if key not in state]
    unknown = [key for key in state if key not in wanted and not _is_quantization_state(key)]
    shapes = [
        f"{key} {tuple(state[key].shape)} instead of {tuple(value.shape)}"
        for key, value in wanted.items()
        if key in state and state[key].shape != value.shape
    ]
    for problem, names in (("lacks", missing), ("has beside them", unknown), ("has in other shapes", shapes)):
        if names:
            shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise ConfigError(
                f"The weights in {path} do not fit {type(net).__name__}: the file {problem} {shown}. "
                "Choose the model that the file was made for, or another file."
            )
    net.load_state_dict({key: state[key] for key in wanted})
    return net


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ConfigError(f"No weights at {path}: give the path of a file that ends in {', '.join(SUFFIXES)}.")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ConfigError(f"{path} cannot be read as weights: {error}") from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ConfigError(f"{path} holds no state dict (names to tensors), but a {type(content).__name__}.")
    of_net = {key.removeprefix("net."): value for key, value in content.items() if key.startswith("net.")}
    return of_net or dict(content)


def _is_quantization_state(key: str) -> bool:
    """Whether a key is one of those that ``qlightning.prepare`` adds to the float state dict."""
    return any(part in ("weight_fake_quant", "graph_fake_quant") for part in key.split("."))
