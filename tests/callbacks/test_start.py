"""Where a quantization-aware training starts from: a calibration, right before fake quantization."""

import copy

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from qlightning import QConfig, QuantizationAwareTraining, calibrate, prepare
from qlightning.errors import CalibrationError, ConfigError
from qlightning.fake_quantize import WeightFakeQuantize, fake_quantizers
from qlightning.learned import learned_fake_quantizers
from qlightning.observers import HistogramObserver, MinMaxObserver
from tests.callbacks.nets import assert_same_state, loader, samples, state_of, task, trainer


def grids(module):
    return {
        name: (fq.scale.clone(), fq.zero_point.clone())
        for name, fq in fake_quantizers(module)
        if not isinstance(fq, WeightFakeQuantize)
    }


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, grid in expected.items():
        assert all(torch.equal(a, b) for a, b in zip(actual[name], grid, strict=True)), name


class Watch(pl.Callback):
    """Notes, batch by batch, what the step runs on; it stands behind our callback."""

    def __init__(self):
        self.grids, self.observing = [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.grids.append(grids(pl_module.net))
        self.observing.append(any(fq.observer_enabled for _, fq in fake_quantizers(pl_module)))


def fit(tmp_path, model=None, watch=None, train=None, ckpt_path=None, callbacks=(), **settings):
    model = model or task(pl)
    epochs = settings.pop("max_epochs", 1)
    callback = QuantizationAwareTraining(**settings)
    run = trainer(
        pl, tmp_path, [callback, *([watch] if watch else []), *callbacks], max_epochs=epochs, enable_checkpointing=True
    )
    run.fit(model, loader() if train is None else train, ckpt_path=ckpt_path)
    return model, callback


@pytest.mark.parametrize("observer", [MinMaxObserver, HistogramObserver])
def test_the_ranges_are_those_of_a_calibration(tmp_path, observer):
    qconfig, model, watch = QConfig(activation_observer=observer), task(pl), Watch()
    twin = prepare(copy.deepcopy(model.net), qconfig)
    calibrate(twin, loader(), num_batches=3)
    fit(tmp_path, model, watch, qconfig=qconfig, calibrate=3, freeze_observers=0)
    assert_same(watch.grids[0], grids(twin))
    assert_same(watch.grids[-1], grids(twin))


def test_batches_and_random_numbers_are_the_same_with_and_without(tmp_path):
    start, ends = state_of(task(pl)), []
    for calibrate_ in (0, 2):
        model = task(pl)
        model.load_state_dict(start)
        seen = []

        class Batches(pl.Callback):
            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx, seen=seen):
                seen.append(batch[0].sum() + torch.rand(()))

        torch.manual_seed(1)
        shuffled = DataLoader(TensorDataset(*samples(32)), batch_size=8, shuffle=True)
        fit(tmp_path, model, train=shuffled, callbacks=[Batches()], calibrate=calibrate_)
        ends.append(torch.stack(seen))
    assert torch.equal(*ends)


def test_a_float_phase_observes_nothing_and_is_calibrated_at_its_end(tmp_path):
    watch = Watch()
    fit(tmp_path, None, watch, calibrate=2, fake_quant_start="2 steps", freeze_observers=None, qconfig=QConfig())
    assert watch.observing == [False, False, True, True]
    assert all(scale == 0 for scale, _ in watch.grids[1].values())
    assert all(scale > 0 for scale, _ in watch.grids[2].values())


class Stop(pl.Callback):
    """Ends the training behind its first epoch, as EarlyStopping may."""

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = True


def assert_calibrated(callback, count):
    """The ranges are those of a calibration of the weights that were converted."""
    module = callback.prepared["net"]
    twin = copy.deepcopy(module)
    for _, fq in fake_quantizers(twin):
        fq.reset()
    calibrate(twin, loader(), num_batches=count)
    assert_same(grids(module), grids(twin))
    assert callback.int8_model is not None


