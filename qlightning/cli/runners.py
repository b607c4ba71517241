"""Models of files, each run by what its kind of file is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qlightning.cli import nets
from qlightning.errors import ArtifactError, ConfigError
from qlightning.export import Metadata, load, metadata_of, warn_of_saturation

Runner = Callable[..., dict[str, Tensor]]
"""From tensors to results by name."""


def runner(path: Path, model: Sequence[str] | None = None, backend: str = "auto", threads: int = 0) -> Runner:
    """What runs the model of a file: this library, ONNX Runtime (``.onnx``) or OpenVINO (``.xml``).

    Args:
        path: The file.
        model: For ``.safetensors`` the float net, as the command line spells it.
        backend: What runs ``.pt2`` and ``.safetensors``.
        threads: For ONNX Runtime and OpenVINO, which have threads of their own; 0: as they like.

    Raises:
        QuantizationError: The file cannot be loaded.
        ImportError: The runtime is not installed.
    """
    if path.suffix == ".onnx":
        return _onnxruntime(path, threads)
    if path.suffix == ".xml":
        return _openvino(path, threads)
    return of_net(loaded(path, model, backend))


def facts_of(path: Path) -> Metadata:
    """The facts of a file that is to be run, with a warning where this CPU would run it wrongly.

    Raises:
        QuantizationError: It is no file of ours, or damaged.
    """
    found = metadata_of(path)
    warn_of_saturation(path, found)
    return found


def loaded(path: Path, model: Sequence[str] | None, backend: str) -> nn.Module:
    """The int8 model of a ``.pt2`` or ``.safetensors`` file.

    Raises:
        ConfigError: A ``.safetensors`` file needs a float net.
        QuantizationError: The file cannot be loaded.
    """
    if path.suffix != ".safetensors":
        return load(path, backend=backend)
    if model is None:
        raise ConfigError(f"{path} has no code in it: name the float net by --model.")
    return load(path, nets.build(model), backend=backend)


def of_net(net: nn.Module) -> Runner:
    """What runs a net in torch."""

    def run(*inputs: Tensor) -> dict[str, Tensor]:
        with torch.inference_mode():
            return dict(_named(net(*inputs), ""))

    return run


def _onnxruntime(path: Path, threads: int) -> Runner:
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(f"{path}: ONNX Runtime runs it: pip install onnxruntime.") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # a class of its own for each kind of failure
        raise ArtifactError(f"{path}: ONNX Runtime cannot load it: {error}") from error
    names = [spec.name for spec in session.get_inputs()]
    results = [spec.name for spec in session.get_outputs()]

    def run(*inputs: Tensor) -> dict[str, Tensor]:
        found = session.run(results, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})
        return {name: torch.from_numpy(y) for name, y in zip(results, found, strict=True)}

    return run


def _openvino(path: Path, threads: int) -> Runner:
    try:
        import openvino
    except ImportError as error:
        raise ImportError(f"{path}: OpenVINO runs it: pip install openvino.") from error
    settings = {"INFERENCE_NUM_THREADS": threads} if threads else {}
    try:
        model = openvino.Core().compile_model(str(path), "CPU", settings)
    except RuntimeError as error:
        raise ArtifactError(f"{path}: OpenVINO cannot load it: {error}") from error
    results = [spec.any_name for spec in model.outputs]

    def run(*inputs: Tensor) -> dict[str, Tensor]:
        found = model([x.numpy() for x in inputs])
        return {name: torch.from_numpy(found[i].copy()) for i, name in enumerate(results)}

    return run


def _named(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a nested result, by where they are in it."""
    if isinstance(value, Tensor):
        yield name or "output", value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _named(item, f"{name}.{key}".lstrip("."))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _named(item, f"{name}.{i}".lstrip("."))
