"""FakeQuantize: an observer and the grid it found, applied to a tensor with straight-through gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qlightning.affine import calculate_qparams, fake_quantize, is_inside, symmetric_scale
from qlightning.errors import NonFiniteError
from qlightning.observers import MinMaxObserver, Observer, foreign
from qlightning.observers.base import extremes_of
from qlightning.qscheme import QScheme

_MAX_NDIM = 10


class FakeQuantize(nn.Module):
    """Rounds a tensor to the grid that its observer has found.

    It observes floating point tensors only while it trains (``module.train()``) and ``observer_enabled``, or inside
    :func:`calibrating`; validation, test and prediction never move it. While it has observed nothing it passes
    tensors through. The two switches are plain Python flags: they follow from the schedule and are never saved.

    Args:
        scheme: The grid.
        observer: A module with ``forward(x)`` and ``calculate_qparams() -> (scale, zero_point)``.
        name: The place in the model, for messages.

    Attributes:
        scale: float32, 0-d or one per channel; 0 while nothing was observed. Saved.
        zero_point: int32, of the same shape. Saved.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(self, scheme: QScheme, observer: nn.Module, name: str = "") -> None:
        super().__init__()
        self.scheme = scheme
        self.observer = observer
        self.name = name
        self.observer_enabled = True
        self.fake_quant_enabled = True
        self.calibrating = False
        self.observed = False
        self._seen_ndims: set[int] = set()
        self.register_buffer("scale", torch.zeros(()))
        self.register_buffer("zero_point", torch.zeros((), dtype=torch.int32))
        self.register_load_state_dict_post_hook(_regrid)

    @property
    def seen_ndims(self) -> set[int]:
        """The numbers of dimensions of the tensors observed. Saved, in the metadata of the state dict."""
        return self._seen_ndims | {ndim for ndim in range(_MAX_NDIM) if getattr(self, f"_seen_{ndim}d", False)}

    @seen_ndims.setter
    def seen_ndims(self, ndims: set[int]) -> None:
        self._seen_ndims = ndims

    def forward(self, x: Any) -> Any:
        """Observes ``x`` where that is its turn, and returns it on the grid, in its own dtype.

        Raises:
            NonFiniteError: ``x`` holds NaN or infinity where a range was to be observed; names the layer.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
            return x
        if self.calibrating:
            self._observe(x)
            return x
        inside = self.follow(x) if self.follows() else False
        if not (self.fake_quant_enabled and self.observed):
            return x
        return fake_quantize(x, self.scale, self.zero_point, self.scheme, inside)

    def follows(self) -> bool:
        """Whether it is its observer's turn to see what passes, and the grid's to follow."""
        return self.training and self.observer_enabled and not _recomputes()

    def follow(self, x: Tensor) -> bool:
        """Observes a tensor and takes the grid from it; returns whether all of the tensor surely lies on the grid."""
        self._observe(x)
        return self._refreshed()

    def follow_extremes(self, x: Tensor, low: Tensor, high: Tensor) -> bool:
        """Follows a tensor of the shape and dtype of ``x``, with finite extremes, whose observer needs no more."""
        self._seen_ndims.add(x.dim())
        self.observer.observe_extremes(x, low, high)  # type: ignore[operator]
        return self._refreshed()

    def _refreshed(self) -> bool:
        self.refresh()
        if torch.compiler.is_compiling():  # what a graph reads is guarded, and compiles anew when it changes
            return False
        extremes = self.observer.batch_range if isinstance(self.observer, Observer) else None
        if extremes is None:
            return False
        return is_inside(extremes[0], extremes[1], self.scale, self.zero_point, self.scheme)

    def _observe(self, x: Tensor) -> None:
        if torch.compiler.is_compiling():
            # Written and never read in a graph: a set that grows would be guarded, and compile the graph anew.
            setattr(self, f"_seen_{x.dim()}d", True)
        else:
            self._seen_ndims.add(x.dim())
        try:
            with torch.no_grad():
                self.observer(x.detach())
        except NonFiniteError as error:
            raise self._named(error) from error

    def _named(self, error: NonFiniteError) -> NonFiniteError:
        return NonFiniteError(f"{self.name or type(self).__name__}: {error}")

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes scale and zero point from what the observer has seen; without it they stay.

        Raises:
            ConfigError: An observer with a ``calculate_qparams`` of its own gave none of the grid.
            NonFiniteError: Its scale is NaN or infinite; names the layer.
        """
        observer = self.observer
        # A graph of torch.compile, which cannot ask, comes here right after it has observed.
        asks = isinstance(observer, Observer) and not torch.compiler.is_compiling()
        if asks and not (observer.seen_shapes or observer.observed):
            return
        scale, zero_point = observer.calculate_qparams()  # type: ignore[operator]
        # What our maths gives is right; a graph cannot look at values.
        if not torch.compiler.is_compiling() and not _is_our_maths(observer):
            try:
                foreign.check_qparams(observer, scale, zero_point, self.scheme)
            except NonFiniteError as error:
                raise self._named(error) from error
        if self.scale.shape != scale.shape:
            self.scale.resize_(scale.shape)  # the same buffers, which DDP and others hold on to
            self.zero_point.resize_(scale.shape)
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)
        # Writing an attribute of a module takes longer than reading it; a graph would guard what it reads.
        if torch.compiler.is_compiling() or not self.observed:
            self.observed = True

    def reset(self) -> None:
        """Forgets what was observed; an observer of others forgets where it has ``reset()``."""
        if callable(reset := getattr(self.observer, "reset", None)):
            reset()
        self.scale.zero_()
        self.zero_point.zero_()
        self.observed = False

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FakeQuantize:
        scale = self.scale
        super()._apply(fn, recurse)
        if self.scale.dtype != scale.dtype:  # half() and the like: the grid keeps its precision, only the device moves
            self.scale = scale.to(self.scale.device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.observed and prefix[:-1] in (metadata := getattr(destination, "_metadata", {})):
            metadata[prefix[:-1]]["ndims"] = sorted(self.seen_ndims)  # no tensor, so no key that others would miss

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        for name in ("scale", "zero_point"):
            saved, own = state_dict.get(prefix + name), getattr(self, name)
            if isinstance(saved, Tensor) and saved.shape != own.shape:
                setattr(self, name, own.new_zeros(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        self.observed = bool((self.scale > 0).all())
        self.seen_ndims = set(local_metadata.get("ndims", self.seen_ndims if self.observed else ()))

    def extra_repr(self) -> str:
        """The scheme, for ``print(model)``."""
        return str(self.scheme)


def _recomputes() -> bool:
    """Whether a backward runs: gradient checkpointing then calls the forward again, on what was observed already."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _is_our_maths(observer: nn.Module) -> bool:
    """Whether scale and zero point come from a range, and not from a ``calculate_qparams`` of the observer's own."""
    return isinstance(observer, Observer) and type(observer).calculate_qparams is Observer.calculate_qparams


def _regrid(fq: FakeQuantize, _: Any) -> None:
    """After a state dict was loaded: an average of several (EMA) has averaged the grid, too, which is none."""
    if fq.observed and isinstance(fq.observer, Observer) and fq.observer.observed:
        fq.refresh()


class WeightFakeQuantize(FakeQuantize):
    """A FakeQuantize for a layer's weight, whose channels are always the output channels.

    Args:
        scheme: The grid; axis 0 means the output channels.
        observer: As for FakeQuantize.
        name: The layer, for messages.
        transposed_groups: The ``groups`` of a transposed convolution, whose weight is stored as
            (in, out / groups, ...); None for all other layers, stored as (out, in / groups, ...).
    """

    def __init__(
        self, scheme: QScheme, observer: nn.Module, name: str = "", transposed_groups: int | None = None
    ) -> None:
        super().__init__(scheme, observer, name)
        self.transposed_groups = transposed_groups

    def forward(self, weight: Tensor, multiplier: Tensor | None = None) -> Tensor:
        """Returns the weight on the grid.

        Args:
            weight: In the layer's own layout.
            multiplier: float32 (out,): the factor that a BatchNorm behind the layer will scale its channels by, where
                the grid does not scale along with it: FQ(w * s) / s is then what folding gives.
        """
        if self.calibrating and self.observed:
            return weight
        w = self.to_output_first(weight)
        if multiplier is not None:
            multiplier = multiplier.view(-1, *[1] * (w.dim() - 1)).to(w.dtype)
            w = w * multiplier
        w = super().forward(w)
        if self.calibrating:
            self.refresh()
            return weight
        if multiplier is not None:
            w = w / multiplier
        return self.from_output_first(w)

    @torch.no_grad()
    def observed_on(self, weight: Tensor, multiplier: Tensor | None = None) -> WeightFakeQuantize:
        """Itself where it has a grid; else a copy that has seen the weight (of a layer that stayed in eval mode)."""
        if self.observed:
            return self
        fq = copy.deepcopy(self)
        fq.observe(weight, multiplier)
        return fq

    @torch.no_grad()
    def observe(self, weight: Tensor, multiplier: Tensor | None = None) -> None:
        """Takes the grid from a weight, in the layer's own layout; ``multiplier`` as for ``forward``."""
        w = self.to_output_first(weight.detach().float())
        if multiplier is not None:
            w = w * multiplier.view(-1, *[1] * (w.dim() - 1))
        self._observe(w)
        self.refresh()

    def allocate(self, channels: int) -> None:
        """Gives scale, zero point and the observer's states their shape before anything is observed."""
        self.scale.resize_(channels).zero_()
        self.zero_point.resize_(channels).zero_()
        if isinstance(self.observer, Observer):
            self.observer.allocate(channels)

    def _observe(self, x: Tensor) -> None:
        # The whole weight is seen every time, so what it was before does not count.
        if isinstance(self.observer, Observer):
            self.observer.reset_states()
        elif callable(reset := getattr(self.observer, "reset", None)):
            reset()
        super()._observe(x)

    @torch.no_grad()
    def follow(self, x: Tensor) -> bool:
        observer, scheme = self.observer, self.scheme
        if not (type(observer) is MinMaxObserver and observer.nonfinite == "raise" and scheme.symmetric):
            return super().follow(x)
        if scheme.axis != 0 or not x.is_cpu or x.dim() < 2 or torch.compiler.is_compiling():
            return super().follow(x)
        # The same in the fewest calls: these cost more than the passes do in all but large layers.
        low, high = extremes_of(x, 0)
        scale = symmetric_scale(low, high, scheme)
        if not math.isfinite(scale.max().item()) or scale.shape != self.scale.shape:
            return super().follow(x)
        observer.saw(x, low, high)
        self._seen_ndims.add(x.dim())
        self.scale.copy_(scale)
        self.zero_point.fill_(scheme.middle)
        if not self.observed:
            self.observed = True
        return scheme.signed and scheme.narrow_range  # the largest code of a channel is that of its extreme

    def to_output_first(self, weight: Tensor) -> Tensor:
        """(in, out / groups, ...) to (out, in / groups, ...) for a transposed convolution; else the weight itself."""
        if self.transposed_groups is None:
            return weight
        return swap_channels(weight, self.transposed_groups)

    def from_output_first(self, weight: Tensor) -> Tensor:
        """The way back."""
        if self.transposed_groups is None:
            return weight
        return swap_channels(weight, self.transposed_groups)


def swap_channels(weight: Tensor, groups: int) -> Tensor:
    """Swaps input and output channels of a grouped convolution's weight; its own inverse.

    Args:
        weight: (groups * a, b, ...).
        groups: The groups of the convolution.

    Returns:
        (groups * b, a, ...).
    """
    a, b, kernel = weight.shape[0] // groups, weight.shape[1], weight.shape[2:]
    return weight.reshape(groups, a, b, *kernel).transpose(1, 2).reshape(groups * b, a, *kernel)


def fake_quantizers(module: nn.Module) -> Iterator[tuple[str, FakeQuantize]]:
    """The fake-quantizers below a module, with their names; those of weights are WeightFakeQuantize."""
    return ((name, child) for name, child in module.named_modules() if isinstance(child, FakeQuantize))


@torch.no_grad()
def raise_nonfinite(fqs: Iterable[FakeQuantize]) -> None:
    """Raises what graphs of torch.compile could not raise, with one transfer from the device where all is well.

    Raises:
        NonFiniteError: A compiled graph has met NaN or infinity since the last call; names the layer.
    """
    found = [(fq, o) for fq in fqs if isinstance(o := fq.observer, Observer) and o._in_graph]
    if not found or not torch.stack([observer._met_nonfinite for _, observer in found]).any().item():
        return
    for fq, observer in found:
        try:
            observer.raise_nonfinite()
        except NonFiniteError as error:
            raise fq._named(error) from error


@torch.no_grad()
def refresh_all(fqs: Iterable[FakeQuantize]) -> None:
    """Does what :meth:`FakeQuantize.refresh` does for each of many, in one computation for all ranges of one scheme."""
    ranges: dict[QScheme, list[tuple[FakeQuantize, Tensor, Tensor]]] = {}
    for fq in fqs:
        observer = fq.observer
        follows = type(fq).refresh is FakeQuantize.refresh  # one whose scale is learned does not
        if follows and isinstance(observer, Observer) and _is_our_maths(observer):
            low, high = observer.range()
            if low.ndim == high.ndim == fq.scale.ndim == 0:
                ranges.setdefault(observer.scheme, []).append((fq, low, high))
                continue
        fq.refresh()
    for scheme, found in ranges.items():
        chosen, lows, highs = zip(*found, strict=True)
        scales, zero_points = calculate_qparams(torch.stack(lows), torch.stack(highs), scheme)
        torch._foreach_copy_([fq.scale for fq in chosen], scales.unbind())
        torch._foreach_copy_([fq.zero_point for fq in chosen], zero_points.unbind())
        for fq in chosen:
            fq.observed = True


def set_observers(module: nn.Module, enabled: bool) -> None:
    """Lets every observer below the module follow the training batches, or freezes it."""
    for _, fq in fake_quantizers(module):
        fq.observer_enabled = enabled


def set_fake_quant(module: nn.Module, enabled: bool) -> None:
    """Switches the rounding of every fake-quantizer below the module on or off."""
    for _, fq in fake_quantizers(module):
        fq.fake_quant_enabled = enabled


@contextmanager
def calibrating(module: nn.Module) -> Iterator[None]:
    """Within it every observer below the module sees what passes, and nothing is rounded; leaves the grids refreshed.

    After an exception nothing is refreshed.
    """
    found = [fq for _, fq in fake_quantizers(module)]
    for fq in found:
        if isinstance(fq, WeightFakeQuantize):
            fq.observed = False
        fq.calibrating = True
    try:
        yield
        raise_nonfinite(found)
        for fq in found:
            if not isinstance(fq, WeightFakeQuantize) and fq.seen_ndims:
                fq.refresh()
    finally:
        for fq in found:
            fq.calibrating = False
            fq.observed = bool((fq.scale > 0).all())
