"""What Lightning's own QuantizationAwareTraining was reported for, by the numbers of its issues."""

import inspect

import pytest
import torch
from torch import nn

from qlightning import PostTrainingQuantization, QuantizationAwareTraining, convert
from tests.callbacks.nets import Net, loader, samples, state_of, task, trainer


class TwoImages(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)
        self.fc = nn.Linear(4, 3)

    def forward(self, left, right=None, *, scale: float = 1.0):
        x = self.left(left) + self.right(left if right is None else right)
        return self.fc(torch.relu(x).mean((2, 3))) * scale


def two_images(pl):
    class Task(type(task(pl))):
        def __init__(self):
            super().__init__()
            self.net = TwoImages()

        def forward(self, image, other=None, *, scale: float = 1.0):
            return self.net(image, right=other, scale=scale)

        def training_step(self, batch, batch_idx):
            x, y = batch
            return nn.functional.cross_entropy(self(image=x, other=-x), y)

        def validation_step(self, batch, batch_idx):
            self.log("loss", self.training_step(batch, batch_idx))

        def predict_step(self, batch, batch_idx):
            return self(other=-batch[0], image=batch[0])

    return Task()


def test_issue_7926_several_inputs_and_keywords(pl, tmp_path):
    model, callback = two_images(pl), QuantizationAwareTraining()
    run = trainer(pl, tmp_path, callback)
    run.fit(model, loader(), loader())
    x = samples(32)[0][:8]
    outputs = run.predict(model, loader())
    assert torch.equal(outputs[0], model(x, other=-x))
    assert torch.equal(outputs[0], convert(callback.prepared["net"].eval())(x, right=-x, scale=1.0))
    assert not torch.equal(outputs[0], model(x, other=x))


def test_issue_15862_forward_keeps_its_argument_names(pl, tmp_path):
    model, callback = two_images(pl), QuantizationAwareTraining()
    before = inspect.signature(model.forward), inspect.signature(model.net.forward)
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append((inspect.signature(pl_module.forward), inspect.signature(pl_module.net.forward)))

    trainer(pl, tmp_path, [callback, Watch()], max_epochs=1).fit(model, loader())
    assert seen == [before] * 4
    assert (inspect.signature(model.forward), inspect.signature(model.net.forward)) == before


def test_issue_12896_test_with_ckpt_path_after_fit(pl, tmp_path):
    model, callback = task(pl), QuantizationAwareTraining()
    saver = pl.callbacks.ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True)
    run = trainer(pl, tmp_path, [callback, saver], enable_checkpointing=True)
    run.fit(model, loader(), loader())
    x = samples(8)[0]
    last = model(x)
    for path in ("best", "last", saver.last_model_path):
        (metrics,) = run.test(model, loader(), ckpt_path=path, verbose=False)
        assert 0 <= metrics["val_acc"] <= 1
        assert model.net is callback.int8_model
    assert torch.equal(model(x), last)


def test_issue_11047_pruning_and_quantization(pl, tmp_path):
    model, callback = task(pl), QuantizationAwareTraining()
    pruning = pl.callbacks.ModelPruning("l1_unstructured", amount=0.5)  # every weight and bias that there is
    run = trainer(pl, tmp_path, [pruning, callback], max_epochs=1)
    run.fit(model, loader())
    prepared, int8 = callback.prepared["net"], model.net
    zeros = {name: getattr(prepared, name).weight == 0 for name in ("conv1", "conv2", "fc")}
    assert sum(int(is_zero.sum()) for is_zero in zeros.values()) > 0.45 * sum(z.numel() for z in zeros.values())
    for name, is_zero in zeros.items():
        assert not getattr(int8, name).weight().int_repr()[is_zero].any(), name
    run.test(model, loader(), verbose=False)
    assert model.net is int8


def test_issue_16609_a_round_trip(pl, tmp_path):
    """Why Lightning took its callback away: a forward replaced on the instance, a model that could not be trained on
    after it was converted, and checkpoints that nothing but the same Trainer could load."""

    class Task(type(task(pl))):
        def __init__(self):
            super().__init__()
            self.net = Net()

    def fit(model, epochs, **options):
        callback, saver = QuantizationAwareTraining(), pl.callbacks.ModelCheckpoint(tmp_path, save_last=True)
        run = trainer(pl, tmp_path, [callback, saver], enable_checkpointing=True, max_epochs=epochs)
        run.fit(model, loader(), **options)
        return callback, run, saver.last_model_path

    model = Task()
    _, run, path = fit(model, 1)
    assert "forward" not in vars(model)
    run.save_checkpoint(tmp_path / "after.ckpt")
    for saved in (path, tmp_path / "after.ckpt"):
        loaded = Task.load_from_checkpoint(saved)
        before = state_of(loaded.net)
        again, run, _ = fit(loaded, 1)  # trains on
        assert not torch.equal(again.prepared["net"].fc.weight, before["fc.weight"])
        resumed, run, _ = fit(Task(), 2, ckpt_path=saved)  # as does a new model
        assert run.global_step == 8
        (metrics,) = run.test(run.lightning_module, loader(), verbose=False)
        assert metrics["val_loss"] > 0
        assert run.lightning_module.net is resumed.int8_model


@pytest.mark.parametrize("loop", ["validate", "test"])
def test_issue_7552_quantization_without_training(pl, tmp_path, loop):
    model, callback = task(pl), PostTrainingQuantization(calibration_data=loader())
    x = samples(8)[0]
    wanted = model.eval()(x)
    (metrics,) = getattr(trainer(pl, tmp_path, callback), loop)(model, loader(), verbose=False)
    assert model.net is callback.int8_model
    # Two roundings of half a step of 1/255 for each of the three layers, and the 7 bits of the weights.
    assert (model(x) - wanted).abs().max() < (3 / 255 + 3 / 127) * 2 * wanted.abs().max()
    assert metrics["val_loss"] > 0
