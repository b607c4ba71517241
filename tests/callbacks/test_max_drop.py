"""max_drop of the callbacks: the int8 nets keep to it, and the Trainer notices nothing."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from torch import nn

from qlightning import PostTrainingQuantization, QConfig, QScheme, QuantizationAwareTraining
from qlightning.callbacks import MaxDrop
from qlightning.callbacks.evaluation import Evaluation
from qlightning.errors import AccuracyError, ConfigError
from tests.callbacks.nets import CLASSES, Net, loader, task, trainer

COARSE = QConfig(overrides={"net.conv2": QConfig(weight=QScheme(bits=2, symmetric=True, axis=0, narrow_range=True))})
LOSS = {"monitor": "val_loss", "mode": "min"}


class Imitation(pl.LightningModule):
    """Logs how far the outputs of a net are from those it had to begin with, by their power: 0 in float."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.first = (copy.deepcopy(net).eval(),)  # in a tuple: not a part of it

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.distance(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.distance(batch))

    test_step = validation_step

    def distance(self, batch: Any) -> Any:
        with torch.no_grad():
            target = self.first[0](batch[0])
        return (self.net(batch[0]) - target).square().mean() / target.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def imitation(net: nn.Module) -> Imitation:
    return Imitation(copy.deepcopy(net))


qat = functools.partial(QuantizationAwareTraining, COARSE, backend="reference", freeze_bn=0)
ptq = functools.partial(PostTrainingQuantization, COARSE, backend="reference")


def losses(module: Any, tmp_path: Any, **options: Any) -> float:
    """The validation loss of a LightningModule as a Trainer of its own says."""
    found = trainer(pl, tmp_path, [], **options).validate(module, loader(), verbose=False)
    return float(found[0]["val_loss"])


def kept(callback: Any) -> list[str]:
    return [layer.name for layer in callback.report.float_layers]


def test_qat_keeps_to_it(net: nn.Module, tmp_path: Any) -> None:
    module = imitation(net)
    callback = qat(max_drop=MaxDrop(5e-4, **LOSS))
    trainer(pl, tmp_path, callback).fit(module, loader(), loader())
    choice = callback.decision.choice
    assert losses(module, tmp_path) == pytest.approx(choice.value, rel=1e-5)
    assert choice.value <= choice.float_value + 5e-4
    assert kept(callback) == ["net.conv2"]
    (reason,) = choice.reasons.values()
    assert re.match(r"kept in float by max_drop: alone it costs \S+ of val_loss \(SQNR [\d.]+ dB\)", reason)
    assert [layer.reason for layer in callback.report.float_layers] == [reason]
    assert choice.note in callback.report.notes
    assert callback.decision.sensitivity["net"].ranking[0].name == "conv2"
    assert type(module.net.conv2) is nn.Conv2d


def test_a_goal_that_int8_meets_keeps_nothing_in_float(net: nn.Module, tmp_path: Any) -> None:
    module = imitation(net)
    callback = QuantizationAwareTraining(backend="reference", max_drop=MaxDrop(1.0, **LOSS))
    trainer(pl, tmp_path, callback).fit(module, loader(), loader())
    assert kept(callback) == []
    assert "no layer was kept in float" in callback.decision.choice.note


def test_the_training_is_the_same_with_it(net: nn.Module, tmp_path: Any) -> None:
    """Weights, ranges, what is logged and the random state: all are those of a fit without max_drop."""
    runs = []
    for max_drop in (None, MaxDrop(5e-4, **LOSS)):
        torch.manual_seed(3)
        module = imitation(net)
        callback = qat(max_drop=max_drop)
        run = trainer(pl, tmp_path, callback)
        run.fit(module, loader(), loader())
        state = module.state_dict()
        runs.append((state, {k: float(v) for k, v in run.callback_metrics.items()}, torch.get_rng_state()))
    (first, logged, random), (second, logged_too, random_too) = runs
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    assert logged == logged_too
    assert torch.equal(random, random_too)


