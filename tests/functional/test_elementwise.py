"""Functions of one and of two quantized tensors against exact arithmetic or numpy's float64."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qlightning.functional as QF
from qlightning import QScheme, QuantizedTensor, quantize, quantize_per_channel
from qlightning.errors import ConfigError
from tests.functional.reference import FEW, centred, distance, fraction, grids, steps_from, tensors

BACKENDS = ["auto", "reference"]
relu6 = lambda v: min(max(v, 0), 6)  # noqa: E731
# From the operation to the same in exact fractions, or in floats where it is transcendental.
EXACT = {
    "requantize": (lambda q, **g: QF.requantize(q, **g), lambda v: v),
    "relu": (lambda q, **g: QF.relu(q, **g), lambda v: max(v, 0)),
    "relu6": (lambda q, **g: QF.relu6(q, **g), relu6),
    "leaky_relu": (lambda q, **g: QF.leaky_relu(q, 0.125, **g), lambda v: v if v > 0 else v / 8),
    "hardswish": (lambda q, **g: QF.hardswish(q, **g), lambda v: v * relu6(v + 3) / 6),
    "hardsigmoid": (lambda q, **g: QF.hardsigmoid(q, **g), lambda v: Fraction(relu6(v + 3)) / 6),
    "clamp": (lambda q, **g: QF.clamp(q, -1.5, 2.25, **g), lambda v: min(max(v, Fraction(-3, 2)), Fraction(9, 4))),
    "clamp below": (lambda q, **g: QF.clamp(q, max=0.5, **g), lambda v: min(v, Fraction(1, 2))),
    "add_scalar": (lambda q, **g: QF.add_scalar(q, 1.25, **g), lambda v: v + Fraction(5, 4)),
    "mul_scalar": (lambda q, **g: QF.mul_scalar(q, -0.375, **g), lambda v: v * Fraction(-3, 8)),
}
FLOATS = {
    "elu": (lambda q, **g: QF.elu(q, 0.7, **g), lambda v: v if v > 0 else 0.7 * math.expm1(v)),
    "sigmoid": (lambda q, **g: QF.sigmoid(q, **g), lambda v: 1 / (1 + math.exp(-v)) if v > -700 else 0.0),
    "tanh": (lambda q, **g: QF.tanh(q, **g), math.tanh),
    "silu": (lambda q, **g: QF.silu(q, **g), lambda v: v / (1 + math.exp(-v)) if v > -700 else 0.0),
    "gelu": (lambda q, **g: QF.gelu(q, **g), lambda v: v * (1 + math.erf(v / math.sqrt(2))) / 2),
}


def values_of(q):
    return centred(q).astype(object) * fraction(q.q_scale())


@pytest.mark.parametrize("name", EXACT)
@FEW
@given(tensors((3, 7)), grids(), st.sampled_from(BACKENDS))
def test_exact_functions_are_rounded_once(name, q, grid, backend):
    operation, function = EXACT[name]
    before = q.clone()
    values = np.vectorize(function, otypes=[object])(values_of(q))
    result = operation(q, **grid, backend=backend)
    # Float64 may not tell on which side of a tie a quotient lies that is within 1e-9 of it.
    tied = np.vectorize(lambda s: abs(s % 1 - Fraction(1, 2)) < Fraction(1, 10**9), otypes=[bool])
    assert distance(result, values, grid) <= int(tied(steps_from(values, grid)).any())
    assert q == before


@pytest.mark.parametrize("name", FLOATS)
@FEW
@given(tensors((3, 7)), grids(), st.sampled_from(BACKENDS))
def test_transcendental_functions_are_rounded_once(name, q, grid, backend):
    operation, function = FLOATS[name]
    values = np.vectorize(lambda v: function(float(v)), otypes=[float])(values_of(q))
    result = operation(q, **grid, backend=backend)
    scheme = grid["scheme"]
    steps = np.clip(
        values / np.float64(np.float32(grid["scale"])) + grid["zero_point"], scheme.quant_min, scheme.quant_max
    )
    assert np.abs(result.int_repr().numpy() - steps).max() <= 0.5 + 1e-9
    assert result.scheme == scheme


PAIRS = {
    "add": (QF.add, lambda a, b: a + b),
    "mul": (QF.mul, lambda a, b: a * b),
    "add_relu": (QF.add_relu, lambda a, b: np.vectorize(lambda v: max(v, 0), otypes=[object])(a + b)),
}


@pytest.mark.parametrize("name", PAIRS)
@FEW
@given(st.data(), grids(), st.sampled_from(BACKENDS))
def test_sums_and_products_are_within_one_code(name, data, grid, backend):
    shapes = data.draw(st.sampled_from([((2, 3, 4), (2, 3, 4)), ((2, 3, 4), (3, 1)), ((1,), (5,)), ((), (2,))]))
    a, b = (data.draw(tensors(shape)) for shape in shapes)
    operation, function = PAIRS[name]
    values = function(values_of(a), values_of(b))
    assert distance(operation(a, b, **grid, backend=backend), values, grid) <= (0 if backend == "reference" else 1)


@FEW
@given(st.data(), grids(), st.sampled_from(BACKENDS))
def test_cat_rounds_each_part_once(data, grid, backend):
    parts = [
        data.draw(tensors((2, width, 3))) for width in data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    ]
    values = np.concatenate([values_of(part) for part in parts], axis=1)
    assert distance(QF.cat(parts, 1, **grid, backend=backend), values, grid) == 0


def test_what_lies_on_its_own_grid_keeps_it():
    q = quantize(torch.randn(2, 3, 8, 8), 0.05, 100, torch.quint8)
    kept = [QF.relu(q), QF.max_pool2d(q, 2), QF.cat([q, q]), QF.interpolate(q, scale_factor=2), QF.max_pool1d(q[0], 3)]
    for result in kept:
        assert (result.q_scale(), result.q_zero_point()) == (q.q_scale(), 100)
        assert result.scheme == q.scheme
    channels = quantize_per_channel(torch.randn(3, 4), torch.rand(3) + 0.1, torch.tensor([1, 0, -5]), 0)
    assert torch.equal(QF.relu(channels).dequantize(), channels.dequantize().relu())
    assert QF.relu(channels).q_per_channel_axis() == 0


@pytest.mark.parametrize("scheme", [None, QScheme(bits=5), torch.quint8, QScheme(symmetric=True)])
def test_a_chosen_grid_covers_the_exact_result(scheme):
    a, b = quantize(torch.randn(40), 0.05, 3), quantize(torch.randn(40) * 5, 0.2, 0)
    exact = torch.from_numpy((values_of(a) * values_of(b)).astype(np.float64))
    result = QF.mul(a, b, scheme=scheme)
    wanted = a.scheme if scheme is None else QF.quantize(torch.zeros(1), 1.0, 0, scheme).scheme
    assert result.scheme == wanted
    scale, zero_point = QF.choose_qparams(exact, wanted)
    assert result.q_scale() == scale.item()
    assert result.q_zero_point() == zero_point.item()
    assert (result.dequantize() - exact).abs().max() <= scale * 1.0001


def test_a_constant_or_empty_result_has_a_grid():
    zeros = quantize(torch.zeros(3), 0.1, 0)
    assert torch.equal(QF.add(zeros, zeros).dequantize(), torch.zeros(3))
    for operation in (QF.relu, QF.sigmoid, lambda q: QF.add(q, q), lambda q: QF.cat([q, q])):
        assert operation(quantize(torch.zeros(0, 2), 0.1, 0)).numel() == 0
    assert QF.hardsigmoid(quantize(torch.full((2,), 99.0), 1.0, 0)).dequantize() == pytest.approx(1.0)


def test_relu6_never_leaves_its_range_by_more_than_the_rounding():  # C57
    q = quantize(torch.linspace(-10, 10, 200), 0.08, 128, torch.quint8)
    result = QF.relu6(q)
    assert result.dequantize().min() == 0
    assert result.dequantize().max() == pytest.approx(6.0, rel=1e-6)
    assert (result.dequantize() - q.dequantize().clamp(0, 6)).abs().max() <= result.q_scale() * 0.5001


NATIVE = {
    "add": (lambda a, b: torch.ops.quantized.add(a, b, 0.1, 90), lambda a, b: QF.add(a, b, scale=0.1, zero_point=90)),
    "add_relu": (
        lambda a, b: torch.ops.quantized.add_relu(a, b, 0.1, 90),
        lambda a, b: QF.add_relu(a, b, scale=0.1, zero_point=90),
    ),
    "mul": (lambda a, b: torch.ops.quantized.mul(a, b, 0.1, 90), lambda a, b: QF.mul(a, b, scale=0.1, zero_point=90)),
    "cat": (
        lambda a, b: torch.ops.quantized.cat([a, b], 0, 0.1, 90),
        lambda a, b: QF.cat([a, b], 0, scale=0.1, zero_point=90),
    ),
    "relu": (lambda a, b: torch.relu(a), lambda a, b: QF.relu(a)),
    "leaky_relu": (
        lambda a, b: torch.ops.quantized.leaky_relu(a, 0.1, False, 0.05, 9),
        lambda a, b: QF.leaky_relu(a, 0.1, scale=0.05, zero_point=9),
    ),
    "elu": (
        lambda a, b: torch.ops.quantized.elu(a, 0.05, 9, 0.7),
        lambda a, b: QF.elu(a, 0.7, scale=0.05, zero_point=9),
    ),
    "hardswish": (
        lambda a, b: torch.ops.quantized.hardswish(a, 0.05, 9),
        lambda a, b: QF.hardswish(a, scale=0.05, zero_point=9),
    ),
    "sigmoid": (
        lambda a, b: torch.ops.quantized.sigmoid(a, 1 / 256, 0),
        lambda a, b: QF.sigmoid(a, scale=1 / 256, zero_point=0),
    ),
    "tanh": (lambda a, b: torch.tanh(a), lambda a, b: QF.tanh(a, scale=2 / 256, zero_point=128)),
    "hardsigmoid": (
        lambda a, b: torch.nn.functional.hardsigmoid(a),
        lambda a, b: QF.hardsigmoid(a, scale=1 / 256, zero_point=0),
    ),
    "relu6": (
        lambda a, b: torch.ops.quantized.relu6(a),
        lambda a, b: QF.relu6(a, scale=a.q_scale(), zero_point=a.q_zero_point()),
    ),
    "clamp": (
        lambda a, b: torch.ops.quantized.clamp(a, -1.0, 2.0),
        lambda a, b: QF.clamp(a, -1.0, 2.0, scale=a.q_scale(), zero_point=a.q_zero_point()),
    ),
    "max_pool2d": (lambda a, b: torch.max_pool2d(a, 2), lambda a, b: QF.max_pool2d(a, 2)),
    "avg_pool2d": (
        lambda a, b: torch.nn.functional.avg_pool2d(a, 2),
        lambda a, b: QF.avg_pool2d(a, 2, scale=a.q_scale(), zero_point=a.q_zero_point()),
    ),
    "adaptive_avg_pool2d": (
        lambda a, b: torch.nn.functional.adaptive_avg_pool2d(a, 3),
        lambda a, b: QF.adaptive_avg_pool2d(a, 3, scale=a.q_scale(), zero_point=a.q_zero_point()),
    ),
    "interpolate": (
        lambda a, b: torch.nn.functional.interpolate(a, scale_factor=2),
        lambda a, b: QF.interpolate(a, scale_factor=2),
    ),
}


@pytest.mark.parametrize("name", NATIVE)
def test_torch_s_native_operations_agree(name):
    generator = torch.Generator().manual_seed(0)
    a = quantize(torch.randn(2, 3, 8, 8, generator=generator) * 3, 0.0513, 120, torch.quint8)
    b = quantize(torch.randn(2, 3, 8, 8, generator=generator), 0.0217, 100, torch.quint8)
    theirs, ours = NATIVE[name]
    native, result = theirs(a.to_native(), b.to_native()), ours(a, b)
    assert result.q_scale() == pytest.approx(native.q_scale(), rel=1e-7)
    assert result.q_zero_point() == native.q_zero_point()
    difference = (result.int_repr().int() - native.int_repr().int()).abs()
    # Scales of which no sum or product lies in the middle of two codes, where float32 and float64 may round otherwise.
    assert not difference.any()


CALLS = {
    "conv1d": lambda q, **g: QF.conv1d(q, q, **g),
    "conv2d": lambda q, **g: QF.conv2d(q, q, **g),
    "conv3d": lambda q, **g: QF.conv3d(q, q, **g),
    "linear": lambda q, **g: QF.linear(q, q, **g),
    "matmul": lambda q, **g: QF.matmul(q, q, **g),
    "add": lambda q, **g: QF.add(q, q, **g),
    "add_relu": lambda q, **g: QF.add_relu(q, q, **g),
    "mul": lambda q, **g: QF.mul(q, q, **g),
    "cat": lambda q, **g: QF.cat([q, q], **g),
    "add_scalar": lambda q, **g: QF.add_scalar(q, 1.0, **g),
    "mul_scalar": lambda q, **g: QF.mul_scalar(q, 2.0, **g),
    "clamp": lambda q, **g: QF.clamp(q, 0.0, 1.0, **g),
    "avg_pool1d": lambda q, **g: QF.avg_pool1d(q, 1, **g),
    "avg_pool2d": lambda q, **g: QF.avg_pool2d(q, 1, **g),
    "avg_pool3d": lambda q, **g: QF.avg_pool3d(q, 1, **g),
    "max_pool1d": lambda q, **g: QF.max_pool1d(q, 1, **g),
    "max_pool2d": lambda q, **g: QF.max_pool2d(q, 1, **g),
    "max_pool3d": lambda q, **g: QF.max_pool3d(q, 1, **g),
    "adaptive_avg_pool1d": lambda q, **g: QF.adaptive_avg_pool1d(q, 1, **g),
    "adaptive_avg_pool2d": lambda q, **g: QF.adaptive_avg_pool2d(q, 1, **g),
    "adaptive_avg_pool3d": lambda q, **g: QF.adaptive_avg_pool3d(q, 1, **g),
    "adaptive_max_pool1d": lambda q, **g: QF.adaptive_max_pool1d(q, 1, **g),
    "adaptive_max_pool2d": lambda q, **g: QF.adaptive_max_pool2d(q, 1, **g),
    "adaptive_max_pool3d": lambda q, **g: QF.adaptive_max_pool3d(q, 1, **g),
    "interpolate": lambda q, **g: QF.interpolate(q, 1, **g),
    "batch_norm": lambda q, **g: QF.batch_norm(q, torch.zeros(2), torch.ones(2), **g),
    "layer_norm": lambda q, **g: QF.layer_norm(q, [2], **g),
}
for _name in [
    "requantize",
    "relu",
    "relu6",
    "leaky_relu",
    "elu",
    "hardswish",
    "hardsigmoid",
    "sigmoid",
    "tanh",
    "silu",
    "gelu",
]:
    CALLS[_name] = getattr(QF, _name)
MATHS = {
    "calculate_qparams",
    "choose_qparams",
    "dequantize",
    "fake_quantize",
    "quantize",
    "quantize_per_channel",
    "sqnr",
}
BAD_GRIDS = [
    {"scale": 0.0, "zero_point": 0},
    {"scale": -1.0, "zero_point": 0},
    {"scale": float("nan"), "zero_point": 0},
    {"scale": 0.1},
    {"zero_point": 3},
    {"scale": 0.1, "zero_point": 200},
    {"scale": 0.1, "zero_point": 0.5},
    {"scale": torch.tensor([0.1, 0.2]), "zero_point": 0},
    {"scheme": "int8"},
    {"backend": "fbgem"},
]


def test_the_calls_above_are_all_there_are():
    assert set(CALLS) | MATHS | {"QFunctional"} == set(QF.__all__)


@pytest.mark.parametrize("name", CALLS)
def test_wrong_operands_and_grids_are_typed_errors(name):
    dims = 4 if "2d" in name else 5 if "3d" in name else 3
    shape = (2, 2) if name in ("linear", "matmul", "layer_norm", "batch_norm") else (2,) * dims
    q = quantize(torch.zeros(shape), 0.1, 0)
    assert isinstance(CALLS[name](q), QuantizedTensor)
    for wrong in (torch.zeros(shape), torch.zeros(shape, dtype=torch.int8), q.to_native(), [1.0]):
        with pytest.raises(ConfigError, match=rf"{name}: .*Quantize it first"):
            CALLS[name](wrong)
    for grid in BAD_GRIDS:
        with pytest.raises(ConfigError):
            CALLS[name](q, **grid)
    with pytest.raises(TypeError, match="zero_pont"):
        CALLS[name](q, scale=0.1, zero_pont=1)


def test_clamp_wants_bounds_that_do_not_cross():
    q = quantize(torch.zeros(2), 0.1, 0)
    with pytest.raises(ConfigError, match="above max"):
        QF.clamp(q, 2.0, 1.0)
    with pytest.raises(ConfigError, match="min, max or both"):
        QF.clamp(q)
    with pytest.raises(ConfigError, match="at least one"):
        QF.cat([])
    with pytest.raises(ConfigError, match="bias"):
        QF.linear(q[None], q[None], torch.zeros(1, dtype=torch.int32))
