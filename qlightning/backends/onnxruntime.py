"""The backend ``onnxruntime``: the QDQ graph as an ONNX model in ONNX Runtime, in this process."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from qlightning.backends.base import Backend, accepts_int8, cpu_has_int8_dot_products, missing_packages
from qlightning.backends.qdq import NO_KERNEL

if TYPE_CHECKING:
    from qlightning.backends.onnx_form import OnnxForm

_INT8 = {"QLinearConv", "QLinearMatMul", "QGemm", "MatMulIntegerToFloat", "ConvInteger", "DynamicQuantizeMatMul"}


def build() -> Backend:
    """Builds the backend for this machine."""
    return Backend(
        name="onnxruntime",
        lower=lower,
        unavailable=missing_packages("onnxruntime", ("onnxruntime", "onnx")),
        reduced=None if cpu_has_int8_dot_products() else "weight",
        accepts=accepts_int8,
        rounds_layer=_rounds_layer,
    )


def _rounds_layer(in_sum: bool, activation: str) -> bool:
    """Its layers are int8 where they are rounded; what the grid ends with, a ReLU or ReLU6, can stand between."""
    return in_sum or activation not in ("", "relu", "hardtanh")


def lower(graph: fx.Graph, root: nn.Module) -> fx.Graph:
    """Turns a QDQ graph into a call of ONNX Runtime."""
    from qlightning.backends import runtime  # it needs onnx

    return runtime.lower(graph, root, OnnxRuntime())


class OnnxRuntime:
    """Compiles ONNX models with ONNX Runtime."""

    name = "onnxruntime"
    integer_bias = True  # its int8 kernels add nothing else
    signed = False  # on x86 its kernels are made for uint8

    def compile(self, form: OnnxForm, threads: int) -> _Compiled:
        """Builds a session on the CPU."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Threads that wait for the next call by spinning would take the cores from torch between the calls.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        with tempfile.TemporaryDirectory() as folder:
            options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
            session = onnxruntime.InferenceSession(
                form.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            return _Compiled(session, form, _kernels(options.optimized_model_filepath, form))


class _Compiled:
    """A compiled model.

    Attributes:
        kernels: What computes each layer.
    """

    def __init__(self, session: Any, form: OnnxForm, kernels: dict[str, str]) -> None:
        self.kernels = kernels
        self._session = session
        self._inputs = form.inputs
        self._outputs = [(value.name, value.shape, _DTYPES[value.type]) for value in session.get_outputs()]

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs it on the memory of the tensors, into that of new ones."""
        binding = self._session.io_binding()
        results = [torch.empty(shape, dtype=dtype) for _, shape, dtype in self._outputs]
        for name, x in zip(self._inputs, tensors, strict=True):
            binding.bind_input(name, "cpu", 0, x.numpy().dtype.type, tuple(x.shape), _pointer(x))
        for (name, _, _), y in zip(self._outputs, results, strict=True):
            binding.bind_output(name, "cpu", 0, y.numpy().dtype.type, tuple(y.shape), _pointer(y))
        self._session.run_with_iobinding(binding)
        return results


_SOME = torch.empty(1)


def _pointer(x: Tensor) -> int:
    """Where its memory is; it refuses none at all, as empty tensors have."""
    return x.data_ptr() or _SOME.data_ptr()


_DTYPES = {
    "tensor(float)": torch.float32, "tensor(double)": torch.float64, "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32, "tensor(int8)": torch.int8, "tensor(uint8)": torch.uint8, "tensor(bool)": torch.bool,
}  # fmt: skip


def _kernels(path: str, form: OnnxForm) -> dict[str, str]:
    """For each layer the operator that computes it in the graph that ONNX Runtime has made."""
    import onnx

    nodes = onnx.load_model(path).graph.node
    operators = {re.sub(r"_token_\d+$", "", node.name): node.op_type for node in nodes}  # it numbers what it changes
    found = {}
    for layer, name in form.layers:
        operator = operators.get(name, "operator without a name")
        found[layer] = f"onnxruntime {operator}" if operator in _INT8 else f"{NO_KERNEL}, in onnxruntime {operator}"
    return found
