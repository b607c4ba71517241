"""Files that int8 models leave in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qlightning.backends import Backend
from qlightning.errors import ConfigError
from qlightning.export.executorch import save_executorch
from qlightning.export.metadata import Metadata
from qlightning.export.onnx import onnx_metadata, save_onnx
from qlightning.export.openvino import openvino_metadata, save_openvino, weights_of
from qlightning.export.pt2 import load_pt2, pt2_metadata, save_pt2
from qlightning.export.saturation import warn_of_saturation
from qlightning.export.state import load_state, save_state, state_metadata
from qlightning.files import check_target

__all__ = ["READABLE", "SUFFIXES", "Metadata", "load", "metadata_of", "parts_of", "save", "warn_of_saturation"]

_SAVERS = {
    ".pt2": save_pt2,
    ".safetensors": save_state,
    ".onnx": save_onnx,
    ".xml": save_openvino,
    ".pte": save_executorch,
}
_READERS = {".pt2": pt2_metadata, ".safetensors": state_metadata, ".onnx": onnx_metadata, ".xml": openvino_metadata}
SUFFIXES = tuple(_SAVERS)
"""The kinds of files that :func:`save` writes."""
READABLE = tuple(_READERS)
"""Those whose facts can be read without running them."""
_RUNTIMES = {".onnx": "onnxruntime or openvino run", ".xml": "openvino runs", ".pte": "executorch runs"}


def save(
    int8: nn.Module,
    path: str | Path,
    *,
    example_inputs: Any = None,
    metrics: Mapping[str, float] | None = None,
    class_names: Sequence[str] | None = None,
    source: str | Path | None = None,
) -> Metadata:
    """Saves an int8 model to a file of the kind that the suffix says.

    ======================  ========================================================================================
    ``.pt2``                torch and qlightning run it, without the source code of the model
    ``.safetensors``        the int8 state dict; qlightning builds the model on an instance of the float one
    ``.onnx``               ONNX Runtime, OpenVINO and others
    ``.xml``                OpenVINO IR; the integers are in the ``.bin`` beside it
    ``.pte``                ExecuTorch, with XNNPACK
    ======================  ========================================================================================

    Args:
        int8: A model from ``convert`` or ``quantize_model``.
        path: The file, or a link to it. It is complete or not there: an interrupted call leaves the old one.
        example_inputs: The arguments of a call; None: like one that the model has seen.
        metrics: Finite numbers to be kept in the file, by name; numpy and torch scalars, too.
        class_names: Names of the outputs, to be kept in the file.
        source: The checkpoint that the model was made from; its SHA-256 is kept.

    Returns:
        The facts that the file carries: backend, schemes, layers, inputs, versions.

    Warns:
        UserWarning: The runtimes of an ``.onnx`` or ``.xml`` file saturate on this CPU. That they do so on older ones
            is a fact in the file (``full_range``).

    Raises:
        ConfigError: No file has this suffix, or the model is no int8 graph as a whole.
        ArtifactError: The shapes of its inputs are not known, or it cannot be written so.
        ImportError: A library that the kind of file needs is not installed.
        OSError: No file can be written there; said before any work is done.

    Examples:
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
    saver = _of_kind(path, _SAVERS)
    for part in parts_of(Path(path)):
        check_target(part)
    with _own_defaults():
        found = saver(
            int8, path, example_inputs=example_inputs, metrics=metrics, class_names=class_names, source=source
        )
    warn_of_saturation(path, found)
    return found


def load(path: str | Path, model: nn.Module | None = None, *, backend: str | Backend = "auto") -> nn.Module:
    """Makes an int8 model of a ``.pt2`` or ``.safetensors`` file from :func:`save`; nothing in it is executed.

    Args:
        path: The file.
        model: For ``.safetensors`` an instance of the float model, of any weights; left as it is.
        backend: What it is to run on; ``"auto"`` picks by the CPU and says where that is another than it was made for.

    Raises:
        ConfigError: It is a file that other runtimes run, or ``model`` is missing, or given and not needed.
        ArtifactError: It is no such file, or damaged, or belongs to another model. Nothing is loaded then.
        BackendError: The backend cannot run here, or not these ranges.
        FileNotFoundError: There is no file.
    """
    suffix = Path(path).suffix
    if suffix in _RUNTIMES:
        raise ConfigError(f"{path}: {_RUNTIMES[suffix]} this kind of file. Save the model as .pt2 to load it here.")
    if suffix == ".safetensors":
        if model is None:
            raise ConfigError(
                f"{path} holds a state dict: give an instance of the float model, load(path, model=...), or save the "
                "int8 model as .pt2, which needs none."
            )
        with _own_defaults():
            return load_state(path, model, backend=backend)
    if model is not None:
        raise ConfigError(f"{path}: only a .safetensors file is loaded into a model; leave out model=.")
    with _own_defaults():
        return load_pt2(path, backend=backend)


def metadata_of(path: str | Path) -> Metadata:
    """The facts that a file from :func:`save` carries.

    Raises:
        ConfigError: No file of ours has this suffix.
        ArtifactError: It is no such file, or damaged.
        FileNotFoundError: There is no file.
        ImportError: A library that the kind of file needs is not installed.
    """
    return _of_kind(path, _READERS)(path)


def parts_of(path: Path) -> list[Path]:
    """The files that :func:`save` writes under the name of one: an ``.xml`` has a ``.bin`` beside it."""
    return [path, weights_of(path)] if path.suffix == ".xml" else [path]


@contextmanager
def _own_defaults() -> Iterator[None]:
    """Within it torch makes tensors as it does without the user's settings: float32, on the CPU."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def _of_kind(path: str | Path, by_suffix: Mapping[str, Callable[..., Metadata]]) -> Callable[..., Metadata]:
    if (found := by_suffix.get(Path(path).suffix)) is None:
        raise ConfigError(f"{path}: the suffix says the kind of file; possible are {', '.join(by_suffix)}.")
    return found
