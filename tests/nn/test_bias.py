"""Biases in steps of integer sums: in the int8 model, and in the prepared one before it."""

import copy

import pytest
import torch
from torch import nn

from qlightning import calibrate, convert, prepare
from qlightning.backends.qdq import QUANTIZE
from qlightning.fake_quantize import set_fake_quant
from qlightning.nn.bias import BiasRounding, folded_bias, rounded_bias


def roundings(prepared: nn.Module) -> list[BiasRounding]:
    return [m for m in prepared.modules() if isinstance(m, BiasRounding)]


def calibrated(net: nn.Module, x: torch.Tensor) -> nn.Module:
    prepared = prepare(net.eval(), mode="ptq", backend="reference")
    calibrate(prepared, [x])
    return prepared


def test_rounding() -> None:
    bias, step = torch.tensor([0.26, -0.26, 3.0, 1e-37, 0.0]), torch.tensor([0.1, 0.1, 1e-9, 1e-38, 0.1])
    found = rounded_bias(bias, step)
    torch.testing.assert_close(found, torch.tensor([0.3, -0.3, 3.0, 1e-37, 0.0]))
    assert found[3] == bias[3]


@torch.no_grad()
def test_folding_is_what_batch_norm_does() -> None:
    torch.manual_seed(0)
    conv, bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
    bn.running_mean.normal_(), bn.running_var.uniform_(0.5, 2), bn.weight.normal_(), bn.bias.normal_()
    bn.weight[1] = 0
    zero = torch.zeros(1, 3, 2, 2)
    expected = bn.eval()(conv(zero))[0, :, 0, 0]
    torch.testing.assert_close(folded_bias(conv.bias, bn), expected)


@torch.no_grad()
@pytest.mark.parametrize("bn", [True, False])
def test_prepared_and_int8_round_alike_for_every_call_of_a_layer(bn: bool) -> None:
    class Twice(nn.Module):
        """One layer, called on values of two scales."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)
            self.bn = nn.BatchNorm2d(3) if bn else nn.Identity()
            self.act = nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self.bn(self.conv(self.act(self.bn(self.conv(x))) * 50.0)))

    torch.manual_seed(0)
    net, x = Twice(), torch.randn(4, 3, 5, 5)
    if bn:
        net.bn.running_mean.normal_(), net.bn.weight.normal_(), net.bn.bias.normal_()
    prepared = calibrated(net, x)
    assert len({float(r.of[2].scale) for r in roundings(prepared)}) == 2
    int8 = convert(prepared)
    step = next(
        n.args[1] for n in reversed(next(iter(int8._captured.programs.values()))[0].qdq.nodes) if n.target is QUANTIZE
    )
    difference = (prepared(x) - int8(x)).abs()
    assert difference.max() <= 1.01 * step
    assert (difference > step / 2).float().mean() < 0.01  # ties
    for rounding in roundings(prepared):
        assert rounding.shift().abs().max() > 0


@torch.no_grad()
def test_nothing_is_rounded_without_grids_in_training_or_in_float() -> None:
    torch.manual_seed(0)
    net, x = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)),
        torch.randn(4, 3, 5, 5),
    )
    expected = copy.deepcopy(net).eval()(x)
    prepared = prepare(net.eval(), mode="ptq", backend="reference")
    assert all(r.shift() is None for r in roundings(prepared))
    assert torch.equal(prepared(x), expected)
    calibrate(prepared, [x])
    assert all(r.shift() is not None for r in roundings(prepared))
    set_fake_quant(prepared, False)
    assert torch.equal(prepared(x), expected)
    training = prepared._captured.programs
    used = {str(n.target) for (_, mode), found in training.items() if mode for p in found for n in p.graph.nodes}
    assert not any(isinstance(prepared.get_submodule(t), BiasRounding) for t in used if t.startswith("_"))


@torch.no_grad()
def test_the_bias_of_a_dead_channel_is_kept() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), torch.randn(4, 3, 5, 5)
    net[1].weight[2], net[1].bias[2] = 0.0, 0.123456
    int8 = convert(calibrated(net, x))
    layer = int8.get_submodule("0")
    assert float(layer.bias[2]) == pytest.approx(0.123456, rel=1e-6)
    assert not layer.codes[2].any()


def test_a_copy_rounds_by_its_own_layers() -> None:
    prepared = calibrated(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(4, 3, 5, 5))
    twin = copy.deepcopy(prepared)
    (rounding,) = roundings(twin)
    assert rounding.of[0] is twin[0]
    assert not set(prepared.state_dict()) - {"0.weight", "0.bias"} & {k for k in prepared.state_dict() if "bias_" in k}
