"""Pooling, resizing and normalization against numpy's float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import qlightning.functional as QF
from qlightning import QScheme, quantize, quantize_per_channel
from qlightning.errors import ConfigError, NonFiniteError
from tests.functional.reference import FEW, centred, grids, tensors


def windows(x, kernel, stride):
    view = np.lib.stride_tricks.sliding_window_view(x, kernel, axis=tuple(range(2, x.ndim)))
    return view[(slice(None), slice(None), *[slice(None, None, stride)] * (x.ndim - 2))]


def close(result, values, grid):
    """Within half a step of the exact value, which float64 has to some 1e-12 of a step here."""
    scheme = grid["scheme"]
    steps = values / np.float64(np.float32(grid["scale"])) + grid["zero_point"]
    steps = np.clip(steps, scheme.quant_min, scheme.quant_max)
    assert result.scheme == scheme
    assert result.shape == steps.shape
    assert np.abs(result.int_repr().numpy() - steps).max() <= 0.5 + 1e-9


@FEW
@given(st.data(), st.integers(1, 3), st.integers(1, 2), grids(), st.sampled_from(["auto", "reference"]))
def test_pooling_in_one_to_three_dimensions(data, kernel, stride, grid, backend):
    for dims in (1, 2, 3):
        q = data.draw(tensors((2, 2, *(4, 5, 3)[:dims])))
        values = centred(q) * np.float64(np.float32(q.q_scale()))
        over = tuple(range(-dims, 0))
        seen = windows(values, (kernel,) * dims, stride)
        close(getattr(QF, f"avg_pool{dims}d")(q, kernel, stride, **grid, backend=backend), seen.mean(over), grid)
        close(getattr(QF, f"max_pool{dims}d")(q, kernel, stride, **grid, backend=backend), seen.max(over), grid)
        kept = getattr(QF, f"max_pool{dims}d")(q, kernel, stride, backend=backend)
        codes = windows(q.int_repr().numpy(), (kernel,) * dims, stride).max(over)
        assert kept.int_repr().tolist() == codes.tolist()
        whole = tuple(range(2, 2 + dims))
        for pool, numpy_pool in (("avg", np.mean), ("max", np.max)):
            result = getattr(QF, f"adaptive_{pool}_pool{dims}d")(q, 1, **grid, backend=backend)
            close(result, numpy_pool(values, axis=whole, keepdims=True), grid)


def test_padding_of_pools_is_that_of_torch():
    q = quantize(torch.randn(1, 2, 7, 7), 0.05, 40, torch.quint8)
    x = q.dequantize()
    assert torch.equal(QF.max_pool2d(q, 3, 2, 1, ceil_mode=True).dequantize(), F.max_pool2d(x, 3, 2, 1, ceil_mode=True))
    result = QF.avg_pool2d(q, 3, 2, 1, count_include_pad=False)
    expected = F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)
    assert (result.dequantize() - expected).abs().max() <= result.q_scale()


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic", "area"])
def test_resizing_is_that_of_the_values(mode):
    q = quantize(torch.randn(1, 2, 5, 5), 0.05, 40, torch.quint8)
    result = QF.interpolate(q, size=(9, 7), mode=mode)
    exact = F.interpolate(q.dequantize().double(), size=(9, 7), mode=mode)
    bound = 0 if mode.startswith("nearest") else result.q_scale() * 1.0001
    assert (result.dequantize() - exact.float()).abs().max() <= bound
    signed = quantize(torch.randn(1, 2, 5, 5), 0.05, -3)
    assert QF.interpolate(signed, size=3, mode=mode).scheme == signed.scheme


@FEW
@given(tensors((3, 4, 5)), grids())
def test_norms_are_those_of_numpy(q, grid):
    values = centred(q) * np.float64(np.float32(q.q_scale()))
    mean, var, gamma, beta = (torch.tensor(v) for v in np.random.default_rng(0).random((4, 4), dtype=np.float32))
    shaped = [t.numpy().astype(np.float64)[:, None] for t in (mean, var, gamma, beta)]
    expected = (values - shaped[0]) / np.sqrt(shaped[1] + 1e-5) * shaped[2] + shaped[3]
    close(QF.batch_norm(q, mean, var, gamma, beta, **grid), expected, grid)
    centre, spread = values.mean(-1, keepdims=True), values.var(-1, keepdims=True)
    close(QF.layer_norm(q, [5], eps=1e-3, **grid), (values - centre) / np.sqrt(spread + 1e-3), grid)


def test_a_result_that_is_no_number_is_an_error():
    q = quantize(torch.ones(1, 2), 0.1, 0)
    with pytest.raises(NonFiniteError):
        QF.batch_norm(q, torch.zeros(2), torch.tensor([1.0, float("nan")]))


def test_channels_of_their_own_scales_are_pooled_by_value():
    q = quantize_per_channel(torch.randn(2, 3, 6), torch.rand(3) + 0.1, torch.zeros(3).int(), 1)
    result = QF.max_pool1d(q, 2)
    assert (result.dequantize() - F.max_pool1d(q.dequantize(), 2)).abs().max() <= result.q_scale()
    added = QF.add(q, q)
    assert (added.dequantize() - 2 * q.dequantize()).abs().max() <= added.q_scale()


def test_qfunctional_has_one_grid_for_all():
    module = QF.QFunctional(scale=0.25, zero_point=3, scheme=QScheme())
    a, b = quantize(torch.randn(3, 3), 0.05, 0), quantize(torch.randn(3, 3), 0.02, 5)
    grid = {"scale": 0.25, "zero_point": 3, "scheme": QScheme()}
    assert module.add(a, b) == QF.add(a, b, **grid)
    assert module.add_relu(a, b) == QF.add_relu(a, b, **grid)
    assert module.mul(a, b) == QF.mul(a, b, **grid)
    assert module.matmul(a, b) == QF.matmul(a, b, **grid)
    assert module.cat([a, b], 1) == QF.cat([a, b], 1, **grid)
    assert module.add_scalar(a, 2.0) == QF.add_scalar(a, 2.0, **grid)
    assert module.mul_scalar(a, 2.0) == QF.mul_scalar(a, 2.0, **grid)
    other = QF.QFunctional(scheme=QScheme())
    other.load_state_dict(module.state_dict())
    assert other.add(a, b) == module.add(a, b)
    assert "scale=0.25, zero_point=3, int8 affine per tensor" in repr(module)
    with pytest.raises(RuntimeError, match="call one of its methods"):
        module(a, b)
    for wrong in ({"scale": 0.0}, {"zero_point": -1}, {"scheme": "int8"}):
        with pytest.raises(ConfigError):
            QF.QFunctional(**wrong)


@pytest.mark.parametrize("scheme", [QScheme(), QScheme(bits=4), QScheme(signed=False)])
def test_a_window_of_padding_alone_has_the_lowest_code(scheme):
    q = quantize(torch.tensor([[[-3.0, -5.0]]]), 1.0, 3, scheme)
    assert QF.max_pool1d(q, 2, 1, 1, 3).int_repr().item() == scheme.quant_min
    assert QF.max_pool1d(q, 2, 1, 1, 3, scale=1.0, zero_point=3).int_repr().item() == scheme.quant_min
