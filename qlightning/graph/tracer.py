"""The torch.fx tracer: what the symbols of a trace answer, and which calls it records that torch.fx would look into."""

from __future__ import annotations

import builtins
import copy
import functools
import gc
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import CheckpointFunction

from qlightning.fake_quantize import FakeQuantize
from qlightning.graph.eager import is_eager
from qlightning.graph.failure import TraceError, failure_of
from qlightning.nn.float_functional import FloatFunctional
from qlightning.nn.qat import QATLayer, has_forward_hooks
from qlightning.vocabulary import OPAQUE, Kind, Vocabulary


class Symbol(fx.Proxy):
    """A value during the trace."""

    tracer: Tracer

    def __getattr__(self, k: str) -> _Attribute:
        return _Attribute(self, k)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("tracer", "node", "root", "attr", "_node"):
            raise ValueError(f"forward assigns the attribute {name} of a tensor, which a graph would not repeat")
        object.__setattr__(self, name, value)

    @classmethod
    def __torch_function__(cls, orig_method: Any, types: Any, args: Any = None, kwargs: Any = None) -> Any:
        return fx.Proxy.__torch_function__.__func__(Symbol, orig_method, types, args, kwargs)  # type: ignore[attr-defined]


class _Attribute(Symbol, fx.proxy.Attribute):
    """An attribute of a symbol, a method perhaps."""


def _define_in_place(name: str) -> None:
    def record(self: Symbol, other: Any) -> fx.Proxy:
        # Numbers make new numbers: only a tensor changes in place.
        target = getattr(operator, f"i{name}" if self.tracer.may_be_tensor(self.node) else _PLAIN.get(name, name))
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    setattr(Symbol, f"__i{name}__", record)


_PLAIN = {"and": "and_", "or": "or_"}
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    _define_in_place(_name)


class Tracer(fx.Tracer):
    """Records calls down to torch's own modules; remembers whose code every call stands in.

    Args:
        leaves: Names of modules that are called in one piece.
        values: Names of the placeholders that stand for numbers and other objects, not tensors.
    """

    proxy_buffer_attributes = True

    def __init__(self, leaves: Iterable[str], values: Iterable[str] = ()) -> None:
        super().__init__()
        self._leaves = frozenset(leaves)
        self._values = frozenset(values)
        self._tensor_names: dict[int, str] = {}
        self._symbols: list[weakref.ref[fx.Proxy]] = []

    def proxy(self, node: fx.Node) -> Symbol:
        symbol = Symbol(node, self)
        self._symbols.append(weakref.ref(symbol))
        return symbol

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, FloatFunctional) and not has_forward_hooks(m):
            return False  # an excluded one has no grid, but torch.ao's cannot be called in one piece
        if module_qualified_name in self._leaves or isinstance(m, (QATLayer, FakeQuantize)):
            return True
        if is_eager(m):
            return False
        if isinstance(m, OPAQUE):
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
            raise TraceError(failure_of(self.path_of_module(m), m, error)) from error

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
            parameter_proxy_cache[name].node.meta["class"] = type(attr_val)
        return parameter_proxy_cache[name]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy):
            return a.node
        # torch.fx makes a plain dict of every mapping.
        if isinstance(a, dict) and type(a) is not dict:
            return self.create_node("call_function", _builder(a), (self.create_arg(dict(a)),), {})
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
        # The keys of the stack number the calls of a module, the values are (path, type).
        node.meta["owner"] = next(reversed(self.module_stack.values()))[0] if self.module_stack else ""
        if not torch.is_grad_enabled() and node.op not in ("placeholder", "get_attr", "output"):
            node.meta["no_grad"] = True
        return node

    def keeps_symbols(self) -> bool:
        """Whether, after the trace, something still holds a symbol: the forward has put it where a graph would not."""
        for generation in range(3):  # some are in cycles with frames
            if all(symbol() is None for symbol in self._symbols):
                return False
            gc.collect(generation)
        return any(symbol() is not None for symbol in self._symbols)

    def class_of(self, node: fx.Node) -> type:
        """The class of the value that a node will have.

        Raises:
            ValueError: It cannot be known before the call.
        """
        found = _class_of(node, self._values, Vocabulary(self.graph, self.root))
        if found is None:
            raise ValueError("forward asks for the class of a value that is not known before the call")
        return found

    def may_be_tensor(self, node: fx.Node) -> bool:
        """Whether a node may have a tensor for its value."""
        return _class_of(node, self._values, Vocabulary(self.graph, self.root)) in (None, Tensor, nn.Parameter)


_COMPUTES = frozenset(
    {Kind.LAYER, Kind.BATCH_NORM, Kind.ACTIVATION, Kind.BINARY, Kind.MATMUL, Kind.CAT, Kind.POOL, Kind.SAME}
)
_FACTS: dict[str, type] = {"shape": torch.Size, "dtype": torch.dtype, "device": torch.device, "ndim": int}
_COUNTS = frozenset({"size", "dim", "ndimension", "numel", "nelement", "stride", "get_device"})


