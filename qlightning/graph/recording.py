"""Running the graphs of a model node by node, to look at the values in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

from qlightning.backends.qdq import QUANTIZE, QUANTIZE_PER_CHANNEL, layer_path
from qlightning.fake_quantize import FakeQuantize, WeightFakeQuantize
from qlightning.graph.bind import BoundModule
from qlightning.graph.patterns import can_fold, only_user
from qlightning.graph.programs import Captured, Program
from qlightning.graph.signature import describe_call
from qlightning.nn.bias import BiasRounding
from qlightning.nn.qat import QATLayer, layer_type
from qlightning.vocabulary import Kind, Vocabulary

Visit = Callable[[str, Tensor], None]
"""Called with a name and the value that was found there."""


@dataclass(frozen=True)
class Call:
    """The arguments of a call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def cut(self, samples: int) -> Call:
        """The same call with the first samples alone; copies, on the CPU, without gradients.

        A tensor whose first size is that of the first tensor is taken to have a sample in each of its rows.
        """
        size = self.samples

        def first(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            part = value[:samples] if value.dim() and len(value) == size else value
            return part.detach().cpu().clone()

        return self._mapped(first)

    def to(self, device: torch.device) -> Call:
        """The same call on another device."""
        return self._mapped(lambda value: value.to(device) if isinstance(value, Tensor) else value)

    def _mapped(self, function: Callable[[Any], Any]) -> Call:
        args, kwargs = tree_map(function, (self.args, dict(self.kwargs)))
        return Call(args, kwargs)

    @property
    def samples(self) -> int:
        """The first size of the first tensor; 0 where there is none."""
        return len(self._tensors[0]) if self._tensors else 0

    def numel(self) -> int:
        """The elements of all tensors."""
        return sum(tensor.numel() for tensor in self._tensors)

    @property
    def _tensors(self) -> list[Tensor]:
        return [v for v in tree_leaves((self.args, dict(self.kwargs))) if isinstance(v, Tensor) and v.dim()]


@contextmanager
def noting_calls(roots: Mapping[str, nn.Module], keep: Callable[[str, Call], None]) -> Iterator[None]:
    """Within it every call of modules is handed on, by the name of the module, before it runs."""
    handles = [
        root.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: keep(name, Call(args, kwargs)),
            with_kwargs=True,
        )
        for name, root in roots.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def in_eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within it the modules are in eval mode; nothing of theirs is told so, and each gets its own mode back."""
    trained = [module for module in modules if module.training]
    for module in trained:
        module.training = False
    try:
        yield
    finally:
        for module in trained:
            module.training = True


def program_of(root: nn.Module, call: Call) -> tuple[Program, list[Any]] | None:
    """The eval graph that a bound module has for a call, and the leaves that it takes; None where it has none."""
    captured: Captured = root.__dict__["_captured"]
    for frozen in (False, True):
        spec, leaves = describe_call(captured.signature, call.args, dict(call.kwargs), freeze_numbers=frozen)
        for program in captured.programs.get((spec, False), []):
            if program.fits(root):
                return program, leaves
    return None


def eval_programs(root: nn.Module) -> list[Program]:
    """All eval graphs of a bound module."""
    captured: Captured = root.__dict__["_captured"] if isinstance(root, BoundModule) else Captured(type(root), None)
    return [program for (_, training), found in captured.programs.items() if not training for program in found]


class Int8Run(fx.Interpreter):
    """Runs a QDQ graph.

    Args:
        root: The int8 module.
        graph: Its QDQ graph.
        layer: Gets the result of every int8 layer, without the activation behind it.
        grid: Gets the node that quantizes and the value before it.
    """

    def __init__(
        self, root: nn.Module, graph: fx.Graph, layer: Visit, grid: Callable[[fx.Node, Tensor], None] | None = None
    ) -> None:
        super().__init__(root, graph=graph)
        self._layer, self._grid = layer, grid

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if self._grid is not None and n.target in (QUANTIZE, QUANTIZE_PER_CHANNEL):
            self._grid(n, self.env[n.args[0]])  # type: ignore[index]
        elif (path := layer_path(n)) is not None:
            self._layer(path, value)
        return value


def folded_bns(graph: fx.Graph, root: nn.Module) -> dict[fx.Node, fx.Node]:
    """The BatchNorms of a prepared graph that fold into the layers before them: from the one's node to the other's."""
    ops = Vocabulary(graph, root)
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if ops[node].kind is Kind.BATCH_NORM and isinstance(ops.module(node), _BatchNorm) and can_fold(node, ops):
            layer = ops[node].inputs[0]
            user = only_user(layer, ops)
            if ops[layer].kind is Kind.LAYER and user is not None and user is node:
                found[user] = layer
    return found


def layer_names(graph: fx.Graph, root: nn.Module) -> dict[fx.Node, str]:
    """The layers of a prepared graph with the names that their int8 layers have (`qlightning.graph.qdq`)."""
    modules = dict(root.named_modules())
    found = {}
    for node in graph.nodes:
        if node.op == "call_module" and isinstance(modules[str(node.target)], QATLayer):
            found[node] = str(node.target)
        elif node.op == "call_function" and (attribute := _weight_of(node, modules)):
            owner = attribute.rpartition(".")[0]
            free = owner != "" and layer_type(modules[owner]) is not None
            found[node] = owner if free else "layer" if isinstance(root, QATLayer) else f"{attribute}_quantized"
    return found


def _weight_of(node: fx.Node, modules: Mapping[str, nn.Module]) -> str:
    """The attribute that is the weight of a layer that is called as a function; empty for other calls."""
    for value in node.args[1:2] or [node.kwargs.get("weight")]:
        if isinstance(value, fx.Node) and isinstance(modules.get(str(value.target)), WeightFakeQuantize):
            return str(value.args[0].target)  # type: ignore[union-attr]
    return ""


class FloatRun(fx.Interpreter):
    """Runs an eval graph of a prepared module in float, as if nothing were rounded.

    Args:
        root: The prepared module, in eval mode.
        graph: The graph.
        layer: Gets the result of every layer that is a module, BatchNorm included where it folds in; a layer that is
            called several times counts once.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph, layer: Visit) -> None:
        super().__init__(root, graph=graph)
        self._layer = layer
        names = layer_names(graph, root)
        bns = folded_bns(graph, root)
        for bn, head in bns.items():
            if head in names:
                names[bn] = names.pop(head)
        self._results = names
        self._seen: set[str] = set()

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        name = self._results.get(n)
        if name is not None and name not in self._seen:
            self._seen.add(name)
            self._layer(name, value)
        return value

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module: Any = self.module.get_submodule(str(target))
        if isinstance(module, (FakeQuantize, BiasRounding)):
            return args[0]
        if isinstance(module, QATLayer):
            base: Any = layer_type(module)
            return base.forward(module, *args, **kwargs)
        return module(*args, **kwargs)


def is_activation(fq: nn.Module) -> bool:
    """Whether a module is the fake-quantizer of an activation."""
    return isinstance(fq, FakeQuantize) and not isinstance(fq, WeightFakeQuantize)