@pytest.mark.parametrize("learned", [None, "lsq"])
def test_a_training_that_ends_in_its_float_phase_is_calibrated_at_its_end(tmp_path, learned):
    settings = {"qconfig": QConfig(learned=learned), "fake_quant_start": 1, "freeze_observers": 2}
    _, callback = fit(tmp_path, callbacks=[Stop()], calibrate=3, max_epochs=3, **settings)
    assert_calibrated(callback, 3)


def test_the_best_of_the_float_phase_is_calibrated(tmp_path):
    best = pl.callbacks.ModelCheckpoint(monitor="qat/stage", mode="min")
    _, callback = fit(
        tmp_path, callbacks=[best], calibrate=3, max_epochs=2, fake_quant_start=1, freeze_observers=2, convert="best"
    )
    saved = torch.load(best.best_model_path, weights_only=True)["state_dict"]
    assert torch.equal(callback.prepared["net"].conv1.weight, saved["net.conv1.weight"])
    assert_calibrated(callback, 3)


def test_a_calibration_that_fails_leaves_nothing_to_a_further_fit(tmp_path):
    class Fails(type(task(pl))):
        calls = 0

        def validation_step(self, batch, batch_idx):
            Fails.calls += 1
            if Fails.calls == 2:
                raise ValueError("no such batch")
            return super().validation_step(batch, batch_idx)

    settings = {"calibrate": 3, "fake_quant_start": 1, "freeze_observers": 2, "max_epochs": 2}
    settings["qconfig"] = QConfig(activation_observer=MinMaxObserver)
    model = Fails()
    with pytest.raises(CalibrationError, match="no such batch"):
        fit(tmp_path, model, train=loader(scale=10.0), **settings)
    watch = Watch()
    fit(tmp_path, model, watch, **{**settings, "fake_quant_start": 0})
    twin = prepare(task(pl).net, settings["qconfig"])
    calibrate(twin, loader(), num_batches=3)
    first = next(iter(grids(twin)))  # reads the images, whatever the weights have become
    assert_same({first: watch.grids[0][first]}, {first: grids(twin)[first]})


def test_learned_scales_start_from_a_calibration(tmp_path):
    watch = Watch()
    _, callback = fit(tmp_path, None, watch, calibrate=4, qconfig=QConfig(learned=True))
    assert all(scale > 0 for scale, _ in watch.grids[0].values())
    assert all(fq.learning for _, fq in learned_fake_quantizers(callback.prepared["net"]))


@pytest.mark.parametrize("stop", [4, 8])
def test_a_resumed_run_ends_like_one_that_never_stopped(tmp_path, stop):
    start = state_of(task(pl))

    def run(name, ckpt_path=None):
        model = task(pl)
        model.load_state_dict(start)
        saver = pl.callbacks.ModelCheckpoint(tmp_path / name, every_n_train_steps=1, save_top_k=-1)
        points = {"fake_quant_start": "6 steps", "freeze_observers": "9 steps", "convert": False, "max_epochs": 3}
        fit(tmp_path, model, None, None, ckpt_path, [saver], calibrate=2, **points)
        return state_of(model)

    whole = run("whole")
    assert_same_state(run(f"resumed{stop}", next((tmp_path / "whole").glob(f"*step={stop}.ckpt"))), whole)


def test_persistent_workers_are_left_to_the_training(tmp_path):
    data = TensorDataset(*samples(32))
    train = DataLoader(data, batch_size=8, num_workers=1, persistent_workers=True)
    watch = Watch()
    fit(tmp_path, None, watch, train, calibrate=1, fake_quant_start="2 steps")
    assert len(watch.grids) == 4


@pytest.mark.parametrize("count", [-1, True, 2.0, "all"])
def test_a_number_of_batches_is_needed(count):
    with pytest.raises(ConfigError, match="calibrate="):
        QuantizationAwareTraining(calibrate=count)


def test_without_it_frozen_ranges_are_an_error(tmp_path):
    with pytest.raises(CalibrationError, match="no batch has ever reached"):
        fit(tmp_path, freeze_observers=0)
