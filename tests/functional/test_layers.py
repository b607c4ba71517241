"""Convolutions, linear layers and matrix products against exact integer arithmetic."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qlightning.functional as QF
from qlightning import QScheme, QuantizedTensor
from tests.functional.reference import FEW, SCALES, SCHEMES, centred, conv, distance, fraction, grids, tensors

WEIGHTS = [
    QScheme(symmetric=True, narrow_range=True),
    QScheme(symmetric=True),
    QScheme(bits=7, symmetric=True),
    QScheme(),
    QScheme(signed=False),
]
BACKENDS = ["auto", "reference"]


def per_output_channel(draw, weight):
    """The same codes with a scale for each output channel."""
    scales = torch.tensor([draw(SCALES) for _ in range(weight.shape[0])])
    zero_points = weight.zero_point.expand(weight.shape[0]).clone()
    scheme = QScheme(weight.scheme.bits, weight.scheme.signed, weight.scheme.symmetric, 0, weight.scheme.narrow_range)
    return QuantizedTensor(weight.codes, scales, zero_points, scheme)


def exact_layer(sums, x, weight, bias, channel_axis):
    """sums * scales + bias, in fractions."""
    scales = [fraction(s) for s in weight.scale.reshape(-1).tolist()]
    scales = scales * sums.shape[channel_axis] if len(scales) == 1 else scales
    shape = [1] * sums.ndim
    shape[channel_axis] = -1
    factors = np.array([fraction(x.q_scale()) * scale for scale in scales], dtype=object).reshape(shape)
    values = sums.astype(object) * factors
    if bias is None:
        return values
    return values + np.array([fraction(b) for b in bias.tolist()], dtype=object).reshape(shape)


@st.composite
def convolutions(draw):
    dims, groups = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    kernel, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    spatial = [draw(st.integers(dilation * (kernel - 1) + 1, 6)) for _ in range(dims)]
    x = draw(tensors((draw(st.integers(1, 2)), 2 * groups, *spatial)))
    weight = draw(tensors((2 * groups, 2, *[kernel] * dims), schemes=WEIGHTS))
    if draw(st.booleans()):
        weight = per_output_channel(draw, weight)
    bias = draw(st.one_of(st.none(), st.lists(st.sampled_from([-3.0, 0.0, 0.1, 40.0]), min_size=4, max_size=4)))
    bias = None if bias is None else torch.tensor(bias[: 2 * groups])
    options = {"stride": draw(st.integers(1, 2)), "padding": draw(st.integers(0, 2)), "dilation": dilation}
    return dims, x, weight, bias, {**options, "groups": groups}


@FEW
@given(convolutions(), grids(), st.sampled_from(BACKENDS))
def test_convolutions_are_within_one_code_of_exact_arithmetic(case, grid, backend):
    dims, x, weight, bias, options = case
    function = {1: QF.conv1d, 2: QF.conv2d, 3: QF.conv3d}[dims]
    result = function(x, weight, bias, **options, **grid, backend=backend)
    values = exact_layer(conv(centred(x), centred_weight(weight), **options), x, weight, bias, 1)
    assert distance(result, values, grid) <= (0 if backend == "reference" else 1)


def centred_weight(weight):
    return weight.int_repr().numpy().astype(np.int64) - weight.zero_point.numpy().reshape(-1)[0]


@FEW
@given(st.data(), grids(), st.sampled_from(BACKENDS))
def test_linear_is_within_one_code_of_exact_arithmetic(data, grid, backend):
    features = data.draw(st.integers(1, 70))
    x = data.draw(tensors((*data.draw(st.sampled_from([(3,), (2, 2), ()])), features)))
    weight = data.draw(tensors((4, features), schemes=WEIGHTS))
    if data.draw(st.booleans()):
        weight = per_output_channel(data.draw, weight)
    bias = data.draw(st.sampled_from([None, torch.tensor([0.3, -20.0, 0.0, 1e-3])]))
    result = QF.linear(x, weight, bias, **grid, backend=backend)
    values = exact_layer(centred(x) @ centred_weight(weight).T, x, weight, bias, -1)
    assert distance(result, values, grid) <= (0 if backend == "reference" else 1)


@FEW
@given(st.data(), grids(), st.sampled_from(BACKENDS))
def test_matmul_is_exact(data, grid, backend):
    a, b = data.draw(tensors((2, 3, 5))), data.draw(tensors((5, 4)))
    values = (centred(a) @ centred(b)).astype(object) * (fraction(a.q_scale()) * fraction(b.q_scale()))
    assert distance(QF.matmul(a, b, **grid, backend=backend), values, grid) == 0


def worst(shape, scheme, code, scale=0.01, zero_point=0):
    codes = torch.full(shape, code, dtype=scheme.dtype)
    return QuantizedTensor(codes, torch.tensor(scale), torch.tensor(zero_point), scheme)


@pytest.mark.parametrize("code", [127, -127])
def test_nothing_saturates_with_worst_case_codes(code):
    """All products as large as can be: a kernel that adds pairs up in 16 bits would be off by half."""
    weight = QScheme(symmetric=True)
    x = worst((1, 64, 5, 5), SCHEMES[0], 255)
    w = worst((8, 64, 3, 3), weight, code)
    result = QF.conv2d(x, w, scale=255 * 127 * 576 * 1e-4 / 100, zero_point=128, scheme=SCHEMES[0])
    assert (result.int_repr().int() == (228 if code > 0 else 28)).all()
    depthwise = QF.conv2d(x, worst((64, 1, 3, 3), weight, code), groups=64, scale=0.291465, zero_point=128)
    assert (depthwise.int_repr().int() == (228 if code > 0 else 28)).all()
    flat = QF.linear(worst((2, 64), SCHEMES[0], 255), worst((8, 64), weight, code), scale=2.07264, zero_point=128)
    assert (flat.int_repr().int() == (228 if code > 0 else 28)).all()


def test_cancelling_sums_are_exact_though_float32_is_not():
    """A bias that takes nearly all of the sum away leaves less than float32 can tell."""
    x, w = worst((1, 1000), SCHEMES[0], 255, scale=1.0), worst((1, 1000), QScheme(symmetric=True), 63, scale=1.0)
    bias = torch.tensor([-255.0 * 63 * 1000 + 3])
    assert QF.linear(x, w, bias, scale=0.1, zero_point=100).int_repr().item() == 130


@pytest.mark.parametrize("backend", BACKENDS)
def test_layouts_and_shapes_at_the_edges(backend):
    x = worst((2, 4, 6, 6), SCHEMES[0], 9, zero_point=3)
    w = worst((3, 4, 3, 3), QScheme(bits=7, symmetric=True), 5)
    expected = QF.conv2d(x, w, scale=0.1, zero_point=1, backend="reference")
    for given_x in (
        QuantizedTensor(x.codes.contiguous(memory_format=torch.channels_last), x.scale, x.zero_point, x.scheme),
        x.permute(0, 1, 3, 2).permute(0, 1, 3, 2),
        x.expand(2, 4, 6, 6),
    ):
        assert QF.conv2d(given_x, w, scale=0.1, zero_point=1, backend=backend) == expected
    assert QF.conv2d(x[0], w, scale=0.1, zero_point=1, backend=backend) == expected[0]
    empty = QF.conv2d(x[:0], w, scale=0.1, zero_point=1, backend=backend)
    assert empty.shape == (0, 3, 4, 4)
    for padding, size in (("same", 6), ("valid", 4), ((1, 0), None)):
        result = QF.conv2d(x, w, padding=padding, scale=0.1, zero_point=1, backend=backend)
        assert result == QF.conv2d(x, w, padding=padding, scale=0.1, zero_point=1, backend="reference")
        assert size is None or result.shape[-1] == size
    assert QF.linear(x.permute(0, 2, 3, 1)[:0], worst((5, 4), w.scheme, 1), backend=backend).shape == (0, 6, 6, 5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_that_do_not_fit_are_errors(backend):
    x, w = worst((2, 4, 6, 6), SCHEMES[0], 9), worst((3, 5, 3, 3), QScheme(symmetric=True), 5)
    with pytest.raises(RuntimeError, match=r"channels|size"):
        QF.conv2d(x, w, backend=backend)
    with pytest.raises(RuntimeError):
        QF.linear(x, worst((3, 5), QScheme(symmetric=True), 5), backend=backend)


def test_the_native_kernels_agree():
    """torch's quantized convolution and linear layer, on codes that cannot saturate on any CPU."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 128, (2, 4, 6, 6), generator=generator).to(torch.uint8)
    x = QuantizedTensor(codes, torch.tensor(0.02), torch.tensor(30), QScheme(signed=False))
    codes = torch.randint(-63, 64, (6, 4, 3, 3), generator=generator).to(torch.int8)
    w = QuantizedTensor(codes, torch.rand(6, generator=generator) + 0.01, torch.zeros(6).int(), QScheme(axis=0))
    bias = torch.randn(6, generator=generator)
    native = torch.ao.nn.quantized.functional.conv2d(
        x.to_native(), w.to_native(), bias, stride=2, padding=1, scale=0.7, zero_point=90
    )
    ours = QF.conv2d(x, w, bias, stride=2, padding=1, scale=0.7, zero_point=90)
    # The native kernels round the bias to int32 steps of both scales, which may move a tie.
    assert (ours.int_repr().int() - native.int_repr().int()).abs().max() <= 1
    x, w = x[:, :, 0, 0], w[:, :, 1, 1]
    packed = torch.ops.quantized.linear_prepack(w.to_native(), bias)
    native = torch.ops.quantized.linear(x.to_native(), packed, 0.3, 90)
    ours = QF.linear(x, w, bias, scale=0.3, zero_point=90)
    assert (ours.int_repr().int() - native.int_repr().int()).abs().max() <= 1
