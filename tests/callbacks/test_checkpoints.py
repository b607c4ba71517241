"""Checkpoints have the prepared form, and meet int8 models without a wrong result."""

import functools

import pytest
import pytorch_lightning
import torch

import qlightning
from qlightning import PostTrainingQuantization, QConfig, QScheme, QuantizationAwareTraining, convert
from qlightning.callbacks.schedule import FREEZE_BN, FREEZE_OBSERVERS, Progress
from qlightning.errors import ConfigError
from qlightning.graph import is_prepared
from qlightning.nn.quantized import QuantizedLayer
from qlightning.observers import MinMaxObserver, MovingAverageObserver
from tests.callbacks.nets import Net, assert_same_state, loader, samples, state_of, task, trainer


def checkpointed_fit(pl, tmp_path, callback=None, **options):
    saver = pl.callbacks.ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True, save_top_k=-1)
    model, callback = task(pl), callback or QuantizationAwareTraining()
    run = trainer(pl, tmp_path, [callback, saver], enable_checkpointing=True, **options)
    run.fit(model, loader(64), loader())
    return model, callback, run, saver


def int8_of(checkpoint, pl):
    """The int8 conversion of a checkpoint, made another way: by a fresh model and without a Trainer."""
    from qlightning import prepare

    model = task(pl)
    prepare(model.net)
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])
    return convert(model.net.eval())


def test_checkpoints_during_fit_have_the_prepared_form_and_load_with_weights_only(pl, tmp_path):
    _, callback, _, saver = checkpointed_fit(pl, tmp_path)
    checkpoint = torch.load(saver.last_model_path, weights_only=True)
    prepared = {f"net.{name}" for name in callback.prepared["net"].state_dict()}
    assert set(checkpoint["state_dict"]) == prepared
    assert {name for name, _ in task(pl).named_parameters()} <= prepared
    (facts,) = [state for key, state in checkpoint["callbacks"].items() if key.startswith("QuantizationAware")]
    assert facts["backend"] == callback.backend.name


def test_a_checkpoint_that_is_saved_after_fit_has_the_prepared_form(pl, tmp_path):
    model, callback, run, saver = checkpointed_fit(pl, tmp_path)
    run.save_checkpoint(tmp_path / "after.ckpt")
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)["state_dict"]
    assert_same_state(saved, torch.load(saver.last_model_path, weights_only=True)["state_dict"])
    assert model.net is callback.int8_model


@pytest.mark.parametrize("which", [None, "best", "last", "path"])
def test_test_after_fit_measures_the_int8_model_of_that_checkpoint(pl, tmp_path, which):  # C03
    model, _, run, saver = checkpointed_fit(pl, tmp_path)
    earlier = saver.best_model_path if which == "best" else sorted(tmp_path.glob("epoch=0*.ckpt"))[0]
    path = {None: saver.last_model_path, "best": saver.best_model_path, "last": saver.last_model_path, "path": earlier}[
        which
    ]
    (metrics,) = run.test(model, loader(seed=5), ckpt_path=str(path) if which == "path" else which, verbose=False)
    x, y = samples(32, seed=5)
    expected = int8_of(path, pl)(x)
    assert torch.equal(model(x), expected)
    loss = sum(float(torch.nn.functional.cross_entropy(expected[i : i + 8], y[i : i + 8])) for i in range(0, 32, 8)) / 4
    assert metrics["val_loss"] == pytest.approx(loss, rel=1e-5)
    assert not is_prepared(model.net)


def test_a_state_dict_that_is_loaded_by_hand_is_converted_as_well(pl, tmp_path):
    model, *_ = checkpointed_fit(pl, tmp_path)
    path = sorted(tmp_path.glob("epoch=0*.ckpt"))[0]
    model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(model(x), int8_of(path, pl)(x))
    own = state_of(model)
    model.load_state_dict(own)
    assert_same_state(state_of(model), own)


def test_a_float_state_dict_brings_the_float_net_back_with_a_warning(pl, tmp_path):
    model, *_ = checkpointed_fit(pl, tmp_path)
    other = task(pl).eval()
    with pytest.warns(UserWarning, match="float model is back"):
        model.load_state_dict(other.state_dict())
    x = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(model.eval()(x), other(x))


def test_own_forward_meets_checkpoints_too(tmp_path):
    from tests.callbacks.test_qat import Direct

    pl, callback = pytorch_lightning, QuantizationAwareTraining()
    saver = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1)
    model = Direct()
    run = trainer(pl, tmp_path, [callback, saver], enable_checkpointing=True, max_epochs=3)
    run.fit(model, loader())
    x = torch.randn(4, 3, 8, 8)
    last = model(x)
    run.test(model, loader(), ckpt_path=str(sorted(tmp_path.glob("epoch=0*.ckpt"))[0]), verbose=False)
    assert not torch.equal(model(x), last)
    run.test(model, loader(), ckpt_path=str(sorted(tmp_path.glob("epoch=2*.ckpt"))[0]), verbose=False)
    assert torch.equal(model(x), last)


