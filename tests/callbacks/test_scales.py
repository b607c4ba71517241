"""Learned scales in a Lightning training: their group in the optimizers, checkpoints, and other callbacks."""

import itertools

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.optim import lr_scheduler

from qlightning import LearnedScales, QConfig, QuantizationAwareTraining, convert
from qlightning.callbacks.scales import weights_of
from qlightning.errors import ConfigError, NonFiniteError
from qlightning.fake_quantize import fake_quantizers
from qlightning.learned import learned_fake_quantizers
from tests.callbacks.nets import Net, assert_same_state, loader, state_of, task, trainer

FACTOR = 0.25
LEARNED = QConfig(learned=LearnedScales(lr_factor=FACTOR))


def sgd(parameters, **settings):
    return torch.optim.SGD(parameters, **{"lr": 0.02, "momentum": 0.9, "weight_decay": 1e-3, **settings})


def task_with(configure, net=None):
    class Task(type(task(pl))):
        def configure_optimizers(self):
            return configure(self)

    model = Task()
    if net is not None:
        model.net = net
    return model


def fit(tmp_path, configure=lambda model: sgd(model.parameters()), callbacks=(), qconfig=LEARNED, net=None, **options):
    ckpt_path = options.pop("ckpt_path", None)
    settings = options.pop("settings", {})
    model, callback = task_with(configure, net), QuantizationAwareTraining(qconfig, **settings)
    if "state" in options:
        model.load_state_dict(options.pop("state"))
    run = trainer(pl, tmp_path, [callback, *callbacks], **options)
    run.fit(model, loader(), loader(), ckpt_path=ckpt_path)
    return model, callback, run


def scales_of(module):
    return [p for _, fq in learned_fake_quantizers(module) for p in fq.parameters(recurse=False)]


def ids(parameters):
    return {id(p) for p in parameters}


def test_scales_have_a_group_of_their_own(tmp_path):
    _, callback, run = fit(tmp_path)
    prepared = callback.prepared["net"]
    weights, scales = run.optimizers[0].param_groups
    assert ids(weights["params"]) == ids(weights_of(prepared))
    assert ids(scales["params"]) == ids(scales_of(prepared))
    assert scales["weight_decay"] == 0
    assert weights["weight_decay"] == 1e-3
    assert scales["lr"] == FACTOR * weights["lr"]
    assert scales["momentum"] == weights["momentum"]


def test_int8_runs_on_the_learned_grids(tmp_path):
    model, callback, run = fit(tmp_path)
    prepared = callback.prepared["net"].eval()
    assert all(fq.learning and torch.equal(fq.step, fq.scale) for _, fq in learned_fake_quantizers(prepared))
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(model.net(x), convert(prepared)(x))
    assert run.test(model, loader(), verbose=False)


@pytest.mark.parametrize("names", [False, True])
def test_groups_of_the_user_keep_their_weights(tmp_path, names):
    def configure(model):
        def chosen(kind):
            found = [(n, p) for n, p in model.named_parameters() if n.endswith("bias") == kind]
            return found if names else [p for _, p in found]

        groups = [{"params": chosen(False)}, {"params": chosen(True), "lr": 0.1, "weight_decay": 0.0}]
        return sgd(groups)

    _, callback, run = fit(tmp_path, configure)
    groups = run.optimizers[0].param_groups
    assert [len(group["params"]) for group in groups] == [5, 3, len(scales_of(callback.prepared["net"]))]
    assert groups[2]["lr"] == FACTOR * groups[0]["lr"]
    if names:
        assert "net.graph_fake_quant.conv1.step" in groups[2]["param_names"]


def test_an_optimizer_of_chosen_weights_gets_the_scales(tmp_path):
    _, callback, run = fit(tmp_path, lambda model: sgd([p for n, p in model.named_parameters() if "fc" in n]))
    groups = run.optimizers[0].param_groups
    assert [len(group["params"]) for group in groups] == [2, len(scales_of(callback.prepared["net"]))]
    assert all(bool((fq.step != 0).all()) for _, fq in learned_fake_quantizers(callback.prepared["net"]))


SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=8),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=3),
    "linear": lambda o: lr_scheduler.LinearLR(o),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.StepLR(o, 2)], milestones=[3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers_move_the_scales_along(tmp_path, scheduler):
    def configure(model):
        optimizer = sgd(model.parameters())
        return [optimizer], [{"scheduler": scheduler(optimizer), "interval": "step"}]

    rates = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    fit(tmp_path, configure, [Watch()])
    assert len(rates) == 8
    assert len({weights for weights, _ in rates}) > 1
    for weights, scales in rates:
        assert scales == pytest.approx(FACTOR * weights)


def test_a_plateau_moves_the_scales_along(tmp_path):
    def configure(model):
        optimizer = sgd(model.parameters())
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, threshold=10.0, min_lr=1e-9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    _, _, run = fit(tmp_path, configure, max_epochs=4)
    weights, scales = (group["lr"] for group in run.optimizers[0].param_groups)
    assert weights < 0.02
    assert scales == pytest.approx(FACTOR * weights)


def stepped(model):
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    return [optimizer], [{"scheduler": lr_scheduler.CosineAnnealingLR(optimizer, 16), "interval": "step"}]


@pytest.mark.parametrize("stop", [4, 8, 12])
def test_a_resumed_run_ends_like_one_that_never_stopped(tmp_path, stop):
    start = state_of(task(pl))
    points = {"fake_quant_start": "6 steps", "freeze_observers": "11 steps", "freeze_bn": "13 steps", "convert": False}

    def run(name, ckpt_path=None):
        saver = pl.callbacks.ModelCheckpoint(tmp_path / name, every_n_train_steps=1, save_top_k=-1)
        model, _, runner = fit(
            tmp_path,
            stepped,
            [saver],
            settings=points,
            state=start,
            enable_checkpointing=True,
            max_epochs=4,
            ckpt_path=ckpt_path,
        )
        return state_of(model), [group["lr"] for group in runner.optimizers[0].param_groups]

    whole, rates = run("whole")
    resumed, again = run(f"resumed{stop}", next((tmp_path / "whole").glob(f"*step={stop}.ckpt")))
    assert_same_state(resumed, whole)
    assert again == rates


@pytest.mark.parametrize("configure", [stepped, lambda model: sgd(model.parameters())])
def test_a_float_training_is_resumed_with_learned_scales(tmp_path, configure):
    saver = pl.callbacks.ModelCheckpoint(tmp_path)
    run = trainer(pl, tmp_path, [saver], enable_checkpointing=True)
    run.fit(task_with(configure), loader())
    before = run.optimizers[0].param_groups[0]["lr"]
    _, callback, run = fit(tmp_path, configure, max_epochs=4, ckpt_path=saver.best_model_path)
    weights, scales = (group["lr"] for group in run.optimizers[0].param_groups)
    assert scales == pytest.approx(FACTOR * weights)
    assert weights <= before
    assert all(fq.learning for _, fq in learned_fake_quantizers(callback.prepared["net"]))


def test_a_checkpoint_with_observed_scales_is_refused_and_lists_the_difference(tmp_path):
    saver = pl.callbacks.ModelCheckpoint(tmp_path)
    fit(tmp_path, callbacks=[saver], qconfig=QConfig(), enable_checkpointing=True)
    with pytest.raises(ConfigError, match="learned scales are none there and activations, weights here"):
        fit(tmp_path, max_epochs=4, ckpt_path=saver.best_model_path)


def test_a_checkpoint_rebuilds_learned_scales(tmp_path):
    saver = pl.callbacks.ModelCheckpoint(tmp_path)
    model, _, _ = fit(tmp_path, callbacks=[saver], enable_checkpointing=True)
    restored = type(task(pl)).load_from_checkpoint(saver.best_model_path)
    assert all(fq.learning for _, fq in learned_fake_quantizers(restored.net))
    assert scales_of(restored.net)
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(convert(restored.net)(x), model.net(x))


def test_frozen_scales_hold_still(tmp_path):
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            seen.append([fq.scale.clone() for _, fq in fake_quantizers(pl_module)])

    fit(tmp_path, callbacks=[Watch()], settings={"freeze_observers": "5 steps"}, accumulate_grad_batches=1)
    same = [all(map(torch.equal, a, b)) for a, b in itertools.pairwise(seen)]
    assert not any(same[:4])
    assert all(same[4:])


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_averages_of_scales_are_what_is_converted(tmp_path, kind, before):
    average = (
        pl.callbacks.EMAWeightAveraging(decay=0.5)
        if kind == "ema"
        else pl.callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)
    )
    callback = QuantizationAwareTraining(LEARNED)
    model = task_with(lambda model: sgd(model.parameters()))
    callbacks = [average, callback] if before else [callback, average]
    trainer(pl, tmp_path, callbacks, max_epochs=4).fit(model, loader(64), loader())
    for name, fq in learned_fake_quantizers(callback.prepared["net"]):
        assert torch.equal(fq.scale, fq.step), name
        assert fq.zero_point.dtype == torch.int32, name
        if fq.scheme.symmetric:
            assert bool((fq.zero_point == fq.scheme.middle).all()), name
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(model.net(x), convert(callback.prepared["net"].eval())(x))


def test_compiled_graphs_learn_scales(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # the branches of a graph, in Python
    fit(tmp_path, settings={"compile": True})


def test_without_an_optimizer_there_is_nothing_to_learn_with(tmp_path):
    with pytest.raises(ConfigError, match="Learned scales need an optimizer"):
        fit(tmp_path, lambda model: None)


def test_an_optimizer_without_groups_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="LBFGS"):
        fit(tmp_path, lambda model: torch.optim.LBFGS(model.parameters()))


def test_nan_names_the_layer_and_the_batch(tmp_path):
    class Broken(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            if trainer.global_step == 3:
                fq = dict(learned_fake_quantizers(pl_module))["net.graph_fake_quant.conv1"]
                fq.step.grad.fill_(torch.nan)

    with pytest.raises(NonFiniteError, match=r"epoch 0, training batch 3: conv1.*learned scale"):
        fit(tmp_path, callbacks=[Broken()])


def test_rates_can_be_logged(tmp_path):
    class Logger(pl.loggers.logger.DummyLogger):
        pass

    fit(tmp_path, stepped, [pl.callbacks.LearningRateMonitor("step")], logger=Logger())


def test_the_weights_are_told_from_the_scales(tmp_path):
    _, callback, _ = fit(tmp_path)
    prepared = callback.prepared["net"]
    assert len(weights_of(prepared)) == len(list(Net().parameters()))
    assert isinstance(scales_of(prepared)[0], nn.Parameter)
