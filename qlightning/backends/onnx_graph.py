"""Building an ONNX model of static shapes: nodes, constants, inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import onnx
import onnx.helper
import onnx.numpy_helper
import torch
from torch import Tensor

OPSET = 20
"""Of 2023: what ONNX Runtime reads from 1.17 on and OpenVINO from 2024 on."""

DTYPES: dict[torch.dtype, int] = {
    torch.float32: onnx.TensorProto.FLOAT,
    torch.float64: onnx.TensorProto.DOUBLE,
    torch.int64: onnx.TensorProto.INT64,
    torch.int32: onnx.TensorProto.INT32,
    torch.int8: onnx.TensorProto.INT8,
    torch.uint8: onnx.TensorProto.UINT8,
    torch.bool: onnx.TensorProto.BOOL,
}


class OnnxGraph:
    """An ONNX graph that grows node by node; its values are known by name."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._initializers: list[Any] = []
        self._constants: dict[Any, str] = {}
        self._kept: list[Tensor] = []  # their ids are keys
        self._number = 0

    def add(self, op_type: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Adds a node of one output; returns the name of the output.

        Args:
            op_type: The ONNX operator.
            inputs: Names of values; "" for an optional one that is left out.
            name: Name of the node; "" for any.
            attributes: Its attributes.
        """
        return self.add_many(op_type, *inputs, name=name, count=1, **attributes)[0]

    def add_many(self, op_type: str, *inputs: str, count: int, name: str = "", **attributes: Any) -> list[str]:
        """Adds a node of several outputs; returns their names."""
        name = name or self._fresh(op_type)
        outputs = [self._fresh("v") for _ in range(count)]
        node = onnx.helper.make_node(op_type, list(inputs), outputs, name=name, **attributes)
        self._nodes.append(node)
        return outputs

    def constant(self, value: Tensor | Sequence[int] | float, dtype: torch.dtype | None = None) -> str:
        """The name of a constant; sequences become int64."""
        if isinstance(value, Tensor):
            key: Any = (id(value), dtype)
            self._kept.append(value)
        else:
            value = list(value) if isinstance(value, Sequence) else value
            key = (str(value), dtype)
        if key not in self._constants:
            tensor = torch.as_tensor(value, dtype=dtype).detach().contiguous()
            name = self._fresh("c")
            self._initializers.append(onnx.numpy_helper.from_array(tensor.numpy(), name))
            self._constants[key] = name
        return self._constants[key]

    def model(self, inputs: Iterable[tuple[str, Tensor]], outputs: Iterable[tuple[str, Tensor]]) -> onnx.ModelProto:
        """The finished model.

        Args:
            inputs: Names, and tensors of the same shape and dtype.
            outputs: Likewise.
        """

        def info(name: str, like: Tensor) -> Any:
            return onnx.helper.make_tensor_value_info(name, DTYPES[like.dtype], list(like.shape))

        graph = onnx.helper.make_graph(
            self._nodes,
            "qlightning",
            [info(*entry) for entry in inputs],
            [info(*entry) for entry in outputs],
            self._initializers,
        )
        opset = onnx.helper.make_opsetid("", OPSET)
        return onnx.helper.make_model(graph, opset_imports=[opset], producer_name="qlightning", ir_version=9)

    def _fresh(self, stem: str) -> str:
        self._number += 1
        return f"{stem}_{self._number}"
