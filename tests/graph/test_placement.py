"""Where a backend wants grids and how they look: in the middle of both signs, within blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from qlightning import QConfig, QScheme, calibrate, convert, prepare
from qlightning.backends import resolve_backend
from qlightning.fake_quantize import WeightFakeQuantize, fake_quantizers
from qlightning.graph.signs import feeds_sums_alone, never_negative
from qlightning.vocabulary import Vocabulary


class Net(nn.Module):
    """Two residual blocks, the second with a convolution beside and without an activation behind the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2), nn.Hardswish()
        self.conv1, self.bn1, self.conv2 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
        self.beside, self.last = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.stem(x)))
        x = torch.relu(x + self.bn1(self.conv1(x)))
        y = self.act(self.conv2(x))
        return self.last(self.beside(x) + y)


def in_activated_sum(in_sum: bool, activation: str) -> bool:
    return in_sum and activation != ""


def in_sum_or_hardswish(in_sum: bool, activation: str) -> bool:
    return in_sum or activation == "hardswish"


def grids(centres: bool, rounds: Any = None, qconfig: QConfig | None = None) -> dict[str, QScheme]:
    """The schemes of the activations of the net, by name."""
    backend = replace(resolve_backend("reference"), centres_signed=centres)
    backend = replace(backend, rounds_layer=rounds) if rounds else backend
    net = prepare(Net(), qconfig, backend=backend, mode="ptq")
    return {n: fq.scheme for _, fq in fake_quantizers(net) if not isinstance(fq, WeightFakeQuantize) and (n := fq.name)}


def test_grids_of_values_of_both_signs_are_centred_where_the_backend_wants_it() -> None:
    plain = grids(False)
    assert {scheme.symmetric for scheme in plain.values()} == {False}
    centred = {name: scheme.symmetric for name, scheme in grids(True).items()}
    assert centred.keys() == plain.keys()
    # Behind the stem and the first sum there is a ReLU; conv2 has its hardswish, which only the sum reads.
    assert centred == {"stem_input": True, "stem": False, "conv1": False, "conv2": False, "beside": True}


def test_layers_are_rounded_within_their_blocks_where_the_backend_wants_it() -> None:
    plain = set(grids(True))
    assert set(grids(True, in_activated_sum)) - plain == {"bn1_inner"}
    assert not grids(True, in_activated_sum)["bn1_inner"].symmetric
    assert set(grids(True, in_sum_or_hardswish)) - plain == {"bn1_inner", "conv2_inner", "beside_inner"}


@pytest.mark.parametrize("scheme", [QScheme(signed=False, bits=7), QScheme(signed=False, axis=1)], ids=str)
def test_other_schemes_stay_as_they_are(scheme: QScheme) -> None:
    assert set(grids(True, None, QConfig(activation=scheme)).values()) == {scheme}


@torch.no_grad()
def test_the_int8_model_computes_what_the_prepared_one_does() -> None:
    torch.manual_seed(0)
    backend = replace(resolve_backend("reference"), centres_signed=True, rounds_layer=in_sum_or_hardswish)
    net = prepare(Net().eval(), backend=backend, mode="ptq")
    calibrate(net, [torch.randn(2, 3, 8, 8) for _ in range(4)])
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(convert(net)(x), net(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "function, never",
    [
        (F.relu, True),
        (F.relu6, True),
        (torch.sigmoid, True),
        (F.hardsigmoid, True),
        (lambda x: x.clamp(0.0, 2.0), True),
        (lambda x: x.clamp(-1.0, 2.0), False),
        (F.hardswish, False),
        (lambda x: F.relu(x) + F.relu6(x), True),
        (lambda x: F.relu(x) + x, False),
        (lambda x: F.relu(x) * torch.sigmoid(x), True),
        (lambda x: F.max_pool2d(F.relu(x), 2).flatten(1), True),
        (lambda x: F.adaptive_avg_pool2d(F.relu(x), 1), True),
        (lambda x: torch.cat([F.relu(x), x], 1), False),
        (lambda x: F.relu(x) - 1, False),
        (lambda x: x, False),
    ],
)
def test_signs(function: object, never: bool) -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)  # type: ignore[operator]

    module = Module()
    graph = fx.Tracer().trace(module)
    (output,) = (node for node in graph.nodes if node.op == "output")
    value = output.args[0]
    assert (value in never_negative(graph, Vocabulary(graph, module))) == never
    if never:
        x = torch.linspace(-9, 9, 64).reshape(1, 4, 4, 4)
        assert (module(x) >= 0).all()


def test_what_feeds_sums_alone() -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
            return (x.flatten(1) + y.flatten(1)) * z.flatten(1) + F.relu(y).flatten(1)

    graph = fx.Tracer().trace(Module())
    ops = Vocabulary(graph, Module())
    found = {node.name: feeds_sums_alone(node, ops) for node in graph.nodes if node.op == "placeholder"}
    assert found == {"x": True, "y": False, "z": False}