def test_ptq_keeps_to_it_in_fit_and_in_validation(net: nn.Module, tmp_path: Any) -> None:
    for stage in ("fit", "validate"):
        module = imitation(net)
        callback = ptq(calibration_data=loader(), max_drop=MaxDrop(5e-4, **LOSS))
        run = trainer(pl, tmp_path, callback, max_epochs=1)
        if stage == "fit":
            run.fit(module, loader(), loader())
        else:
            (logged,) = run.validate(module, loader(), verbose=False)
            assert logged["val_loss"] == pytest.approx(callback.decision.choice.value, rel=1e-5)
        assert kept(callback) == ["net.conv2"]
        assert losses(module, tmp_path) <= callback.decision.choice.float_value + 5e-4


def test_data_of_its_own_and_none(net: nn.Module, tmp_path: Any) -> None:
    def tested(max_drop: MaxDrop) -> Any:
        callback = ptq(calibration_data=loader(), max_drop=max_drop)
        trainer(pl, tmp_path, callback).test(imitation(net), loader(), verbose=False)
        return callback

    assert kept(tested(MaxDrop(5e-4, data=loader(), batches=2, **LOSS))) == ["net.conv2"]
    with pytest.raises(ConfigError, match=r"max_drop is measured on validation data.*Test data is not taken"):
        tested(MaxDrop(5e-4, **LOSS))


def test_metric_and_direction_come_from_who_monitors_them(net: nn.Module, tmp_path: Any) -> None:
    module = imitation(net)
    callback = qat(max_drop=5e-4)
    stopping = pl.callbacks.EarlyStopping(monitor="val_loss", mode="min")
    trainer(pl, tmp_path, [callback, stopping], max_epochs=1).fit(module, loader(), loader())
    goal = callback.decision.choice.goal
    assert (goal.metric, goal.higher_is_better) == ("val_loss", False)


def test_what_was_chosen_goes_with_the_checkpoint(net: nn.Module, tmp_path: Any) -> None:
    module = imitation(net)
    callback = qat(max_drop=MaxDrop(5e-4, **LOSS))
    run = trainer(pl, tmp_path, callback, enable_checkpointing=True)
    run.fit(module, loader(), loader())
    early = run.checkpoint_callback.best_model_path
    run.save_checkpoint(late := str(tmp_path / "late.ckpt"))
    value = losses(module, tmp_path)

    again = imitation(Net())
    trainer(pl, tmp_path, []).validate(again, loader(), ckpt_path=late, verbose=False)
    assert type(again.net.conv2) is nn.Conv2d
    again.first = module.first
    assert losses(again, tmp_path) == value

    # The same callback goes on to know it; another one says that it cannot.
    run.validate(module, loader(), ckpt_path=early, verbose=False)
    assert kept(callback) == ["net.conv2"]
    other = qat(max_drop=MaxDrop(5e-4, **LOSS))
    with pytest.warns(
        UserWarning, match="max_drop is decided at the end of a fit, and this checkpoint was saved before"
    ):
        trainer(pl, tmp_path, other).validate(imitation(Net()), loader(), ckpt_path=early, verbose=False)


def test_a_further_fit_chooses_anew(net: nn.Module, tmp_path: Any) -> None:
    module = imitation(net)
    for max_drop, expected in ((MaxDrop(5e-4, **LOSS), ["net.conv2"]), (None, [])):
        callback = qat(max_drop=max_drop)
        trainer(pl, tmp_path, callback, max_epochs=1).fit(module, loader(), loader())
        assert kept(callback) == expected


def test_what_the_training_itself_has_lost_no_choice_brings_back(net: nn.Module, tmp_path: Any) -> None:
    module = imitation(net)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=3.0)
    callback = qat(max_drop=MaxDrop(5e-4, **LOSS))
    with pytest.raises(
        AccuracyError, match=r"in float before the training.*exclude=\['net\..*left as they were trained"
    ):
        trainer(pl, tmp_path, callback, max_epochs=1).fit(module, loader(), loader())
    assert callback.prepared["net"] is module.net
    assert kept(callback) == []