@pytest.mark.parametrize("stop", [4, 8, 12])
def test_a_resumed_run_ends_like_one_that_never_stopped(tmp_path, stop):  # C22, in the phases of the schedule
    pl = pytorch_lightning

    def run(name, max_steps, ckpt_path=None):
        model = task(pl)
        model.load_state_dict(start)
        callback = QuantizationAwareTraining(
            fake_quant_start="2 steps", freeze_observers="7 steps", freeze_bn="11 steps", convert=False
        )
        saver = pl.callbacks.ModelCheckpoint(tmp_path / name, every_n_train_steps=1, save_top_k=-1)
        runner = trainer(pl, tmp_path, [callback, saver], enable_checkpointing=True, max_epochs=4, max_steps=max_steps)
        runner.fit(model, loader(), loader(), ckpt_path=ckpt_path)
        return state_of(model)

    start = state_of(task(pl))
    whole = run("whole", 16)
    part = next((tmp_path / "whole").glob(f"*step={stop}.ckpt"))
    resumed = run(f"resumed{stop}", 16, part)
    assert_same_state(resumed, whole)


def test_ptq_with_a_checkpoint_calibrates_its_weights(pl, tmp_path):
    saver = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1)
    model = task(pl)
    run = trainer(pl, tmp_path, [saver], enable_checkpointing=True)
    run.fit(model, loader(64))
    first, last = (str(next(tmp_path.glob(f"epoch={epoch}*.ckpt"))) for epoch in (0, 1))
    callback = PostTrainingQuantization(calibration_data=loader())
    fresh = task(pl)
    tester = trainer(pl, tmp_path, callback)
    x = torch.randn(4, 3, 8, 8)
    outputs = []
    for path in (first, last, None):
        tester.test(fresh, loader(), ckpt_path=path, verbose=False)
        assert fresh.net is callback.int8_model
        outputs.append(fresh(x))
    model = model.eval()
    assert (outputs[1] - model(x)).abs().max() < 0.1 * model(x).abs().max()
    assert not torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[1], outputs[2])


class LinearBN(torch.nn.Sequential):
    """A BatchNorm that folds into its linear layer where inputs have two dimensions, and only there."""

    def __init__(self):
        nn = torch.nn
        super().__init__(
            nn.AvgPool2d(8), nn.Flatten(), nn.Linear(3, 3), nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        )


@pytest.mark.parametrize("again", [False, True])
def test_a_checkpoint_says_what_batches_looked_like(tmp_path, again):
    pl, callback = pytorch_lightning, QuantizationAwareTraining()
    saver = pl.callbacks.ModelCheckpoint(tmp_path)
    model, fresh = task(pl, LinearBN()), task(pl, LinearBN())
    trainer(pl, tmp_path, [callback, saver], enable_checkpointing=True).fit(model, loader(64))
    path = saver.best_model_path
    if again:  # what was loaded is saved with it
        run = trainer(pl, tmp_path, QuantizationAwareTraining(convert=False))
        run.validate(task(pl, LinearBN()), loader(), ckpt_path=path, verbose=False)
        run.save_checkpoint(path := tmp_path / "again.ckpt")
    trainer(pl, tmp_path, QuantizationAwareTraining()).test(fresh, loader(), ckpt_path=path, verbose=False)
    x = samples(4, seed=7)[0]
    assert torch.equal(fresh(x), callback.int8_model(x))
    assert isinstance(fresh.net[4], torch.nn.Identity)  # folded


@pytest.mark.parametrize("own", [False, True])
def test_a_fresh_model_is_tested_in_int8_with_the_checkpoint_of_a_training(pl, tmp_path, own):  # C03
    model, callback, _, saver = checkpointed_fit(pl, tmp_path)
    fresh, callback = task(pl), QuantizationAwareTraining(convert=own)
    trainer(pl, tmp_path, callback).test(fresh, loader(), ckpt_path=saver.last_model_path, verbose=False)
    x = torch.randn(4, 3, 8, 8)
    assert is_prepared(fresh.net) is not own
    if own:
        assert fresh.net is callback.int8_model
        assert torch.equal(fresh(x), model(x))


def test_a_model_that_was_never_trained_is_said_to_run_in_float(tmp_path):
    model = task(pytorch_lightning)
    with pytest.warns(UserWarning, match="runs in float"):
        trainer(pytorch_lightning, tmp_path, QuantizationAwareTraining()).test(model, loader(), verbose=False)


