"""CrossLayerEqualization: evens the channels of a layer out with what the next layer multiplies them by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qlightning.errors import ConfigError
from qlightning.graph.changes import LayerChange, StepReport, tensor_at
from qlightning.graph.programs import Captured
from qlightning.steps.base import Step
from qlightning.steps.pairs import Pair, find_pairs
from qlightning.steps.subject import Subject, full_name

_STILL = 1e-3  # a pass that moves all channels by less is the last
_TINY = 1e-30
_MOST = 2.0**10  # what a channel is scaled by at most in one direction, so that float32 keeps its digits


@dataclass(frozen=True)
class CrossLayerEqualization(Step):
    """Scales channels between neighbouring layers so that both have the same range in each of them.

    Where a ReLU (or LeakyReLU, or nothing) stands between two layers, a channel can be divided by any positive factor
    in the first and multiplied by it in the second, and the net computes the same. With r1 and r2 the largest weights
    of channel i in both, the factor is sqrt(r1[i] / r2[i]); chains (such as pointwise, depthwise, pointwise) are gone
    over until nothing moves. BatchNorm counts as folded, and takes the factor of the first layer. From section 4.1 of
    Nagel et al., "Data-Free Quantization through Weight Equalization and Bias Correction", 2019.

    It helps where weights have one grid for a whole layer, or channels of very different size. Only pairs are changed
    whose value in between is read once, by the second layer. ReLU6, Hardswish and the like do not scale along: these
    pairs are left alone, and never is an activation replaced.

    Args:
        passes: How often the pairs are gone over at most.

    Raises:
        ConfigError: ``passes`` is no positive integer.
    """

    passes: int = 20
    before_calibration: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.passes, bool) or not isinstance(self.passes, int) or self.passes < 1:
            raise ConfigError(f"CrossLayerEqualization passes={self.passes!r}: a positive integer is needed.")

    def apply(self, subject: Subject) -> StepReport:
        rows: list[LayerChange] = []
        called, shared = _calls(subject), subject.shared()
        for model, path, root in subject.roots():
            found = find_pairs(root, called, shared)
            work = _Work(root)
            pairs = [pair for pair in found.values() if isinstance(pair, Pair)]
            before = {pair: work.evenness(pair) for pair in pairs}
            factors = _equalize(work, pairs, self.passes)
            for name, value in work.changed():
                subject.write(model, full_name(path, name), value)
            for name, pair in found.items():
                full = full_name(model, path, name)
                if isinstance(pair, str):
                    rows.append(LayerChange(full, False, pair))
                else:
                    what = _words(pair, factors[pair])
                    rows.append(LayerChange(full, pair in factors, what, before[pair], work.evenness(pair)))
        measure = "range of a channel as a part of the largest, in both layers, their product, mean over channels"
        return StepReport(repr(self), tuple(rows), measure)


def _calls(subject: Subject) -> Counter[int]:
    """How often each module is called by the graphs of eval mode, the most in any way of calling."""
    total: Counter[int] = Counter()
    for _, _, root in subject.roots():
        captured: Captured = root.__dict__["_captured"]
        most: Counter[int] = Counter()
        for (_, training), programs in captured.programs.items():
            for program in programs if not training else ():
                nodes = [node for node in program.graph.nodes if node.op == "call_module"]
                most |= Counter(id(root.get_submodule(str(node.target))) for node in nodes)
        total += most
    return total


def _equalize(work: _Work, pairs: list[Pair], passes: int) -> dict[Pair, Tensor]:
    """Scales the channels of pairs until nothing moves; returns what each first layer was divided by, (channels,)."""
    factors: dict[Pair, Tensor] = {}
    for _ in range(passes):
        moved = 0.0
        for pair in pairs:
            first, second = work.ranges(pair)
            alive = (first > 0) & (second > 0)
            factor = torch.where(alive, (first / second).sqrt(), 1.0).nan_to_num(1.0).clamp(1 / _MOST, _MOST)
            work.scale(pair, factor)
            factors[pair] = factors.get(pair, 1.0) * factor
            moved = max(moved, float(factor.log().abs().max()))
        if moved < _STILL:
            break
    return factors


class _Work:
    """Weights and biases in float64 while they are scaled.

    Attributes:
        values: By the name of the tensor below the root.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.values: dict[str, Tensor] = {}

    def ranges(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """The largest weight of each channel in both layers, with the BatchNorms folded in; two of (channels,)."""
        first = self._weight(pair.first).abs().flatten(1).amax(1) * self._factor(pair.bn).abs()
        weight = self._by_input(pair.second).abs()
        if pair.second_bn:
            weight = weight * self._factor(pair.second_bn).abs().view(weight.shape[0], -1, 1, 1)
        return first, weight.amax((1, 3)).flatten()

    def evenness(self, pair: Pair) -> float:
        """How even the ranges of the channels are: 1 where all are the same."""
        first, second = self.ranges(pair)
        return float((first / first.max().clamp_min(_TINY) * second / second.max().clamp_min(_TINY)).mean())

    def scale(self, pair: Pair, factor: Tensor) -> None:
        """Divides the channels of the first layer, and multiplies in the second."""
        owner, divided = (pair.bn, ("weight", "bias")) if pair.bn else (pair.first, ("weight", "bias"))
        for name in divided:
            if self._root.get_submodule(owner)._parameters[name] is not None:
                value = self._value(f"{owner}.{name}")
                value /= factor.view(-1, *[1] * (value.dim() - 1))
        weight = self._by_input(pair.second)  # a view
        weight *= factor.view(weight.shape[0], 1, weight.shape[2], 1)

    def changed(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are no longer what they were, float32, with their names below the root."""
        for name, value in self.values.items():
            if not torch.equal(value.float(), tensor_at(self._root, name)):
                yield name, value.float()

    def _value(self, path: str) -> Tensor:
        if path not in self.values:
            self.values[path] = tensor_at(self._root, path).detach().double().contiguous()
        return self.values[path]

    def _weight(self, layer: str) -> Tensor:
        return self._value(f"{layer}.weight")

    def _by_input(self, layer: str) -> Tensor:
        """A view of a weight as (groups, out of a group, in of a group, all else)."""
        weight, module = self._weight(layer), self._root.get_submodule(layer)
        groups = int(getattr(module, "groups", 1))
        return weight.view(groups, weight.shape[0] // groups, weight.shape[1], -1)

    def _factor(self, bn: str) -> Tensor:
        """What a BatchNorm multiplies channels by, with its weight as scaled so far; 1 where there is none."""
        if not bn:
            return torch.ones((), dtype=torch.float64)
        module: Any = self._root.get_submodule(bn)
        factor = torch.rsqrt(module.running_var.double() + module.eps)
        return factor if module.weight is None else factor * self._value(f"{bn}.weight")


def _words(pair: Pair, factor: Tensor) -> str:
    low, high = float(factor.min()), float(factor.max())
    return f"channels divided by {low:.3g} to {high:.3g}, and multiplied by it in {pair.second}"
