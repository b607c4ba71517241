"""Observer: a statistic of the tensors that pass, which ends in a range to quantize to."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qlightning import affine
from qlightning.blocks import BLOCK_NUMEL, in_memory_order
from qlightning.errors import ConfigError, NonFiniteError
from qlightning.qscheme import QScheme

Reduction = Literal["min", "max", "sum", "mean"]
REDUCTIONS: tuple[Reduction, ...] = ("min", "max", "sum", "mean")
SEEN_SHAPES = 8
"""How many different shapes an observer remembers."""


class Observer(nn.Module):
    """Watches tensors and returns them unchanged; a subclass is a statistic: ``update(x)`` and ``range()``.

    Its state is declared with `add_state`: float32 buffers in the state dict, which stay float32 whatever precision the
    model is cast to. A state that begins 0-d may grow on the first batch (one value for each channel): a fresh observer
    loads it all the same, and buffers are resized in place, so that DDP goes on with the same tensors.

    In a graph of torch.compile no value is looked at: a batch with NaN or infinity leaves the state as it is, and
    `raise_nonfinite` raises the error, when it is called.

    Args:
        scheme: The grid the tensor will be quantized to. With an axis, the statistic is taken for each slice along it.
        nonfinite: At NaN and infinity ``"raise"`` an error before anything is changed, or ``"skip"`` these elements.

    Attributes:
        seen_dtype: The dtype of the last tensor (before it became float32), or None. Not saved.
        seen_shapes: The first few different shapes. Not saved.
        batch_range: The minimum and maximum of the last tensor, along the scheme's axis; None where they are not
            finite, or not known. Not saved.

    Raises:
        ConfigError: A setting is unknown.

    Examples:
        >>> class AbsMax(Observer):
        ...     def __init__(self, scheme: QScheme) -> None:
        ...         super().__init__(scheme)
        ...         self.add_state("bound", torch.tensor(0.0), reduction="max")
        ...
        ...     def update(self, x: Tensor) -> None:
        ...         self.set_state("bound", torch.maximum(self.bound, x.abs().max()))
        ...
        ...     def range(self) -> tuple[Tensor, Tensor]:
        ...         return -self.bound, self.bound
        >>> observer = AbsMax(QScheme())
        >>> observer(torch.tensor([1.0, -3.0]))
        tensor([ 1., -3.])
        >>> observer.range()
        (tensor(-3.), tensor(3.))
    """

    _keeps_gaps = False
    """Whether `update` gets NaN where elements of a per-channel batch are skipped, and not the channel's minimum."""

    def __init__(self, scheme: QScheme, *, nonfinite: Literal["raise", "skip"] = "raise") -> None:
        super().__init__()
        if not isinstance(scheme, QScheme):
            raise ConfigError(f"{type(self).__name__} scheme={scheme!r}: a QScheme is possible.")
        if nonfinite not in ("raise", "skip"):
            raise ConfigError(f"{type(self).__name__} nonfinite={nonfinite!r}: 'raise' or 'skip' is possible.")
        self.scheme = scheme
        self.nonfinite = nonfinite
        self.seen_dtype: torch.dtype | None = None
        self.seen_shapes: list[tuple[int, ...]] = []
        self._defaults: dict[str, Tensor] = {}
        self._reductions: dict[str, Reduction] = {}
        self.batch_range: tuple[Tensor, Tensor] | None = None
        self._extremes: tuple[Tensor, Tensor] | None = None
        # No buffer: averages of a model and DDP go through all buffers, and have nothing to do with it.
        self._met_nonfinite = torch.zeros((), dtype=torch.bool)
        self._in_graph = False

    def add_state(self, name: str, default: Tensor, reduction: Reduction) -> None:
        """Declares a buffer of the statistic.

        Args:
            name: The attribute and the key in the state dict.
            default: The value before any data and after `reset`; kept as float32.
            reduction: How the states of several ranks combine: ``"min"``, ``"max"``, ``"sum"`` or ``"mean"``.

        Raises:
            ConfigError: The reduction is unknown.
        """
        if reduction not in REDUCTIONS:
            raise ConfigError(f"State {name!r} reduction={reduction!r}: one of {', '.join(REDUCTIONS)} is possible.")
        default = default.detach().to(torch.float32)
        self.register_buffer(name, default.clone())
        self._defaults[name] = default
        self._reductions[name] = reduction

    @property
    def reductions(self) -> Mapping[str, Reduction]:
        """The names of the states and how ranks combine them, in the order they were declared."""
        return self._reductions

    @property
    def observed(self) -> bool:
        """Whether data was seen: a state differs from its default. Read from the state, it survives saving."""
        return any(not torch.equal(self._state(name).cpu(), default) for name, default in self._defaults.items())

    def allocate(self, channels: int) -> None:
        """Gives the states that begin 0-d one value for each channel, before any data."""
        for name, default in self._defaults.items():
            if default.ndim == 0:
                self._defaults[name] = default.repeat(channels)
        self.reset()

    def set_state(self, name: str, value: Tensor) -> None:
        """Writes a state into its buffer, which takes the shape of the value."""
        buffer = self._state(name)
        if buffer.shape != value.shape:
            buffer.resize_(value.shape)
        buffer.copy_(value)

    def reset(self) -> None:
        """Forgets everything seen."""
        self.reset_states()
        self.seen_dtype = None
        self.seen_shapes = []

    def reset_states(self) -> None:
        """Gives the statistic its default, and keeps what is known of the tensors seen."""
        for name, default in self._defaults.items():
            self.set_state(name, default)

    @torch.no_grad()
    def merge(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Replaces the state by the combination of several (one for each rank, this one's among them).

        Args:
            states: State dicts of observers like this one. Ranks that saw nothing do not count.
        """
        defaults = self._defaults
        seen = [s for s in states if any(not torch.equal(s[name].cpu(), d) for name, d in defaults.items())]
        if not seen:
            return self.reset()
        for name, reduction in self._reductions.items():
            parts = torch.broadcast_tensors(*(state[name].to(self._state(name)) for state in seen))
            self.set_state(name, _combine(torch.stack(parts), reduction))

    @abstractmethod
    def update(self, x: Tensor) -> None:
        """Takes in a batch: a finite, not empty float32 tensor without gradient, not to be changed.

        A channel that was skipped whole has the extremes ``inf`` and ``-inf``.
        """

    @abstractmethod
    def range(self) -> tuple[Tensor, Tensor]:
        """Returns the lowest and the highest value to be represented: 0-d, or one value for each channel."""

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Returns scale (float32) and zero point (int32): 0-d, or one value for each channel.

        Raises:
            CalibrationError: Nothing was observed.
        """
        found: Any = self.range()
        if not (isinstance(found, tuple) and len(found) == 2 and all(isinstance(end, Tensor) for end in found)):
            raise ConfigError(
                f"{type(self).__name__}.range() gave {_kinds(found)}; two tensors are needed, the lowest and the "
                "highest value: 0-d, or with one value for each channel."
            )
        return affine.calculate_qparams(*found, self.scheme)

    def forward(self, x: Tensor) -> Tensor:
        """Observes a tensor and returns it as it is. An empty tensor changes nothing.

        Raises:
            ConfigError: It is not a floating point tensor, or lacks the axis of the scheme.
            NonFiniteError: It has NaN or infinite elements (unless they are skipped). No state is changed.
        """
        if not isinstance(x, Tensor) or not x.is_floating_point():
            what = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
            raise ConfigError(f"{type(self).__name__} got {what}: only floating point tensors have a range to observe.")
        if x.numel() == 0:
            return x
        seen = x.detach()
        if torch.compiler.is_compiling() and self._observe_in_graph(seen):
            return x
        low, high = extremes_of(seen, self.scheme.axis)
        self.batch_range = low, high
        if not all_finite(low, high):
            self.batch_range = None
            if self.nonfinite == "raise":
                raise self._nonfinite_error(f"a tensor of shape {tuple(x.shape)} ({x.dtype})")
            seen, low, high = _without_nonfinite(seen, self.scheme.axis, self._keeps_gaps)
            if not (low <= high).any():
                return x
        self._remember(x)
        self._record(seen, low, high)
        return x

    def extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the float32 minimum and maximum of a batch along the scheme's axis.

        Inside `update` it costs nothing: `forward` has looked for NaN and infinity by the same pass. A channel of which
        all elements were skipped has the minimum ``inf`` and the maximum ``-inf``.
        """
        return self._extremes if self._extremes is not None else extremes_of(x, self.scheme.axis)

    def raise_nonfinite(self) -> None:
        """Raises the error that a graph of torch.compile could not raise, once.

        Raises:
            NonFiniteError: A tensor had NaN or infinite elements since the last call.
        """
        if self._in_graph and self._met_nonfinite.item():
            self._met_nonfinite.zero_()
            raise self._nonfinite_error("a compiled graph")

    def extra_repr(self) -> str:
        return f"{self.scheme}{', nonfinite=skip' if self.nonfinite == 'skip' else ''}"

    def _remember(self, x: Tensor) -> None:
        if self.seen_dtype is not x.dtype:  # writing an attribute of a module takes longer than reading it
            self.seen_dtype = x.dtype
        if x.shape not in self.seen_shapes and len(self.seen_shapes) < SEEN_SHAPES:
            self.seen_shapes.append(tuple(x.shape))

    def _record(self, x: Tensor, low: Tensor, high: Tensor) -> None:
        """Hands a checked batch, of any floating dtype, to `update`. Statistics of the extremes alone override it."""
        self._extremes = low, high
        try:
            with torch.no_grad():  # of what a subclass may compute with
                self.update(x.float())
        finally:
            self._extremes = None

    def _observe_in_graph(self, x: Tensor) -> bool:
        """Observes without a branch on any value: the state stays as it is, or follows, by `torch.where`.

        Attributes are only written here: those that are read are guarded, and a change would compile anew.

        Returns:
            False: Not possible, as elements that are left out change the shape.
        """
        dtype = x.dtype
        if self.nonfinite == "raise":
            low, high = extremes_of(x, self.scheme.axis)
            fine = (low.isfinite() & high.isfinite()).all()
            self._met_nonfinite.logical_or_(~fine)
            self._in_graph = True
        elif type(self)._record is Observer._record and (self.scheme.axis is None or self._keeps_gaps):
            return False
        else:
            x, low, high = _replaced_nonfinite(x, self.scheme.axis)
            fine = (low <= high).any()
        self.seen_dtype = dtype
        before = [(self._state(name).clone(), name) for name in self._defaults]
        self._record(torch.where(fine, x, 0), torch.where(fine, low, 0), torch.where(fine, high, 0))
        for old, name in before:
            state = self._state(name)
            state.copy_(torch.where(fine, state, old))
        return True

    def _nonfinite_error(self, where: str) -> NonFiniteError:
        return NonFiniteError(
            f"{type(self).__name__} got NaN or infinity in {where}. "
            "Look for the layer that made it, or build the observer with nonfinite='skip'."
        )

    def _state(self, name: str) -> Tensor:
        state = self._buffers[name]
        assert state is not None
        return state

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Observer:
        """Moves the state to other devices, but keeps it float32 (``half()``, ``to(dtype)``)."""

        def keep_dtype(state: Tensor) -> Tensor:
            moved = fn(state)
            return moved if moved.dtype == state.dtype else state.to(moved.device)

        self._met_nonfinite = fn(self._met_nonfinite)
        return super()._apply(keep_dtype, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Gives the buffers the shapes that come in, and what comes in the dtype of the buffers (``assign=True``)."""
        for name in self._defaults:
            incoming = state_dict.get(prefix + name)
            if isinstance(incoming, Tensor):
                default = self._defaults[name]
                if default.ndim == 0:
                    self._state(name).resize_(incoming.shape)
                elif incoming.ndim == 0:
                    incoming = incoming.expand(default.shape)
                state_dict[prefix + name] = incoming.to(torch.float32)
        super()._load_from_state_dict(state_dict, prefix, *args)


def extremes_of(x: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
    """Returns the float32 minimum and maximum, NaN where there is NaN."""
    if axis is None:
        low, high = torch.aminmax(in_memory_order(x))
        return (low, high) if low.dtype is torch.float32 else (low.float(), high.float())
    if not -x.ndim <= axis < x.ndim:
        raise ConfigError(f"QScheme axis={axis}: a tensor of shape {tuple(x.shape)} has no such dimension.")
    rest = [dim for dim in range(x.ndim) if dim != axis % x.ndim]
    if not rest:
        return x.float(), x.float()
    # torch.aminmax(dim=...) is not vectorised: two passes are 7 to 13 times faster, and need no transposed copy.
    if axis == 0 and x.is_cpu and x.numel() > BLOCK_NUMEL and not torch.compiler.is_compiling():
        blocks = x.split(max(1, BLOCK_NUMEL * x.shape[0] // x.numel()))  # the second pass finds them in the cache
        pairs = [(block.amin(rest), block.amax(rest)) for block in blocks]
        low, high = (torch.cat(bounds) for bounds in zip(*pairs, strict=True))
        return low.float(), high.float()
    return x.amin(rest).float(), x.amax(rest).float()


def all_finite(low: Tensor, high: Tensor) -> bool:
    """Whether a range has neither NaN nor infinity, in one transfer from the device where all is well."""
    if low.ndim == high.ndim == 0 and low.is_cpu:  # the commonest case: nothing to transfer
        return math.isfinite(low.item()) and math.isfinite(high.item())
    span = (high - low).abs()  # of a channel that was not seen: minus infinity
    if math.isfinite((span.max() if span.ndim else span).item()):
        return True
    # The span of a range may also be beyond float32.
    return bool((low.isfinite() & high.isfinite()).all())


def _without_nonfinite(x: Tensor, axis: int | None, keeps_gaps: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a batch whose NaN and infinities are left out, and its extremes.

    Per tensor the finite elements remain, in one dimension; per channel they are replaced, or NaN where gaps are kept.
    """
    if axis is not None:
        replaced, low, high = _replaced_nonfinite(x, axis)
        return (torch.where(x.isfinite(), replaced, torch.nan) if keeps_gaps else replaced), low, high
    rest = x[x.isfinite()]
    if rest.numel() == 0:
        nothing = torch.full((), torch.inf, device=x.device)
        return rest, nothing, -nothing
    return rest, *extremes_of(rest, None)


def _replaced_nonfinite(x: Tensor, axis: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a batch of the same shape, and its extremes.

    NaN and infinities become the minimum of their channel, or of the tensor (zero where no element is finite), which
    moves no extreme.
    """
    finite = x.isfinite()
    low, _ = extremes_of(torch.where(finite, x, torch.inf), axis)
    _, high = extremes_of(torch.where(finite, x, -torch.inf), axis)
    shape = [1] * x.ndim
    if axis is not None:
        shape[axis] = -1
    return torch.where(finite, x.float(), low.where(low <= high, 0.0).reshape(shape)), low, high


def _combine(states: Tensor, reduction: Reduction) -> Tensor:
    """Combines states stacked along dimension 0. A mean leaves out infinities, which stand for channels not seen."""
    if reduction == "min":
        return states.amin(0)
    if reduction == "max":
        return states.amax(0)
    if reduction == "sum":
        return states.sum(0)
    mean = states.masked_fill(states.isinf(), torch.nan).nanmean(0)
    return torch.where(mean.isnan(), states[0], mean)


def _kinds(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__