def _class_of(node: Any, values: frozenset[str], ops: Vocabulary) -> type | None:
    if not isinstance(node, fx.Node):
        return type(node)
    if node.op == "placeholder":
        return None if str(node.target) in values else Tensor
    if node.op == "get_attr":
        return node.meta.get("class", Tensor)
    name = str(getattr(node.target, "__name__", node.target))
    if name == "getattr":
        return _FACTS.get(str(node.args[1]), Tensor if node.args[1] in ("T", "mT", "H", "data", "real") else None)
    if name in _COUNTS:
        return torch.Size if name == "size" and len(node.args) + len(node.kwargs) == 1 else int
    if name.startswith("is_"):
        return bool
    if getattr(node.target, "__module__", "") == "_operator" and name != "getitem":
        operands = {_class_of(arg, values, ops) for arg in node.args}
        if operands & {Tensor, nn.Parameter}:
            return Tensor
        return int if operands == {int} and name != "truediv" else None
    op = ops[node]
    if name == "getitem":
        parent = _class_of(node.args[0], values, ops)
        if parent is torch.Size:
            return int if isinstance(node.args[1], int) else torch.Size
        return Tensor if parent in (Tensor, nn.Parameter, tuple) else None
    if op.kind in _COMPUTES:
        return tuple if op.sequence else Tensor
    module = ops.module(node)
    if module is not None:
        plain = type(module).__module__.startswith("torch.nn.") and not isinstance(module, (nn.Sequential, *OPAQUE))
        return Tensor if plain and not getattr(module, "return_indices", False) else None
    known = node.op == "call_method" or str(getattr(node.target, "__module__", "torch")).startswith("torch")
    return Tensor if op.kind is Kind.FLOAT and known and not op.sequence else None


_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros")


@contextmanager
def recording() -> Iterator[None]:
    """Records what torch.fx does not see by itself: factories of tensors, functions with a backward of their own."""

    def recorder(factory: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(factory)
        def record(*args: Any, **kwargs: Any) -> Any:
            symbol = _symbol_in(args, kwargs)
            if symbol is None:
                return factory(*args, **kwargs)
            return symbol.tracer.create_proxy("call_function", factory, args, kwargs)

        return record

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        symbol = _symbol_in(args, kwargs)
        if symbol is None:
            return plain_apply.__get__(None, cls)(*args, **kwargs)
        if cls is CheckpointFunction:  # saves memory, and changes nothing else
            return args[0](*args[2:])
        return symbol.tracer.create_proxy("call_function", _function_of(cls), args, kwargs)

    def refuse_autocast(self: Any) -> None:
        raise ValueError("forward switches autocast, which a graph would not repeat")

    def refuse_backward(self: Any) -> None:
        raise ValueError("forward applies an autograd.Function by another name; call <Function>.apply")

    plain_apply = vars(torch.autograd.Function)["apply"]
    isinstance_of = builtins.isinstance

    def is_instance(value: Any, classes: Any) -> bool:
        """As isinstance, which C code does not call: that would take a symbol for a tensor's memory."""
        found = isinstance_of(value, classes)
        if found or not isinstance_of(value, Symbol):
            return found
        asking = sys._getframe(1).f_globals.get("__name__", "")
        if f"{asking}.".startswith(("torch.", "qlightning.graph.")):
            return found
        return issubclass(value.tracer.class_of(value.node), classes)

    def is_tensor(value: Any) -> bool:
        known = value.tracer.class_of(value.node) if isinstance_of(value, Symbol) else type(value)
        return issubclass(known, Tensor)

    patches: list[tuple[Any, str, Any]] = [(torch, name, recorder(getattr(torch, name))) for name in _FACTORIES]
    patches += [
        (torch, "is_tensor", is_tensor),
        (torch.autocast, "__enter__", refuse_autocast),
        (builtins, "isinstance", is_instance),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    try:
        for owner, name, patch in patches:
            setattr(owner, name, patch)
        BackwardCFunction.__init__ = refuse_backward  # type: ignore[method-assign]
        torch.autograd.Function.apply = classmethod(apply)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        del BackwardCFunction.__init__
        torch.autograd.Function.apply = plain_apply


def _symbol_in(args: Any, kwargs: Any) -> fx.Proxy | None:
    flat, _ = tree_flatten((args, kwargs))
    return next((value for value in flat if isinstance(value, fx.Proxy)), None)


def _builder(mapping: dict[Any, Any]) -> Callable[[dict[Any, Any]], Any]:
    """What makes a mapping like another from a plain dict: its class; or a copy, as a defaultdict has more to it."""
    cls = type(mapping)
    try:
        if cls(dict(mapping)).keys() == mapping.keys():
            return cls
    except TypeError:
        pass
    empty = copy.copy(mapping)
    empty.clear()

    def build(items: dict[Any, Any]) -> Any:
        built = copy.copy(empty)
        built.update(items)
        return built

    build.__name__ = cls.__name__
    return build


@functools.cache
def _function_of(cls: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``cls.apply`` as a function with a name."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return cls.apply(*args, **kwargs)

    function.__name__, function.__module__ = cls.__name__, cls.__module__
    return function
