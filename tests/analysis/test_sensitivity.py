"""sensitivity: what it says of a layer is what a model says in which that layer alone is quantized."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from qlightning import QConfig, QScheme, quantize_model, sensitivity
from qlightning.affine import sqnr
from qlightning.analysis import Sensitivity
from qlightning.errors import CalibrationError, ConfigError

LAYERS = ["0", "3", "6"]


@pytest.fixture(scope="module")
def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(16, 3, 9, 9), torch.randint(0, 4, (16,))) for _ in range(3)]


def margin(outputs: Tensor, targets: Tensor) -> float:
    return float(outputs.gather(1, targets[:, None]).mean())


def only(net: nn.Module, batches: Sequence[Any], int8: Sequence[str]) -> nn.Module:
    exclude = [name for name in LAYERS if name not in int8]
    return quantize_model(net, batches, backend="reference", exclude=exclude)


measure = partial(sensitivity, backend="reference", progress=False)


@pytest.mark.parametrize("mode", ["only", "all_but"])
def test_each_layer_costs_what_a_model_says_with_the_others_excluded(
    net: nn.Module, batches: list[tuple[Tensor, Tensor]], mode: str
) -> None:
    found = measure(net, batches, metric=margin, mode=mode)
    x, y = (torch.cat(part) for part in zip(*batches, strict=True))
    with torch.no_grad():
        exact = net(x)
    assert found.metric_float == pytest.approx(margin(exact, y), rel=1e-6)
    assert [layer.name for layer in found.layers] == LAYERS
    for layer in found.layers:
        int8 = [layer.name] if mode == "only" else [name for name in LAYERS if name != layer.name]
        outputs = only(net, batches, int8)(x)
        # The int8 model sums in another order than the fake-quantized one: a code may tip over where it is a tie.
        assert layer.sqnr_db == pytest.approx(sqnr(exact, outputs), abs=0.1)
        assert layer.metric == pytest.approx(margin(outputs, y), abs=1e-3)
        assert layer.drop == pytest.approx(found.metric_float - layer.metric, abs=1e-12)
    assert found.sqnr_db == pytest.approx(sqnr(exact, only(net, batches, LAYERS)(x)), abs=0.1)


def test_all_forms_of_a_metric_say_the_same(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(1) == targets).float().mean()

    def of_model(model: nn.Module) -> float:
        assert not model.training
        assert not torch.is_grad_enabled()
        return float(torch.cat([model(x).argmax(1) == y for x, y in batches]).float().mean())

    metrics = (accuracy, of_model, torchmetrics.classification.MulticlassAccuracy(4, average="micro"))
    found = [measure(net, batches, metric=metric) for metric in metrics]
    assert [f.passes for f in found] == [5, 10, 5]
    for other in found[1:]:
        assert [layer.metric for layer in other.layers] == pytest.approx([layer.metric for layer in found[0].layers])
        assert other.metric_int8 == pytest.approx(found[0].metric_int8)


def test_a_metric_of_which_less_is_better_has_its_drop_upwards(
    net: nn.Module, batches: list[tuple[Tensor, Tensor]]
) -> None:
    hot = [(x, nn.functional.one_hot(y, 4).float()) for x, y in batches]
    found = measure(net, hot, metric=torchmetrics.MeanSquaredError())
    assert not found.higher_is_better
    for layer in found.layers:
        assert layer.drop == pytest.approx(layer.metric - found.metric_float, abs=1e-12)


def test_fewer_bits_are_more_sensitive(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    narrow = QConfig(weight=QScheme(bits=3, symmetric=True, axis=0, narrow_range=True))
    found = measure(net, batches, qconfig=QConfig(overrides={"3": narrow}))
    assert found.ranking[0].name == "3"
    assert found.ranking[0].scheme.startswith("int3")
    assert measure(net, batches, qconfig=QConfig(overrides={"3": narrow}), mode="all_but").ranking[0].name == "3"


def test_the_model_is_left_as_it_is(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    trained = copy.deepcopy(net).train()
    before = copy.deepcopy(trained.state_dict())
    random_state = torch.get_rng_state()
    measure(trained, batches)
    assert trained.training
    assert trained.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in trained.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_it_is_the_same_twice(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    first, second = (measure(net, batches, metric=margin).to_dict() for _ in range(2))
    assert {**first, "seconds": 0} == {**second, "seconds": 0}


def test_multiplications_are_counted_per_sample(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    layers = measure(net, batches).layers
    expected = [7 * 7 * 8 * 27, 3 * 3 * 8 * 72, 72 * 4]
    assert [layer.macs for layer in layers] == expected
    assert [layer.mac_share for layer in layers] == pytest.approx([count / sum(expected) for count in expected])
    assert [layer.weights for layer in layers] == [8 * 27, 8 * 72, 72 * 4]


def test_what_it_says_can_be_read_and_drawn(
    net: nn.Module, batches: list[tuple[Tensor, Tensor]], tmp_path: Path
) -> None:
    found = measure(net, batches, metric=margin)
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines[2:5]] == [layer.name for layer in found.ranking]
    assert "margin" in lines[0]
    plain = json.loads(found.to_json())
    assert [layer["name"] for layer in plain["layers"]] == [layer.name for layer in found.ranking]
    assert plain["metric_name"] == "margin"
    found.save_plot(tmp_path / "all.png")
    assert (tmp_path / "all.png").stat().st_size > 10_000
    silent = Sensitivity("only", (found.layers[0].__class__("a", "Conv2d", "", math.inf),), math.inf)
    assert json.loads(silent.to_json())["layers"][0]["sqnr_db"] is None
    silent.save_plot(tmp_path / "silent.png")


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (3, r"metric=3: a function of the model"),
        (lambda a, b, c: 0, r"takes 3 arguments: metric\(model\) or metric\(outputs, targets\)"),
        (lambda model: float("nan"), r"gave nan"),
        (lambda model: "much", r"gave str, and not one number"),
        (torchmetrics.MeanMetric(), r"does not say whether higher is better"),
    ],
)
def test_a_metric_that_cannot_be_used_is_an_error(
    net: nn.Module, batches: list[tuple[Tensor, Tensor]], metric: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        measure(net, batches, metric=metric)


def test_data_that_cannot_be_used_is_an_error(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    with pytest.raises(ConfigError, match="needs targets, and a batch has none"):
        measure(net, [x for x, _ in batches], metric=margin)
    with pytest.raises(CalibrationError, match="no batch"):
        measure(net, [])
    with pytest.raises(ConfigError, match=r"data is an iterable of batches, got a Tensor; did you mean \[x\]"):
        measure(net, batches[0][0])
    for number in (0, -1, True, 1.5):
        with pytest.raises(ConfigError, match=f"num_batches={number}: a positive integer or None"):
            measure(net, batches, num_batches=number)
    with pytest.raises(ConfigError, match="mode='each': 'only' or 'all_but'"):
        measure(net, batches, mode="each")
