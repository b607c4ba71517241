"""What Lightning tries out before a training (learning rates, batch sizes) leaves everything as it was."""

import copy

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from qlightning import QConfig, QuantizationAwareTraining
from qlightning.fake_quantize import fake_quantizers
from qlightning.graph import is_prepared
from qlightning.observers import HistogramObserver
from tests.callbacks.nets import Net, assert_same_state, loader, state_of, task, trainer


class Tunable(type(task(pl))):
    def __init__(self):
        super().__init__()
        self.net, self.lr, self.batch_size = Net(), 0.01, 8

    def train_dataloader(self):
        return loader(32, self.batch_size)

    def val_dataloader(self):
        return loader(16, self.batch_size)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


TUNERS = {
    "lr_find": lambda tuner, model: tuner.lr_find(model, num_training=6, update_attr=False),
    "scale_batch_size": lambda tuner, model: tuner.scale_batch_size(model, steps_per_trial=2, max_trials=1),
}


@pytest.mark.parametrize("tune", TUNERS.values(), ids=TUNERS.keys())
@pytest.mark.parametrize("late", [False, True])
def test_a_tuner_leaves_a_float_model_in_float(tmp_path, tune, late):
    class Model(Tunable):
        if late:

            def configure_model(self):
                assert self.net is not None

    model, callback = Model(), QuantizationAwareTraining()
    before, names = state_of(model), set(vars(model))
    run = trainer(pl, tmp_path, callback)
    tune(pl.tuner.Tuner(run), model)
    assert type(model.net) is Net
    assert_same_state(state_of(model), before)
    assert "configure_model" not in set(vars(model)) - names
    run.fit(model)
    assert model.net is callback.int8_model


@pytest.mark.parametrize("tune", TUNERS.values(), ids=TUNERS.keys())
@pytest.mark.parametrize("observer", [HistogramObserver, None])
def test_a_tuner_between_two_trainings_leaves_the_int8_model_and_its_ranges(tmp_path, tune, observer):
    qconfig = QConfig() if observer is None else QConfig(activation_observer=observer)
    model, callback = Tunable(), QuantizationAwareTraining(qconfig, freeze_bn=1)
    trainer(pl, tmp_path, callback).fit(model)
    x = torch.randn(4, 3, 8, 8)
    wanted, int8, prepared = model(x), state_of(model), state_of(callback.prepared["net"])
    tune(pl.tuner.Tuner(trainer(pl, tmp_path, callback)), model)
    assert_same_state(state_of(model), int8)
    assert_same_state(state_of(callback.prepared["net"]), prepared)
    assert torch.equal(model(x), wanted)
    assert model.net is callback.int8_model


def test_a_tuner_on_a_prepared_model_leaves_it_prepared_as_it_is(tmp_path):
    model, callback = Tunable(), QuantizationAwareTraining(convert=False)
    trainer(pl, tmp_path, callback).fit(model)
    before = state_of(model)
    pl.tuner.Tuner(trainer(pl, tmp_path, callback)).lr_find(model, num_training=6, update_attr=False)
    assert is_prepared(model.net)
    assert_same_state(state_of(model), before)


def test_batch_sizes_are_tried_on_the_int8_model(tmp_path):
    model, callback = Tunable(), QuantizationAwareTraining()
    run = trainer(pl, tmp_path, callback)
    run.fit(model)
    x = torch.randn(4, 3, 8, 8)
    wanted = model(x)
    pl.tuner.Tuner(run).scale_batch_size(model, method="validate", steps_per_trial=1, max_trials=1)
    assert torch.equal(model(x), wanted)
    assert model.net is callback.int8_model


def facts_of(callback):
    """What a callback knows, besides modules."""
    known = vars(callback).items()
    return {
        name: copy.copy(value) for name, value in known if isinstance(value, (bool, int, float, str, list, type(None)))
    }


def watched(finder, snapshots):
    """A finder that says what state is before and after it."""

    class Watched(finder):
        def on_fit_start(self, trainer, pl_module):
            snapshots.append(snapshot(trainer, pl_module))
            super().on_fit_start(trainer, pl_module)
            snapshots.append(snapshot(trainer, pl_module))

    return Watched


def snapshot(run, model):
    (callback,) = (c for c in run.callbacks if isinstance(c, QuantizationAwareTraining))
    fqs = dict(fake_quantizers(model))
    return {
        "model": state_of(model),
        "optimizer": copy.deepcopy(run.optimizers[0].state_dict()),
        "callback": (facts_of(callback), callback.state_dict()),
        "flags": {
            name: (fq.observed, fq.observer_enabled, fq.fake_quant_enabled, set(fq.seen_ndims))
            for name, fq in fqs.items()
        },
        "observed": {name: fq.observer.observed for name, fq in fqs.items()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "progress": (run.global_step, run.current_epoch),
    }


FINDERS = {
    "lr": lambda s: watched(pl.callbacks.LearningRateFinder, s)(num_training_steps=6, update_attr=False),
    "batch_size": lambda s: watched(pl.callbacks.BatchSizeFinder, s)(steps_per_trial=2, max_trials=1),
}


@pytest.mark.parametrize("finder", FINDERS.values(), ids=FINDERS.keys())
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("observer", [HistogramObserver, None])
def test_a_finder_within_fit_leaves_no_trace(tmp_path, finder, first, observer):
    qconfig = QConfig() if observer is None else QConfig(activation_observer=observer)
    callback, snapshots = QuantizationAwareTraining(qconfig, fake_quant_start=1), []
    found = finder(snapshots)
    model = Tunable()
    # A second training, too, which starts with ranges and moments.
    for epochs in (2, 2):
        run = trainer(pl, tmp_path, [callback, found] if first else [found, callback], max_epochs=epochs)
        run.fit(model)
        before, after = snapshots[-2:]
        assert_same_state(after.pop("model"), before.pop("model"))
        for name, value in before.items():
            assert after[name] == value, name
        assert model.net is callback.int8_model
    assert len(snapshots) == 4
    assert isinstance(callback.prepared["net"], nn.Module)
