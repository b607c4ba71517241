"""ExecuTorch: the QDQ form as a .pte program, whose int8 parts run in XNNPACK."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from typing_extensions import Unpack

from qlightning.errors import ArtifactError
from qlightning.export.form import first_paragraph, tried_form
from qlightning.export.metadata import KEY, Metadata, Notes, collect, input_specs
from qlightning.export.xnnpack import xnnpack_form
from qlightning.files import written_whole
from qlightning.graph.qdq_module import QDQModule


def save_executorch(
    int8: nn.Module, path: str | Path, *, example_inputs: Any = None, **notes: Unpack[Notes]
) -> Metadata:
    """Writes an int8 model as an ExecuTorch program for XNNPACK, after it has been loaded and run once.

    Layers whose values are rounded, behind a ReLU or Hardtanh or none, run in int8; all others on float weights, and on
    the same values. Activations are int8 in the file: uint8 codes less 128. The sizes of the inputs are those of the
    example, whose batch size is the largest. The file is complete or not there.

    Args:
        int8: A model from ``convert`` or ``quantize_model``.
        path: The file, ``.pte``.
        example_inputs: The arguments of a call; None: like one that the model has seen.
        notes: What else the file is to say.

    Returns:
        The facts that the file carries: its method ``qlightning`` gives them as JSON.

    Raises:
        ConfigError: The model is no int8 graph as a whole; names the parts that are.
        ArtifactError: The shapes of its inputs are not known, its activations are not of 8 full bits, or ExecuTorch
            cannot take or run a part of it.
        ImportError: executorch is not installed.
    """
    _import()
    qdq = tried_form(int8, example_inputs)
    program, free = _exported(xnnpack_form(qdq.module), qdq)
    found = collect(int8, input_specs(qdq, free), **notes)
    content = _lowered(program, found)
    _run_once(content, qdq)
    with written_whole(path) as temporary:
        Path(temporary).write_bytes(content)
    return found


def _import() -> None:
    try:
        import executorch.exir
        import executorch.kernels.quantized  # noqa: F401  registers what programs quantize and dequantize with
    except ImportError as error:
        raise ImportError("ExecuTorch programs need executorch: pip install 'qlightning[executorch]'.") from error


def _exported(module: fx.GraphModule, qdq: QDQModule) -> tuple[torch.export.ExportedProgram, list[list[int]]]:
    """The program, and the free dimensions of each input: the batch size, up to that of the example."""
    size = max((x.shape[0] for x in qdq.example if x.dim()), default=1)
    none: list[list[int]] = [[] for _ in qdq.example]
    batch = [[0] if x.dim() else [] for x in qdq.example]
    failure: Exception = RuntimeError()
    for free in (batch, none) if size > 1 else (none,):  # with a free batch size; else with that of the example
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dim = torch.export.Dim("batch", min=1, max=size) if any(free) else None
                shapes = tuple(dict.fromkeys(dims, dim) for dims in free) if any(free) else None
                return torch.export.export(module, qdq.example, dynamic_shapes=shapes), free
        except Exception as error:  # torch.export raises whatever went wrong
            failure = error
    raise ArtifactError(
        f"{type(qdq.module).__name__}: torch.export cannot take it: {first_paragraph(failure)}."
    ) from failure


def _lowered(program: torch.export.ExportedProgram, found: Metadata) -> bytes:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    facts = {KEY: found.to_json()}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], constant_methods=facts)
            return bytes(edge.to_executorch().buffer)
    except Exception as error:  # its passes raise whatever went wrong
        raise ArtifactError(f"ExecuTorch cannot take the model: {error}.") from error


def _run_once(content: bytes, qdq: QDQModule) -> None:
    """Runs the program: XNNPACK says as it is loaded what it does not take, the other kernels as they run."""
    from executorch.runtime import Runtime

    try:
        Runtime.get().load_program(content).load_method("forward").execute([x.contiguous() for x in qdq.example])
    except RuntimeError as error:
        raise ArtifactError(f"ExecuTorch does not run what it has made of the model: {error}.") from error
