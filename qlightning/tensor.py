"""QuantizedTensor: integers with the scale and zero point that give them their meaning, on plain int8 storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qlightning import affine
from qlightning.errors import ConfigError, NonFiniteError
from qlightning.qparams import NATIVE_SCHEMES, as_scheme, check_float, checked_qparams
from qlightning.qscheme import QScheme


def _shape_method(name: str, any_layout: str | None = None) -> Callable[..., QuantizedTensor]:
    def method(self: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
        def move(name: str) -> Callable[[Tensor], Tensor]:
            return lambda t: getattr(t, name)(*args, **kwargs)

        return self._moved(f"{name}()", move(name), move(any_layout or name))

    method.__name__ = name
    method.__qualname__ = f"QuantizedTensor.{name}"
    method.__doc__ = f"``torch.Tensor.{name}`` of the codes; channels go along."
    return method


class QuantizedTensor:
    """A tensor of integer codes that stand for ``(code - zero_point) * scale``.

    It is a plain object, no ``torch.Tensor``, on the plain integer dtypes that outlive torch's quantized ones. It has
    the methods of those (``int_repr``, ``q_scale``, ...), shape operations that keep the meaning of the codes, and is
    saved by ``torch.save`` (and loaded with ``weights_only=True``). Arithmetic is in `qlightning.functional`.

    Shape operations carry the channels of a per-channel tensor along: ``permute`` moves its axis, a slice of the axis
    takes the scales of the slice, and where one channel is left, the result is per tensor. What leaves no dimension
    whose slices have one scale each is an error. The codes of views are shared with the original.

    Args:
        codes: int8 for signed schemes, uint8 for unsigned ones; any shape.
        scale: float32: 0-d, or 1-d with one value for each slice along ``scheme.axis``; above zero.
        zero_point: int32, shaped as the scale; codes of the grid.
        scheme: The grid. Its axis becomes non-negative here.

    Attributes:
        codes: The integers.
        scale: float32, 0-d or 1-d.
        zero_point: int32, 0-d or 1-d.
        scheme: The grid.

    Raises:
        ConfigError: They do not fit together; says which and why.

    Examples:
        >>> q = quantize(torch.tensor([[-1.0, 0.3], [2.0, 5.0]]), 0.05, 0, QScheme())
        >>> q.int_repr()
        tensor([[-20,   6],
                [ 40, 100]], dtype=torch.int8)
        >>> q[1].dequantize()
        tensor([2., 5.])
    """

    def __init__(self, codes: Tensor, scale: Tensor, zero_point: Tensor, scheme: QScheme) -> None:
        scheme = as_scheme(scheme)
        if not isinstance(codes, Tensor) or codes.dtype != scheme.dtype:
            found = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
            raise ConfigError(f"QuantizedTensor codes of {scheme} are {scheme.dtype}, got {found}.")
        storage = torch.iinfo(scheme.dtype)
        if codes.numel() and (scheme.quant_min, scheme.quant_max) != (storage.min, storage.max):
            lowest, highest = (int(end) for end in codes.aminmax())
            if lowest < scheme.quant_min or highest > scheme.quant_max:
                raise ConfigError(
                    f"QuantizedTensor codes from {lowest} to {highest}: {scheme} has those from {scheme.quant_min} to "
                    f"{scheme.quant_max}."
                )
        self.codes = codes.detach()
        self.scale, self.zero_point, self.scheme = checked_qparams(scale, zero_point, scheme, codes)

    @classmethod
    def from_native(cls, tensor: Tensor) -> QuantizedTensor:
        """Takes over one of torch's native quantized tensors (``torch.quint8``, ``torch.qint8``), while those exist.

        Raises:
            ConfigError: It is not quantized, or to another dtype.
        """
        if not isinstance(tensor, Tensor) or not tensor.is_quantized or tensor.dtype not in NATIVE_SCHEMES:
            found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigError(f"from_native takes tensors of torch.quint8 or torch.qint8, got {found}.")
        scheme = NATIVE_SCHEMES[tensor.dtype]
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return cls(
                tensor.int_repr(), torch.tensor(tensor.q_scale()), torch.tensor(tensor.q_zero_point()).int(), scheme
            )
        scales, zero_points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        if zero_points.is_floating_point():
            raise ConfigError(f"from_native: {tensor.qscheme()} has zero points that are no codes.")
        axis = tensor.q_per_channel_axis()
        return cls(tensor.int_repr(), scales.float(), zero_points.int(), replace(scheme, axis=axis))

    def to_native(self) -> Tensor:
        """Returns torch's native quantized tensor of the same codes (``torch.quint8`` or ``torch.qint8``)."""
        scale, zero_point = self.scale.double(), self.zero_point.long()
        if self.axis is None:
            return torch._make_per_tensor_quantized_tensor(self.codes, scale.item(), int(zero_point))
        return torch._make_per_channel_quantized_tensor(self.codes, scale, zero_point, self.axis)

    # What it holds, under the names of torch.Tensor

    @property
    def axis(self) -> int | None:
        """The dimension whose slices have scales of their own; None for one scale."""
        return self.scheme.axis

    @property
    def shape(self) -> torch.Size:
        """The shape of the codes."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.codes.ndim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the codes."""
        return self.codes.dtype

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the size of one dimension."""
        return self.codes.size() if dim is None else self.codes.size(dim)

    def dim(self) -> int:
        """The number of dimensions."""
        return self.codes.dim()

    def numel(self) -> int:
        """The number of codes."""
        return self.codes.numel()

    def is_contiguous(self, *, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        """Whether the codes lie in memory in order."""
        return self.codes.is_contiguous(memory_format=memory_format)

    def __len__(self) -> int:
        return len(self.codes)

    def int_repr(self) -> Tensor:
        """The integers: int8 or uint8, not copied."""
        return self.codes

    def dequantize(self) -> Tensor:
        """The values that the codes stand for: ``(codes - zero_point) * scale``, float32."""
        return affine.dequantize(self.codes, self.scale, self.zero_point, self.axis)

    def qscheme(self) -> torch.qscheme:
        """Torch's word for the kind of grid, such as ``torch.per_tensor_affine``; ``scheme`` says all of it."""
        if self.axis is None:
            return torch.per_tensor_symmetric if self.scheme.symmetric else torch.per_tensor_affine
        return torch.per_channel_symmetric if self.scheme.symmetric else torch.per_channel_affine

    def q_scale(self) -> float:
        """The scale of a per-tensor grid."""
        return float(self._per_tensor("q_scale", self.scale))

    def q_zero_point(self) -> int:
        """The zero point of a per-tensor grid."""
        return int(self._per_tensor("q_zero_point", self.zero_point))

    def q_per_channel_scales(self) -> Tensor:
        """The scales of a per-channel grid, float32 (channels,)."""
        return self._per_channel("q_per_channel_scales", self.scale)

    def q_per_channel_zero_points(self) -> Tensor:
        """The zero points of a per-channel grid, int32 (channels,)."""
        return self._per_channel("q_per_channel_zero_points", self.zero_point)

    def q_per_channel_axis(self) -> int:
        """The dimension of the channels of a per-channel grid."""
        self._per_channel("q_per_channel_axis", self.scale)
        assert self.axis is not None
        return self.axis

    def _per_tensor(self, name: str, value: Tensor) -> Tensor:
        if self.axis is not None:
            raise ConfigError(f"{name}() of a tensor with a scale for each slice along axis {self.axis}.")
        return value

    def _per_channel(self, name: str, value: Tensor) -> Tensor:
        if self.axis is None:
            raise ConfigError(f"{name}() of a tensor with one scale: use q_scale() and q_zero_point().")
        return value

    # Equality, text, copies

    def equal(self, other: QuantizedTensor) -> bool:
        """Whether codes, scales, zero points and scheme are the same; what ``==`` gives, too."""
        return (
            isinstance(other, QuantizedTensor)
            and self.scheme == other.scheme
            and self.shape == other.shape
            and torch.equal(self.codes, other.codes)
            and torch.equal(self.scale, other.scale)
            and torch.equal(self.zero_point, other.zero_point)
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QuantizedTensor) and self.equal(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        values = repr(self.dequantize()).removeprefix("tensor(").removesuffix(")")
        if self.axis is None:
            grid = f"scale={self.q_scale():.6g}, zero_point={self.q_zero_point()}"
        else:
            ends = [f"{float(end):.3g}" for end in (self.scale.amin(), self.scale.amax())] if len(self.scale) else []
            grid = f"{len(self.scale)} scales{' from ' + ' to '.join(ends) if ends else ''}"
        return f"QuantizedTensor({values}, {self.scheme}, {grid}, shape={tuple(self.shape)})"

    def __reduce__(self) -> tuple[Any, ...]:
        scheme = self.scheme
        parts = (scheme.bits, scheme.signed, scheme.symmetric, scheme.axis, scheme.narrow_range)
        return _rebuild, (*self._parts(), parts)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.equal:
            return args[0].equal(args[1]) if isinstance(args[0], QuantizedTensor) else False
        name = getattr(func, "__name__", str(func))
        raise ConfigError(
            f"torch's {name}() takes no QuantizedTensor. See qlightning.functional for arithmetic on quantized "
            f"tensors, or call dequantize() first."
        )

    # Shape operations

    reshape = _shape_method("reshape")
    view = _shape_method("view", "reshape")  # the numbers of the channels have strides that no view may fit
    flatten = _shape_method("flatten")
    unflatten = _shape_method("unflatten")
    permute = _shape_method("permute")
    transpose = _shape_method("transpose")
    t = _shape_method("t")
    movedim = _shape_method("movedim")
    squeeze = _shape_method("squeeze")
    unsqueeze = _shape_method("unsqueeze")
    expand = _shape_method("expand")
    select = _shape_method("select")
    narrow = _shape_method("narrow")
    index_select = _shape_method("index_select")
    flip = _shape_method("flip")

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> QuantizedTensor:
        """The same with the codes in memory in order."""
        return self._with_codes(self.codes.contiguous(memory_format=memory_format))

    def clone(self, *, memory_format: torch.memory_format = torch.preserve_format) -> QuantizedTensor:
        """A copy that shares nothing."""
        codes = self.codes.clone(memory_format=memory_format)
        return QuantizedTensor(codes, self.scale.clone(), self.zero_point.clone(), self.scheme)

    def to(self, device: str | torch.device | int, *, non_blocking: bool = False) -> QuantizedTensor:
        """The same on another device.

        Raises:
            ConfigError: A dtype is asked for.
        """
        if isinstance(device, torch.dtype):
            raise ConfigError(f"to({device}): a QuantizedTensor keeps its codes; call dequantize() for floats.")
        codes, scale, zero_point = (t.to(device, non_blocking=non_blocking) for t in self._parts())
        return QuantizedTensor(codes, scale, zero_point, self.scheme)

    def cpu(self) -> QuantizedTensor:
        """The same on the CPU."""
        return self.to("cpu")

    def __getitem__(self, index: Any) -> QuantizedTensor:
        if isinstance(index, QuantizedTensor):
            raise ConfigError("A QuantizedTensor is no index; use its int_repr().")
        return self._moved("[...]", lambda t: t[index])

    def __iter__(self) -> Iterator[QuantizedTensor]:
        return iter(self[i] for i in range(len(self)))

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.codes, self.scale, self.zero_point

    def _with_codes(self, codes: Tensor) -> QuantizedTensor:
        return QuantizedTensor(codes, self.scale, self.zero_point, self.scheme)

    def _moved(self, name: str, move: Callable[[Tensor], Tensor], move_any: Any = None) -> QuantizedTensor:
        """Moves the codes, and finds out where the channels are by moving their numbers the same way."""
        codes = move(self.codes)
        if self.axis is None:
            return self._with_codes(codes)
        shape = [1] * self.ndim
        shape[self.axis] = -1
        numbers = torch.arange(self.shape[self.axis], device=self.device).view(shape).expand(self.shape)
        found = _channels((move_any or move)(numbers))
        if found is None:
            raise ConfigError(
                f"{name} would mix the channels along axis {self.axis} of a per-channel tensor of shape "
                f"{tuple(self.shape)}, each with a scale of its own. Keep that dimension whole, or dequantize() first."
            )
        axis, channels = found
        return QuantizedTensor(codes, self.scale[channels], self.zero_point[channels], replace(self.scheme, axis=axis))


def _channels(numbers: Tensor) -> tuple[int | None, Tensor] | None:
    """Where channels have got to, from the channel number of each element.

    Returns:
        The dimension along which alone the numbers change, and the numbers along it; None and the one number where all
        are the same (or there are none); None where no dimension is it.
    """
    if numbers.numel() == 0:
        return None, numbers.new_zeros(())
    first = numbers[(0,) * numbers.ndim]
    changing = [dim for dim in range(numbers.ndim) if numbers.shape[dim] > 1 and numbers.stride(dim) != 0]
    for dim in changing:
        along = numbers[(0,) * dim + (slice(None),) + (0,) * (numbers.ndim - dim - 1)]
        shape = [1] * numbers.ndim
        shape[dim] = -1
        if bool((numbers == along.view(shape)).all()) and bool((along != first).any()):
            return dim, along.clone()
    return (None, first.clone()) if bool((numbers == first).all()) else None


def quantize(
    x: Tensor,
    scale: float | Tensor,
    zero_point: int | Tensor,
    scheme: QScheme | torch.dtype = QScheme(),  # noqa: B008
) -> QuantizedTensor:
    """Quantizes a float tensor: ``clamp(round(x / scale) + zero_point)``, half rounded to even.

    Args:
        x: Floating point values, of any shape.
        scale: Above zero: a number, or for a scheme with an axis a 1-d tensor with one value for each slice along it.
        zero_point: A code of the grid, or a 1-d tensor of them.
        scheme: The grid, or torch's name for an affine one of 8 bits: ``torch.quint8``, ``torch.qint8`` (or
            ``torch.uint8``, ``torch.int8``).

    Raises:
        ConfigError: ``x`` is no float tensor, or scale and zero point fit neither it nor the scheme.
        NonFiniteError: ``x`` has NaN, which has no code. Infinities saturate.

    Examples:
        >>> quantize(torch.tensor([0.1, 0.24]), 0.1, 10, torch.quint8).int_repr()
        tensor([11, 12], dtype=torch.uint8)
    """
    scheme = as_scheme(scheme)
    check_float(x, "quantize")
    scale, zero_point, scheme = checked_qparams(scale, zero_point, scheme, x)
    if bool(x.isnan().any()):
        raise NonFiniteError("quantize got NaN, which no code stands for. Look for the layer that made it.")
    codes = affine.quantize(x.detach(), scale, zero_point, scheme)
    return QuantizedTensor(codes, scale, zero_point, scheme)


def quantize_per_channel(
    x: Tensor,
    scales: Tensor,
    zero_points: Tensor,
    axis: int,
    scheme: QScheme | torch.dtype = QScheme(),  # noqa: B008
) -> QuantizedTensor:
    """Quantizes a float tensor with a scale and a zero point for each slice along an axis.

    Args:
        x: Floating point values, of any shape.
        scales: 1-d, above zero.
        zero_points: 1-d, codes of the grid.
        axis: The dimension of the channels; replaces that of the scheme.
        scheme: As for :func:`quantize`.

    Raises:
        ConfigError, NonFiniteError: As :func:`quantize`.

    Examples:
        >>> q = quantize_per_channel(torch.eye(2), torch.tensor([0.1, 0.5]), torch.tensor([0, 1]), axis=0)
        >>> q.int_repr()
        tensor([[10,  0],
                [ 1,  3]], dtype=torch.int8)
    """
    return quantize(x, scales, zero_points, replace(as_scheme(scheme), axis=axis))


def _rebuild(codes: Tensor, scale: Tensor, zero_point: Tensor, parts: tuple[Any, ...]) -> QuantizedTensor:
    """Builds what was pickled; checks it like any other."""
    return QuantizedTensor(codes, scale, zero_point, QScheme(*parts))


# A function that only checks and holds tensors and numbers: nothing in a file can make it do anything else.
torch.serialization.add_safe_globals([_rebuild])
