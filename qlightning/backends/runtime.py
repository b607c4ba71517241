"""Running a QDQ graph in another runtime: what runs there is compiled when it is first called, for each shape anew."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from qlightning.backends.aten_form import aten_form
from qlightning.backends.onnx_form import KNOWN, Weight
from qlightning.backends.onnx_parts import Engine, Parts
from qlightning.backends.qdq import NO_KERNEL, free_name, layer_path
from qlightning.errors import BackendError
from qlightning.nn.quantized import QuantizedLayer

MAX_SHAPES = 8
"""How many shapes of inputs stay compiled; what is called with more compiles again and again."""


def lower(graph: fx.Graph, root: nn.Module, engine: Engine) -> fx.Graph:
    """Turns a QDQ graph into one call of a runtime.

    Args:
        graph: The QDQ graph; left as it is.
        root: The module it belongs to, which keeps the :class:`Runtime`.
        engine: The runtime.
    """
    runtime = Runtime(graph, root, engine)
    name = free_name(root, "runtime")
    root.__dict__[name] = runtime
    for path in runtime.layers:
        layer = root.get_submodule(path)
        assert isinstance(layer, QuantizedLayer)
        layer.kernel = f"{engine.name}, which compiles it when it is first called"
        layer.add_packing(_Forget(runtime))
    new = fx.Graph()
    copies = {node: new.node_copy(node) for node in graph.nodes if node.op == "placeholder"}
    result = new.call_function(_run, (new.get_attr(name), *copies.values()))
    new.output(result)
    return new


def _run(runtime: Runtime, *leaves: Any) -> Any:
    return runtime(*leaves)


@dataclass
class _Forget:
    """Takes the place of a packed weight: when it is to be packed again, the codes have changed."""

    runtime: Runtime

    def __call__(self, layer: nn.Module) -> None:
        self.runtime.forget()


class Runtime:
    """Runs one QDQ graph in a runtime.

    What is compiled belongs to shapes, dtypes and the number of threads that torch has; it is not copied or saved.

    Args:
        graph: The QDQ graph.
        root: The module it belongs to.
        engine: The runtime.
    """

    def __init__(self, graph: fx.Graph, root: nn.Module, engine: Engine) -> None:
        self.graph = graph
        self.layers = tuple(dict.fromkeys(p for n in graph.nodes if (p := layer_path(n)) is not None))
        self._root = root
        self._engine = engine
        self._warned = False
        self._calls: OrderedDict[Any, Callable[[tuple[Any, ...]], Any]] = OrderedDict()
        self._floats: list[_Float] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        copied = memo[id(self)] = Runtime.__new__(Runtime)
        copied.__dict__.update(self.__dict__)
        copied._calls, copied._floats = OrderedDict(), []
        copied._root = copy.deepcopy(self._root, memo)
        return copied

    def forget(self) -> None:
        """Drops what is compiled, as the model has changed."""
        self._calls = OrderedDict()

    @torch.compiler.disable
    def __call__(self, *leaves: Any) -> Any:
        """Runs the graph on the leaves of a call.

        Raises:
            BackendError: A tensor is not on the CPU.
        """
        if any(value.has_changed() for value in self._floats):
            self.forget()
        key = (torch.get_num_threads(), torch.is_autocast_enabled("cpu"), *map(_key, leaves))
        call = self._calls.get(key)
        if call is None:
            if not self._calls:
                self._floats = _floats(self._root)
            call = self._calls[key] = self._compile(leaves)
            while len(self._calls) > MAX_SHAPES:
                self._calls.popitem(last=False)
        else:
            with suppress(KeyError):  # another thread has just dropped it
                self._calls.move_to_end(key)
        return call(leaves)

    def _compile(self, leaves: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], Any]:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if elsewhere := [x.device for x in tensors if x.device.type != "cpu"]:
            raise BackendError(f"Backend {self._engine.name!r} runs on the CPU, and an input is on {elsewhere[0]}.")
        if any(not x.numel() for x in tensors):
            return self._reference()
        try:
            form = aten_form(self.graph, self._root, leaves, KNOWN)
            weights = [Weight(path, self._layer(path)) for path in form.weights]
            parts = Parts(form, weights, self._engine, torch.get_num_threads())
        except Exception as error:  # torch's tracing and the runtimes raise whatever went wrong
            return self._fallen_back(error)
        torchs = f"in torch, as {'; '.join(parts.problems)}"
        for path in self.layers:
            self._layer(path).kernel = parts.kernels.get(path, f"{NO_KERNEL}, {torchs}")
        return parts

    def _layer(self, path: str) -> QuantizedLayer:
        layer = self._root.get_submodule(path)
        assert isinstance(layer, QuantizedLayer)
        return layer

    def _reference(self) -> Callable[[tuple[Any, ...]], Any]:
        """The graph as it is, which torch runs."""
        module = fx.GraphModule(self._root, self.graph)
        return lambda leaves: module(*leaves)

    def _fallen_back(self, error: Exception) -> Callable[[tuple[Any, ...]], Any]:
        """The graph as it is, as the runtime cannot take it; said once."""
        reference = self._reference()
        reason: str | None = str(error).strip().split("\n")[0]

        def run(leaves: tuple[Any, ...]) -> Any:
            nonlocal reason
            results = reference(leaves)  # where this fails, too, the call is at fault
            if reason is not None:
                self._tell(reason)
                reason = None
            return results

        return run

    def _tell(self, reason: str) -> None:
        for path in self.layers:
            self._layer(path).kernel = f"{NO_KERNEL}, in torch, as {self._engine.name} fails: {reason}"
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self._root).__name__} runs on 'reference', at float speed: {self._engine.name} cannot take it: "
                f"{reason}",
                stacklevel=5,
            )


@dataclass(frozen=True)
class _Float:
    """A parameter or buffer of a float part as it was when it went into what is compiled."""

    owner: Mapping[str, Tensor | None]
    name: str
    value: Tensor
    version: int | None

    def has_changed(self) -> bool:
        """Whether it is another one now, or was written to."""
        return self.owner.get(self.name) is not self.value or _version(self.value) != self.version


def _floats(root: nn.Module) -> list[_Float]:
    """All of them; int8 layers tell of changes themselves."""
    return [
        _Float(owner, name, value, _version(value))
        for module in root.modules()
        if not isinstance(module, QuantizedLayer)
        for owner in (module._parameters, module._buffers)
        for name, value in owner.items()
        if value is not None
    ]


def _version(value: Tensor) -> int | None:
    """Counts how often a tensor was written to; inference tensors do not count."""
    return None if value.is_inference() else value._version


def _key(leaf: Any) -> Any:
    """What of an argument the compiled form depends on."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)
