"""Files that int8 models leave in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from qlightning.backends import Backend
from qlightning.errors import ConfigError
from qlightning.export.metadata import Metadata
from qlightning.export.onnx import save_onnx
from qlightning.export.pt2 import load_pt2, metadata_of, save_pt2

__all__ = ["SUFFIXES", "Metadata", "load", "metadata_of", "save", "save_onnx", "save_pt2"]

_SAVERS = {".pt2": save_pt2, ".onnx": save_onnx}
SUFFIXES = tuple(_SAVERS)
"""The kinds of files that :func:`save` writes."""


def save(
    int8: nn.Module,
    path: str | Path,
    *,
    example_inputs: Any = None,
    metrics: Mapping[str, float] | None = None,
    class_names: Sequence[str] | None = None,
    source: str | Path | None = None,
) -> Metadata:
    """Saves an int8 model to a file of the kind that the suffix says: ``.pt2`` or ``.onnx``.

    Args:
        int8: A model from ``convert`` or ``quantize_model``.
        path: The file. It is complete or not there: an interrupted call leaves the old one.
        example_inputs: The arguments of a call; None: like one that the model has seen.
        metrics: Numbers to be kept in the file, by name.
        class_names: Names of the outputs, to be kept in the file.
        source: The checkpoint that the model was made from; its SHA-256 is kept.

    Returns:
        The facts that the file carries: backend, schemes, layers, inputs, versions.

    Raises:
        ConfigError: No file has this suffix, or the model is no int8 graph as a whole.
        ArtifactError: The shapes of its inputs are not known, or it cannot be written so.
        ImportError: A library that the kind of file needs is not installed.

    Example:
        >>> import tempfile, torch
        >>> from qlightning import quantize_model
        >>> int8 = quantize_model(nn.Sequential(nn.Linear(4, 2)), [torch.randn(8, 4)])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     facts = save(int8, f"{folder}/net.pt2", metrics={"accuracy": 0.9})
        ...     loaded = load(f"{folder}/net.pt2")
        >>> bool((loaded(torch.ones(1, 4)) == int8(torch.ones(1, 4))).all())
        True
        >>> facts.inputs[0].shape
        (-1, 4)
    """
    saver = _SAVERS.get(Path(path).suffix)
    if saver is None:
        raise ConfigError(f"{path}: the suffix says the kind of file; possible are {', '.join(_SAVERS)}.")
    return saver(int8, path, example_inputs=example_inputs, metrics=metrics, class_names=class_names, source=source)


def load(path: str | Path, *, backend: str | Backend = "auto") -> nn.Module:
    """Makes an int8 model of a ``.pt2`` file from :func:`save`; nothing in the file is executed.

    Args:
        path: The file.
        backend: What it is to run on; ``"auto"`` picks by the CPU and says where that is another than it was made for.

    Raises:
        ConfigError: It is a file that other runtimes run.
        ArtifactError: It is no such file, or damaged. Nothing is loaded then.
        BackendError: The backend cannot run here, or not these ranges.
        FileNotFoundError: There is no file.
    """
    if Path(path).suffix == ".onnx":
        raise ConfigError(
            f"{path}: ONNX files are run by onnxruntime or openvino; save the model as .pt2 to load it here."
        )
    return load_pt2(path, backend=backend)
