"""max_drop: the goal is met by the int8 model, with no layer in float that is not needed for it."""

from __future__ import annotations

import copy
from collections.abc import Collection

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from qlightning import QConfig, QScheme, quantize_model, report
from qlightning.analysis.max_drop import Choice, Goal, choose, keep_within
from qlightning.analysis.sensitivity import LayerSensitivity
from qlightning.errors import AccuracyError, CalibrationError, ConfigError
from qlightning.graph.calibrate import calibrate
from qlightning.graph.prepare import prepare

COSTS = {"a": 4.0, "b": 2.0, "c": 1.0, "d": 0.5, "e": 0.25}
RANKING = [LayerSensitivity(name, "Conv2d", "", 20.0 + place) for place, name in enumerate(COSTS)]


def simulated(int8: Collection[str]) -> float:
    return 90 - sum(COSTS[name] for name in int8)


def chosen(max_drop: float, true: float = 0.0) -> Choice:
    return choose(Goal(max_drop, "accuracy", True), RANKING, simulated, lambda int8: simulated(int8) - true)


@pytest.mark.parametrize("max_drop", [0.0, 0.3, 0.5, 0.75, 1.0, 1.8, 2.2, 3.75, 4.2, 7.0, 7.75, 9.0])
def test_what_is_kept_meets_the_goal_and_none_of_it_can_be_left_out(max_drop: float) -> None:
    if max_drop < 0.25:
        with pytest.raises(AccuracyError, match=r"90 in float, 82.25 in int8, and 89.75 with e alone in int8"):
            chosen(max_drop)
        return
    found = chosen(max_drop)
    assert found.value >= 90 - max_drop
    for name in found.reasons:
        assert simulated([other for other in COSTS if other not in found.reasons or other == name]) < 90 - max_drop
    assert found.int8_value == 82.25
    assert (not found.reasons) == (max_drop >= 7.75)


def test_reasons_say_what_the_layer_alone_costs() -> None:
    found = chosen(2.0)
    assert found.reasons == {
        "a": "kept in float by max_drop: alone it costs 4 of accuracy (SQNR 20.0 dB)",
        "b": "kept in float by max_drop: alone it costs 2 of accuracy (SQNR 21.0 dB)",
    }
    assert found.note == (
        "max_drop=2: accuracy is 90 in float and 88.25 in int8, with 2 of 5 layers kept in float (82.25 with none)."
    )
    assert chosen(8).note == "max_drop=8: accuracy is 90 in float and 82.25 in int8; no layer was kept in float for it."


def test_the_int8_model_has_the_last_word() -> None:
    assert list(chosen(2.0, true=0.5).reasons) == ["a", "b", "c"]
    assert list(chosen(8.0, true=0.5).reasons) == ["a"]  # the simulation needs none


def test_a_metric_that_jumps_ends_in_a_minimal_set_too() -> None:
    def needs(int8: Collection[str]) -> float:
        return 90.0 if not {"b", "d"} & set(int8) else 80.0

    assert list(choose(Goal(1, "accuracy", True), RANKING, needs, needs).reasons) == ["b", "d"]


def test_a_loss_must_not_rise() -> None:
    found = choose(Goal(2.0, "loss", False), RANKING, lambda n: 90 - simulated(n), lambda n: 90 - simulated(n))
    assert list(found.reasons) == ["a", "b"]


def test_the_float_model_before_a_training_counts_where_it_was_better() -> None:
    goal = Goal(2.0, "accuracy", True)
    assert list(choose(goal, RANKING, simulated, simulated, before=80.0).reasons) == ["a", "b"]
    assert list(choose(goal, RANKING, simulated, simulated, before=91.0).reasons) == ["a", "b", "c"]
    assert choose(goal, RANKING, lambda n: 60.0, lambda n: 84.0, before=85.0).reasons == {}
    with pytest.raises(
        AccuracyError, match=r"was 95 in float before the training, and is 82.25 in int8.*\['a', 'b', 'c'\]"
    ):
        choose(goal, RANKING, simulated, simulated, before=95.0)


def test_percentage_points_of_a_fraction_are_an_error() -> None:
    message = r"max_drop=0\.5, but accuracy is 0\.9 in float, a fraction.*are max_drop=0\.005"
    with pytest.raises(ConfigError, match=message):
        choose(Goal(0.5, "accuracy", True), RANKING, lambda n: simulated(n) / 100, lambda n: simulated(n) / 100)


@pytest.fixture(scope="module")
def batches(net: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """With the float net's own predictions for targets: its accuracy is 1, and any flip counts."""
    torch.manual_seed(1)
    images = [torch.randn(64, 3, 9, 9) for _ in range(4)]
    with torch.no_grad():
        return [(x, net(x).argmax(1)) for x in images]


COARSE = QConfig(
    overrides={"3": QConfig(weight=QScheme(bits=2, symmetric=True, axis=0, narrow_range=True))},
)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return 100 * (outputs.argmax(1) == targets).float().mean()


def test_quantize_model_keeps_to_it(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    def measured(model: nn.Module) -> float:
        return float(accuracy(torch.cat([model(x) for x, _ in batches]), torch.cat([y for _, y in batches])))

    plain = quantize_model(net, batches, backend="reference", qconfig=COARSE)
    assert measured(plain) < 96
    before = copy.deepcopy(net.state_dict())
    for metric in (accuracy, measured):
        int8 = quantize_model(net, batches, backend="reference", qconfig=COARSE, max_drop=4, metric=metric)
        assert measured(int8) >= 96
        (row,) = report(int8).float_layers
        assert row.name == "3"
        assert row.reason.startswith("kept in float by max_drop: alone it costs")
        assert f"100 in float and {measured(int8):.6g} in int8, with 1 of 3" in str(report(int8))
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_a_metric_of_torchmetrics_and_data_of_its_own(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    metric = torchmetrics.classification.MulticlassAccuracy(4, average="micro")
    images = [x for x, _ in batches]
    int8 = quantize_model(
        net, images, backend="reference", qconfig=COARSE, max_drop=0.04, metric=metric, evaluation_data=batches
    )
    assert [row.name for row in report(int8).float_layers] == ["3"]


def test_after_an_error_the_choice_before_counts(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    prepared = calibrate(prepare(copy.deepcopy(net), backend="reference", mode="ptq"), batches)
    before = prepared.__dict__["_preparation"].float_choice
    with pytest.raises(AccuracyError, match="cannot be met with any layer in int8"):
        keep_within(prepared, batches, lambda model: float(torch.equal(model(batches[0][0]), net(batches[0][0]))), 0)
    assert prepared.__dict__["_preparation"].float_choice is before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_drop": -1, "metric": accuracy}, "max_drop=-1: a number from 0 on"),
        ({"max_drop": True, "metric": accuracy}, "max_drop=True: a number from 0 on"),
        ({"max_drop": 0.5}, "max_drop=0.5 of what"),
        ({"metric": accuracy}, "metric and evaluation_data serve max_drop"),
        ({"max_drop": 1, "metric": accuracy, "evaluation_data": torch.zeros(1)}, "evaluation_data is an iterable"),
    ],
)
def test_settings_that_cannot_be_used(
    net: nn.Module, batches: list[tuple[Tensor, Tensor]], arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        quantize_model(net, batches, backend="reference", **arguments)


def test_without_data_to_measure_on_there_is_no_choice(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    with pytest.raises(CalibrationError, match="no batch to measure on: evaluation_data is empty"):
        quantize_model(net, batches, backend="reference", max_drop=1, metric=accuracy, evaluation_data=[])
