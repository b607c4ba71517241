"""From the forward of a module to a torch.fx graph of the calls that it makes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten

from qlightning.fake_quantize import FakeQuantize
from qlightning.nn.qat import QATLayer, layer_type
from qlightning.vocabulary import OPAQUE


@dataclasses.dataclass(frozen=True)
class TraceFailure:
    """Why the forward of a module could not be traced.

    Attributes:
        path: Name of the module below the root whose own code it was; "" for the root.
        module_type: Its class.
        where: ``file:line`` of its code.
        message: What the tracer said.
    """

    path: str
    module_type: str
    where: str
    message: str

    def __str__(self) -> str:
        name = f"{self.path} ({self.module_type})" if self.path else self.module_type
        return f"{name} cannot be traced at {self.where}: {self.message}"


class TraceError(Exception):
    """Carries a TraceFailure out of the tracer."""

    def __init__(self, failure: TraceFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class _Tracer(fx.Tracer):
    """Records calls down to torch's own modules; remembers whose code every call stands in."""

    proxy_buffer_attributes = True

    def __init__(self, leaves: Iterable[str]) -> None:
        super().__init__()
        self._leaves = frozenset(leaves)
        self._tensor_names: dict[int, str] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self._leaves or isinstance(m, (*OPAQUE, QATLayer, FakeQuantize)):
            return True
        # Under sync_batchnorm, Lightning leaves a class of its own in the place of torch's (plugins/layer_sync.py).
        if isinstance(m, _BatchNorm) and type(m).forward is _BatchNorm.forward:
            return True
        return isinstance(m, torch.jit.ScriptModule) or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            return super().call_module(m, forward, args, kwargs)
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(_failure(self.path_of_module(m), m, error)) from error

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if not isinstance(attr_val, Tensor):
            return attr_val
        if not self._tensor_names:
            for key, tensor in (*self.root.named_parameters(), *self.root.named_buffers()):
                self._tensor_names.setdefault(id(tensor), key)
        if (name := self._tensor_names.get(id(attr_val))) is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def create_arg(self, a: Any) -> Any:
        # torch.fx makes a plain dict of every mapping.
        if isinstance(a, dict) and type(a) is not dict:
            return self.create_node("call_function", type(a), (self.create_arg(dict(a)),), {})
        if isinstance(a, Tensor) and not self._is_of_root(a):
            # A tensor that the forward has made: the module has no name for it, the graph keeps it.
            node = self.create_node("get_attr", "constant", (), {})
            node.meta["constant"] = a.detach()
            return node
        return super().create_arg(a)

    def _is_of_root(self, tensor: Tensor) -> bool:
        return any(tensor is own for own in (*self.root.parameters(), *self.root.buffers()))

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        if node.target in (operator.setitem, "__setitem__"):
            raise ValueError("forward assigns to elements of a tensor, which a graph would not repeat")
        node.meta["owner"] = next(reversed(self.module_stack), "") if self.module_stack else ""
        return node


def trace(
    module: nn.Module,
    original: type[nn.Module],
    call: Callable[[list[Any]], tuple[list[Any], dict[str, Any]]],
    leaf_names: list[str],
    *,
    training: bool,
    leaves: Iterable[str] = (),
) -> fx.Graph:
    """Traces the forward of a module for one way of calling it.

    Args:
        module: The root; left as it is.
        original: The class whose ``forward`` is traced.
        call: Builds the arguments of ``forward`` from the leaves, which are symbols during the trace.
        leaf_names: A name for each leaf; the placeholders of the graph.
        training: The mode that ``module.training`` shows in it and all below.
        leaves: Names of modules that are called in one piece.

    Raises:
        TraceError: Some code cannot be traced; carries which and where.
    """
    params = ", ".join(leaf_names)
    namespace: dict[str, Any] = {"_call": call, "_forward": original.forward}
    body = f"args, kwargs = _call([{params}]); return _forward(self, *args, **kwargs)"
    source = f"def forward(self, {params}): {body}\n"
    exec(source, namespace)
    own_class = module.__class__
    before = {name: (m, m.training, dict(m.__dict__)) for name, m in module.named_modules()}
    tracer = _Tracer(leaves)
    random = torch.get_rng_state()
    try:
        module.__class__ = type(original.__name__, (own_class,), {"forward": namespace["forward"]})
        for m, _, _ in before.values():
            m.training = training
        with _recording_factories():
            graph = tracer.trace(module)
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(_failure("", module, error, original)) from error
    finally:
        module.__class__ = own_class
        written = _restore(before)
        draws = not torch.equal(torch.get_rng_state(), random)
        torch.set_rng_state(random)
    if draws:
        message = "forward draws random numbers, which a graph would not draw again"
        raise TraceError(TraceFailure("", original.__name__, _source_of(original), message))
    if written is not None:
        path, attribute = written
        cls = type(before[path][0]) if path else original
        message = f"forward assigns self.{attribute}, which a graph would not repeat"
        raise TraceError(TraceFailure(path, cls.__name__, _source_of(cls), message))
    try:
        _read_after_write(graph, module)
    except ValueError as error:
        raise TraceError(TraceFailure("", original.__name__, _source_of(original), str(error))) from error
    graph.eliminate_dead_code(is_impure_node=_keeps)
    return graph