def test_a_resumed_training_knows_the_float_net_that_it_began_with(net: nn.Module, tmp_path: Any) -> None:
    befores = []
    for epochs, path in ((1, None), (2, str(tmp_path / "one.ckpt"))):
        module = imitation(net)
        callback = qat(max_drop=MaxDrop(5e-4, **LOSS))
        run = trainer(pl, tmp_path, callback, max_epochs=epochs)
        run.fit(module, loader(), loader(), ckpt_path=path)
        run.save_checkpoint(tmp_path / "one.ckpt")
        befores.append(callback.state_dict()["float_before"])
    assert befores[0] == befores[1] == pytest.approx(0, abs=1e-9)


class WithMetrics(pl.LightningModule):
    """Logs by metrics and at the end of the epoch, and keeps outputs in a list; two nets."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.head = nn.Sequential(nn.Linear(CLASSES, CLASSES))
        nn.init.eye_(self.head[0].weight)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(CLASSES, average="micro")
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.head(self.net(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.head(self.net(batch[0]))
        self.accuracy.update(logits, batch[1])
        self.log("acc", self.accuracy)
        self.outputs.append((logits, batch[1]))

    def on_validation_epoch_end(self) -> None:
        logits, targets = (torch.cat(part) for part in zip(*self.outputs, strict=True))
        self.log("epoch_loss", nn.functional.cross_entropy(logits, targets))
        self.outputs.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize(("monitor", "mode"), [("acc", "max"), ("epoch_loss", "min")])
def test_metrics_and_epoch_ends_count_as_lightning_counts_them(
    net: nn.Module, tmp_path: Any, monitor: str, mode: Any
) -> None:
    module = WithMetrics(copy.deepcopy(net))
    callback = qat(max_drop=MaxDrop(0.02, monitor, mode))
    data = loader(30)  # whose last batch is smaller
    trainer(pl, tmp_path, callback, max_epochs=1).fit(module, data, data)
    assert module.outputs == []
    (logged,) = trainer(pl, tmp_path, []).validate(module, data, verbose=False)
    assert logged[monitor] == pytest.approx(callback.decision.choice.value, rel=1e-5)
    assert set(callback.decision.parts) == {"net", "head"}


class Flat(Imitation):
    """Layers that hang on the LightningModule, whose own forward is quantized; two loaders to validate with."""

    def __init__(self, net: Net) -> None:
        super().__init__(net)
        del self.net
        self.conv1, self.conv2, self.fc = net.conv1, net.conv2, net.fc
        self.bn1, self.bn2 = net.bn1, net.bn2

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.bn1(self.conv1(x)))
        return self.fc(torch.relu(x + self.bn2(self.conv2(x))).mean((2, 3)))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.distance(batch))

    def distance(self, batch: Any) -> Any:
        with torch.no_grad():
            target = self.first[0](batch[0])
        return (self(batch[0]) - target).square().mean() / target.square().mean()


def test_a_forward_of_its_own_and_two_loaders(net: nn.Module, tmp_path: Any) -> None:
    module = Flat(copy.deepcopy(net))
    config = QConfig(overrides={"conv2": COARSE.overrides["net.conv2"]})
    goal = MaxDrop(5e-4, "val_loss/dataloader_idx_1", "min")
    callback = PostTrainingQuantization(config, backend="reference", calibration_data=loader(), max_drop=goal)
    (_, logged) = trainer(pl, tmp_path, callback).validate(module, [loader(), loader(seed=1)], verbose=False)
    assert kept(callback) == ["conv2"]
    assert logged["val_loss/dataloader_idx_1"] == pytest.approx(callback.decision.choice.value, rel=1e-5)


def test_a_goal_out_of_reach_is_an_error_that_leaves_what_was_trained(
    net: nn.Module, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = iter([0.0, 0.0])  # in float, before the training and after it
    monkeypatch.setattr(Evaluation, "value", lambda self, monitor: next(values, 1.0))  # worse by whatever rounds
    module = imitation(net)
    callback = QuantizationAwareTraining(backend="reference", max_drop=MaxDrop(0.0, **LOSS))
    with pytest.raises(AccuracyError, match="max_drop=0 cannot be met with any layer in int8"):
        trainer(pl, tmp_path, callback, max_epochs=1).fit(module, loader(), loader())
    assert callback.int8_model is None
    assert callback.prepared["net"] is module.net
    assert kept(callback) == []


@pytest.mark.parametrize(
    ("max_drop", "message"),
    [
        (0.5, r"max_drop=0\.5 of what\? No one metric is monitored.*monitor='val_acc', mode='max'"),
        (MaxDrop(0.5, "val_loss"), r"monitor='val_loss', mode='max'"),
    ],
)
def test_a_metric_that_is_not_known_is_an_error_before_training(
    net: nn.Module, tmp_path: Any, max_drop: Any, message: str
) -> None:
    for callback in (QuantizationAwareTraining, PostTrainingQuantization):
        module = imitation(net)
        with pytest.raises(ConfigError, match=message):
            trainer(pl, tmp_path, callback(backend="reference", max_drop=max_drop)).fit(module, loader(), loader())
        assert type(module.net.conv1) is nn.Conv2d


@pytest.mark.parametrize(
    ("max_drop", "message"),
    [
        (MaxDrop(0.5, "val_acc", "max"), r"max_drop=0\.5, but val_acc is .* in float, a fraction"),
        (MaxDrop(0.05, "accuracy", "max"), r"'accuracy' is not logged by the validation of Task\. It logs 'val_loss'"),
    ],
)
def test_a_wrong_unit_or_name_is_an_error(net: nn.Module, tmp_path: Any, max_drop: MaxDrop, message: str) -> None:
    callback = PostTrainingQuantization(backend="reference", calibration_data=loader(), max_drop=max_drop)
    module = task(pl, copy.deepcopy(net))
    with pytest.raises(ConfigError, match=message):
        trainer(pl, tmp_path, callback).validate(module, loader(), verbose=False)
    assert type(module.net.conv1) is nn.Conv2d


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"points": -1}, "max_drop=-1"),
        ({"points": 1, "mode": "up"}, "mode='up'"),
        ({"points": 1, "monitor": 3}, "monitor=3"),
        ({"points": 1, "batches": 0}, "batches=0"),
        ({"points": 1, "data": iter([1])}, "gone through several times"),
    ],
)
def test_settings_that_cannot_be_used(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MaxDrop(**arguments)
    with pytest.raises(ConfigError, match="convert=False"):
        QuantizationAwareTraining(max_drop=0.5, convert=False)


def test_points_of_a_wrong_unit_are_refused_before_the_training(net: nn.Module, tmp_path: Any) -> None:
    class Accurate(Imitation):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.net(batch[0])
            self.log("accuracy", torch.tensor(0.9))

    module = Accurate(copy.deepcopy(net))
    training = trainer(pl, tmp_path, qat(max_drop=MaxDrop(1.0, monitor="accuracy", mode="max")))
    with pytest.raises(ConfigError, match=r"percentage points are max_drop=0\.01"):
        training.fit(module, loader(), loader())
    assert training.global_step == 0


class WithMetric(nn.Module):
    """A net and a metric in one module, as it is found in research code."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.distance = torchmetrics.MeanMetric()


class Wrapped(Imitation):
    """Imitation with its net, and a metric beside that, one level deeper."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(nn.Identity())
        self.first = (copy.deepcopy(net).eval(),)
        self.wrapper = WithMetric(net)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        target = self.first[0](batch[0])
        distance = (self.wrapper.net(batch[0]) - target).square().mean() / target.square().mean()
        self.wrapper.distance.update(distance, weight=len(batch[0]))
        self.log("val_loss", self.wrapper.distance)


def test_metrics_beside_a_net_in_one_module_measure_each_run_alone(net: nn.Module, tmp_path: Any) -> None:
    found = []
    for model, name in ((imitation(net), "net"), (Wrapped(copy.deepcopy(net)), "wrapper.net")):
        callback = PostTrainingQuantization(
            backend="reference", modules=[name], calibration_data=loader(), max_drop=MaxDrop(1.0, **LOSS)
        )
        trainer(pl, tmp_path, [callback]).validate(model, loader(), verbose=False)
        assert callback.decision is not None
        found.append((callback.decision.choice.float_value, callback.decision.choice.int8_value))
    assert found[0][0] == 0
    assert found[1] == pytest.approx(found[0], rel=1e-5)  # sums in float32
