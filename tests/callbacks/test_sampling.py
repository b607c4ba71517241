"""What is sampled of a training: it changes nothing, costs little, and ends in the log and in the report."""

import csv
import math
import warnings
from pathlib import Path

import pytest
import pytorch_lightning
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from qlightning import PostTrainingQuantization, QConfig, QuantizationAwareTraining
from qlightning.callbacks import sampling
from qlightning.callbacks.sampling import KEPT, Track
from qlightning.callbacks.schedule import Phase
from qlightning.errors import ConfigError
from qlightning.graph.sampling import Sample, look_at
from tests.callbacks.nets import Net, assert_same_state, loader, state_of, task, trainer
from tests.html.documents import parse


class Dropping(Net):
    """Needs random numbers, as a sampled batch must not."""

    def features(self, x):
        return nn.functional.dropout(super().features(x), 0.3, self.training)


def fitted(pl, tmp_path, net=None, *, batches=8, epochs=1, run=None, **options):
    """A model that was trained, its callback, and the losses on the way."""
    torch.manual_seed(0)
    model, callback, losses = task(pl, net or Dropping()), QuantizationAwareTraining(**options), []
    original = model.training_step

    def training_step(batch, batch_idx):
        loss = original(batch, batch_idx)
        losses.append(loss.item())
        return loss

    model.training_step = training_step
    fit = trainer(pl, tmp_path, callback, max_epochs=epochs, **(run or {}))
    fit.fit(model, loader(8 * batches), loader(8))
    return model, callback, losses


