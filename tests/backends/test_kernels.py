"""The kernels on codes: right for every code, whatever torch's own do on this CPU."""

import pytest
import torch

from qlightning.backends import kernels

FUNCTIONS = {
    "add": torch.add,
    "add_relu": lambda x, y: torch.relu(x + y),
    "mul": torch.mul,
}


@pytest.mark.parametrize("shape", [(64, 1024), (1, 5), (2, 64, 16, 32)])
@pytest.mark.parametrize("zero_points", [(0, 0, 0), (128, 100, 90)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_pair_of_codes(name, zero_points, shape):
    left_zero, right_zero, zero = zero_points
    every = torch.arange(256, dtype=torch.uint8)
    left, right = every.repeat_interleave(256), every.repeat(256)
    numel = torch.Size(shape).numel()
    left, right = (x[torch.linspace(0, 65535, numel).long()].view(shape) for x in (left, right))
    exact = FUNCTIONS[name]((left.double() - left_zero) * 0.0513, (right.double() - right_zero) * 0.0217)
    scale = float(exact.abs().max()) / 200 + 1e-3
    expected = ((exact / scale).round() + zero).clamp(0, 255)
    found = kernels.binary(name, left, 0.0513, left_zero, right, 0.0217, right_zero, scale, zero)
    difference = (found.double() - expected).abs()
    near_tie = ((exact / scale) % 1 - 0.5).abs() < 1e-4
    assert difference.max() <= 1
    assert not difference[~near_tie].any()


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch):
    signed = {"add": lambda a, *_: a.view(torch.int8).clamp(0).to(torch.uint8)}  # codes from 128 on as negative numbers
    kernels.has_binary.cache_clear()
    monkeypatch.setattr(kernels, "_BINARY", signed)
    try:
        assert not kernels.has_binary("add")
        assert not kernels.has_binary("mul")
        codes = torch.full((600,), 200, dtype=torch.uint8)
        assert torch.equal(kernels.binary("add", codes, 1.0, 0, codes, 1.0, 0, 2.0, 0), codes)
    finally:
        kernels.has_binary.cache_clear()
