"""Fake-quantizers whose scales are parameters of the net, learned along with its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qlightning.affine import SCALE_MIN, fake_quantize
from qlightning.errors import ConfigError, NonFiniteError
from qlightning.fake_quantize import FakeQuantize, WeightFakeQuantize, _recomputes, fake_quantizers
from qlightning.lsq import LearnedScales, gradient_scale, learned_fake_quantize
from qlightning.qscheme import QScheme


class LearnedFakeQuantize(FakeQuantize):
    """A FakeQuantize whose scale is learned, and the lower end of its range where the scheme is affine.

    Its observer gives the grid to begin with: a calibration, the batches of a float phase, or else the first training
    batch. From the first training batch on that is rounded the grid is learned, while ``observer_enabled`` (which a
    schedule switches off to freeze ranges): no observer runs then. ``scale`` and ``zero_point`` are the grid in use, as
    for any fake-quantizer; they follow the parameters in :meth:`settle`.

    Attributes:
        step: float32 parameter, shaped as the scale; 0 until the scale is learned. Saved.
        offset: float32 parameter, 0-d, the value of the lowest code; None where the scheme is symmetric. Saved.
        learning: Whether the grid is that of the parameters by now, and no longer the observer's.
    """

    step: nn.Parameter
    offset: nn.Parameter | None

    def __init__(
        self, scheme: QScheme, observer: nn.Module, name: str = "", settings: LearnedScales | None = None
    ) -> None:
        super().__init__(scheme, observer, name)
        self.settings = settings or LearnedScales()
        self.learning = False
        self.step = nn.Parameter(torch.zeros(()))
        self.offset = None if scheme.symmetric else nn.Parameter(torch.zeros(()))

    def forward(self, x: Any) -> Any:
        """Returns ``x`` on the grid, with gradients for the grid while it is learned.

        Raises:
            NonFiniteError: As for FakeQuantize, while its observer still runs.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
            return x
        if self.calibrating:
            self._observe(x)
            return x
        follows = self.training and self.observer_enabled
        if follows and not self.learning:
            if not (self.fake_quant_enabled and self.observed) and not _recomputes():
                self._observe(x)
                self.refresh()
            if self.fake_quant_enabled:
                self._start()
        if not (self.fake_quant_enabled and self.observed):
            return self._attached(x)
        if self.observer_enabled and not torch.compiler.is_compiling():
            self.settle()
        if not follows:
            return self._attached(fake_quantize(x, self.scale, self.zero_point, self.scheme))
        if not torch.compiler.is_compiling():
            self._seen_ndims.add(x.dim())
        factor = gradient_scale(self._sharing(x), self.scheme)
        # Copies, as the backward needs the grid of this call.
        grid = self.scale.clone(), self.zero_point.clone()
        return learned_fake_quantize(x, self.step, self.offset, *grid, self.scheme, factor)

    def _sharing(self, x: Tensor) -> int:
        """How many elements of one sample share a scale."""
        return x.numel() // x.shape[0] if x.ndim else 1

    @torch.no_grad()
    def _start(self) -> None:
        """Takes the grid that was observed as the one to learn from; the same on all ranks."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(self.scale, 0)
            dist.broadcast(self.zero_point, 0)
        self.step.copy_(self.scale)
        if self.offset is not None:
            self.offset.copy_((self.scheme.quant_min - self.zero_point) * self.scale)
        self.learning = True

    @torch.no_grad()
    def settle(self) -> None:
        """Takes scale and zero point from the parameters, after these have moved.

        A scale at most halves or doubles at a time, so that it stays positive whatever the learning rate, and zero
        stays in the range.
        """
        if not self.learning:
            return
        self.step.clamp_((self.scale * 0.5).clamp_(min=SCALE_MIN), self.scale * 2)
        self.scale.copy_(self.step)
        if self.offset is None:
            self.zero_point.fill_(self.scheme.middle)  # averages of state dicts (EMA) have rounded it down
            return
        low, high = self.scheme.quant_min, self.scheme.quant_max
        self.offset.clamp_(self.scale * (low - high), torch.zeros_like(self.scale))
        self.zero_point.copy_(low - (self.offset / self.scale).round())

    @torch.no_grad()
    def hold(self) -> None:
        """Takes the parameters from the grid in use, as momentum and the like move them after they were frozen."""
        if self.learning:
            self.step.copy_(self.scale)
            if self.offset is not None:
                self.offset.copy_((self.scheme.quant_min - self.zero_point) * self.scale)

    def refresh(self) -> None:
        """Takes scale and zero point from the parameters; while they are not learned yet, from the observer."""
        if self.learning:
            self.settle()
        else:
            super().refresh()

    def reset(self) -> None:
        """Forgets what was observed and learned."""
        super().reset()
        self._forget()

    @torch.no_grad()
    def _forget(self) -> None:
        self.learning = False
        self.step.zero_()
        if self.offset is not None:
            self.offset.zero_()

    def _observe(self, x: Tensor) -> None:
        if self.calibrating and self.learning:
            self._forget()
        super()._observe(x)

    def _attached(self, x: Tensor) -> Tensor:
        """The values, with gradients of zero for the parameters: DDP waits for a gradient of each one."""
        if not (self.training and torch.is_grad_enabled() and dist.is_available() and dist.is_initialized()):
            return x
        attached: Tensor = _Attached.apply(x, self.step, self.offset)
        return attached

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LearnedFakeQuantize:
        before = {name: p.detach() for name, p in self.named_parameters(recurse=False)}
        super()._apply(fn, recurse)
        for name, parameter in self.named_parameters(recurse=False):
            if parameter.dtype != before[name].dtype:  # half() and the like, as for the scale
                parameter.data = before[name].to(parameter.device)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        if prefix + "scale" in state_dict:  # of one that observes: its grid is what is learned from
            for name, parameter in self.named_parameters(recurse=False):
                state_dict.setdefault(prefix + name, torch.zeros_like(parameter))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        self.learning = bool((self.step != 0).all())  # below zero: saved right after an optimizer step

    def extra_repr(self) -> str:
        """The scheme, for ``print(model)``."""
        return f"{super().extra_repr()}, learned"


class LearnedWeightFakeQuantize(WeightFakeQuantize, LearnedFakeQuantize):
    """A WeightFakeQuantize whose scales are learned: one for each output channel, or one for all.

    Args:
        scheme: The grid; axis 0 means the output channels.
        observer: As for FakeQuantize.
        name: The layer, for messages.
        transposed_groups: As for WeightFakeQuantize.
        settings: How they are learned.
    """

    def __init__(
        self,
        scheme: QScheme,
        observer: nn.Module,
        name: str = "",
        transposed_groups: int | None = None,
        settings: LearnedScales | None = None,
    ) -> None:
        super().__init__(scheme, observer, name, transposed_groups)
        self.settings = settings or LearnedScales()

    def allocate(self, channels: int) -> None:
        """Gives scale, zero point, parameters and the observer's states their shape before anything is observed."""
        super().allocate(channels)
        self.step = nn.Parameter(torch.zeros(channels))
        self.offset = None if self.offset is None else nn.Parameter(torch.zeros(channels))

    def observe(self, weight: Tensor, multiplier: Tensor | None = None) -> None:
        """Takes the grid from a weight; one that is learned stays as its parameters say."""
        if self.learning:
            self.settle()
        else:
            super().observe(weight, multiplier)

    def _sharing(self, x: Tensor) -> int:
        return x.numel() // self.scale.numel()


