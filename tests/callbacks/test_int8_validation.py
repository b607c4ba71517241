"""Validation on int8, conversion of the best weights, and BatchNorm statistics taken anew."""

import copy

import pytest
import torch
from torch import nn

from qlightning import QuantizationAwareTraining, convert, prepare
from qlightning.errors import BackendError, ConfigError
from qlightning.graph import is_prepared, restore_forward
from tests.callbacks.nets import assert_same_state, loader, samples, state_of, task, trainer


def loss_on(net, count=32):
    x, y = samples(count)
    with torch.no_grad():
        parts = [nn.functional.cross_entropy(net(x[i : i + 8]), y[i : i + 8]).item() for i in range(0, count, 8)]
    return sum(parts) / len(parts)


def is_converted(net):
    """Whether a net computes in int8, as its output shows: it is that of the conversion, to the last bit."""
    x, _ = samples(64, seed=9)
    restored = copy.deepcopy(net)
    restore_forward(restored)
    return torch.equal(net(x), convert(restored)(x)) and not torch.equal(net(x), restored(x))


def observed_fit(pl, tmp_path, net_state, others=(), **options):
    """A fit with every source of noise: shuffling, dropout; returns all that the training has left."""
    torch.manual_seed(1)
    states, values, converted = [], [], []

    class Watch(pl.callbacks.Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                converted.append(is_converted(pl_module.net))

        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                states.append((state_of(pl_module), torch.get_rng_state()))
                values.append((converted[-1], trainer.callback_metrics["val_loss"].item()))

    model = task(pl)
    model.load_state_dict(net_state)
    callback = QuantizationAwareTraining(convert=False, freeze_observers=0.5, freeze_bn=0.75, **options)
    run = trainer(pl, tmp_path, [callback, *others, Watch()], max_epochs=4)
    run.fit(model, torch.utils.data.DataLoader(loader(64).dataset, 8, shuffle=True), loader())
    return states, values, callback, run


@pytest.mark.parametrize("every", [True, 2])
def test_validation_runs_on_int8_and_the_training_is_the_same(pl, tmp_path, every):
    start = state_of(task(pl))
    plain, _, _, _ = observed_fit(pl, tmp_path, start)
    states, int8, callback, run = observed_fit(pl, tmp_path, start, validate_int8=every)
    for (state, rng), (other, other_rng) in zip(states, plain, strict=True):
        assert_same_state(state, other)
        assert torch.equal(rng, other_rng)
    assert [is_int8 for is_int8, _ in int8] == ([True] * 4 if every is True else [False, True, False, True])
    prepared = callback.prepared["net"]
    assert int8[-1][1] == pytest.approx(loss_on(convert(prepared.eval())), rel=1e-6)
    moments = next(iter(run.optimizers[0].state.values()))["momentum_buffer"]
    assert moments.isfinite().all()


def test_what_is_monitored_is_the_int8_model(pl, tmp_path):
    saver = pl.callbacks.ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1)
    model, callback = task(pl), QuantizationAwareTraining(validate_int8=True, convert="best")
    run = trainer(pl, tmp_path, [saver, callback], enable_checkpointing=True, max_epochs=3)
    run.fit(model, loader(64), loader())
    for path, score in saver.best_k_models.items():
        other = task(pl)
        prepare(other.net)
        other.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        assert loss_on(convert(other.net.eval())) == pytest.approx(score.item(), rel=1e-6)
    assert loss_on(callback.int8_model) == pytest.approx(saver.best_model_score.item(), rel=1e-6)


def test_int8_validation_sees_the_exponential_average(pl, tmp_path):
    average = pl.callbacks.EMAWeightAveraging(decay=0.9)
    start = state_of(task(pl))
    for others in ([average], []):
        states, values, callback, _ = observed_fit(pl, tmp_path, start, others, validate_int8=True)
        if others:
            assert values[-1][1] == pytest.approx(loss_on(convert(callback.prepared["net"].eval())), rel=1e-6)
            averaged = states
    assert_same_state(averaged[0][0], states[0][0])  # the training itself is that of the current weights


