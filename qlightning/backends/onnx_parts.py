"""Running a call in a runtime: the whole of it, or the parts between calls that ONNX has no counterpart of."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from qlightning.backends.aten_form import ATenForm
from qlightning.backends.onnx_form import OnnxForm, Weight, onnx_form, problem


class Compiled(Protocol):
    """A compiled model."""

    @property
    def kernels(self) -> Mapping[str, str]:
        """What computes each layer, by its name."""

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs it on contiguous tensors; the results are the caller's."""


class Engine(Protocol):
    """A runtime.

    Attributes:
        name: The name of its backend.
        integer_bias: Whether it wants biases as int32 codes; else they stay float.
        signed: Whether it wants codes around 128 as int8 codes around 0.
    """

    name: str
    integer_bias: bool
    signed: bool

    def compile(self, form: OnnxForm, threads: int) -> Compiled:
        """Compiles a model for that many threads.

        Raises:
            Exception: Of any kind, where the runtime cannot run a part of it.
        """


class Parts:
    """Runs a call.

    Args:
        form: The call.
        weights: The weights of its layers, in the order of the form.
        engine: The runtime.
        threads: Number of its threads.

    Attributes:
        kernels: What computes each layer, by its name; layers that are left to torch are missing.
        problems: Why calls are left to torch.

    Raises:
        Exception: Of any kind, where the runtime cannot run a part of it.
    """

    def __init__(self, form: ATenForm, weights: Sequence[Weight], engine: Engine, threads: int) -> None:
        self._engine, self._threads = engine, threads
        self._form = form
        self.kernels: dict[str, str] = {}
        module = form.module
        self._rest = _open_results(module.graph)
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        known = dict(zip(placeholders[len(form.leaves) :], weights, strict=True))
        found = {n: why for n in module.graph.nodes if n.op == "call_function" and (why := problem(n))}
        self.problems = tuple(dict.fromkeys(found.values()))
        if not found:
            part = self._part(module, known)
            self._used = [form.leaves[i] for i in part.used]
            self._run: Any = part
            self._more: list[Tensor | None] = []
            return
        self._run = self._split(module, known, found)
        self._used = list(form.leaves)
        inputs = [node for node in self._run.graph.nodes if node.op == "placeholder"][len(form.leaves) :]
        self._more = [weight.float() if node.users else None for node, weight in zip(inputs, weights, strict=True)]

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Runs the call on its arguments."""
        results = self._run(*(leaves[i] for i in self._used), *self._more)
        flat = [results[value] if is_tensor else value for is_tensor, value in self._rest]
        return pytree.tree_unflatten(flat, self._form.result)

    def _split(
        self, module: fx.GraphModule, known: Mapping[fx.Node, Weight], torchs: Collection[fx.Node]
    ) -> fx.GraphModule:
        """The module with parts that are compiled, and the other calls as they are."""
        partitioner = CapabilityBasedPartitioner(module, _AllBut(torchs), allows_single_node_partition=False)
        split = partitioner.partition_and_fuse()
        weights = {node.name: weight for node, weight in known.items()}  # its nodes are others
        for node in split.graph.nodes:
            if node.op != "call_module":
                continue
            inner = split.get_submodule(node.target)
            assert isinstance(inner, fx.GraphModule)
            inside = [n for n in inner.graph.nodes if n.op == "placeholder"]
            constants = {n: self._constant(value, split, weights) for n, value in zip(inside, node.args, strict=True)}
            part = self._part(inner, {n: value for n, value in constants.items() if value is not None})
            split._modules[node.target] = part
            node.args = tuple(node.args[i] for i in part.used)
        split.graph.eliminate_dead_code()
        split.recompile()
        return split

    @staticmethod
    def _constant(value: fx.Node, module: fx.GraphModule, weights: Mapping[str, Weight]) -> Weight | Tensor | None:
        """What an input of a part always is; None where that differs from call to call."""
        if value.op == "get_attr":
            found: Tensor = operator.attrgetter(str(value.target))(module)
            return found.detach()
        return weights.get(value.name) if value.op == "placeholder" else None

    def _part(self, module: fx.GraphModule, known: Mapping[fx.Node, Weight | Tensor]) -> _Part:
        form = onnx_form(module, known, self._engine.integer_bias, self._engine.signed)
        compiled = self._engine.compile(form, self._threads)
        self.kernels.update(compiled.kernels)
        output = next(node for node in module.graph.nodes if node.op == "output")
        return _Part(compiled, form, isinstance(output.args[0], (list, tuple)))


class _Part(nn.Module):
    """A compiled part; takes the tensors that it uses, in any layout of memory."""

    def __init__(self, compiled: Compiled, form: OnnxForm, is_list: bool) -> None:
        super().__init__()
        self.used = form.used
        self._compiled, self._is_list = compiled, is_list

    def forward(self, *tensors: Tensor) -> Any:
        results = self._compiled([x.detach().contiguous() for x in tensors])
        return results if self._is_list else results[0]


class _AllBut(OperatorSupportBase):
    def __init__(self, nodes: Collection[fx.Node]) -> None:
        self._nodes = nodes

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: fx.Node) -> bool:
        return node.op == "call_function" and node not in self._nodes


def _open_results(graph: fx.Graph) -> list[tuple[bool, Any]]:
    """Leaves the tensors alone in the output of a graph.

    Returns:
        For each result whether it is a tensor, and its place among the tensors or else itself.
    """
    (output,) = (node for node in graph.nodes if node.op == "output")
    results = list(output.args[0])
    nodes = [value for value in results if isinstance(value, fx.Node)]
    output.args = (nodes,)
    order = iter(range(len(nodes)))
    return [(True, next(order)) if isinstance(value, fx.Node) else (False, value) for value in results]
