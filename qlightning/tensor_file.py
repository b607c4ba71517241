"""Quantized and plain tensors in one safetensors file."""

from __future__ import annotations

import hashlib
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
from qlightning.strict_json import parse
from qlightning.tensor import QuantizedTensor

FORMAT = 1
_KEY = "qlightning.tensors"
_DIGEST = "qlightning.sha256"
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

    Examples:
        >>> import tempfile
        >>> from qlightning import quantize
        >>> q = quantize(torch.tensor([0.5, 1.0]), 0.5, 0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_tensors({"weight": q}, f"{folder}/weights.safetensors")
        ...     load_tensors(f"{folder}/weights.safetensors")["weight"] == q
        True
    """
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
    write_safetensors(path, flat, {_KEY: json.dumps({"format": FORMAT, "schemes": schemes})})


def load_tensors(path: str | Path) -> dict[str, Tensor | QuantizedTensor]:
    """Loads what :func:`save_tensors` has saved, bit-equal; of any other safetensors file the plain tensors.

    Nothing of a safetensors file is ever executed.

    Raises:
        ArtifactError: It is no such file, is damaged or of a later format; says what was found.
        FileNotFoundError: There is no file.
        ImportError: safetensors is not installed.
    """
    flat, metadata = read_safetensors(path)
    tensors: dict[str, Tensor | QuantizedTensor] = {}
    for name, scheme in _schemes(path, metadata.get(_KEY)).items():
        try:
            codes, scale, zero_point = (flat.pop(f"{name}.{part}") for part in _PARTS)
            tensors[name] = QuantizedTensor(codes, scale, zero_point, QScheme(**scheme))
        except (KeyError, TypeError, ConfigError) as error:
            raise ArtifactError(f"{path}: {name!r} is no quantized tensor: {error}.") from error
    return {**flat, **tensors}


def write_safetensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes plain tensors and texts to a ``.safetensors`` file, with a checksum of both; complete or not there.

    Raises:
        ImportError: safetensors is not installed.
    """
    safetensors = _safetensors()
    # A file holds no views: each tensor gets memory of its own.
    flat = {n: value.detach().cpu().clone(memory_format=torch.contiguous_format) for n, value in tensors.items()}
    with written_whole(path) as temporary:
        safetensors.torch.save_file(flat, temporary, {**metadata, _DIGEST: _checksum(flat, metadata)})


def read_safetensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and texts of a ``.safetensors`` file; those of :func:`write_safetensors` have to be unchanged.

    Raises:
        ArtifactError: It is no such file, or damaged.
        FileNotFoundError: There is no file.
        ImportError: safetensors is not installed.
    """
    safetensors = _safetensors()
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such file.")
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = dict(file.metadata() or {})
            flat = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    except (safetensors.SafetensorError, OSError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise ArtifactError(f"{path} is no whole safetensors file: {error}.") from error
    digest = metadata.pop(_DIGEST, None)
    if (digest is not None or any(key.startswith("qlightning") for key in metadata)) and digest != _checksum(
        flat, metadata
    ):
        raise ArtifactError(f"{path}: its contents do not have the checksum that they were saved with.")
    return flat, metadata


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """The SHA-256 of tensors and texts, in the order of their names."""
    digest = hashlib.sha256()
    for name, text in sorted(metadata.items()):
        digest.update(json.dumps([name, text]).encode())
    for name, value in sorted(tensors.items()):
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _schemes(path: str | Path, text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = parse(text)
        version, schemes = found["format"], dict(found["schemes"])
    except (ValueError, KeyError, TypeError) as error:
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