def test_an_interrupted_int8_validation_leaves_the_prepared_net(pl, tmp_path):
    model, callback = task(pl), QuantizationAwareTraining(validate_int8=True)
    calls = []

    def broken(batch, batch_idx):
        calls.append(1)
        if len(calls) > 5:
            raise RuntimeError("broken")
        type(model).validation_step(model, batch, batch_idx)

    model.validation_step = broken
    with pytest.raises(RuntimeError, match="broken"):
        trainer(pl, tmp_path, callback, num_sanity_val_steps=0).fit(model, loader(), loader())
    net = model.net.eval()
    assert not is_converted(net)
    assert convert(net)(samples(4)[0]).isfinite().all()


def test_an_accelerator_without_int8_kernels_is_refused(pl, tmp_path):
    callback = QuantizationAwareTraining(validate_int8=True, backend="onednn")
    run, model = trainer(pl, tmp_path, callback), task(pl)
    run.strategy._root_device = torch.device("cuda")  # no accelerator is here, so fit would not come that far
    with pytest.raises(BackendError, match="run on the CPU"):
        callback.setup(run, model, "fit")
    assert not is_prepared(model)


@pytest.mark.parametrize("convert_from", ["best", "last", True])
def test_int8_is_made_of_the_best_or_the_last_weights(pl, tmp_path, convert_from):
    saver = pl.callbacks.ModelCheckpoint(tmp_path, monitor="val_loss", mode="max", save_top_k=-1)  # the worst
    model, callback = task(pl), QuantizationAwareTraining(convert=convert_from)
    run = trainer(pl, tmp_path, [callback, saver], enable_checkpointing=True, max_epochs=3)
    run.fit(model, loader(64), loader())
    other = task(pl)
    prepare(other.net)
    path = saver.best_model_path if convert_from == "best" else next(tmp_path.glob("epoch=2*"))
    other.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(model(x), convert(other.net.eval())(x))
    run.fit_loop.max_epochs = 4
    run.fit(model, loader(64), loader())
    assert callback.report.int8_layers


def test_the_best_needs_something_that_is_monitored(pl, tmp_path):
    model = task(pl)
    before = state_of(model)
    with pytest.raises(ConfigError, match="monitor"):
        trainer(pl, tmp_path, QuantizationAwareTraining(convert="best")).fit(model, loader())
    assert_same_state(state_of(model), before)
    run = trainer(pl, tmp_path, QuantizationAwareTraining(convert="best"), fast_dev_run=True)
    with pytest.warns(UserWarning, match="No checkpoint was written"):
        run.fit(task(pl), loader(), loader())


def test_batchnorm_statistics_are_taken_anew(pl, tmp_path):  # C81
    model, callback = task(pl), QuantizationAwareTraining(reestimate_bn=3, freeze_bn=0.5)
    run = trainer(pl, tmp_path, callback, max_epochs=2)
    run.fit(model, loader(64, scale=2.0), loader())
    prepared = callback.prepared["net"]
    assert (prepared.bn1.momentum, prepared.bn1.eps) == (0.1, 1e-5)
    assert prepared.bn1.num_batches_tracked == 3
    inputs = []
    handle = prepared.bn1.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    x, _ = samples(64, scale=2.0)
    for batch in x.split(8)[:3]:
        prepared.eval()(batch)
    handle.remove()
    means = torch.stack([batch.mean((0, 2, 3)) for batch in inputs]).mean(0)
    torch.testing.assert_close(prepared.bn1.running_mean, means, rtol=1e-4, atol=1e-5)
    assert torch.equal(callback.int8_model(x), convert(prepared.eval())(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"convert": "first"}, "convert"),
        ({"validate_int8": -1}, "validate_int8"),
        ({"validate_int8": "yes"}, "validate_int8"),
        ({"reestimate_bn": True}, "reestimate_bn"),
        ({"reestimate_bn": -2}, "reestimate_bn"),
    ],
)
def test_wrong_settings(options, message):
    with pytest.raises(ConfigError, match=message):
        QuantizationAwareTraining(**options)
