"""One ATen call while it is translated to ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from qlightning.backends.onnx_graph import DTYPES, OnnxGraph


class UntranslatableError(Exception):
    """A call that has no counterpart in ONNX, or not with these arguments."""


class Call:
    """One ATen call while it is translated.

    Args:
        node: Its node; ``meta["val"]`` says shape and dtype.
        graph: The ONNX graph that grows.
        name: Gives the ONNX name of an argument that is a tensor.
    """

    def __init__(self, node: fx.Node, graph: OnnxGraph, name: Callable[[Any], str]) -> None:
        self.node, self.graph, self._name = node, graph, name
        self.add = graph.add
        self.out: Any = node.meta.get("val")
        given = dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False))  # type: ignore[union-attr]
        self.arguments = {
            a.name: given.get(a.name, node.kwargs.get(a.name, a.default_value))
            for a in node.target._schema.arguments  # type: ignore[union-attr]
        }

    def __getitem__(self, name: str) -> Any:
        """An argument as it stands in the node, by the name that it has in the schema."""
        return self.arguments[name]

    def value(self, name: str = "self") -> Tensor:
        """A fake tensor of the shape and dtype of an argument."""
        found: Tensor = self.arguments[name].meta["val"]
        return found

    def name(self, argument: str = "self", dtype: torch.dtype | None = None) -> str:
        """The ONNX name of an argument that is a tensor or a number.

        Args:
            argument: Its name in the schema.
            dtype: Cast to this; None: as it is.
        """
        return self.name_of(self.arguments[argument], dtype)

    def name_of(self, value: Any, dtype: torch.dtype | None = None) -> str:
        """The ONNX name of a tensor's node or a number."""
        if not isinstance(value, fx.Node):
            return self.graph.constant(value, dtype)
        name = self._name(value)
        if dtype is not None and value.meta["val"].dtype != dtype:
            return self.add("Cast", name, to=DTYPES[dtype])
        return name

    def axes(self, name: str = "dim") -> list[int]:
        """Dimensions as counted from the front; all where none is given."""
        dims, rank = self[name], self.value().dim()
        if dims is None or dims == []:
            return list(range(rank))
        return sorted(d % rank for d in ([dims] if isinstance(dims, int) else dims))

    def refuse(self, why: str) -> UntranslatableError:
        """The error that says what ONNX lacks."""
        return UntranslatableError(f"{self.node.target}: {why}")


Operator = Callable[[Call], Any]
