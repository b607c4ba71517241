"""Fake-quantizers in the graphs of a module: on the edges that the plan names, and on weights of function calls."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from qlightning.backends import Backend
from qlightning.backends.qdq import free_name
from qlightning.calls import LAYER_FUNCTIONS, argument
from qlightning.fake_quantize import FakeQuantize, set_observers
from qlightning.graph.bind import GRAPH_MODULES
from qlightning.graph.capture import module_device
from qlightning.graph.joined import mark_joinable
from qlightning.graph.patterns import Block, Plan, plan, source_of
from qlightning.graph.programs import Captured, Program
from qlightning.graph.signature import CallSpec
from qlightning.graph.signs import feeds_sums_alone, never_negative
from qlightning.graph.tracing import trace
from qlightning.learned import build_fake_quant
from qlightning.nn.bias import BiasRounding
from qlightning.nn.qat import QATLayer, build_weight_fake_quant, check_dtype
from qlightning.qconfig import Mode, QConfig, Resolver
from qlightning.vocabulary import Kind, Vocabulary


class GraphPreparer:
    """Puts fake-quantizers into the graphs of one root, those that are traced later too.

    Args:
        path: Name of the root below the model.
        resolver: Answers which QConfig a name has.
        backend: Has a say in where grids go and how they look.
        mode: "qat" or "ptq".
        leaves: Names of modules that are called in one piece.
    """

    def __init__(self, path: str, resolver: Resolver, backend: Backend, mode: Mode, leaves: frozenset[str]) -> None:
        self._path = path
        self._resolver = resolver
        self._backend = backend
        self._mode = mode
        self._leaves = leaves

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphPreparer:
        return self

    def trace(self, module: nn.Module, spec: CallSpec, training: bool | None = None) -> Program:
        """Traces the module for one more way of calling it, and prepares the graph."""
        captured: Captured = module.__dict__["_captured"]
        graph, reads = trace(module, captured.original, spec, training=training, leaves=self._leaves)
        self.insert(graph, module, module.training if training is None else training)
        return Program(graph, reads)

    def plan(
        self, graph: fx.Graph, module: nn.Module, ops: Vocabulary | None = None, left_out: Collection[str] = ()
    ) -> tuple[Plan, Vocabulary]:
        """Finds where the grids of a graph go.

        Args:
            graph: The graph, without fake-quantizers.
            module: The root.
            ops: What its calls mean, where that is known.
            left_out: Full names of layers that stay float, besides those that are excluded.
        """
        ops = ops or Vocabulary(graph, module)

        def is_excluded(name: str) -> bool:
            return self._resolver.resolve(self.full(name))[0] is None or self.full(name) in left_out

        def is_int8_layer(node: fx.Node) -> bool:
            return self.qconfig_of(node) is not None and self.full(layer_of(node)) not in left_out

        floats = {
            node
            for node in graph.nodes
            if is_excluded(node.meta.get("owner", ""))  # of a FloatFunctional, which is looked into nevertheless
            or (node.op == "call_module" and is_excluded(str(node.target)))
        }
        return plan(graph, ops, is_int8_layer, floats, self._backend.rounds_layer), ops

    def qconfig_of(self, layer: fx.Node) -> QConfig | None:
        """The settings of a layer's node; None where it stays float."""
        return self._resolver.resolve(self.full(layer_of(layer)))[0]

    def insert(self, graph: fx.Graph, module: nn.Module, training: bool) -> None:
        """Puts fake-quantizers into a graph; those of the same name are shared with the module's other graphs.

        Args:
            graph: The graph.
            module: The root.
            training: Whether it is one of training mode, in which biases are not rounded.
        """
        found, ops = self.plan(graph, module)
        names = _call_names(graph)
        used = set(names.values())
        grids: dict[fx.Node, str] = {}
        positive = never_negative(graph, ops)
        centred = {n: not (n in positive or feeds_sums_alone(n, ops)) for n in found.grids}
        for node in found.grids:
            block = found.blocks.get(node)
            head = block.head if block is not None else node
            source = ops[node].kind is Kind.SOURCE
            name = _unused(f"{names[found.consumers[node]]}_input", used) if source else names[head]
            if node in found.inner:
                name = _unused(f"{name}_inner", used)
            used.add(name)
            fq = self._fake_quant(module, name, str(head.meta.get("owner", "")), centred[node])
            with graph.inserting_after(node):
                inserted = graph.call_module(f"{GRAPH_MODULES}.{fq}", (node,))
            node.replace_all_uses_with(inserted, delete_user_cb=lambda user, own=inserted: user is not own)  # type: ignore[misc]
            grids[node] = fq
            if training and block is not None:
                mark_joinable(inserted, block, ops)
        if not training:
            for block in found.blocks.values():
                self._round_bias(graph, block, grids, module, ops)
        self._keep_constants(graph, module)
        for node in list(graph.nodes):
            if node.op == "call_function" and ops_kind(ops, node) is Kind.LAYER:
                self._insert_weight(graph, node, module, ops)
        if self._mode == "ptq":
            set_observers(module, False)  # calibrate alone moves the ranges
        graph.lint()

    def _round_bias(
        self, graph: fx.Graph, block: Block, grids: dict[fx.Node, str], module: nn.Module, ops: Vocabulary
    ) -> None:
        """Lets a graph of eval mode round the bias of a layer as int8 does, where the layer's input has a grid."""
        layer, bn = ops.module(block.head), None if block.bn is None else ops.module(block.bn)
        key = grids.get(source_of(ops[block.head].inputs[0], ops))
        if not isinstance(layer, QATLayer) or key is None or (layer.bias is None and bn is None):
            return
        modules = self._graph_modules(module)
        name = _identifier(
            "_".join([str(block.head.target), *([str(block.bn.target)] if block.bn else []), key, "bias"])
        )
        x = modules[key]
        assert isinstance(x, FakeQuantize)
        rounding = BiasRounding(layer, bn, x)
        while name in modules and getattr(modules[name], "of", None) != rounding.of:
            name += "_"
        if name not in modules:
            modules[name] = rounding.train(module.training)
        value = block.bn or block.head
        with graph.inserting_after(value):
            inserted = graph.call_module(f"{GRAPH_MODULES}.{name}", (value,))
        value.replace_all_uses_with(inserted, delete_user_cb=lambda user: user is not inserted)

    def _keep_constants(self, graph: fx.Graph, module: nn.Module) -> None:
        """Gives the tensors that a forward has made a place that moves with the model and is not saved."""
        modules = self._graph_modules(module)
        for node in [node for node in graph.nodes if "constant" in node.meta]:
            value = node.meta.pop("constant")
            own = dict(modules.named_buffers(recurse=False))
            same = (n for n, t in own.items() if t.dtype == value.dtype and torch.equal(t.cpu(), value.cpu()))
            name = next(same, None) or free_name(modules, f"constant_{len(own)}")
            if name not in own:
                modules.register_buffer(name, value.clone(), persistent=False)
            node.target = f"{GRAPH_MODULES}.{name}"
            with graph.inserting_after(node):  # the forward makes it anew each time, and may change it in place
                fresh = graph.call_method("clone", (node,))
            node.replace_all_uses_with(fresh, delete_user_cb=lambda user, own=fresh: user is not own)

    def _insert_weight(self, graph: fx.Graph, node: fx.Node, module: nn.Module, ops: Vocabulary) -> None:
        """A weight fake-quantizer for a layer that is called as a function."""
        weight, qconfig = argument(node, 1, "weight"), self.qconfig_of(node)
        if weight.op != "get_attr" or qconfig is None:
            return
        modules = self._graph_modules(module)
        target = str(weight.target)
        base = LAYER_FUNCTIONS[str(getattr(node.target, "__name__", ""))]
        transposed = issubclass(base, nn.modules.conv._ConvTransposeNd)
        groups = argument(node, 6, "groups", 1) if transposed else None
        # A weight that is called both ways has its output channels in two places, and a grid for each.
        kind = "" if groups is None else f"_transposed{groups}"
        name = _key(modules, f"{target}{kind}_grid", self.full(target))
        if name not in modules:
            check_dtype(self.full(target), _parameter(module, target))
            fq = build_weight_fake_quant(_parameter(module, target), self.full(target), qconfig, groups)
            modules[name] = fq.train(module.training)
        with graph.inserting_after(weight):
            inserted = graph.call_module(f"{GRAPH_MODULES}.{name}", (weight,))
        node.replace_input_with(weight, inserted)

    def _fake_quant(self, module: nn.Module, name: str, owner: str, centred: bool) -> str:
        modules = self._graph_modules(module)
        key = _key(modules, name, self.full(name))
        if key not in modules:
            qconfig = self._resolver.resolve(self.full(owner))[0] or self._resolver.resolve("")[0] or QConfig()
            if centred:
                qconfig = replace(qconfig, activation=self._backend.centred(qconfig.activation))
            observer = qconfig.build_activation_observer(self._mode)
            fq = build_fake_quant(qconfig.activation, observer, self.full(name), qconfig.learned_scales)
            modules[key] = fq.to(module_device(module)).train(module.training)
        return key

    @staticmethod
    def _graph_modules(module: nn.Module) -> nn.ModuleDict:
        if GRAPH_MODULES not in module._modules:
            module.add_module(GRAPH_MODULES, nn.ModuleDict().train(module.training))
        modules = module._modules[GRAPH_MODULES]
        assert isinstance(modules, nn.ModuleDict)
        return modules

    def full(self, name: str) -> str:
        """The name below the model of what has a name below the root."""
        return f"{self._path}.{name}" if self._path and name else self._path or name


