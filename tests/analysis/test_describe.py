"""describe: what it counts and measures, against numpy."""

import math

import numpy as np
import pytest
import torch

from qlightning import QScheme, describe, quantize, quantize_per_channel
from qlightning.errors import ConfigError


@pytest.mark.parametrize("scheme", [QScheme(), QScheme(bits=3, signed=False), QScheme(bits=4, narrow_range=True)])
def test_counts_and_errors_are_those_of_numpy(scheme):
    x = torch.randn(7, 11, generator=torch.Generator().manual_seed(0)) * 3
    q = quantize(x, 0.11, 1, scheme)
    found = describe(q, x)
    levels = range(scheme.quant_min, scheme.quant_max + 1)
    codes = q.int_repr().numpy().astype(int)
    counts = [int((codes == level).sum()) for level in levels]
    assert found.counts.tolist() == counts
    assert found.levels == len(levels)
    assert found.used == len(np.unique(codes))
    assert found.unused == len(levels) - found.used
    assert found.saturated_low == counts[0] / 77
    assert found.saturated_high == counts[-1] / 77
    exact = x.numpy().astype(np.float64)
    error = exact - q.dequantize().numpy()
    assert found.max_error == np.abs(error).max()
    assert found.mean_error == pytest.approx(np.abs(error).mean(), rel=1e-12)
    assert found.sqnr == pytest.approx(10 * np.log10((exact**2).sum() / (error**2).sum()), rel=1e-9)
    text = str(found)
    assert f"{found.used} of {len(levels)} ({found.unused} unused)" in text
    assert f"{found.sqnr:.2f} dB" in text


def test_the_worst_channels_come_first():
    x = torch.ones(8, 4) * torch.linspace(0.1, 1.0, 4)
    scales = torch.tensor([0.01, 0.35, 0.01, 0.6])
    found = describe(quantize_per_channel(x, scales, torch.zeros(4, dtype=torch.int32), axis=1), x)
    assert [worst.channel for worst in found.worst_channels][:2] == [3, 1]
    values = [worst.sqnr for worst in found.worst_channels]
    assert values == sorted(values)
    assert "channel 3" in str(found)
    assert "0.01 to 0.6 (4 channels)" in str(found)


def test_without_an_original_there_is_no_error():
    found = describe(quantize(torch.zeros(0, 3), 0.5, 0))
    assert found.sqnr is None
    assert "SQNR" not in str(found)
    assert found.saturated_low == 0
    exact = torch.tensor([0.5, 1.0])
    assert describe(quantize(exact, 0.5, 0), exact).sqnr == math.inf


@pytest.mark.parametrize("original", [torch.zeros(3), torch.zeros(2, dtype=torch.int8), "no tensor"])
def test_an_original_of_another_kind_is_an_error(original):
    with pytest.raises(ConfigError, match=r"float tensor of shape \(2,\)"):
        describe(quantize(torch.zeros(2), 0.5, 0), original)
    with pytest.raises(ConfigError, match="Quantize it first"):
        describe(original)


@pytest.mark.parametrize("bits", [3, 8])
@pytest.mark.parametrize("axis", [None, 0])
def test_the_plot_shows_every_code_and_the_float_values(tmp_path, bits, axis):
    pytest.importorskip("matplotlib")
    x = torch.randn(4, 500)
    scale = torch.tensor(0.02) if axis is None else torch.full((4,), 0.02)
    q = quantize(x, scale, torch.zeros(scale.shape, dtype=torch.int32), QScheme(bits=bits, axis=axis))
    found = describe(q, x)
    codes, values = found.plot().axes
    inner, ends = (part.get_data().values for part in codes.patches)
    assert (inner + ends).tolist() == found.counts.tolist()
    assert not ends[1:-1].any()
    assert not inner[[0, -1]].any()
    assert codes.patches[0].get_facecolor() != codes.patches[1].get_facecolor()
    assert values.patches[0].get_data().values.sum() == x.numel()
    assert len(values.lines) == (2 if axis is None else 0)
    assert len(describe(q).plot().axes) == 1
    found.save_plot(tmp_path / "codes.png")
    assert (tmp_path / "codes.png").stat().st_size > 1000


def test_huge_values_are_described_and_drawn():
    pytest.importorskip("matplotlib")
    x = torch.tensor([3e38, -3e38, 0.0])
    found = describe(quantize(x, 0.1, 0), x)
    assert found.max_error == pytest.approx(3e38)
    assert found.plot().axes[1].patches[0].get_data().values.sum() == 3
    assert describe(quantize(x[2:], 0.1, 0), torch.tensor([1e300], dtype=torch.float64)).max_error == 1e300