_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros")


@contextmanager
def _recording_factories() -> Iterator[None]:
    """Records calls that make a tensor of a size known at run time, which torch.fx does not see by itself."""

    def recording(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def record(*args: Any, **kwargs: Any) -> Any:
            flat, _ = tree_flatten((args, kwargs))
            proxy = next((value for value in flat if isinstance(value, fx.Proxy)), None)
            if proxy is None:
                return factory(*args, **kwargs)
            return proxy.tracer.create_proxy("call_function", factory, args, kwargs)

        return record

    factories = {name: getattr(torch, name) for name in _FACTORIES}
    try:
        for name, factory in factories.items():
            setattr(torch, name, recording(factory))
        yield
    finally:
        for name, factory in factories.items():
            setattr(torch, name, factory)


def _restore(before: dict[str, tuple[nn.Module, bool, dict[str, Any]]]) -> tuple[str, str] | None:
    """Gives every module its mode and attributes back; returns the first attribute that the forward had assigned."""
    written = None
    for path, (m, mode, attributes) in before.items():
        m.training = mode
        changed = [k for k, v in m.__dict__.items() if k not in attributes or attributes[k] is not v]
        changed = [k for k in changed if k != "training"]
        if changed:
            written = written or (path, changed[0])
            m.__dict__.clear()
            m.__dict__.update(attributes)
            m.training = mode
    return written


def _keeps(node: fx.Node) -> bool:
    """Dead calls are dropped, but those with effects: of modules (hooks, BatchNorm), in place, and assertions."""
    return node.op in ("placeholder", "output", "call_module") or node.target is torch._assert or _mutates(node)


_MUTATING_OPERATORS = frozenset(
    f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "and", "or", "xor")
)


def _mutates(node: fx.Node) -> bool:
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        return bool(node.kwargs.get("inplace", False)) or name in _MUTATING_OPERATORS or name.endswith("_")
    return False


def _read_after_write(graph: fx.Graph, root: nn.Module) -> None:
    """Lets later uses of a tensor that a call changes in place read the result of that call instead."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        changed = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if changed is None:
            continue
        by_module = node.op == "call_module" and getattr(root.get_submodule(str(node.target)), "inplace", False) is True
        if by_module or _mutates(node):
            if _is_view_of_later_use(changed, order, order[node]):
                raise ValueError(
                    f"forward changes a part of a tensor in place ({node.name}), which a graph would not repeat"
                )
            for user in [user for user in changed.users if order[user] > order[node]]:
                user.replace_input_with(changed, node)


def _is_view_of_later_use(node: fx.Node, order: dict[fx.Node, int], now: int) -> bool:
    """Whether a value may share the memory of another that is read later on."""
    while str(getattr(node.target, "__name__", node.target)) in _VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        if any(order[user] > now for user in node.users):
            return True
    return False


# fmt: off
_VIEWS = frozenset({
    "getitem", "getattr", "view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "permute",
    "transpose", "t", "swapaxes", "swapdims", "movedim", "moveaxis", "squeeze", "unsqueeze", "expand",
    "expand_as", "narrow", "select", "chunk", "split", "tensor_split", "unbind", "detach",
})
# fmt: on


def _failure(path: str, module: nn.Module, error: Exception, cls: type | None = None) -> TraceFailure:
    message = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename and "/qlightning/graph/" not in frame.filename and frame.filename[0] != "<"
    ]
    if frames:
        where = f"{frames[-1].filename}:{frames[-1].lineno}"
        if frames[-1].line:
            message = f"`{frames[-1].line}`: {message}"
    else:
        where = _source_of(cls or type(module))
    return TraceFailure(path, (cls or type(module)).__name__, where, message)


def _source_of(cls: type) -> str:
    try:
        return f"{inspect.getsourcefile(cls.forward)}:{inspect.getsourcelines(cls.forward)[1]}"  # type: ignore[attr-defined]
    except (OSError, TypeError):
        return "unknown source"


def has_layers(module: nn.Module) -> bool:
    """Whether a module is, or holds, a layer that can be quantized (attention and recurrent modules aside)."""
    if isinstance(module, OPAQUE):
        return False
    return layer_type(module) is not None or any(has_layers(child) for child in module.children())


def is_container(module: nn.Module) -> bool:
    """Whether a module only holds others and cannot be called, or is one of torch's lists of modules."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward
