import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qlightning.affine import (
    SCALE_MIN,
    calculate_qparams,
    dequantize,
    fake_quantize,
    is_inside,
    quantize,
    sqnr,
)
from qlightning.blocks import BLOCK_NUMEL
from qlightning.errors import CalibrationError, ConfigError, NonFiniteError
from qlightning.qscheme import QScheme

SCHEMES = [
    QScheme(bits=bits, signed=signed, symmetric=symmetric, narrow_range=narrow_range)
    for bits in range(2, 9)
    for signed in (False, True)
    for symmetric in (False, True)
    for narrow_range in (False, True)
]
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=str)

FLOAT32_MAX = torch.finfo(torch.float32).max
RANGES = {
    "both signs": (-1.7, 3.1),
    "positive": (2.0, 3.0),
    "negative": (-3.0, -2.0),
    "zero": (0.0, 0.0),
    "constant": (5.0, 5.0),
    "denormal": (-1e-42, 1e-42),
    "1e-38": (-1e-38, 1e-38),
    "1e30": (-1e30, 2e30),
    "huge": (-3e38, 3e38),
    "all of float32": (-FLOAT32_MAX, FLOAT32_MAX),
    "lopsided": (-1e-6, 1e6),
}
LOW, HIGH = (torch.tensor(bounds) for bounds in zip(*RANGES.values(), strict=True))


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def random_ranges(count: int = 1000) -> tuple[Tensor, Tensor]:
    """Ranges of all sizes, on either side of zero and across it."""
    ends = torch.randn(2, count) * 10 ** torch.empty(count).uniform_(-6, 6)
    return ends.amin(0), ends.amax(0)


def ao_qparams(low: Tensor, high: Tensor, scheme: QScheme) -> tuple[Tensor, Tensor]:
    """What torch.ao's per-channel observer makes of given extremes."""
    from torch.ao.quantization import PerChannelMinMaxObserver

    observer = PerChannelMinMaxObserver(
        dtype=torch.qint8 if scheme.signed else torch.quint8,
        qscheme=torch.per_channel_symmetric if scheme.symmetric else torch.per_channel_affine,
        eps=SCALE_MIN,
        **({} if scheme.bits == 8 else {"quant_min": scheme.quant_min, "quant_max": scheme.quant_max}),
    )
    observer(torch.stack((low, high), 1))
    return observer.calculate_qparams()


class TestCalculateQparams:
    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
    @pytest.mark.parametrize(
        "scheme",
        # torch.ao rounds the middle of an unsigned grid down where its limits are given.
        [s for s in SCHEMES if not s.narrow_range and (s.bits == 8 or s.signed or not s.symmetric)],
        ids=str,
    )
    def test_equals_torch_ao(self, scheme: QScheme) -> None:
        low, high = random_ranges()
        scale, zero_point = calculate_qparams(low, high, scheme)
        ao_scale, ao_zero_point = ao_qparams(low, high, scheme)
        assert torch.equal(scale, ao_scale)
        assert torch.equal(zero_point, ao_zero_point.to(torch.int32))

    @every_scheme
    def test_scalars_and_channels_agree(self, scheme: QScheme) -> None:
        random_low, random_high = random_ranges()
        low = torch.cat((LOW, random_low, random_low * 1e-39))  # the last are beyond the normal numbers
        high = torch.cat((HIGH, random_high, random_high * 1e-39))
        scale, zero_point = calculate_qparams(low, high, scheme)
        assert scale.dtype == torch.float32
        assert zero_point.dtype == torch.int32
        for index in range(len(low)):
            one_scale, one_zero_point = calculate_qparams(low[index], high[index], scheme)
            assert one_scale.shape == one_zero_point.shape == ()
            assert torch.equal(one_scale, scale[index])
            assert torch.equal(one_zero_point, zero_point[index])

    @every_scheme
    def test_any_finite_range_has_a_finite_positive_scale(self, scheme: QScheme) -> None:
        scale, zero_point = calculate_qparams(LOW, HIGH, scheme)
        assert scale.isfinite().all()
        assert (scale >= SCALE_MIN).all()
        assert scale.reciprocal().isfinite().all()
        assert ((zero_point >= scheme.quant_min) & (zero_point <= scheme.quant_max)).all()

    @every_scheme
    def test_zero_is_exact(self, scheme: QScheme) -> None:
        scale, zero_point = calculate_qparams(LOW, HIGH, scheme)
        per_channel = QScheme(scheme.bits, scheme.signed, scheme.symmetric, 0, scheme.narrow_range)
        assert torch.equal(
            fake_quantize(torch.zeros_like(scale), scale, zero_point, per_channel), torch.zeros_like(scale)
        )

    @every_scheme
    def test_the_grid_covers_the_range_within_one_step(self, scheme: QScheme) -> None:
        low, high = random_ranges()
        scale, zero_point = (qparam.double() for qparam in calculate_qparams(low, high, scheme))
        bottom, top = (scheme.quant_min - zero_point) * scale, (scheme.quant_max - zero_point) * scale
        # Half a step by rounding the zero point; one where a grid has one code more on one side than on the other.
        slack = (1.0 if scheme.symmetric else 0.5) * scale * (1 + 1e-5)
        assert (bottom - slack <= low.double()).all()
        assert (top + slack >= high.double()).all()

    @pytest.mark.parametrize("bits", range(2, 9))
    def test_symmetric_zero_point_is_the_middle(self, bits: int) -> None:
        low, high = random_ranges(10)
        assert (calculate_qparams(low, high, QScheme(bits=bits, symmetric=True))[1] == 0).all()
        unsigned = QScheme(bits=bits, signed=False, symmetric=True)
        assert (calculate_qparams(low, high, unsigned)[1] == 2 ** (bits - 1)).all()

    @pytest.mark.parametrize("low", [math.nan, -math.inf, 0.0, -FLOAT32_MAX])
    @pytest.mark.parametrize("high", [math.nan, math.inf])
    @pytest.mark.parametrize("shape", [(), (3,)], ids=str)
    def test_nonfinite_bounds_raise(self, low: float, high: float, shape: tuple[int, ...]) -> None:
        min_val, max_val = torch.zeros(shape), torch.ones(shape)
        min_val.view(-1)[-1], max_val.view(-1)[-1] = low, high
        with pytest.raises(NonFiniteError, match="NaN or infinity"):
            calculate_qparams(min_val, max_val, QScheme())

    @pytest.mark.parametrize(("low", "high"), [(math.inf, -math.inf), (1.0, 0.5), (FLOAT32_MAX, -FLOAT32_MAX)])
    def test_nothing_observed_raises(self, low: float, high: float) -> None:
        with pytest.raises(CalibrationError, match="nothing was observed") as caught:
            calculate_qparams(torch.tensor(low), torch.tensor(high), QScheme())
        assert not isinstance(caught.value, NonFiniteError)
        with pytest.raises(CalibrationError, match="in 1 of 2 channels"):
            calculate_qparams(torch.tensor([0.0, low]), torch.tensor([0.0, high]), QScheme(axis=0))


def numpy_codes(x: Tensor, scale: Tensor, zero_point: Tensor, scheme: QScheme) -> np.ndarray[Any, Any]:
    """The formula in numpy: float32 product (as torch's kernels), the rest in float64."""
    shape = [1] * x.ndim
    if scheme.axis is not None:
        shape[scheme.axis] = -1
    scale_, zero_point_ = scale.numpy().reshape(shape), zero_point.numpy().reshape(shape)
    scaled = x.numpy() * (np.float32(1) / scale_)
    codes = np.rint(scaled.astype(np.float64)) + zero_point_
    return np.clip(codes, scheme.quant_min, scheme.quant_max)


def grid(scheme: QScheme, channels: int) -> tuple[Tensor, Tensor]:
    shape = (channels,) if scheme.per_channel else ()
    low, high = -torch.rand(shape) * 2 - 0.1, torch.rand(shape) * 2 + 0.1
    return calculate_qparams(low, high, scheme)


GRIDS = [
    QScheme(bits, signed, symmetric, axis)
    for bits in (2, 4, 8)
    for signed, symmetric in ((True, True), (True, False), (False, False), (False, True))
    for axis in (None, 0, 1, -1)
]
every_grid = pytest.mark.parametrize("scheme", GRIDS, ids=str)


class TestQuantize:
    @every_grid
    def test_codes_are_those_of_the_formula(self, scheme: QScheme) -> None:
        x = torch.randn(5, 5, 5) * 2
        scale, zero_point = grid(scheme, 5)
        codes = quantize(x, scale, zero_point, scheme)
        assert codes.dtype is scheme.dtype
        np.testing.assert_array_equal(codes.numpy(), numpy_codes(x, scale, zero_point, scheme))

    def test_ties_go_to_even_before_the_zero_point(self) -> None:
        x = torch.tensor([-1.5, -0.5, 0.5, 1.5, 2.5])
        codes = quantize(x, torch.tensor(1.0), torch.tensor(1, dtype=torch.int32), QScheme())
        assert codes.tolist() == [-1, 1, 1, 3, 3]

    @every_grid
    def test_codes_survive_the_round_trip(self, scheme: QScheme) -> None:
        every_code = torch.arange(scheme.quant_min, scheme.quant_max + 1).to(scheme.dtype)
        scale, zero_point = grid(scheme, 3)
        codes = every_code.view(1, 1, -1).expand(3, 3, -1).contiguous()
        if scheme.axis == -1:
            codes = codes.transpose(0, 2).contiguous()
        values = dequantize(codes, scale, zero_point, scheme.axis)
        assert torch.equal(quantize(values, scale, zero_point, scheme), codes)

    @pytest.mark.parametrize("scheme", [QScheme(), QScheme(signed=False), QScheme(bits=4, axis=0)], ids=str)
    def test_huge_values_saturate(self, scheme: QScheme) -> None:
        x = torch.tensor([[-math.inf, -FLOAT32_MAX, -1e20, 1e20, FLOAT32_MAX, math.inf]])
        scale, zero_point = grid(scheme, 1)
        assert quantize(x, scale, zero_point, scheme).tolist() == [[scheme.quant_min] * 3 + [scheme.quant_max] * 3]

    def test_low_precision_input_is_computed_in_float32(self) -> None:
        x = torch.randn(1000).bfloat16()
        scale, zero_point = grid(QScheme(), 1)
        assert torch.equal(quantize(x, scale, zero_point, QScheme()), quantize(x.float(), scale, zero_point, QScheme()))

    def test_dequantize_gives_float32(self) -> None:
        codes = torch.arange(256, dtype=torch.uint8)
        values = dequantize(codes, torch.tensor(0.5), torch.tensor(128, dtype=torch.int32))
        assert values.dtype is torch.float32
        assert torch.equal(values, torch.arange(-64, 64, 0.5))

    @pytest.mark.parametrize("axis", [0, 1, 2, -4])
    def test_qparams_that_do_not_fit_are_refused(self, axis: int) -> None:
        scale, zero_point = torch.ones(4), torch.zeros(4, dtype=torch.int32)
        x, scheme = torch.ones(2, 3, 5), QScheme(axis=axis)
        for call in (quantize, fake_quantize):
            with pytest.raises(ConfigError, match="axis"):
                call(x, scale, zero_point, scheme)
        with pytest.raises(ConfigError, match="axis"):
            dequantize(x.to(torch.int8), scale, zero_point, axis)
        with pytest.raises(ConfigError, match="per-tensor"):
            quantize(x, scale, zero_point, QScheme())


def torch_fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, scheme: QScheme) -> Tensor:
    limits = scheme.quant_min, scheme.quant_max
    if scheme.axis is None:
        return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, *limits)
    return torch.fake_quantize_per_channel_affine(x, scale, zero_point, scheme.axis % x.ndim, *limits)


