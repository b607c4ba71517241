"""Post-training quantization with validate, test, predict and fit."""

from functools import lru_cache

import pytest
import pytorch_lightning
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from qlightning import PostTrainingQuantization, QuantizationAwareTraining
from qlightning.errors import CalibrationError, ConfigError, NonFiniteError
from qlightning.fake_quantize import fake_quantizers
from qlightning.graph import is_prepared
from tests.callbacks.nets import Net, assert_same_state, loader, samples, state_of, task, trainer


@lru_cache
def learned():
    """The weights of a net that has learned its task a bit, so that int8 and float can be told from noise."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(5):
        for x, y in loader(64, seed=epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    return net.state_dict()


def trained(pl):
    model = task(pl)
    model.net.load_state_dict(learned())
    return model.eval()


def data(pl, batches=10, *, calibration=False, seen=None, setups=None):
    class Data(pl.LightningDataModule):
        def setup(self, stage):
            if setups is not None:
                setups.append(stage)
            if stage == "fit":
                self.train = loader(8 * batches)

        def train_dataloader(self):
            for batch in self.train:
                if seen is not None:
                    seen.append("train")
                yield batch

        def val_dataloader(self):
            return loader(seed=3)

        test_dataloader = val_dataloader

        def predict_dataloader(self):
            return [samples(8)[0]]

    if calibration:

        def calibration_dataloader(self):
            for batch in loader(24):
                seen.append("calibration")
                yield batch

        Data.calibration_dataloader = calibration_dataloader
    return Data()


@pytest.mark.parametrize("loop", ["validate", "test"])
def test_evaluation_calibrates_on_training_batches_and_runs_in_int8(pl, tmp_path, loop):
    model, seen, setups = trained(pl), [], []
    x, y = samples(32, seed=3)
    wanted, net = model(x), model.net
    callback = PostTrainingQuantization()
    run = trainer(pl, tmp_path, callback, limit_val_batches=1.0)
    (metrics,) = getattr(run, loop)(model, datamodule=data(pl, seen=seen, setups=setups), verbose=False)
    assert seen == ["train"] * 10
    assert model.net is callback.int8_model
    assert callback.prepared == {"net": net}
    assert not callback.report.float_layers
    assert metrics["val_acc"] == pytest.approx(float((model(x).argmax(1) == y).float().mean()))
    # A few steps of the output's own grid: the net has four grids in a row.
    assert (model(x) - wanted).abs().max() < 0.1 * wanted.abs().max()
    assert not torch.equal(model(x), wanted)

    getattr(run, loop)(model, datamodule=data(pl, seen=seen), verbose=False)
    assert len(seen) == 10  # not calibrated again
    assert model.net is callback.int8_model


def test_the_calibration_budget_is_its_own(pl, tmp_path):  # C52
    seen = []
    callback = PostTrainingQuantization(calibration_batches=7)
    run = trainer(pl, tmp_path, callback, limit_val_batches=1, limit_train_batches=1)
    run.validate(trained(pl), datamodule=data(pl, seen=seen), verbose=False)
    assert len(seen) == 7
    seen.clear()
    callback = PostTrainingQuantization(calibration_batches=None)
    trainer(pl, tmp_path, callback).validate(trained(pl), datamodule=data(pl, 40, seen=seen), verbose=False)
    assert len(seen) == 40


def test_a_calibration_dataloader_comes_first(pl, tmp_path):
    seen = []
    trainer(pl, tmp_path, PostTrainingQuantization()).test(
        trained(pl), datamodule=data(pl, seen=seen, calibration=True), verbose=False
    )
    assert seen == ["calibration"] * 3


@pytest.mark.parametrize("kind", ["loader", "list", "tensors", "datamodule"])
def test_calibration_data_is_any_iterable_of_batches_or_a_datamodule(pl, tmp_path, kind):
    given = {
        "loader": loader(),
        "list": list(loader()),
        "tensors": [samples(8)[0]],
        "datamodule": data(pl),
    }[kind]
    model = trained(pl)
    if kind == "tensors":
        callback = PostTrainingQuantization(calibration_data=given, calibration_fn=lambda m, batch: m(batch))
    else:
        callback = PostTrainingQuantization(calibration_data=given)
    trainer(pl, tmp_path, callback).test(model, loader(), verbose=False)
    assert model.net is callback.int8_model


def test_prediction_runs_in_int8(pl, tmp_path):  # C69: batches of any size
    model = trained(pl)
    callback = PostTrainingQuantization(calibration_data=loader())
    one = samples(1, seed=9)[0]
    wanted = model(one)
    (got,) = trainer(pl, tmp_path, callback).predict(model, torch.utils.data.DataLoader(one))
    assert model.net is callback.int8_model
    assert (got - wanted).abs().max() < 0.1 * wanted.abs().max()


class Watchful(pytorch_lightning.LightningModule):
    """Its steps leave traces of all kinds."""

    def __init__(self):
        super().__init__()
        self.net, self.accuracy, self.outputs, self.calls = Net(), MulticlassAccuracy(3), [], 0

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        logits = self.net(x)
        self.accuracy.update(logits, y)
        self.outputs.append(logits)
        self.calls += 1
        self.log("acc", self.accuracy)
        assert self.trainer.num_devices == 1
        if self.logger is not None:
            pytest.fail("a calibration batch was logged")


def test_calibration_leaves_no_trace(tmp_path):
    model = Watchful()
    before = state_of(model.net)
    shuffled = torch.utils.data.DataLoader(loader().dataset, batch_size=8, shuffle=True)
    callback = PostTrainingQuantization(calibration_data=shuffled)
    states = []

    class Probe(pytorch_lightning.Callback):
        def on_validation_start(self, trainer, pl_module):
            states.append(torch.get_rng_state())

    run = trainer(pytorch_lightning, tmp_path, [Probe(), callback, Probe()])
    (metrics,) = run.validate(model, loader(16), verbose=False)
    assert model.calls == len(model.outputs) == 2
    logits = model.net(samples(16)[0])
    expected = MulticlassAccuracy(3)(logits, samples(16)[1])
    assert metrics["acc"] == pytest.approx(float(expected))
    assert torch.equal(states[0], states[1])
    weights = {name: tensor for name, tensor in state_of(callback.prepared["net"]).items() if name in before}
    assert_same_state(weights, before)
    assert type(model) is Watchful


def test_a_net_goes_back_to_float_for_fit_and_is_quantized_again_at_its_end(pl, tmp_path):
    model, callback = trained(pl), PostTrainingQuantization(calibration_data=loader())
    net = model.net
    run = trainer(pl, tmp_path, callback)
    run.validate(model, loader(), verbose=False)
    assert model.net is not net
    seen = []

    class Probe(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(pl_module.net)

    trainer(pl, tmp_path, [callback, Probe()], max_epochs=1).fit(model, loader(), loader())
    assert set(seen) == {net}
    assert model.net is callback.int8_model
    # and with the training batches of fit, where no data is given
    model, callback = trained(pl), PostTrainingQuantization()
    trainer(pl, tmp_path, callback, max_epochs=1).fit(model, loader(), loader())
    assert model.net is callback.int8_model


def test_ptq_then_qat_on_the_same_module(tmp_path):
    pl = pytorch_lightning
    model = trained(pl)
    net = model.net
    trainer(pl, tmp_path, PostTrainingQuantization(calibration_data=loader())).validate(model, loader(), verbose=False)
    callback = QuantizationAwareTraining()
    trainer(pl, tmp_path, callback, max_epochs=1).fit(model.train(), loader())
    assert callback.prepared["net"] is net
    assert model.net is callback.int8_model


def test_a_lightning_module_with_layers_of_its_own_is_calibrated(tmp_path):
    from tests.callbacks.test_qat import Direct

    model, callback = Direct().eval(), PostTrainingQuantization(calibration_data=loader())
    x = samples(8)[0]
    wanted = model(x)
    trainer(pytorch_lightning, tmp_path, callback).test(model, loader(), verbose=False)
    assert callback.prepared == {"": model}
    assert all(fq.observed for _, fq in fake_quantizers(model))
    assert (model(x) - wanted).abs().max() < 0.1 * wanted.abs().max()


def test_two_callbacks_work_on_two_nets(tmp_path):
    pl = pytorch_lightning
    model = trained(pl)
    model.second = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model.forward = lambda x: model.second(model.net(x))
    callbacks = [PostTrainingQuantization(modules=[name], calibration_data=loader()) for name in ("net", "second")]
    run = trainer(pl, tmp_path, callbacks)
    for _ in range(2):
        run.validate(model, loader(), verbose=False)
        assert model.net is callbacks[0].int8_model
        assert model.second is callbacks[1].int8_model


def failing(pl, tmp_path, callback, error, match, model=None):
    model = model or trained(pl)
    before, cls = state_of(model), type(model.net)
    with pytest.raises(error, match=match):
        trainer(pl, tmp_path, callback).test(model, loader(), verbose=False)
    assert type(model.net) is cls
    assert not is_prepared(model.net)
    assert_same_state(state_of(model), before)


def test_no_data_and_bad_data_are_errors_that_leave_the_model_as_it_was(pl, tmp_path):  # C27
    failing(pl, tmp_path, PostTrainingQuantization(), CalibrationError, "No data to calibrate on")
    failing(pl, tmp_path, PostTrainingQuantization(calibration_data=[]), CalibrationError, "no batch")
    failing(pl, tmp_path, PostTrainingQuantization(calibration_data=loader(0)), CalibrationError, "no batch")
    x, y = samples(8)
    x[3, 0, 0, 0] = float("nan")
    bad = PostTrainingQuantization(calibration_data=[samples(8), (x, y)])
    failing(pl, tmp_path, bad, NonFiniteError, "calibration batch 1: .*conv1")
    wrong = PostTrainingQuantization(calibration_data=[{"image": x}])
    failing(pl, tmp_path, wrong, CalibrationError, "calibration_fn")
    wrong = PostTrainingQuantization(calibration_data=loader(), modules=["nett"])
    failing(pl, tmp_path, wrong, ConfigError, "Did you mean 'net'")
    unused = trained(pl)
    unused.extra = nn.Sequential(nn.Linear(3, 3))
    only_extra = PostTrainingQuantization(calibration_data=loader(), modules=["extra"])
    failing(pl, tmp_path, only_extra, CalibrationError, "never ran", unused)


def test_settings_are_checked_when_the_callback_is_built():
    for wrong in (
        {"calibration_batches": 0},
        {"calibration_batches": True},
        {"calibration_batches": 1.5},
        {"calibration_fn": 3},
        {"qconfig": "int8"},
    ):
        with pytest.raises(ConfigError):
            PostTrainingQuantization(**wrong)


def test_the_progress_bar_shows_the_calibration(pl, tmp_path, capsys):
    callback = PostTrainingQuantization(calibration_data=loader())
    bar = pl.callbacks.TQDMProgressBar()
    trainer(pl, tmp_path, [callback, bar], enable_progress_bar=True).validate(trained(pl), loader(), verbose=False)
    assert "Calibrating" in capsys.readouterr().err
    callback = PostTrainingQuantization(calibration_data=loader())
    trainer(pl, tmp_path, callback).validate(trained(pl), loader(), verbose=False)
    assert "Calibrating" not in capsys.readouterr().err


@pytest.mark.parametrize("how", ["validate", "test", "predict"])
@pytest.mark.parametrize("trained_before", [False, True])
def test_int8_stays_in_eval_mode_whatever_mode_the_float_net_was_in(pl, tmp_path, how, trained_before):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(), nn.Linear(144, 3))
    model = task(pl, net).train()
    run = trainer(pl, tmp_path, callback := PostTrainingQuantization(calibration_data=loader()))
    if trained_before:
        saver = pl.callbacks.ModelCheckpoint(tmp_path)
        fitter = trainer(pl, tmp_path, [QuantizationAwareTraining(), saver], enable_checkpointing=True)
        fitter.fit(task(pl, net), loader())
        run = trainer(pl, tmp_path, callback := QuantizationAwareTraining())
    model.predict_step = lambda batch, batch_idx: model(batch[0])
    options = {} if how == "predict" else {"verbose": False}
    getattr(run, how)(model, loader(), ckpt_path=saver.best_model_path if trained_before else None, **options)
    assert model.net is callback.int8_model
    assert not any(module.training for module in model.net.modules())
    x = samples(4)[0]
    assert torch.equal(model(x), model(x))
