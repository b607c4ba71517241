"""Preparation: how a model was prepared, and why some of its layers stay float."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from qlightning.backends import Backend
from qlightning.calls import LAYER_FUNCTIONS, function_name
from qlightning.fake_quantize import FakeQuantize
from qlightning.graph.bind import BoundModule
from qlightning.graph.capture import CapturedRoot
from qlightning.graph.changes import Change, StepReport
from qlightning.graph.failure import TraceFailure
from qlightning.graph.tracing import has_layers
from qlightning.nn.qat import QATLayer, has_forward_hooks, layer_type
from qlightning.qconfig import Mode, QConfig, Resolver
from qlightning.vocabulary import Vocabulary


@dataclass(frozen=True)
class Grid:
    """Where the values of an activation lie.

    Attributes:
        scale: float32, 0-d or (channels,).
        zero_point: int32, likewise.
        ndims: The numbers of dimensions that it was observed with.
    """

    scale: Tensor
    zero_point: Tensor
    ndims: tuple[int, ...]

    @classmethod
    def of(cls, fq: FakeQuantize) -> Grid:
        """The grid of a fake-quantizer."""
        return cls(fq.scale.detach().cpu().clone(), fq.zero_point.detach().cpu().clone(), tuple(sorted(fq.seen_ndims)))

    def give(self, fq: FakeQuantize) -> None:
        """Lets a fake-quantizer round to this grid."""
        fq.scale.resize_(self.scale.shape).copy_(self.scale)
        fq.zero_point.resize_(self.zero_point.shape).copy_(self.zero_point)
        fq.seen_ndims = set(self.ndims)
        fq.observed = True


@dataclass(frozen=True)
class FloatChoice:
    """Layers of a prepared model that are left in float when it is converted.

    Attributes:
        reasons: Why, by the name of the layer.
        note: What the choice was made by; "" where there is nothing to say.
    """

    reasons: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Preparation:
    """How a model was prepared.

    Attributes:
        qconfig: The settings as the backend has adapted them.
        backend: The backend.
        mode: "qat" or "ptq".
        reasons: Why a layer stays float, by its name.
        failures: Modules whose forward could not be traced.
        to_convert: Whether who loads the model's state dict is to convert it.
        grids: Of an int8 model the grids of its activations, by the name of the fake-quantizer.
        steps: What steps of post-training quantization did, in their order.
        changes: Of a prepared model the tensors that they have set, by name: what unprepare gives back.
        float_choice: What convert leaves in float of what is prepared.
    """

    qconfig: QConfig
    backend: Backend
    mode: Mode
    reasons: dict[str, str] = field(default_factory=dict)
    failures: tuple[TraceFailure, ...] = ()
    to_convert: bool = False
    grids: Mapping[str, Grid] = field(default_factory=dict)
    steps: tuple[StepReport, ...] = ()
    changes: Mapping[str, Change] = field(default_factory=dict)
    float_choice: FloatChoice = field(default_factory=FloatChoice)

    def __deepcopy__(self, memo: dict[int, Any]) -> Preparation:
        return self


class PreparedModule(BoundModule):
    """Marks a module whose forward runs graphs with fake-quantizers."""


def is_prepared(module: nn.Module) -> bool:
    """Whether a module, or a part of it, is prepared."""
    return any(isinstance(m, PreparedModule) for m in module.modules())


def ask_to_convert(module: nn.Module) -> None:
    """Lets the state dicts of a prepared module ask who loads them to convert it."""
    module.__dict__["_preparation"] = replace(module.__dict__["_preparation"], to_convert=True)


def captured_roots(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules at or below a module whose forward runs graphs, with their names."""
    return [(name, m) for name, m in module.named_modules() if isinstance(m, BoundModule)]  # type: ignore[misc]


def compile_graphs(modules: Iterable[nn.Module]) -> None:
    """Lets the graphs at and below modules run by torch.compile, in place; each compiles when it is next called."""
    for module in modules:
        for _, root in captured_roots(module):
            root.__dict__["_captured"].compile()


def uncompile_graphs(modules: Iterable[nn.Module]) -> None:
    """Lets the graphs at and below modules run as they are again."""
    for module in modules:
        for _, root in captured_roots(module):
            root.__dict__["_captured"].uncompile()


def float_reasons(
    model: nn.Module, resolver: Resolver, called: set[str], roots: Iterable[CapturedRoot]
) -> dict[str, str]:
    """Why each layer that is not in a graph stays float."""
    reasons: dict[str, str] = {}
    roots = list(roots)
    passed = {name: reason for root in roots for name, reason in _passed_weights(root)}
    otherwise = {name: reason for root in roots for name, reason in _called_with_more(root)}
    for name, module in model.named_modules():
        base = next((cls for cls in type(module).__mro__ if cls in (nn.Linear, *CONV_TYPES)), None)
        if base is None or name in called or isinstance(module, QATLayer):
            continue
        config, reason = resolver.resolve(name)
        if config is None:
            reasons[name] = reason
        elif inside := _opaque_parent(model, name):
            reasons[name] = f"inside {inside}, which torch calls in one piece"
        elif layer_type(module) is None:
            reasons[name] = f"{type(module).__name__} has a forward of its own"
        elif has_forward_hooks(module):
            reasons[name] = "has forward hooks, which an int8 kernel would not call"
        elif name in passed:
            reasons[name] = passed[name]
        elif name in otherwise:
            reasons[name] = otherwise[name]
        else:
            reasons[name] = "not called as a module by the forward that was traced"
    return reasons


CONV_TYPES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _passed_weights(root: CapturedRoot) -> Iterator[tuple[str, str]]:
    """Layers whose weight a graph hands to a function, and why that does not make them int8."""
    for graph, _ in root.graphs.values():
        ops = Vocabulary(graph, root.module)
        for node in graph.nodes:
            if node.op == "get_attr" and str(node.target).endswith(".weight"):
                layer = f"{root.path}.{node.target}".removeprefix(".").removesuffix(".weight")
                functions = [user for user in node.users if user.op == "call_function"]
                if functions:
                    name = function_name(functions[0].target)
                    computed = ops.computed_argument(functions[0]) if name in LAYER_FUNCTIONS else ""
                    why = f"beside a {computed} that the forward computes" if computed else ""
                    yield layer, f"its weight goes to {name}(){' ' + why if why else ', which is called in one piece'}"


def _called_with_more(root: CapturedRoot) -> Iterator[tuple[str, str]]:
    """Layers that a graph gives more than their input, and what that is."""
    for graph, _ in root.graphs.values():
        for node in graph.nodes:
            if node.op == "call_module" and len(node.args) + len(node.kwargs) > 1:
                more = [*node.kwargs] if node.args else [*node.kwargs][1:]
                named = ", ".join(more) or "further arguments"
                yield f"{root.path}.{node.target}".removeprefix("."), f"called with {named} beside its input"


def _opaque_parent(model: nn.Module, name: str) -> str | None:
    while name:
        name = name.rpartition(".")[0]
        parent = model.get_submodule(name)
        if not has_layers(parent) and type(parent).__module__.startswith("torch.nn.modules."):
            return type(parent).__name__
    return None