class TestFakeQuantize:
    @every_grid
    def test_values_and_gradients_equal_torch(self, scheme: QScheme) -> None:
        ours, theirs = (torch.randn(7, 7, 7, 7).mul_(2).requires_grad_() for _ in range(2))
        theirs.data.copy_(ours.data)
        scale, zero_point = grid(scheme, 7)
        gradient = torch.randn_like(ours)
        ours_out = fake_quantize(ours, scale, zero_point, scheme)
        theirs_out = torch_fake_quantize(theirs, scale, zero_point, scheme)
        assert torch.equal(ours_out, theirs_out)
        ours_out.backward(gradient)
        theirs_out.backward(gradient)
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
        assert 0 < (ours.grad == 0).sum() < ours.numel(), "both sides of the mask should be met"

    @every_grid
    def test_equals_quantize_and_dequantize_to_the_bit(self, scheme: QScheme) -> None:
        x = torch.randn(5, 5, 5) * 2
        scale, zero_point = grid(scheme, 5)
        codes = quantize(x, scale, zero_point, scheme)
        expected = dequantize(codes, scale, zero_point, scheme.axis)
        with torch.no_grad():
            got = fake_quantize(x, scale, zero_point, scheme)
        # As integers, -0.0 differs from 0.0.
        assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
        assert torch.equal(fake_quantize(x.requires_grad_(), scale, zero_point, scheme), got)

    @pytest.mark.parametrize("axis", [None, 0, 1])
    @pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
    def test_blocks_are_seamless(self, axis: int | None, memory_format: torch.memory_format) -> None:
        scheme = QScheme(axis=axis)
        x = torch.randn(37, 64, 12, 12).to(memory_format=memory_format).requires_grad_()
        assert x.numel() > 2 * BLOCK_NUMEL
        scale, zero_point = grid(scheme, x.shape[axis] if axis is not None else 1)
        out = fake_quantize(x, scale, zero_point, scheme)
        assert torch.equal(out, torch_fake_quantize(x, scale, zero_point, scheme))
        assert out.is_contiguous(memory_format=memory_format)
        (ours,) = torch.autograd.grad(out.sum(), x)
        (theirs,) = torch.autograd.grad(torch_fake_quantize(x, scale, zero_point, scheme).sum(), x)
        assert torch.equal(ours, theirs)

    @pytest.mark.parametrize("shape", [(1, BLOCK_NUMEL + 1), (300, 300), (1, BLOCK_NUMEL + 1, 1)], ids=str)
    def test_channels_behind_the_first_dimension(self, shape: tuple[int, ...]) -> None:
        scheme = QScheme(axis=1)
        x = torch.randn(shape)
        scale, zero_point = grid(scheme, shape[1])
        expected = dequantize(quantize(x, scale, zero_point, scheme), scale, zero_point, 1)
        assert torch.equal(fake_quantize(x.requires_grad_(), scale, zero_point, scheme), expected)

    @pytest.mark.parametrize("axis", [None, 0])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_dtype_is_kept_and_computed_in_float32(self, axis: int | None, dtype: torch.dtype) -> None:
        scheme = QScheme(axis=axis)
        x = torch.randn(6, 50).to(dtype).requires_grad_()
        scale, zero_point = grid(scheme, 6)
        out = fake_quantize(x, scale, zero_point, scheme)
        assert out.dtype is dtype
        assert torch.equal(out, fake_quantize(x.float(), scale, zero_point, scheme).to(dtype))
        out.sum().backward()
        assert x.grad is not None
        assert x.grad.dtype is dtype

    @pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1,)], ids=str)
    def test_odd_shapes(self, shape: tuple[int, ...]) -> None:
        x = torch.full(shape, 0.3, requires_grad=True)
        out = fake_quantize(x, torch.tensor(0.5), torch.tensor(0, dtype=torch.int32), QScheme())
        assert torch.equal(out, torch.full(shape, 0.5))
        out.sum().backward()

    def test_the_input_is_left_alone(self) -> None:
        x = torch.randn(100)
        before = x.clone()
        fake_quantize(x, torch.tensor(0.5), torch.tensor(0), QScheme())
        assert torch.equal(x, before)

    @pytest.mark.parametrize("reach, kept", [(127, []), (128, [(torch.bool, 100)])], ids=["inside", "clipped"])
    def test_the_backward_keeps_a_bool_an_element_where_one_was_clipped(self, reach: int, kept: list[Any]) -> None:
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        x = torch.zeros(10, 10)
        x[3, 4] = reach
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            fake_quantize(x.requires_grad_(), torch.ones(10), torch.zeros(10), QScheme(axis=0, symmetric=True))
        assert [(tensor.dtype, tensor.numel()) for tensor in saved] == kept

    @pytest.mark.parametrize("axis", [None, 0, 1])
    @pytest.mark.parametrize("gradient", ["expanded", "transposed", "contiguous"])
    def test_gradients_where_some_blocks_are_clipped(self, axis: int | None, gradient: str) -> None:
        scheme = QScheme(axis=axis)
        x = torch.rand(32, 48, 16, 16)
        assert x.numel() > 2 * BLOCK_NUMEL
        x[-1, 5, 3, 2] = 1e3
        x.requires_grad_()
        scale, zero_point = torch.full((1,), 0.01), torch.full((1,), -100, dtype=torch.int32)
        given = {
            "expanded": torch.tensor(3.0).expand(x.shape),
            "transposed": torch.randn(x.shape).transpose(2, 3),
            "contiguous": torch.randn(x.shape),
        }[gradient]
        before = given.clone()
        (ours,) = torch.autograd.grad(fake_quantize(x, scale, zero_point, scheme), x, given)
        expected = given * (x < 2.275)  # code 127.5
        assert torch.equal(ours, expected)
        assert torch.equal(given, before)

    def test_gradient_of_the_gradient(self) -> None:
        x = torch.tensor([-9.0, 0.3, 0.8], requires_grad=True)
        (first,) = torch.autograd.grad(
            fake_quantize(x, torch.tensor(0.5), torch.tensor(0), QScheme(bits=4)).square().sum(), x, create_graph=True
        )
        (second,) = torch.autograd.grad(first.sum(), x)
        assert second.tolist() == [0.0, 2.0, 2.0]

    @pytest.mark.parametrize("axis", [None, 0, 1])
    @pytest.mark.parametrize("reach", [1.0, 127.4, 127.6, 300.0, math.nan, math.inf])
    @pytest.mark.parametrize("shape", [(4, 6), (4, 2 * BLOCK_NUMEL)], ids=["small", "large"])
    def test_known_extremes_change_nothing(self, shape: tuple[int, int], reach: float, axis: int | None) -> None:
        scheme = QScheme(symmetric=True, axis=axis)
        channels = 1 if axis is None else shape[axis]
        scale, zero_point = torch.full((channels,), 0.1), torch.zeros(channels, dtype=torch.int32)
        x = torch.rand(shape)
        x[2, 3] = reach * 0.1
        inside = is_inside(x.amin(), x.amax(), scale[0], zero_point[0], scheme)
        assert inside == (reach < 127.49)
        x.requires_grad_()
        results = [fake_quantize(x, scale, zero_point, scheme, known) for known in (False, inside)]
        gradients = [torch.autograd.grad(y, x, torch.ones_like(y))[0] for y in results]
        assert torch.equal(*(y.view(torch.int32) for y in results))
        assert torch.equal(*gradients)
        assert gradients[0].sum() == x.numel() - (not reach < 127.5)

    @pytest.mark.parametrize("axis", [None, 0, 1])
    def test_views_with_gaps(self, axis: int | None) -> None:
        scheme = QScheme(axis=axis)
        x = torch.randn(7, 7, 9)[:, :, 1:8].mul(2).requires_grad_()
        scale, zero_point = grid(scheme, 7)
        assert torch.equal(
            fake_quantize(x, scale, zero_point, scheme), fake_quantize(x.contiguous(), scale, zero_point, scheme)
        )

    def test_huge_values_saturate_and_nan_stays(self) -> None:
        x = torch.tensor([-math.inf, -1e38, 1e38, math.inf, math.nan], requires_grad=True)
        out = fake_quantize(x, torch.tensor(0.5), torch.tensor(3), QScheme(bits=4))
        assert out[:4].tolist() == [-5.5, -5.5, 2.0, 2.0]
        assert out[4].isnan()
        out[:4].sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [0.0] * 5

    @pytest.mark.parametrize("low", [-1e-38, 0.0, -1e30])
    def test_extreme_grids_give_finite_values(self, low: float) -> None:
        scale, zero_point = calculate_qparams(torch.tensor(low), torch.tensor(-low), QScheme())
        x = torch.linspace(-1, 1, 11) * low
        out = fake_quantize(x, scale, zero_point, QScheme())
        assert ((out - x).abs() <= scale * 0.5 * (1 + 1e-5)).all()


class TestSqnr:
    def test_is_the_ratio_in_decibels(self) -> None:
        reference = torch.randn(1000)
        other = reference + torch.randn(1000) * 0.01
        ref, oth = reference.numpy().astype(np.float64), other.numpy().astype(np.float64)
        expected = 10 * np.log10((ref**2).sum() / ((ref - oth) ** 2).sum())
        assert sqnr(reference, other) == pytest.approx(expected, rel=1e-12)

    def test_its_ends(self) -> None:
        assert sqnr(torch.ones(3), torch.ones(3)) == math.inf
        assert sqnr(torch.zeros(3), torch.zeros(3)) == math.inf
        assert sqnr(torch.zeros(3), torch.ones(3)) == -math.inf
        assert math.isnan(sqnr(torch.ones(3), torch.full((3,), math.nan)))

    def test_does_not_overflow(self) -> None:
        assert sqnr(torch.tensor([1e30]), torch.tensor([0.9e30])) == pytest.approx(20, abs=1e-5)

    def test_shapes_must_be_equal(self) -> None:
        with pytest.raises(ConfigError, match="shapes"):
            sqnr(torch.ones(3), torch.ones(1))