def logged(tmp_path):
    (path,) = Path(tmp_path).rglob("metrics.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return rows, sorted(name for name in rows[0] if name.startswith("qat/"))


@pytest.mark.parametrize(
    "options",
    [{}, {"freeze_bn": 0.5, "validate_int8": True}, {"qconfig": QConfig(learned=True)}],
    ids=["plain", "frozen", "learned"],
)
def test_the_training_is_the_same_bit_for_bit(pl, tmp_path, options):
    runs = [fitted(pl, tmp_path / str(every), epochs=2, log_every=every, **options) for every in (0, 1)]
    assert runs[0][2] == runs[1][2]
    assert_same_state(*(state_of(callback.prepared["net"]) for _, callback, _ in runs))
    assert len(runs[1][1]._sampler.track.steps) == 16
    assert len(runs[0][1]._sampler.track.steps) == 1  # for the report


def test_hooks_of_users_are_not_called_for_samples(pl, tmp_path):
    counts = []
    for every in (0, 1):
        net, calls = Net(), []
        net.bn1.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        fitted(pl, tmp_path, net, log_every=every)
        counts.append(len(calls))
    assert counts[0] == counts[1]


def test_samples_take_less_than_two_percent_of_the_work(tmp_path):
    """Of convolutions and products of matrices, whose count depends on no clock."""
    work = []
    for every in (0, 50):
        with FlopCounterMode(display=False) as counter:
            _, callback, _ = fitted(pytorch_lightning, tmp_path, batches=50, log_every=every, convert=False)
        work.append(counter.get_total_flops())
    assert len(callback._sampler.track.steps) == 2
    assert 0 < work[1] - work[0] < 0.02 * work[0]


def test_between_samples_nothing_is_looked_at(pl, tmp_path, monkeypatch):
    looks = []

    def counted(*args):
        looks.append(1)
        return look_at(*args)

    monkeypatch.setattr(sampling, "look_at", counted)
    fitted(pl, tmp_path, batches=100)
    assert len(looks) == 3  # the first batch, the 50th, the 100th


def test_loggers_get_the_numbers_and_nothing_else_does(pl, tmp_path):
    run = {"logger": pl.loggers.CSVLogger(tmp_path)}
    model, callback, _ = fitted(pl, tmp_path, log_every=4, run=run)
    rows, names = logged(tmp_path)
    layers = {f"qat/sqnr/{layer.name}" for layer in callback.report.layers}
    assert layers <= set(names)
    assert {"qat/sqnr_worst", "qat/sqnr_median", "qat/clip_worst", "qat/clip_median"} <= set(names)
    assert {name for name in names if name.startswith("qat/clip/")} == {f"qat/clip/{n}" for n in _places(callback)}
    filled = [row for row in rows if row["qat/sqnr_worst"]]
    assert [int(row["step"]) for row in filled] == [0, 3, 7]
    for row in filled:
        assert all(float(row[name]) > 10 for name in layers)
        assert all(0 <= float(row[f"qat/clip/{n}"]) <= 1 for n in _places(callback))
    assert not [name for name in callback._metrics if name.startswith("qat/")]
    assert set(model.trainer.callback_metrics) == {"qat/stage", "val_loss", "val_acc"}


def _places(callback):
    return callback._sampler.track.training().history.low


def test_few_of_many_layers_are_logged(pl, tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "LOGGED", 2)
    _, callback, _ = fitted(pl, tmp_path, log_every=4, run={"logger": pl.loggers.CSVLogger(tmp_path)})
    _, names = logged(tmp_path)
    assert len([name for name in names if name.startswith("qat/sqnr/")]) == 2
    assert len([name for name in names if name.startswith("qat/clip/")]) == 2
    assert len(_places(callback)) == 4  # the report has them all


def test_numbers_are_those_of_the_weights_and_grids(pl, tmp_path):
    _, callback, _ = fitted(pl, tmp_path, batches=4, log_every=4)
    net, history = callback.prepared["net"], callback._sampler.track.training().history
    for name in ("conv1", "conv2", "fc"):
        layer = net.get_submodule(name)
        w, q = (t.detach().double() for t in (layer.weight, layer.eval().fake_quantized_weight()))
        expected = 10 * torch.log10(w.square().sum() / (w - q).square().sum())
        assert history.sqnr[f"net.{name}"][-1] == pytest.approx(float(expected), abs=0.5)  # of the last optimizer step
    for fq in (m for m in net.modules() if type(m).__name__ == "FakeQuantize"):
        low, high = ((code - int(fq.zero_point)) * float(fq.scale) for code in (0, 255))
        assert history.low[f"net.{fq.name}"][-1] == pytest.approx(low)
        assert history.high[f"net.{fq.name}"][-1] == pytest.approx(high)


def test_a_track_is_bounded_and_even():
    track = Track()
    for step in range(10_000):
        track.add(step, Sample(low={"a": float(step)}))
    history = track.training().history
    assert len(history.steps) <= KEPT
    assert {b - a for a, b in zip(history.steps, history.steps[1:], strict=False)} == {history.steps[1]}
    assert history.low["a"] == tuple(map(float, history.steps))


def test_a_track_goes_on_after_it_was_saved():
    one, other = Track(), Track()
    for step in range(300):
        one.add(step, Sample(low={"a": 1.0}, sqnr={"b": math.inf}) if step > 5 else Sample())
        one.enter(step, 0, Phase(True, step > 100, False))
    other.load(one.state())
    for track in (one, other):
        track.add(300, Sample(clip={"c": 0.5}))
        track.enter(300, 1, Phase(True, True, True))
    assert one.training() == other.training()
    assert [stage.step for stage in other.stages] == [0, 101, 300]


def test_a_resumed_training_goes_on_with_its_history(pl, tmp_path):
    _, first, _ = fitted(pl, tmp_path, log_every=4, convert=False, run={"enable_checkpointing": True})
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    torch.manual_seed(0)
    second = QuantizationAwareTraining(log_every=4)
    trainer(pl, tmp_path, second, max_epochs=2).fit(task(pl), loader(64), loader(8), ckpt_path=checkpoint)
    before, after = (callback._sampler.track.training() for callback in (first, second))
    assert after.history.steps[: len(before.history.steps)] == before.history.steps == (1, 4, 8)
    assert after.history.steps[-1] == after.length == 16
    assert after.stages[0] == before.stages[0]


def test_a_look_that_fails_costs_no_training(pl, tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(sampling, "look_at", fails)
    with pytest.warns(UserWarning, match="no longer sampled.*no such luck") as caught:
        _, callback, losses = fitted(pl, tmp_path, log_every=1)
    assert len([w for w in caught if "no such luck" in str(w.message)]) == 1
    assert len(losses) == 8
    assert callback.int8_model is not None


def test_the_report_of_a_training_has_all_of_it(pl, tmp_path):
    model, callback, _ = fitted(pl, tmp_path, epochs=3, log_every=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        document = parse(callback.report.save(tmp_path / "report.html").read_text())
    text = document.text()
    assert "observers frozen" in text
    assert "freeze_observers" in text
    assert "not measured" in text
    assert "Ranges over training" in text
    assert "save(path, data" not in text
    charts = document.find("figure", class_="chart")
    assert len(charts) >= 3 * 4
    for chart in charts:
        drawn = [p.attributes["d"] for p in chart.find("path") if p.attributes["class"] not in ("rule", "end")]
        assert any(drawn), chart.text()
    trainer(pl, tmp_path, callback).test(model, loader(8), verbose=False)
    assert callback._figures["int8"]["val_loss"] > 0
    assert f"{callback._figures['int8']['val_loss']:.4g}" in callback.report.html()


def test_the_report_of_a_calibration_has_its_activations(pl, tmp_path):
    callback = PostTrainingQuantization(calibration_data=loader(64))
    trainer(pl, tmp_path, callback).test(task(pl), loader(8), verbose=False)
    text = parse(callback.report.html()).text()
    assert "SQNR of the output" in text
    assert "distribution on the grid" in text
    assert "save(path, data" not in text


@pytest.mark.parametrize("value", [-1, 1.5, True, "often"])
def test_wrong_intervals_are_named(value):
    with pytest.raises(ConfigError, match="log_every"):
        QuantizationAwareTraining(log_every=value)