def build_fake_quant(scheme: QScheme, observer: nn.Module, name: str, learned: LearnedScales | None) -> FakeQuantize:
    """Builds the fake-quantizer of an activation.

    Raises:
        ConfigError: Its scales are to be learned, and each channel has one.
    """
    if learned is None or not learned.activations:
        return FakeQuantize(scheme, observer, name)
    if scheme.per_channel:
        raise ConfigError(
            f"{name}: the scale of an activation can be learned where all of it has one, not with {scheme}. Use "
            "axis=None, or learned='weights'."
        )
    return LearnedFakeQuantize(scheme, observer, name, learned)


def learned_fake_quantizers(module: nn.Module) -> Iterator[tuple[str, LearnedFakeQuantize]]:
    """The fake-quantizers below a module that learn their scales, with their names."""
    return ((name, fq) for name, fq in fake_quantizers(module) if isinstance(fq, LearnedFakeQuantize))


@torch.no_grad()
def settle_all(fqs: Iterable[FakeQuantize]) -> None:
    """After an optimizer step: grids follow their parameters, or these stay where the grids are frozen.

    Raises:
        NonFiniteError: A parameter became NaN or infinite; names the layer.
    """
    learned = [fq for fq in fqs if isinstance(fq, LearnedFakeQuantize) and fq.learning]
    if not learned:
        return
    moved = torch.stack([fq.step.sum() if fq.offset is None else (fq.step + fq.offset).sum() for fq in learned])
    if not moved.isfinite().all().item():
        name = next(fq.name for fq, value in zip(learned, moved.tolist(), strict=True) if not math.isfinite(value))
        raise NonFiniteError(
            f"{name}: its learned scale is NaN or infinite. Look for NaN in the loss or the batch, or lower the "
            "learning rate."
        )
    for fq in learned:
        if fq.observer_enabled:
            fq.settle()
        else:
            fq.hold()


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor, offset: Tensor | None) -> Tensor:
        ctx.save_for_backward(step, offset)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        step, offset = ctx.saved_tensors
        return grads[0], torch.zeros_like(step), None if offset is None else torch.zeros_like(offset)
