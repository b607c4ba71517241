"""The backend ``openvino``: the QDQ graph as an OpenVINO model, compiled in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from qlightning.backends.base import Backend, accepts_int8, cpu_has_int8_dot_products, missing_packages
from qlightning.backends.qdq import NO_KERNEL

if TYPE_CHECKING:
    from qlightning.backends.onnx_form import OnnxForm


def build() -> Backend:
    """Builds the backend for this machine."""
    return Backend(
        name="openvino",
        lower=lower,
        unavailable=missing_packages("openvino", ("openvino", "onnx")),
        reduced=None if cpu_has_int8_dot_products() else "weight",
        accepts=accepts_int8,
        centres_signed=True,
        rounds_layer=_rounds_layer,
    )


def _rounds_layer(in_sum: bool, activation: str) -> bool:
    """Only then a sum with an activation behind it is part of the layer's kernel; without one nothing is gained."""
    return in_sum and activation != ""


def lower(graph: fx.Graph, root: nn.Module) -> fx.Graph:
    """Turns a QDQ graph into a call of OpenVINO."""
    from qlightning.backends import runtime  # it needs onnx

    return runtime.lower(graph, root, OpenVINO())


class OpenVINO:
    """Compiles ONNX models with OpenVINO."""

    name = "openvino"
    integer_bias = False  # it adds them in float, as is exact, at the same speed
    signed = True  # its kernels have no zero points to correct for then

    def compile(self, form: OnnxForm, threads: int) -> _Compiled:
        """Compiles a model for the CPU."""
        import openvino

        core = openvino.Core()
        config = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            # Threads that are pinned to the first cores would share these with those of other models and processes.
            "ENABLE_CPU_PINNING": False,
            # Its own choice on CPUs with AMX is bfloat16.
            "INFERENCE_PRECISION_HINT": "f32",
        }
        return _Compiled(core.compile_model(core.read_model(form.model.SerializeToString()), "CPU", config), form)


class _Compiled:
    """A compiled model.

    Attributes:
        kernels: What computes each layer.
    """

    def __init__(self, compiled: Any, form: OnnxForm) -> None:
        import openvino

        self._tensor = openvino.Tensor
        self._compiled = compiled
        self._requests: deque[Any] = deque()  # a request serves one call at a time
        self._outputs = [(list(value.shape), _DTYPES[value.element_type.get_type_name()]) for value in compiled.outputs]
        self.kernels = dict(_kernels(compiled, form))

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs it on the memory of the tensors, into that of new ones."""
        try:
            request = self._requests.pop()
        except IndexError:
            request = self._compiled.create_infer_request()
        results = [torch.empty(shape, dtype=dtype) for shape, dtype in self._outputs]
        for i, x in enumerate(tensors):
            request.set_input_tensor(i, self._tensor(x.numpy(), shared_memory=True))
        for i, y in enumerate(results):
            request.set_output_tensor(i, self._tensor(y.numpy(), shared_memory=True))
        request.infer()
        self._requests.append(request)
        return results


_DTYPES = {
    "f32": torch.float32, "f64": torch.float64, "i64": torch.int64, "i32": torch.int32, "i8": torch.int8,
    "u8": torch.uint8, "boolean": torch.bool,
}  # fmt: skip


def _kernels(compiled: Any, form: OnnxForm) -> list[tuple[str, str]]:
    """For each layer the kernel that OpenVINO's own graph names, and the dtypes of its input and its result."""
    fused: dict[str, Any] = {}
    for op in compiled.get_runtime_model().get_ops():
        info = op.get_rt_info()
        if "originalLayersNames" in info:
            for name in info["originalLayersNames"].astype(str).split(","):
                fused.setdefault(name.partition("/")[0], info)
    found = []
    for path, node in form.layers:
        info = fused.get(node)
        if info is None:
            found.append((path, "openvino kernel that has another name in its graph"))
            continue
        kernel, precision, result = (
            info[k].astype(str) for k in ("primitiveType", "runtimePrecision", "outputPrecisions")
        )
        text = f"openvino {kernel}, {precision} to {result}"
        found.append((path, text if precision in ("u8", "i8") else f"{NO_KERNEL}, in {text}"))
    return found
