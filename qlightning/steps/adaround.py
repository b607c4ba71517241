"""AdaRound: learns for every weight whether it is rounded up or down, by what comes out of its layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from qlightning.errors import ConfigError
from qlightning.graph.changes import LayerChange, StepReport
from qlightning.nn.qat import QATLayer
from qlightning.steps.base import Step
from qlightning.steps.replay import LayerCall, replay
from qlightning.steps.subject import Subject, full_name, layers_of, unrounded

# The rectified sigmoid reaches 0 and 1, where it ends in a clamp (Louizos et al. 2018, as in the paper).
_STRETCH = (-0.1, 1.1)


@dataclass(frozen=True)
class AdaRound(Step):
    """Rounds weights up or down by what comes out of their layer, in place of to the nearest code.

    Layer by layer, in the order of the net: the layer gets what the quantized net so far gives it, and its rounding is
    learned so that the result of its block (with BatchNorm, sum and activation) is that of the float net, in least
    squares over the calibration images. Each weight's code is the lower one plus h(V), a rectified sigmoid of a number
    V that is learned; a penalty of 1 - abs(2 h - 1) ** beta, whose beta falls, drives h to 0 or 1 by the end. A weight
    that lies on a code, such as a pruned zero, stays there. Where the result is no better than that of rounding to the
    nearest code, this stays. From Nagel et al., "Up or Down? Adaptive
    Rounding for Post-Training Quantization", 2020 (equations 21 to 25).

    The loss is counted in the error that rounding the layer's weights to the nearest codes makes, so that one set of
    settings suits layers of any size and bit width.

    Args:
        iterations: Steps of Adam for each layer.
        batch_size: Images for each.
        lr: Its learning rate, for V.
        regularization: The weight of the penalty, a mean over the weights.
        beta: Its exponent at the start and at the end.
        warmup: The part of the iterations that runs without the penalty.
        seed: Of the choice of images.

    Raises:
        ConfigError: A setting cannot be used.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from qlightning import quantize_model, report
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
        >>> steps = [AdaRound(iterations=20)]
        >>> int8 = quantize_model(net, [torch.randn(16, 3, 8, 8)], backend="reference", steps=steps)
        >>> len(report(int8).steps[0].layers)
        2
    """

    iterations: int = 200
    batch_size: int = 32
    lr: float = 0.01
    regularization: float = 0.1
    beta: tuple[float, float] = (20.0, 2.0)
    warmup: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "beta", tuple(self.beta))
        for name in ("iterations", "batch_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"AdaRound {name}={value!r}: a positive integer is needed.")
        for name in ("lr", "regularization"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"AdaRound {name}={getattr(self, name)!r}: a number above 0 is needed.")
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"AdaRound warmup={self.warmup!r}: a part of the iterations from 0 to below 1 is needed.")
        if len(self.beta) != 2 or not self.beta[0] >= self.beta[1] > 0:
            raise ConfigError(f"AdaRound beta={self.beta!r}: two numbers above 0, the larger first, are needed.")

    def apply(self, subject: Subject) -> StepReport:
        rows: list[LayerChange] = []
        generator = torch.Generator().manual_seed(self.seed)
        with subject.progress("Learning to round", layers_of(subject)) as bar:

            def visit(call: LayerCall) -> None:
                rows.append(self._round(subject, call, generator))
                bar.update()

            replay(subject, visit)
        measure = "mean square error of the block's result"
        return StepReport(repr(self), tuple(rows), measure)

    def _round(self, subject: Subject, call: LayerCall, generator: torch.Generator) -> LayerChange:
        if call.problem:
            return LayerChange(call.name, False, call.problem)
        with unrounded(call.layer.weight_fake_quant):
            return self._round_layer(subject, call, generator)

    def _round_layer(self, subject: Subject, call: LayerCall, generator: torch.Generator) -> LayerChange:
        codes = _Codes(call.layer)
        data = _Data(call, codes)
        nearest = codes.nearest()
        before = data.error(codes.weight(nearest))
        if not data.unit > 0:
            return LayerChange(call.name, False, "its weights lie on the grid as they are", before, before)
        with torch.enable_grad():
            learned = self._learn(codes, data, generator)
        after = data.error(codes.weight(learned))
        moved = int((learned != nearest).sum())
        if not after < before or not moved:
            return LayerChange(call.name, False, "no better rounding was found", before, before)
        subject.write(call.model, full_name(call.path, "weight"), codes.weight(learned))
        return LayerChange(
            call.name, True, f"{moved} of {learned.numel()} weights rounded the other way", before, after
        )

    def _learn(self, codes: _Codes, data: _Data, generator: torch.Generator) -> Tensor:
        """The codes that learning ends with."""
        low, high = _STRETCH
        start = (codes.fraction - low) / (high - low)
        v = torch.log(start / (1 - start)).requires_grad_()
        optimizer = torch.optim.Adam([v], self.lr)
        for iteration in range(self.iterations):
            h = (torch.sigmoid(v) * (high - low) + low).clamp(0, 1) * codes.between
            loss = data.loss(codes.weight(codes.floor + h), self.batch_size, generator)
            progress = (iteration / self.iterations - self.warmup) / (1 - self.warmup)
            if progress >= 0:
                beta = self.beta[1] + (self.beta[0] - self.beta[1]) * (1 + math.cos(math.pi * progress)) / 2
                loss = loss + self.regularization * (1 - (2 * h - 1).abs().pow(beta)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return codes.on_grid(codes.floor + (v.detach() >= 0) * codes.between)


class _Codes:
    """The grid of a layer's weight, and where the weight lies between its codes.

    Attributes:
        floor: The lower code of each weight, less the zero point: float32, output channels first.
        fraction: How far above it the weight lies, from 0 to 1.
        between: 1 where it lies between two codes, 0 where it lies on one.
    """

    def __init__(self, layer: QATLayer) -> None:
        self._fq = layer.weight_fake_quant
        weight = self._fq.to_output_first(layer.weight.detach().float())
        shape = (-1, *[1] * (weight.dim() - 1))
        self._step = self._fq.scale.view(shape)
        if (multiplier := layer.multiplier()) is not None:  # it is weight * multiplier that is on the grid
            self._step = self._step / multiplier.view(shape)
        zero_point = self._fq.zero_point.view(shape)
        self._low, self._high = self._fq.scheme.quant_min - zero_point, self._fq.scheme.quant_max - zero_point
        quotient = weight / self._step
        self.floor = quotient.floor()
        self.fraction = quotient - self.floor
        self.between = (self.fraction > 0).float()

    def nearest(self) -> Tensor:
        """The nearest codes, as without learning."""
        return self.on_grid((self.floor + self.fraction).round())

    def on_grid(self, codes: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(codes, self._low), self._high)

    def weight(self, codes: Tensor) -> Tensor:
        """The weight of codes, in the layer's layout; these need not be integers."""
        return self._fq.from_output_first(self.on_grid(codes) * self._step)


