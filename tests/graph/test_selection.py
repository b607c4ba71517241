"""A set of layers in int8 needs the grids that prepare puts in where all others are excluded."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor, nn

from qlightning import calibrate, convert, prepare, report
from qlightning.errors import ConfigError
from qlightning.fake_quantize import fake_quantizers
from qlightning.graph.preparation import FloatChoice
from qlightning.graph.selection import Selection, leave_in_float
from qlightning.nn import FloatFunctional


class Residual(nn.Module):
    """Convolutions behind BatchNorm, a sum, a branch, a layer called as a function and a product of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.short = nn.Conv2d(8, 8, 1)
        self.held = nn.Module()
        self.held.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.product = FloatFunctional()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.conv2(y) + self.short(x))
        y = nn.functional.hardswish(nn.functional.linear(y.mean((2, 3)), self.held.weight))
        y = self.product.matmul(y.unsqueeze(1), y.unsqueeze(2).expand(-1, -1, 8)).squeeze(1)
        return self.head(y)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return Residual().eval()


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 3, 10, 10) for _ in range(2)]


def calibrated(net: nn.Module, batches: list[Tensor], exclude: list[str]) -> nn.Module:
    return calibrate(prepare(copy.deepcopy(net), backend="reference", mode="ptq", exclude=exclude), batches)


NAMES = ["stem.0", "conv1", "conv2", "short", "held", "product", "head"]
"""In the order of the graph."""


def test_layers_are_named_as_exclude_takes_them(net: nn.Module, batches: list[Tensor]) -> None:
    parts = Selection(calibrated(net, batches, [])).parts
    assert list(parts) == NAMES
    assert {name: part.weights for name, part in parts.items()}["held"] == 64
    assert parts["product"].kind == "matmul"


@pytest.mark.parametrize("seed", range(8))
def test_a_choice_computes_what_excludes_compute(net: nn.Module, batches: list[Tensor], seed: int) -> None:
    left_out = random.Random(seed).sample(NAMES, 1 + seed % 6)
    chosen, excluded = calibrated(net, batches, []), calibrated(net, batches, left_out)
    selection = Selection(chosen)
    int8 = [name for name in NAMES if name not in left_out]
    assert len(selection.needed(int8)) == len(list(fake_quantizers(excluded)))
    with selection.rounding() as rounding:
        rounding.only(int8)
        assert torch.equal(chosen(batches[0]), excluded(batches[0]))
    leave_in_float(chosen, FloatChoice(dict.fromkeys(left_out, "by choice"), "A note."))
    ours, theirs = convert(chosen), convert(excluded)
    assert torch.equal(ours(batches[0]), theirs(batches[0]))
    layers = [(layer.name, layer.int8) for layer in report(ours).layers]
    assert sorted(layers) == sorted((layer.name, layer.int8) for layer in report(theirs).layers)
    assert {layer.reason for layer in report(ours).float_layers if layer.name in left_out} <= {"by choice"}
    assert str(report(ours)).endswith("A note.")


def test_the_prepared_model_stays_as_it_is(net: nn.Module, batches: list[Tensor]) -> None:
    prepared = calibrated(net, batches, [])
    before = prepared(batches[0])
    with Selection(prepared).rounding() as rounding:
        rounding.only([])
        assert torch.allclose(prepared(batches[0]), net(batches[0]), atol=1e-6)
    leave_in_float(prepared, FloatChoice({"conv1": "so"}))
    assert torch.equal(prepared(batches[0]), before)
    leave_in_float(prepared, FloatChoice())
    assert len(report(convert(prepared)).float_layers) == 0


def test_a_name_that_is_no_layer_is_an_error(net: nn.Module, batches: list[Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"'conv3' is no layer of Residual.*Did you mean 'conv"):
        leave_in_float(calibrated(net, batches, []), FloatChoice({"conv3": "so"}))


def test_an_excluded_layer_with_batchnorm_is_rounded_once(batches: list[Tensor]) -> None:
    """Its BatchNorm computes in float like itself: one grid behind the activation, and none before it."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    )
    prepared = prepare(net.eval(), backend="reference", mode="ptq", exclude=["0"])
    assert {fq.name for _, fq in fake_quantizers(prepared)} == {"2", "3 (weight)"}
