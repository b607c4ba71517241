"""Calls of oneDNN's kernels with all that is known beforehand bound to them: a packed weight, scales, the geometry."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from qlightning.backends import kernels
from qlightning.backends.onednn_kernels import PostOp

_onednn = torch.ops.onednn


class IntegerWeight(Protocol):
    """What has integer codes, output channels first, and a scale for each of these."""

    @property
    def codes(self) -> Tensor: ...

    @property
    def scale(self) -> Tensor: ...


class IntegerLayer(IntegerWeight, Protocol):
    """What has a bias beside, and the zero points of the weight, which are 0."""

    @property
    def zero_point(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...


@dataclass(frozen=True)
class Result:
    """What a kernel gives: codes of a grid, or float32.

    Attributes:
        scale: Of the grid.
        zero_point: Of the grid.
        dtype: uint8 or float32.
        post: What is computed behind the sums.
    """

    scale: float = 1.0
    zero_point: int = 0
    dtype: torch.dtype = torch.float32
    post: PostOp = field(default_factory=PostOp)

    def arguments(self) -> tuple[float, int, torch.dtype, str, list[float], str]:
        """As the kernels take it."""
        return self.scale, self.zero_point, self.dtype, self.post.name, list(self.post.args), self.post.algorithm

    def scales(self, layer: IntegerLayer) -> tuple[Tensor, Tensor, Tensor | None]:
        """Scales, zero points and bias of a layer, with the factor and offset of the post-op in them."""
        factor, offset = self.post.factor, self.post.offset
        if (factor, offset) == (1.0, 0.0):
            return layer.scale, layer.zero_point, layer.bias
        bias = torch.zeros_like(layer.scale) if layer.bias is None else layer.bias
        return layer.scale * factor, layer.zero_point, bias * factor + offset


@dataclass(frozen=True)
class Geometry:
    """The geometry of a convolution, and what its input looks like.

    Attributes:
        x_scale: Scale of the input.
        x_zero_point: Its zero point.
        stride: A number for each dimension, as the next two.
        padding: Likewise.
        dilation: Likewise.
        groups: Of the channels.
        flipped: Whether the weight is flipped in space, as a transposed convolution needs it.
        channels: Channels of the input where it has more than the weight; those are ignored.
    """

    x_scale: float
    x_zero_point: int
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int
    flipped: bool = False
    channels: int | None = None

    def pack(self, layer: IntegerWeight, shape: tuple[int, ...] | None = None) -> Tensor:
        """The weight as the kernel wants it for inputs of a shape, and for as many threads as torch has now.

        One for other inputs or threads is as right, but where it is laid out otherwise it is packed again in each call,
        which can take longer than all else. torch (2.14) keeps the layouts that it has found, for each thread apart,
        by the shapes alone, though a zero point makes it another: so each is found in a thread of its own.
        """
        codes = layer.codes
        if self.flipped:
            codes = codes.flip(list(range(2, codes.dim())))
        if self.channels is not None:
            codes = F.pad(codes, [0, 0] * (codes.dim() - 2) + [0, self.channels - codes.shape[1]])
        if shape is None and codes.dim() == 4:
            some = (28 + d * k for d, k in zip(self.dilation, codes.shape[2:], strict=True))
            shape = (1, codes.shape[1] * self.groups, *some)
        told = None if shape is None else list(shape)
        arguments = (codes.contiguous(), layer.scale, self.x_scale, self.x_zero_point, *self.arguments(), told)
        with ThreadPoolExecutor(1) as other:
            return other.submit(_pack, *arguments).result()

    def arguments(self) -> tuple[list[int], list[int], list[int], int]:
        """As the kernels take it."""
        return self.stride, self.padding, self.dilation, self.groups


@torch.no_grad()
def _pack(*arguments: Any) -> Tensor:
    torch.get_num_threads()  # lets a new thread have as many as the others
    packed: Tensor = _onednn.qconv_prepack(*arguments)
    return packed


@torch.compiler.assume_constant_result
def _threads() -> int:
    return torch.get_num_threads()


class PackedWeights:
    """The weight of a convolution, packed for the first shapes of the input that come; safe between threads.

    Args:
        geometry: Of the convolution.
        layer: Its weight, which does not change.
    """

    _MOST = 2

    def __init__(self, geometry: Geometry, layer: IntegerWeight) -> None:
        self._pack = partial(geometry.pack, layer)
        self._dims = layer.codes.dim()
        self._known: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        self._other: Tensor | None = None
        self.find = self._known.get

    def add(self, threads: int, shape: tuple[int, ...]) -> Tensor:
        """The weight for a number of threads and a shape that were not found."""
        if len(shape) == self._dims and all(shape) and not torch.compiler.is_compiling():
            if any(number != threads for number, _ in list(self._known)):
                self._known.clear()
            if len(self._known) < self._MOST:
                return self._known.setdefault((threads, shape), self._pack(shape))
        if self._other is None:
            self._other = self._pack()
        return self._other


@dataclass(frozen=True)
class Conv:
    """Binds a layer to a convolution of codes that rounds once."""

    geometry: Geometry
    result: Result

    def __call__(self, layer: IntegerLayer) -> Callable[[Tensor], Tensor]:
        x_scale, x_zero_point = self.geometry.x_scale, self.geometry.x_zero_point
        stride, padding, dilation, groups = self.geometry.arguments()
        dims, of_rows = len(stride), len(stride) == 1
        weights, (w_scale, w_zero_point, bias) = PackedWeights(self.geometry, layer), self.result.scales(layer)
        find, add = weights.find, weights.add
        scale, zero_point, dtype, post_op, post_args, algorithm = self.result.arguments()
        kernel = _onednn.qconv_pointwise.default

        def run(x: Tensor) -> Tensor:
            batched = x.dim() != dims + 1
            threads = _threads()
            if (weight := find((threads, x.shape))) is None:
                weight = add(threads, x.shape)
            y: Tensor = kernel(
                x if batched else x[None], x_scale, x_zero_point, weight, w_scale, w_zero_point, bias, stride, padding,
                dilation, groups, scale, zero_point, dtype, post_op, post_args, algorithm,
            )  # fmt: skip
            if of_rows and y.dim() == 4:  # for an empty batch torch (2.14) forgets that it has made an image of a row
                y = y.squeeze(2)
            return y if batched else y[0]

        return run


@dataclass(frozen=True)
class ConvSum:
    """Binds a layer to a 2-d convolution of codes plus a residual of codes, with or without ReLU, rounded once.

    Attributes:
        geometry: See :class:`Geometry`.
        result: See :class:`Result`; its post-op is a ReLU or none.
        residual_scale: Scale of the residual.
        residual_zero_point: Its zero point.
    """

    geometry: Geometry
    result: Result
    residual_scale: float
    residual_zero_point: int

    def __call__(self, layer: IntegerLayer) -> Callable[[Tensor, Tensor, bool], Tensor]:
        x_scale, x_zero_point = self.geometry.x_scale, self.geometry.x_zero_point
        stride, padding, dilation, groups = self.geometry.arguments()
        weights, (w_scale, w_zero_point, bias) = PackedWeights(self.geometry, layer), self.result.scales(layer)
        find, add = weights.find, weights.add
        scale, zero_point, dtype, post_op, *_ = self.result.arguments()
        residual_scale, residual_zero_point = self.residual_scale, self.residual_zero_point
        channels, reach = w_scale.shape[0], [d * (k - 1) for d, k in zip(dilation, layer.codes.shape[2:], strict=True)]
        (vertical, horizontal), (down, right) = ([2 * p - r for p, r in zip(padding, reach, strict=True)], stride)
        kernel = _onednn.qconv2d_pointwise.binary
        in_float = Conv(self.geometry, Result())(layer)
        images = torch.channels_last

        def run(x: Tensor, residual: Tensor, overwrite: bool) -> Tensor:
            """The sum; with ``overwrite``, in the memory of the residual where that fits."""
            if x.dim() == 4:
                batch, _, height, width = x.shape
                shape = (batch, channels, (height + vertical - 1) // down + 1, (width + horizontal - 1) // right + 1)
                if residual.shape == shape:
                    threads = _threads()
                    if (weight := find((threads, x.shape))) is None:
                        weight = add(threads, x.shape)
                    if not (overwrite and residual.is_contiguous(memory_format=images)):
                        residual = residual.clone(memory_format=images)
                    y: Tensor = kernel(
                        x, x_scale, x_zero_point, weight, w_scale, w_zero_point, residual, bias, stride, padding,
                        dilation, groups, scale, zero_point, dtype, residual_scale, residual_zero_point, "sum", 1.0,
                        post_op, [], "",
                    )  # fmt: skip
                    return y
            z = in_float(x) + kernels.dequantize(residual, residual_scale, residual_zero_point)
            return kernels.quantize(z.relu_() if post_op == "relu" else z, scale, zero_point, 0, 255)

        return run


@dataclass(frozen=True)
class ConvTranspose:
    """Binds a layer to a transposed convolution of codes: a plain one with the flipped weight over the spread input.

    Attributes:
        geometry: That of the plain convolution.
        result: See :class:`Result`.
        spacing: Distance of neighbouring elements of the input when it is spread.
        before: Zeros before the first of them, in each dimension.
        after: Zeros behind the last one.
    """

    geometry: Geometry
    result: Result
    spacing: list[int]
    before: list[int]
    after: list[int]

    def __call__(self, layer: IntegerLayer) -> Callable[[Tensor], Tensor]:
        plain = Conv(self.geometry, self.result)(layer)
        zero, dims = self.geometry.x_zero_point, len(self.spacing)
        spacing, before, after = self.spacing, self.before, self.after

        def run(x: Tensor) -> Tensor:
            if x.dim() == dims + 1:
                return plain(kernels.spread(x[None], zero, spacing, before, after))[0]
            return plain(kernels.spread(x, zero, spacing, before, after))

        return run


@dataclass(frozen=True)
class Linear:
    """Binds a layer to a linear layer on codes (..., features) that rounds once."""

    x_scale: float
    x_zero_point: int
    result: Result

    def __call__(self, layer: IntegerLayer) -> Callable[[Tensor], Tensor]:
        x_scale, x_zero_point = self.x_scale, self.x_zero_point
        weight, (w_scale, w_zero_point, bias) = pack_linear(layer), self.result.scales(layer)
        result = self.result.arguments()
        kernel = _onednn.qlinear_pointwise.default
        (features, inputs), dtype = layer.codes.shape, self.result.dtype

        def run(x: Tensor) -> Tensor:
            if not x.numel():  # torch (2.14) gives it two dimensions whatever x has
                kernels.check_width(x, inputs)
                return x.new_empty((*x.shape[:-1], features), dtype=dtype)
            y: Tensor = kernel(x.contiguous(), x_scale, x_zero_point, weight, w_scale, w_zero_point, bias, *result)
            return y

        return run


def pack_linear(layer: IntegerWeight) -> Tensor:
    """The weight of a linear layer as the kernel wants it."""
    packed: Tensor = _onednn.qlinear_prepack(layer.codes.contiguous(), None)
    return packed