class _Data:
    """What a layer gets and what its block should give, in groups of images of one shape.

    Attributes:
        unit: The mean square, an element, of what rounding the layer's weights to the nearest codes makes alone.
    """

    def __init__(self, call: LayerCall, codes: _Codes) -> None:
        self._call = call
        self._targets = call.targets()
        sizes = torch.tensor([float(x.shape[0]) for x in call.inputs])
        self._share = sizes / sizes.sum()
        self.unit = self._mean_square(
            codes.weight(codes.nearest()), lambda batch: self._block(call.layer.weight, batch)
        )

    def error(self, weight: Tensor) -> float:
        """The mean square error of the block's result over all images."""
        return self._mean_square(weight, lambda batch: self._targets[batch])

    def loss(self, weight: Tensor, batch_size: int, generator: torch.Generator) -> Tensor:
        """The mean square error on some images, in units of :attr:`unit`."""
        batch = int(torch.multinomial(self._share, 1, generator=generator))
        rows = torch.randperm(self._call.inputs[batch].shape[0], generator=generator)[:batch_size]
        target = self._targets[batch][rows]
        return (self._block(weight, batch, rows) - target).square().mean() / self.unit

    def _mean_square(self, weight: Tensor, wanted: Callable[[int], Tensor]) -> float:
        total, count = 0.0, 0
        for batch in range(len(self._call.inputs)):
            error = self._block(weight, batch) - wanted(batch)
            total, count = total + float(error.double().square().sum()), count + error.numel()
        return total / count

    def _block(self, weight: Tensor, batch: int, rows: Tensor | None = None) -> Tensor:
        """What the layer's block gives with a weight that is not rounded any more."""
        x = self._call.inputs[batch]
        y: Any = functional_call(self._call.layer, {"weight": weight}, (x if rows is None else x[rows],))
        return self._call.finish(y, batch, rows)
