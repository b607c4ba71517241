"""The noise that sets of int8 layers leave in a model's outputs, without a preparation for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from qlightning.affine import decibels
from qlightning.errors import ConfigError
from qlightning.graph.selection import Rounding, Selection
from qlightning.nn.qat import QATLayer

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Probe:
    """Runs a prepared model on the same calls with other sets of layers in int8.

    Args:
        prepared: A calibrated or trained model, in eval mode.
        calls: Arguments, already where the model is.
        step: Called once for every call that has run.

    Attributes:
        selection: The layers.
        exact: What the calls give in float.
        macs: Multiplications of layers, per sample and as the mean of the calls.
    """

    def __init__(self, prepared: nn.Module, calls: Sequence[Call], step: Callable[[], object] = lambda: None) -> None:
        self._prepared, self._calls, self._step = prepared, calls, step
        self.selection = Selection(prepared)
        self.macs: dict[str, int] = {}
        with self.selection.rounding() as rounding, self._counting():
            self.exact = self.outputs(rounding, ())
        if not any(map(_tensors, self.exact)):
            raise ConfigError(f"{type(prepared).__name__} gives no floating point tensor, so no noise can be measured.")

    def outputs(self, rounding: Rounding, int8: Collection[str]) -> list[Any]:
        """What the calls give with these layers in int8."""
        rounding.only(int8)
        found = []
        for args, kwargs in self._calls:
            found.append(self._prepared(*args, **kwargs))
            self._step()
        return found

    def sqnr(self, outputs: Sequence[Any]) -> float:
        """Signal to quantization noise of outputs in dB, all floating point tensors of all calls taken as one."""
        signal = noise = 0.0
        for exact, found in zip(map(_tensors, self.exact), map(_tensors, outputs), strict=True):
            for reference, other in zip(exact, found, strict=True):
                signal += reference.double().square().sum().item()
                noise += (reference.double() - other.double()).square().sum().item()
        return decibels(signal, noise)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Within it the multiplications of every layer are counted."""
        handles = []
        counts: dict[str, int] = {}
        for name in self.selection.parts:
            layer = self._prepared.get_submodule(name)
            if not isinstance(layer, QATLayer):
                continue

            def count(layer: nn.Module, args: tuple[Any, ...], output: Tensor, name: str = name) -> None:
                weight: Any = layer.weight
                transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd)
                channels = weight.shape[0]  # input channels of a transposed convolution, output channels of all others
                each = args[0] if transposed else output
                counts[name] = counts.get(name, 0) + each.numel() // each.shape[0] * weight.numel() // channels

            handles.append(layer.register_forward_hook(count))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self.macs = {name: total // max(len(self._calls), 1) for name, total in counts.items()}


def _tensors(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
