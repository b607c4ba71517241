"""Quantized and plain tensors in one safetensors file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qlightning.errors import ArtifactError, ConfigError
from qlightning.files import written_whole
from qlightning.qscheme import QScheme
from qlightning.tensor import QuantizedTensor

FORMAT = 1
_KEY = "qlightning.tensors"
_PARTS = ("codes", "scale", "zero_point")


def save_tensors(tensors: Mapping[str, Tensor | QuantizedTensor], path: str | Path) -> None:
    """Saves tensors by name in a ``.safetensors`` file; a quantized one as ``name.codes``, ``.scale``, ``.zero_point``.

    The schemes stand in the metadata of the file, as JSON. The file is complete or not there: an interrupted
    call leaves the old one.

    Args:
        tensors: Quantized or plain ones, by name.
        path: The file to write.

    Raises:
        ConfigError: Two entries would have the same name in the file, or a value is no tensor.
        ImportError: safetensors is not installed.

    Example:
        >>> import tempfile
        >>> from qlightning import quantize
        >>> q = quantize(torch.tensor([0.5, 1.0]), 0.5, 0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_tensors({"weight": q}, f"{folder}/weights.safetensors")
        ...     load_tensors(f"{folder}/weights.safetensors")["weight"] == q
        True
    """
    safetensors = _safetensors()
    flat: dict[str, Tensor] = {}
    schemes: dict[str, Any] = {}
    for name, value in tensors.items():
        if isinstance(value, QuantizedTensor):
            schemes[name] = asdict(value.scheme)
            entries = {f"{name}.{part}": getattr(value, part) for part in _PARTS}
        elif isinstance(value, Tensor):
            entries = {name: value.detach()}
        else:
            raise ConfigError(f"{name}: a Tensor or a QuantizedTensor is needed, got {type(value).__name__}.")
        if clash := entries.keys() & flat.keys():
            raise ConfigError(f"{', '.join(sorted(clash))}: two of the tensors would have this name in the file.")
        flat.update(entries)
    # A file holds no views: each tensor gets memory of its own.
    flat = {name: value.cpu().clone(memory_format=torch.contiguous_format) for name, value in flat.items()}
    with written_whole(path) as temporary:
        metadata = {_KEY: json.dumps({"format": FORMAT, "schemes": schemes})}
        safetensors.torch.save_file(flat, temporary, metadata)


def load_tensors(path: str | Path) -> dict[str, Tensor | QuantizedTensor]:
    """Loads what :func:`save_tensors` has saved, bit-equal; of any other safetensors file the plain tensors.

    Nothing of a safetensors file is ever executed.

    Raises:
        ArtifactError: It is no such file, is damaged or of a later format; says what was found.
        FileNotFoundError: There is no file.
        ImportError: safetensors is not installed.
    """
    safetensors = _safetensors()
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file.")
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            flat = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    except (safetensors.SafetensorError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise ArtifactError(f"{path} is no whole safetensors file: {error}.") from error
    tensors: dict[str, Tensor | QuantizedTensor] = {}
    for name, scheme in _schemes(path, metadata.get(_KEY)).items():
        try:
            codes, scale, zero_point = (flat.pop(f"{name}.{part}") for part in _PARTS)
            tensors[name] = QuantizedTensor(codes, scale, zero_point, QScheme(**scheme))
        except (KeyError, TypeError, ConfigError) as error:
            raise ArtifactError(f"{path}: {name!r} is no quantized tensor: {error}.") from error
    return {**flat, **tensors}


def _schemes(path: str | Path, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = json.loads(text)
        version, schemes = found["format"], dict(found["schemes"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"{path}: its metadata on quantized tensors cannot be read: {error}.") from error
    if version != FORMAT:
        raise ArtifactError(f"{path} has format {version!r} of quantized tensors, this version reads {FORMAT}.")
    return schemes


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError("Files of tensors need safetensors: pip install safetensors.") from error
    return safetensors
