"""Replay: a graph run call by call over all calibration batches, in float and on the grids side by side.

What a layer is given by the quantized net so far, and what the float net makes of its own input, are both there when
the layer's turn comes; what a step then changes in it counts for all that follows. So a whole net takes two passes,
however many layers it has.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.func import functional_call

from qlightning.fake_quantize import FakeQuantize
from qlightning.graph.patterns import can_fold, only_user, source_of
from qlightning.graph.programs import Captured, Program
from qlightning.nn.bias import BiasRounding
from qlightning.nn.qat import QATLayer
from qlightning.steps.normal import mean_before
from qlightning.steps.subject import Subject, full_name, unrounded
from qlightning.vocabulary import Kind, Vocabulary

Calls = list[tuple[Program, list[Any]]]
Values = dict[fx.Node, list[Any]]


@dataclass(frozen=True)
class LayerCall:
    """A layer whose turn has come.

    Attributes:
        model: The name of its model.
        path: Its name below that model.
        layer: The layer.
        bn: The BatchNorm that folds into it; None for none.
        bn_path: Its name below the model.
        inputs: What the quantized net gives it, a tensor for each batch.
        targets: What the float net has at the end of the layer's block (behind BatchNorm, sum and activation).
        sum_targets: What it has there before the activation: behind the layer, its BatchNorm and sums with others.
        input_mean: The mean of each channel of the input by the BatchNorm before it, float32 (in,); None where there is
            none, or more between than a ReLU or another clamp.
        finish: From what the layer gives for rows of a batch to the end of its block, in the quantized net: called with
            that, the number of the batch and the rows (None: all).
        sum: Likewise to what is there before the activation.
        problem: Why nothing of it should be changed; empty where it can be.
    """

    model: str
    path: str
    layer: QATLayer
    bn: Any | None
    bn_path: str
    inputs: list[Tensor]
    targets: Callable[[], list[Tensor]]
    sum_targets: Callable[[], list[Tensor]]
    input_mean: Callable[[], Tensor | None]
    finish: Callable[[Tensor, int, Tensor | None], Tensor]
    sum: Callable[[Tensor, int], Tensor]
    problem: str = ""

    @property
    def name(self) -> str:
        """The name that reports have."""
        return full_name(self.model, self.path)


def replay(subject: Subject, visit: Callable[[LayerCall], None]) -> None:
    """Runs the calibrated nets of a subject layer by layer, and shows every layer to ``visit`` before it runs rounded.

    Args:
        subject: The nets and their batches. A step sets tensors by ``subject.write``.
        visit: Called once for every quantized layer, in the order of the graphs.
    """
    for model, path, root in list(subject.roots()):
        float_calls, calls = _recorded(subject, root, in_float=True), _recorded(subject, root, in_float=False)
        programs = list(dict.fromkeys(program for program, _ in calls))
        aligned = [program for program, _ in float_calls] == [program for program, _ in calls]
        seen: set[nn.Module] = set()
        for program in programs:
            graph = _GraphReplay(subject, model, path, root, program, seen)
            if not aligned:
                graph.problem = "its net is called in other ways on its grids than in float"
            elif len(programs) > 1:
                graph.problem = "its net is called in several ways"
            own = [leaves for other, leaves in calls if other is program]
            floats = [leaves for other, leaves in float_calls if other is program] if aligned else own
            graph.run(floats, own, visit)


def _recorded(subject: Subject, root: nn.Module, in_float: bool) -> Calls:
    """What a root is called with over all batches: the program and its leaves, tensors as copies."""
    captured: Captured = root.__dict__["_captured"]
    recorder = _Recorder(captured)

    @contextmanager
    def recording() -> Iterator[None]:
        root.__dict__["_captured"] = recorder
        try:
            if in_float:
                with subject.in_float():
                    yield
            else:
                yield
        finally:
            root.__dict__["_captured"] = captured

    subject.run(recording())
    return recorder.calls


class _Recorder:
    """Stands in for the graphs of a module, and notes what these are called with."""

    def __init__(self, captured: Captured) -> None:
        self._recorded = captured
        self.calls: Calls = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorded, name)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _, program, leaves = self._recorded.find(module, args, kwargs)
        copies = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.calls.append((program, copies))
        return self._recorded.run(module, args, kwargs)


class _Ahead:
    """The values that there are, and some whose turn has not come yet.

    Attributes:
        floats: Of the float net, for each batch.
        values: Of the quantized one.
    """

    def __init__(self, floats: Values, values: Values, evaluate: Callable[..., tuple[list[Any], list[Any]]]) -> None:
        self.floats, self.values = dict(floats), dict(values)
        self._evaluate = evaluate

    def evaluate(self, node: fx.Node) -> None:
        self.floats[node], self.values[node] = self._evaluate(node, self.floats, self.values)


class _GraphReplay:
    """One graph of one root."""

    def __init__(
        self, subject: Subject, model: str, path: str, root: nn.Module, program: Program, seen: set[nn.Module]
    ) -> None:
        self._subject, self._model, self._path, self._root = subject, model, path, root
        self._nodes = list(program.graph.nodes)
        self._ops = Vocabulary(program.graph, root)
        self._order = {node: index for index, node in enumerate(self._nodes)}
        self._last_use = {value: node for node in self._nodes for value in node.all_input_nodes}
        self._calls = Counter(id(self._ops.module(node)) for node in self._nodes if node.op == "call_module")
        self._shared = subject.shared()
        self._seen = seen
        self._floats: Values = {}
        self._values: Values = {}
        self.problem = ""

    def run(self, floats: list[list[Any]], own: list[list[Any]], visit: Callable[[LayerCall], None]) -> None:
        leaf = 0
        count = range(len(own))
        for node in self._nodes:
            if node.op == "output":
                break
            if node.op == "placeholder":
                self._floats[node] = [leaves[leaf] for leaves in floats]
                self._values[node] = [leaves[leaf] for leaves in own]
                leaf += 1
                continue
            self._floats[node] = [self._evaluate(node, self._floats, i, True) for i in count]
            layer = self._ops.module(node)
            if isinstance(layer, QATLayer) and self._ops[node].kind is Kind.LAYER and layer not in self._seen:
                self._seen.add(layer)
                visit(self._call(node, layer))
            self._values[node] = [self._evaluate(node, self._values, i, False) for i in count]
            for value in node.all_input_nodes:
                if self._last_use[value] is node:
                    del self._floats[value], self._values[value]

    def _call(self, node: fx.Node, layer: QATLayer) -> LayerCall:
        ahead = _Ahead(self._floats, self._values, self._evaluate_both)
        tail = self._tail(node, ahead)
        bn_node = next((n for n in tail if self._ops[n].kind is Kind.BATCH_NORM), None)
        sums = list(itertools.takewhile(self._is_affine, tail))
        bn = None if bn_node is None else self._ops.module(bn_node)
        results = self._floats[node]

        def targets(nodes: list[fx.Node]) -> list[Tensor]:
            return [self._follow(node, y, nodes, ahead.floats, i, None, True) for i, y in enumerate(results)]

        return LayerCall(
            self._model,
            full_name(self._path, str(node.target)),
            layer,
            bn,
            "" if bn_node is None else full_name(self._path, str(bn_node.target)),
            self._values[self._ops[node].inputs[0]],
            lambda: targets(tail),
            lambda: targets(sums),
            lambda: mean_before(node, self._ops),
            lambda y, batch, rows: self._follow(node, y, tail, ahead.values, batch, rows, False),
            lambda y, batch: self._follow(node, y, sums, ahead.values, batch, None, False),
            self.problem or self._problem_of(node, layer, bn),
        )

    def _problem_of(self, node: fx.Node, layer: QATLayer, bn: nn.Module | None) -> str:
        fq = self._ops.module(source_of(self._ops[node].inputs[0], self._ops))
        if not (isinstance(fq, FakeQuantize) and fq.observed):
            return "its input has no grid: it stays float"
        if self._calls[id(layer)] > 1 or (bn is not None and self._calls[id(bn)] > 1):
            return "it is called several times"
        if "weight" not in layer._parameters:
            return "its weight is computed (pruning)"
        own = [*layer._parameters.values(), *(bn._parameters.values() if bn is not None else ())]
        if any(id(parameter) in self._shared for parameter in own):
            return "it shares parameters with another layer"
        return ""

    def _tail(self, node: fx.Node, ahead: _Ahead) -> list[fx.Node]:
        """The nodes behind a layer up to the end of its block, in order."""
        tail: list[fx.Node] = []
        end = node
        while (follower := only_user(end, self._ops)) is not None:
            kind = self._ops[follower].kind
            others = [n for n in follower.all_input_nodes if self._passed(n) is not end]
            known = all(self._look_ahead(n, ahead) for n in others)
            folds = end is node and can_fold(follower, self._ops) and self._same_channels(node)
            sums = kind is Kind.BINARY and known and bool(others)
            if not (folds or sums or kind is Kind.ACTIVATION):
                break
            tail.append(follower)
            end = follower
            if kind is Kind.ACTIVATION:
                break
        return tail

    def _look_ahead(self, node: fx.Node, ahead: _Ahead) -> bool:
        """Whether a value is known before its turn: it is there, or only moves one that is (slices, pads)."""
        if node in ahead.values:
            return True
        if self._ops[node].kind is not Kind.SAME or not all(self._look_ahead(n, ahead) for n in node.all_input_nodes):
            return False
        ahead.evaluate(node)
        return True

    def _evaluate_both(self, node: fx.Node, floats: Values, values: Values) -> tuple[list[Any], list[Any]]:
        count = range(len(next(iter(values.values()))))
        return (
            [self._evaluate(node, floats, i, True) for i in count],
            [self._evaluate(node, values, i, False) for i in count],
        )

    def _is_affine(self, node: fx.Node) -> bool:
        """Whether a shift of what a layer gives comes out of a node behind it, times the factor of its BatchNorm."""
        if self._ops[node].kind is Kind.BINARY:
            return self._ops.binary_name(node) == "add"
        return self._ops[node].kind is Kind.BATCH_NORM

    def _same_channels(self, node: fx.Node) -> bool:
        """Whether the channels of a layer are those of a BatchNorm behind it, which has them second."""
        inputs = self._values[self._ops[node].inputs[0]]
        return not isinstance(self._ops.module(node), nn.Linear) or all(x.dim() == 2 for x in inputs)

    def _passed(self, node: fx.Node) -> fx.Node:
        while self._ops.is_identity(node):
            node = node.all_input_nodes[0]
        return node

    def _follow(
        self,
        node: fx.Node,
        y: Tensor,
        tail: list[fx.Node],
        env: Values,
        batch: int,
        rows: Tensor | None,
        in_float: bool,
    ) -> Tensor:
        """From what a layer gives to what the nodes behind it make of it; leaves all values as they are."""
        before = node
        for follower in tail:
            values: Values = {}
            for n in follower.all_input_nodes:
                if self._passed(n) is before:
                    values[n] = [y.clone()]
                else:
                    other = env[n][batch]
                    values[n] = [other if rows is None or not isinstance(other, Tensor) else other[rows]]
            y = self._evaluate(follower, values, 0, in_float)
            before = follower
        return y

    def _evaluate(self, node: fx.Node, env: Values, batch: int, in_float: bool) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n][batch])
        if node.op == "get_attr":
            return self._attribute(str(node.target), in_float)
        if node.op == "call_function":
            function: Any = node.target
            return function(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        module = self._root.get_submodule(str(node.target))
        if not in_float:
            return module(*args, **kwargs)
        if isinstance(module, (FakeQuantize, BiasRounding)):
            return args[0]
        return self._in_float(module, full_name(self._path, str(node.target)), args, kwargs)

    def _attribute(self, target: str, in_float: bool) -> Any:
        original = self._subject.originals.get(self._model, {}).get(full_name(self._path, target))
        if in_float and original is not None:
            return original
        owner, _, name = target.rpartition(".")
        return getattr(self._root.get_submodule(owner), name)

    def _in_float(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        originals = self._subject.originals.get(self._model, {}).items()
        before = {name.removeprefix(f"{path}."): value for name, value in originals if name.startswith(f"{path}.")}
        with unrounded(*(fq for fq in module.modules() if isinstance(fq, FakeQuantize))):
            return functional_call(module, before, args, kwargs) if before else module(*args, **kwargs)
