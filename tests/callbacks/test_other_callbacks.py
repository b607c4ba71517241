"""Beside other callbacks, before or after them, and with what a Trainer can do: the int8 model is what was trained."""

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from qlightning import PostTrainingQuantization, QuantizationAwareTraining, convert
from qlightning.errors import ConfigError
from tests.callbacks.nets import Net, assert_same_state, loader, samples, state_of, task, trainer


class Tunable(type(task(pl))):
    def __init__(self):
        super().__init__()
        self.net, self.lr, self.batch_size = Net(), 0.05, 8

    def train_dataloader(self):
        return loader(64, self.batch_size)

    def val_dataloader(self):
        return loader()

    test_dataloader = val_dataloader

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=0.9)


class Unfreezing(pl.callbacks.BaseFinetuning):
    """The first convolution is trained from epoch 1 on."""

    def freeze_before_training(self, pl_module):
        self.freeze([pl_module.net.conv1, pl_module.net.bn1], train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group([pl_module.net.conv1, pl_module.net.bn1], optimizer, lr=0.05)


def pruning(model, **options):
    net = model.net
    chosen = [(net.conv1, "weight"), (net.conv2, "weight"), (net.fc, "weight")]
    return pl.callbacks.ModelPruning("l1_unstructured", chosen, amount=0.5, **options)


OTHERS = {
    "pruning": pruning,
    "finetuning": lambda model: Unfreezing(),
    "accumulation": lambda model: pl.callbacks.GradientAccumulationScheduler({0: 4, 1: 2}),
    "stopping": lambda model: pl.callbacks.EarlyStopping("val_loss", patience=0, min_delta=100.0),
    "learning_rate": lambda model: pl.callbacks.LearningRateFinder(num_training_steps=8),
    "batch_size": lambda model: pl.callbacks.BatchSizeFinder(steps_per_trial=1, max_trials=1),
    "rich": lambda model: pl.callbacks.RichProgressBar(),
    "none": lambda model: pl.callbacks.Callback(),
}


def check_end(run, model, callback):
    """The int8 model is the conversion of the prepared one, which has all its parameters, and is what is tested."""
    prepared = callback.prepared["net"]
    assert model.net is callback.int8_model
    assert {name for name, _ in Net().named_parameters()} == {name for name, _ in prepared.named_parameters()}
    assert [row.name for row in callback.report.int8_layers] == ["net.conv1", "net.conv2", "net.fc"]
    x, y = samples(32)
    outputs = model(x)
    assert torch.equal(outputs, convert(prepared.eval())(x))
    (metrics,) = run.test(model, verbose=False)
    assert metrics["val_acc"] == pytest.approx(float((outputs.argmax(1) == y).float().mean()))
    assert torch.equal(model(x), outputs)


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_the_order_of_callbacks_makes_no_difference(tmp_path, other):
    states = []
    start = state_of(Net())
    for first in (True, False):
        model, callback = Tunable(), QuantizationAwareTraining(freeze_observers=0.5, freeze_bn=0.75)
        model.net.load_state_dict(start)
        beside = other(model)
        callbacks = [callback, beside] if first else [beside, callback]
        run = trainer(
            pl, tmp_path, callbacks, enable_progress_bar=isinstance(beside, pl.callbacks.ProgressBar), max_epochs=3
        )
        run.fit(model)
        states.append(state_of(callback.prepared["net"]))
        check_end(run, model, callback)
    assert_same_state(*states)
    assert not any(torch.equal(states[0][f"{name}.weight"], start[f"{name}.weight"]) for name in ("conv1", "fc"))


@pytest.mark.parametrize("first", [False, True])
def test_pruned_weights_are_zeros_in_int8(tmp_path, first):
    model, callback = Tunable(), QuantizationAwareTraining(freeze_observers=0.5)
    beside = pruning(model)
    run = trainer(pl, tmp_path, [callback, beside] if first else [beside, callback])
    for _ in range(2):  # a further fit prunes the same modules, which are prepared ones again
        run.fit_loop.epoch_progress.reset()
        run.fit_loop.max_epochs = 2
        run.fit(model)
        prepared, zeros, count = callback.prepared["net"], 0, 0
        for name in ("conv1", "conv2", "fc"):
            is_zero = prepared.get_submodule(name).weight == 0
            codes = model.net.get_submodule(name).weight().int_repr()
            assert not codes[is_zero].any()
            zeros, count = zeros + int(is_zero.sum()), count + is_zero.numel()
        assert zeros / count >= 0.74  # half of them, and half of what is left
        check_end(run, model, callback)
    run.save_checkpoint(tmp_path / "pruned.ckpt")
    rebuilt, x = Tunable.load_from_checkpoint(tmp_path / "pruned.ckpt", weights_only=True), samples(4)[0]
    assert torch.equal(convert(rebuilt.net.eval())(x), model(x))


@pytest.mark.parametrize("first", [False, True])
def test_a_pruned_net_is_quantized_after_training(tmp_path, first):
    model, callback = Tunable(), PostTrainingQuantization()
    beside = pruning(model)
    run = trainer(pl, tmp_path, [callback, beside] if first else [beside, callback])
    run.fit(model)
    is_zero = callback.prepared["net"].conv2.weight == 0
    assert is_zero.float().mean() > 0.5
    assert not model.net.conv2.weight().int_repr()[is_zero].any()
    check_end(run, model, callback)


@pytest.mark.parametrize("first", [False, True])
def test_what_is_frozen_holds_still_until_it_is_unfrozen(tmp_path, first):
    seen = {}

    class Watch(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            seen[trainer.current_epoch] = state_of(pl_module.net)

    model, callback = Tunable(), QuantizationAwareTraining(freeze_bn=None)
    start = state_of(model.net)
    run = trainer(pl, tmp_path, [callback, Unfreezing(), Watch()] if first else [Unfreezing(), Watch(), callback])
    run.fit(model)
    for name in ("conv1.weight", "bn1.weight", "bn1.running_mean"):
        assert torch.equal(seen[0][name], start[name]), name
        assert not torch.equal(seen[1][name], start[name]), name
    assert not torch.equal(seen[0]["bn2.running_mean"], start["bn2.running_mean"])
    held = {id(p) for group in run.optimizers[0].param_groups for p in group["params"]}
    assert held == {id(p) for p in callback.prepared["net"].parameters()}


def test_steps_are_counted_as_gradients_are_accumulated(tmp_path):
    accumulation = pl.callbacks.GradientAccumulationScheduler({0: 8, 1: 4})  # 1 + 2 steps
    stages = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            stages.append((trainer.global_step, int(trainer.progress_bar_metrics["qat/stage"])))

    callback = QuantizationAwareTraining(freeze_observers="1 steps", freeze_bn="2 steps")
    trainer(pl, tmp_path, [callback, Watch(), accumulation]).fit(Tunable())
    assert stages == [(0, 1)] * 7 + [(1, 1)] + [(1, 2)] * 3 + [(2, 2)] + [(2, 3)] * 3 + [(3, 3)]
    late = QuantizationAwareTraining(fake_quant_start="3 steps", freeze_observers=None)
    with pytest.raises(ConfigError, match="ends at step 3"):
        trainer(pl, tmp_path, [late, accumulation]).fit(Tunable())


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"accumulate_grad_batches": 4}, 4),
        ({"gradient_clip_val": 0.01}, 16),
        ({"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}, 16),
        ({"overfit_batches": 2}, 4),
        ({"overfit_batches": 0.5}, 8),
        ({"limit_train_batches": 3}, 6),
        ({"limit_train_batches": 0.5}, 8),
        ({"max_epochs": -1, "max_steps": 12}, 12),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None}, 16),
        ({"reload_dataloaders_every_n_epochs": 1}, 16),
    ],
    ids=str,
)
def test_settings_of_the_trainer(tmp_path, options, steps):
    stages, norms = [], []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            stages.append(int(trainer.progress_bar_metrics["qat/stage"]))

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            grads = [p.grad for p in pl_module.parameters()]
            norms.append((float(nn.utils.get_total_norm(grads)), max(float(grad.abs().max()) for grad in grads)))

    class Clipped(Tunable):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
            grads = [p.grad for p in self.parameters()]
            norms[-1] = float(nn.utils.get_total_norm(grads)), max(float(grad.abs().max()) for grad in grads)

    model, callback = Clipped(), QuantizationAwareTraining(freeze_observers=0.5, freeze_bn=0.75)
    run = trainer(pl, tmp_path, [callback, Watch()], **options)
    run.fit(model)
    assert run.global_step == steps
    batches = len(stages)
    wanted = [1] * -(-batches // 2) + [2] * (-(-3 * batches // 4) - -(-batches // 2))
    assert stages == wanted + [3] * (batches - len(wanted))
    if clip := options.get("gradient_clip_val"):
        which = 1 if "gradient_clip_algorithm" in options else 0
        assert all(norm[which] <= clip * (1 + 1e-5) for norm in norms)
    check_end(run, model, callback)


def test_one_batch_is_enough_for_an_int8_model(tmp_path):
    model, callback = Tunable(), QuantizationAwareTraining()
    run = trainer(pl, tmp_path, callback, fast_dev_run=True)
    run.fit(model)
    assert model.net is callback.int8_model
    x = samples(4)[0]
    assert torch.equal(model(x), convert(callback.prepared["net"].eval())(x))


class Alternating(Tunable):
    """Two optimizers that a training step drives by hand, with gradients clipped."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()[batch_idx % 2]
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()

    def configure_optimizers(self):
        head = list(self.net.fc.parameters())
        rest = [p for name, p in self.net.named_parameters() if not name.startswith("fc")]
        return [torch.optim.SGD(head, lr=0.1), torch.optim.Adam(rest, lr=0.01)]


def test_several_optimizers_by_hand(tmp_path):
    model, callback = Alternating(), QuantizationAwareTraining()
    start = state_of(model.net)
    run = trainer(pl, tmp_path, callback)
    run.fit(model)
    after = callback.prepared["net"]
    assert all(not torch.equal(p, start[name]) for name, p in after.named_parameters())
    check_end(run, model, callback)


@pytest.mark.parametrize("first", [False, True])
def test_a_training_that_is_stopped_before_its_points_says_so(tmp_path, first, caplog):
    model, callback = Tunable(), QuantizationAwareTraining(freeze_observers=5, freeze_bn="70 steps")
    stop = pl.callbacks.EarlyStopping("val_loss", patience=0, min_delta=100.0)
    with caplog.at_level("INFO"):
        run = trainer(pl, tmp_path, [callback, stop] if first else [stop, callback], max_epochs=10)
        run.fit(model)
    assert run.current_epoch == 2
    said = [record.getMessage() for record in caplog.records]
    assert "Training ended before freeze_observers, freeze_bn." in said
    check_end(run, model, callback)
