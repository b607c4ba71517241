"""Selection: what rounds in a prepared model where only some of its layers are in int8."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import fx, nn

from qlightning.calls import LAYER_FUNCTIONS, argument, function_name
from qlightning.errors import ConfigError, closest
from qlightning.fake_quantize import FakeQuantize, WeightFakeQuantize, fake_quantizers
from qlightning.graph.insert import GraphPreparer, layer_of
from qlightning.graph.preparation import FloatChoice, Preparation, PreparedModule, captured_roots
from qlightning.graph.programs import Captured
from qlightning.nn.bias import BiasRounding
from qlightning.nn.qat import QATLayer, layer_type
from qlightning.vocabulary import Kind


@dataclass(frozen=True)
class Part:
    """A layer that can be in int8 or in float.

    Attributes:
        name: Of the module below the model, as ``exclude`` takes it.
        kind: Its type; "function" where a function is called on its weight, "matmul" for a product of activations.
        weights: How many numbers its weight has.
        scheme: The grid of its weight; "" for a product.
    """

    name: str
    kind: str
    weights: int
    scheme: str


class Selection:
    """The layers of a prepared model, and what rounds where some of them are left in float.

    A layer in int8 computes with its weight on a grid, on values on a grid. What rounds its result is the grid of what
    reads it. So a set of layers needs the grids that ``prepare`` would put in if it excluded all others.

    Args:
        prepared: A prepared model; read only. Graphs that are traced later count from a new Selection on.

    Attributes:
        parts: The layers by name, in the order of the graphs.
    """

    def __init__(self, prepared: nn.Module) -> None:
        self._prepared = prepared
        self.parts: dict[str, Part] = {}
        self._graphs: list[_Graph] = []
        for _, root in captured_roots(prepared):
            if not isinstance(root, PreparedModule):
                continue
            captured: Captured = root.__dict__["_captured"]
            preparer = captured.preparer
            assert isinstance(preparer, GraphPreparer)
            for (_, training), programs in captured.programs.items():
                if not training:
                    self._graphs += [_Graph(program.graph, root, preparer) for program in programs]
            for graph in self._graphs:
                for part in graph.parts.values():
                    self.parts.setdefault(part.name, part)

    def needed(self, int8: Collection[str]) -> frozenset[FakeQuantize]:
        """The fake-quantizers that round where these layers are in int8 and all others in float.

        Raises:
            ConfigError: A name is none of a layer.
        """
        self.check(int8)
        left_out = frozenset(self.parts).difference(int8)
        return frozenset(fq for graph in self._graphs for fq in graph.needed(left_out))

    def check(self, names: Collection[str]) -> None:
        """Raises a ConfigError for a name that is none of a layer."""
        for name in names:
            if name not in self.parts:
                hint = closest(name, self.parts)
                raise ConfigError(f"{name!r} is no layer of {type(self._prepared).__name__} that can be int8.{hint}")

    @contextmanager
    def rounding(self) -> Iterator[Rounding]:
        """Within it the layers that round can be chosen; afterwards all round that did before."""
        found = [fq for _, fq in fake_quantizers(self._prepared)]
        before = [(fq, fq.fake_quant_enabled) for fq in found]
        try:
            yield Rounding(self, found)
        finally:
            for fq, enabled in before:
                fq.fake_quant_enabled = enabled


class Rounding:
    """The switch between sets of layers, from :meth:`Selection.rounding`."""

    def __init__(self, selection: Selection, fqs: list[FakeQuantize]) -> None:
        self._selection, self._fqs = selection, fqs

    def only(self, int8: Collection[str]) -> None:
        """Lets the model compute as if only these layers were in int8."""
        needed = self._selection.needed(int8)
        for fq in self._fqs:
            fq.fake_quant_enabled = fq in needed


class _Graph:
    """A graph of eval mode as it was before fake-quantizers were put into it, and where these stood."""

    def __init__(self, graph: fx.Graph, module: nn.Module, preparer: GraphPreparer) -> None:
        self._preparer, self._module = preparer, module
        self._grids: dict[fx.Node, FakeQuantize] = {}
        self._weights: dict[fx.Node, FakeQuantize] = {}
        self._graph = self._without_fake_quantizers(graph)
        found, self._ops = preparer.plan(self._graph, module)
        self._layers: dict[fx.Node, str] = {}
        self.parts: dict[str, Part] = {}
        heads = {block.head for block in found.blocks.values()}
        for head in (node for node in self._graph.nodes if node in heads):
            name, kind = preparer.full(layer_of(head)), self._ops[head].kind
            if kind is Kind.LAYER or (kind is Kind.MATMUL and head.meta.get("owner")):
                self._layers[head] = name
                self.parts.setdefault(name, self._part(name, head))

    def needed(self, left_out: Collection[str]) -> Iterator[FakeQuantize]:
        found, _ = self._preparer.plan(self._graph, self._module, self._ops, left_out)
        yield from (self._grids[node] for node in found.grids if node in self._grids)
        for head, name in self._layers.items():
            if name not in left_out and head in self._weights:
                yield self._weights[head]

    def _without_fake_quantizers(self, graph: fx.Graph) -> fx.Graph:
        bare = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        grids: dict[fx.Node, FakeQuantize] = {}
        modules = dict(self._module.named_modules(remove_duplicate=False))
        for node in graph.nodes:
            module = modules.get(str(node.target)) if node.op == "call_module" else None
            if isinstance(module, (FakeQuantize, BiasRounding)):
                values[node] = values[node.args[0]]
                if isinstance(module, WeightFakeQuantize):
                    grids[node] = module
                elif isinstance(module, FakeQuantize):
                    self._grids[values[node]] = module
                continue
            values[node] = bare.node_copy(node, lambda n: values[n])
            if isinstance(module, QATLayer):
                self._weights[values[node]] = module.weight_fake_quant
            elif node.op == "call_function" and function_name(node.target) in LAYER_FUNCTIONS:
                weight = argument(node, 1, "weight")
                if weight in grids:
                    self._weights[values[node]] = grids[weight]
        return bare

    def _part(self, name: str, head: fx.Node) -> Part:
        fq = self._weights.get(head)
        scheme = "" if fq is None else str(fq.scheme)
        if self._ops[head].kind is Kind.MATMUL:
            return Part(name, "matmul", 0, scheme)
        module = self._ops.module(head)
        if module is not None:
            base = layer_type(module) or type(module)
            return Part(name, base.__name__, module.weight.numel(), scheme)  # type: ignore[operator]
        owner, _, attribute = str(argument(head, 1, "weight").target).rpartition(".")
        return Part(name, "function", getattr(self._module.get_submodule(owner), attribute).numel(), scheme)


def leave_in_float(prepared: nn.Module, choice: FloatChoice) -> None:
    """Lets ``convert`` leave layers of a prepared model in float; an empty choice: none.

    The model stays as it is prepared: it goes on training with all of its fake-quantizers, and its state dict says
    what was chosen.

    Raises:
        ConfigError: A name is none of a layer.
    """
    if choice.reasons:
        Selection(prepared).check(choice.reasons)
    preparation: Preparation = prepared.__dict__["_preparation"]
    prepared.__dict__["_preparation"] = replace(preparation, float_choice=choice)


def left_out(prepared: nn.Module, choice: FloatChoice) -> frozenset[FakeQuantize]:
    """The fake-quantizers that have nothing to round where layers are left in float."""
    if not choice.reasons:
        return frozenset()
    selection = Selection(prepared)
    known: Mapping[str, str] = {name: reason for name, reason in choice.reasons.items() if name in selection.parts}
    needed = selection.needed([name for name in selection.parts if name not in known])
    return frozenset(fq for _, fq in fake_quantizers(prepared) if fq not in needed)
