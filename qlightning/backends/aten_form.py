"""The QDQ form of one call as a flat graph of ATen calls of static shapes, functional, its int8 weights as inputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from qlightning.nn.quantized import dequantized_weight
from qlightning.vocabulary import has_effect


@dataclass(frozen=True)
class ATenForm:
    """What one call computes.

    Attributes:
        module: Takes the tensors of the call, then the float weights of the layers; gives a list of tensors.
        leaves: Of the arguments of the call those that are tensors, by their position.
        weights: The names of the QuantizedLayers whose weights come behind the tensors.
        result: Builds what the call gives out of the list.
    """

    module: fx.GraphModule
    leaves: tuple[int, ...]
    weights: tuple[str, ...]
    result: pytree.TreeSpec


def aten_form(graph: fx.Graph, root: nn.Module, leaves: Sequence[Any], operators: Collection[Any]) -> ATenForm:
    """Traces the QDQ graph for a call like this one.

    Args:
        graph: The QDQ graph.
        root: The module it belongs to.
        leaves: The arguments; of tensors shape and dtype count, all else is part of the result.
        operators: ATen calls that stay; others are written in simpler ones where torch knows how.

    Raises:
        Exception: Of any kind: it depends on values, or something in it cannot be traced.
    """
    opened, weights = _with_open_weights(graph)
    module = fx.GraphModule(root, opened)
    places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    shape: list[pytree.TreeSpec] = []

    def run(*tensors: Tensor) -> list[Any]:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=False):
            given[place] = tensor
        flat, spec = pytree.tree_flatten(module(*given, *tensors[len(places) :]))
        shape[:] = [spec]
        return flat

    table = {op: how for op, how in core_aten_decompositions().items() if op not in operators}
    with torch.inference_mode(False), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(leaves[i].shape, dtype=leaves[i].dtype) for i in places]
        inputs += [torch.empty(_weight_shape(root, path)) for path in weights]
        functional = torch.func.functionalize(run, remove="mutations_and_views")
        traced = make_fx(functional, decomposition_table=table, _allow_non_fake_inputs=True)(*inputs)
    if changing := [node.target for node in traced.graph.nodes if node.op == "call_function" and _is_mutable(node)]:
        raise UntraceableError(f"{changing[0]} changes memory in place")
    return ATenForm(traced, places, weights, shape[0])


class UntraceableError(Exception):
    """A call that no flat graph of functional calls stands for."""


def _is_mutable(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _with_open_weights(graph: fx.Graph) -> tuple[fx.Graph, tuple[str, ...]]:
    """A copy of the graph in which the float weights of int8 layers are the last inputs; and the layers' names."""
    opened = fx.Graph()
    opened.output(opened.graph_copy(graph, {}))
    anchor = next((node for node in reversed(opened.nodes) if node.op == "placeholder"), None)
    inputs: dict[str, fx.Node] = {}
    for node in list(opened.nodes):
        if node.target is not dequantized_weight:
            continue
        path = str(node.args[0].target).rpartition(".")[0]
        if path not in inputs:
            with opened.inserting_after(anchor):
                anchor = inputs[path] = opened.placeholder(f"weight_{len(inputs)}")
        node.replace_all_uses_with(inputs[path])
        opened.erase_node(node)
    opened.eliminate_dead_code(is_impure_node=has_effect)
    return opened, tuple(inputs)


def _weight_shape(root: nn.Module, path: str) -> torch.Size:
    layer: Any = root.get_submodule(path)
    return dequantized_weight(
        layer.codes.to("meta"), layer.scale.to("meta"), layer.zero_point.to("meta"), layer.transposed_groups
    ).shape