def layer_of(node: fx.Node) -> str:
    """The name of the module that a node calls, or on whose weight it calls a function; else of what it stands in."""
    if node.op == "call_module":
        return str(node.target)
    if str(getattr(node.target, "__name__", "")) not in LAYER_FUNCTIONS:
        return str(node.meta.get("owner", ""))
    weight = argument(node, 1, "weight")
    if weight.op == "call_module":
        weight = weight.args[0]
    return str(weight.target).rpartition(".")[0]


def ops_kind(ops: Vocabulary, node: fx.Node) -> Kind | None:
    """The kind of a node that the vocabulary knows; None for one inserted later."""
    try:
        return ops[node].kind
    except KeyError:
        return None


def _parameter(module: nn.Module, target: str) -> Tensor:
    owner, _, name = target.rpartition(".")
    parameter: Tensor = getattr(module.get_submodule(owner), name)
    return parameter


def _key(modules: nn.ModuleDict, name: str, own: str) -> str:
    """The key of a fake-quantizer, by the name that it has itself; "a.b" and "a_b" are two."""
    key = _identifier(name)
    while key in modules and modules[key].name != own:
        key += "_"
    return key


def _identifier(name: str) -> str:
    name = re.sub(r"\W", "_", name)
    return f"{name}_" if hasattr(nn.ModuleDict(), name) else name  # "float", "keys": attributes of every ModuleDict


def _call_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """A name for every call: the module called or the code it stands in, numbered where there are several."""
    bases = {}
    for node in graph.nodes:
        if node.op == "call_module":
            bases[node] = str(node.target)
        else:
            target = str(getattr(node.target, "__name__", node.target)).strip("_")
            owner = node.meta.get("owner", "")
            bases[node] = f"{owner}.{target}" if owner else target
    names: dict[fx.Node, str] = {}
    used = set(bases.values())  # a second call of "conv" is not "conv_1" where a module is called that
    seen: set[str] = set()
    for node, base in bases.items():
        names[node] = _unused(base, used) if base in seen else base
        seen.add(base)
        used.add(names[node])
    return names


def _unused(name: str, used: Collection[str]) -> str:
    """The name itself, or with the first number with which it is not in use."""
    if name not in used:
        return name
    return next(numbered for i in itertools.count(1) if (numbered := f"{name}_{i}") not in used)