def hyper_task(pl):
    """A LightningModule that load_from_checkpoint can build."""

    class Task(type(task(pl))):
        def __init__(self, width=8):
            super().__init__()
            self.save_hyperparameters()
            self.net = Net(width)

    return Task


SETTINGS = {
    "defaults": {},
    "observer": {
        "qconfig": QConfig(activation_observer=functools.partial(MovingAverageObserver, averaging_constant=0.1)),
        "exclude": [torch.nn.Linear],
    },
    "overrides": {
        "qconfig": QConfig(
            overrides={"conv1": None, "conv?": QConfig(weight=QScheme(bits=4, symmetric=True))},
            weight_observer=MinMaxObserver,
        ),
        "backend": "reference",
    },
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_load_from_checkpoint_rebuilds_the_structure_without_a_trainer(pl, tmp_path, settings):  # C04
    cls = hyper_task(pl)
    model, callback = cls(width=4), QuantizationAwareTraining(**settings)
    saver = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    trainer(pl, tmp_path, [callback, saver], enable_checkpointing=True).fit(model, loader())
    fresh = cls.load_from_checkpoint(saver.last_model_path, weights_only=True).eval()
    assert_same_state(state_of(fresh.net), state_of(callback.prepared["net"]))
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(fresh(x), callback.prepared["net"].eval()(x))
    assert torch.equal(convert(fresh.net)(x), callback.int8_model(x))
    tester = QuantizationAwareTraining(**settings)
    trainer(pl, tmp_path, tester).test(fresh, loader(), verbose=False)
    assert torch.equal(fresh(x), callback.int8_model(x))


def test_a_checkpoint_of_the_prepared_form_loads_strictly_into_the_plain_model(pl, tmp_path):
    _, callback, _, saver = checkpointed_fit(pl, tmp_path)
    plain = task(pl)
    plain.load_state_dict(torch.load(saver.last_model_path, weights_only=True)["state_dict"])
    qlightning.unprepare(plain.net)
    trained = callback.prepared["net"].state_dict()
    assert_same_state(state_of(plain.net), {name: trained[name] for name in plain.net.state_dict()})
    assert type(plain.net) is Net


def test_a_float_checkpoint_starts_a_quantization_aware_training(pl, tmp_path):
    saver = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    run = trainer(pl, tmp_path, [saver], enable_checkpointing=True)
    run.fit(task(pl), loader(64))
    model, callback = task(pl), QuantizationAwareTraining()
    run = trainer(pl, tmp_path, callback, max_epochs=4)
    run.fit(model, loader(64), ckpt_path=saver.last_model_path)
    assert run.global_step == 32
    assert callback.report.int8_layers


@pytest.mark.parametrize("how", ["fit", "test", "validate"])
def test_other_settings_than_those_of_the_checkpoint_are_listed(pl, tmp_path, how):
    _, _, _, saver = checkpointed_fit(pl, tmp_path)
    other = QuantizationAwareTraining(
        QConfig(
            activation=QScheme(bits=6, signed=False),
            activation_observer=functools.partial(MovingAverageObserver, averaging_constant=0.5),
        ),
        backend="reference",
        exclude=["fc"],
    )
    model = task(pl)
    before = state_of(model)
    run = trainer(pl, tmp_path, other, max_epochs=4)
    data = (loader(), loader()) if how == "fit" else (loader(),)
    with pytest.raises(ConfigError) as error:
        getattr(run, how)(model, *data, ckpt_path=saver.last_model_path)
    for word in ("backend", "uint6", "averaging_constant=0.5", "exclude", "'fc'"):
        assert word in str(error.value), error.value
    if how == "fit":
        assert_same_state(state_of(model), before)


def test_an_observer_that_is_not_imported_is_named(tmp_path):
    net = qlightning.prepare(Net(), QConfig(activation_observer=lambda scheme: MinMaxObserver(scheme)))
    model = task(pytorch_lightning)
    state = {f"net.{name}": value for name, value in net.state_dict().items()}
    with pytest.warns(UserWarning, match="does not say how the model was prepared"):
        model.load_state_dict(state)  # a dict of one's own making has no facts: the float weights alone
    assert not is_prepared(model)
    prepared = task(pytorch_lightning, net)
    before = state_of(model)
    with pytest.raises(ConfigError, match="lambda"):
        model.load_state_dict(prepared.state_dict())
    assert_same_state(state_of(model), before)
    assert not is_prepared(model)


@pytest.mark.parametrize("how", ["test", "validate", "predict"])
def test_a_checkpoint_is_evaluated_in_int8_without_the_callback_too(pl, tmp_path, how):  # C03
    model, _, _, saver = checkpointed_fit(pl, tmp_path)
    fresh = task(pl)
    data = loader() if how != "predict" else torch.utils.data.DataLoader(samples(8)[0], 4)
    getattr(trainer(pl, tmp_path, None), how)(fresh, data, ckpt_path=saver.last_model_path)
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(fresh(x), model(x))
    assert isinstance(fresh.net.conv1, QuantizedLayer)


def test_what_was_calibrated_is_saved_and_evaluated_elsewhere(pl, tmp_path):
    model, callback = task(pl), PostTrainingQuantization(calibration_data=loader())
    run = trainer(pl, tmp_path, callback)
    run.fit(model, loader(64))
    run.save_checkpoint(tmp_path / "ptq.ckpt")
    fresh = task(pl)
    trainer(pl, tmp_path, None).test(fresh, loader(), ckpt_path=tmp_path / "ptq.ckpt", verbose=False)
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(fresh(x), model(x))


def test_a_checkpoint_says_where_it_stands(pl, tmp_path):
    _, callback, _, saver = checkpointed_fit(pl, tmp_path)
    states = torch.load(saver.last_model_path, weights_only=True)["callbacks"]
    (facts,) = [state for key, state in states.items() if key.startswith("QuantizationAware")]
    assert facts["version"] == qlightning.__version__
    assert facts["schedule"] == {
        "fake_quant_start": "epoch 0",
        "freeze_observers": f"{FREEZE_OBSERVERS} of the training",
        "freeze_bn": f"{FREEZE_BN} of the training",
    }
    assert facts["position"] == str(callback.schedule.at(Progress(1, 15, 15 / 16)))


@pytest.mark.parametrize("into", ["float", "prepared", "int8"])
def test_the_state_dict_of_an_int8_net_is_refused_by_a_lightning_module(pl, tmp_path, into):  # C43
    model, *_ = checkpointed_fit(pl, tmp_path)
    state = {f"net.{name}": value for name, value in model.net.state_dict().items()}
    other = task(pl)
    if into != "float":
        callback = QuantizationAwareTraining(convert=into == "int8")
        trainer(pl, tmp_path, callback).fit(other, loader(seed=1), loader())
    before, output = state_of(other), other.eval()(samples(4)[0])
    with pytest.raises(ConfigError, match="that of an int8 model"):
        other.load_state_dict(state)
    assert_same_state(state_of(other), before)
    assert torch.equal(other(samples(4)[0]), output)


@pytest.mark.parametrize("where", ["fresh", "int8 by another callback", "load_from_checkpoint"])
def test_ptq_evaluates_the_checkpoint_of_a_calibration_with_its_ranges(pl, tmp_path, where):
    x, model = samples(8)[0], task(pl)
    run = trainer(pl, tmp_path, PostTrainingQuantization(), max_epochs=1)
    run.fit(model, loader())
    run.save_checkpoint(tmp_path / "ptq.ckpt")
    callback = PostTrainingQuantization(calibration_data=loader(scale=100.0))
    tester, path = trainer(pl, tmp_path, callback), tmp_path / "ptq.ckpt"
    other = task(pl)
    if where.startswith("int8"):
        earlier = PostTrainingQuantization(calibration_data=loader(scale=10.0))
        trainer(pl, tmp_path, earlier).test(other, loader(), verbose=False)
    elif where == "load_from_checkpoint":
        other, path = type(other).load_from_checkpoint(path, weights_only=True), None
    tester.test(other, loader(), ckpt_path=path, verbose=False)
    assert torch.equal(other(x), model(x))
    assert other.net is callback.int8_model
    assert callback.report.layers
    strange = PostTrainingQuantization(backend="reference", exclude=["fc"])
    output = other(x)
    with pytest.raises(ConfigError, match="'fc'"):
        trainer(pl, tmp_path, strange).test(other, loader(), ckpt_path=tmp_path / "ptq.ckpt", verbose=False)
    assert torch.equal(other(x), output)


def test_ptq_trains_float_nets_from_the_checkpoint_of_a_calibration(pl, tmp_path):
    model = task(pl)
    run = trainer(pl, tmp_path, PostTrainingQuantization(), max_epochs=1)
    run.fit(model, loader())
    run.save_checkpoint(tmp_path / "ptq.ckpt")
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(is_prepared(pl_module.net))

    other, callback = task(pl), PostTrainingQuantization()
    trainer(pl, tmp_path, [callback, Watch()]).fit(other, loader(seed=1), ckpt_path=tmp_path / "ptq.ckpt")
    assert seen == [False] * 4
    assert other.net is callback.int8_model
