"""Averages of weights beside quantization: EMA and SWA of Lightning, before or after our callback."""

import pytest
import torch
from torch import nn

from qlightning import QuantizationAwareTraining, convert
from qlightning.errors import ConfigError
from qlightning.fake_quantize import WeightFakeQuantize, fake_quantizers
from qlightning.graph import is_prepared
from qlightning.nn.quantized import has_int8_layers
from tests.callbacks.nets import Net, assert_same_state, loader, state_of, task, trainer


def fit(pl, tmp_path, others, first, **options):
    callback, model = QuantizationAwareTraining(**options), task(pl)
    callbacks = [*others, callback] if first else [callback, *others]
    run = trainer(pl, tmp_path, callbacks, max_epochs=4, enable_checkpointing=any(map(is_saver, others)))
    run.fit(model, loader(64), loader())
    return model, callback, run


def is_saver(callback):
    return type(callback).__name__ == "ModelCheckpoint"


class Recorder:
    """An EMA of the parameters, kept beside Lightning's."""

    def __init__(self, decay):
        self.decay, self.average = decay, None

    def update(self, parameters):
        if self.average is None:
            self.average = [p.detach().clone() for p in parameters]
        else:
            for average, p in zip(self.average, parameters, strict=True):
                average.copy_(average * self.decay + p.detach() * (1 - self.decay))


@pytest.mark.parametrize("first", [False, True])
def test_the_exponential_average_is_what_is_converted(pl, tmp_path, first):  # C35
    recorder = Recorder(0.5)

    class Watch(pl.callbacks.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            recorder.update(pl_module.parameters())

    average = pl.callbacks.EMAWeightAveraging(decay=0.5)
    _, callback, _ = fit(pl, tmp_path, [average, Watch()], first)
    prepared = callback.prepared["net"]
    for p, expected in zip(prepared.parameters(), recorder.average, strict=True):
        torch.testing.assert_close(p.detach(), expected)
    for name, fq in fake_quantizers(prepared):
        scale, zero_point = fq.observer.calculate_qparams()
        assert fq.zero_point.dtype == torch.int32
        assert torch.equal(fq.scale, scale), name
        assert torch.equal(fq.zero_point, zero_point), name
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(callback.int8_model(x), convert(prepared.eval())(x))
    fq = next(fq for _, fq in fake_quantizers(prepared) if isinstance(fq, WeightFakeQuantize))
    assert fq.scale.shape == (8,)


@pytest.mark.parametrize("first", [False, True])
def test_a_checkpoint_of_the_average_is_tested_in_int8_and_resumed(pl, tmp_path, first):
    average = pl.callbacks.EMAWeightAveraging(decay=0.5)
    saver = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    _, callback, _ = fit(pl, tmp_path, [average, saver], first)
    x = torch.randn(4, 3, 8, 8)
    rebuilt = type(task(pl)).load_from_checkpoint(saver.last_model_path, weights_only=True)
    assert torch.equal(convert(rebuilt.net.eval())(x), callback.int8_model(x))
    fresh = task(pl)
    trainer(pl, tmp_path, QuantizationAwareTraining()).test(fresh, loader(), ckpt_path=saver.last_model_path)
    assert torch.equal(fresh(x), callback.int8_model(x))
    resumed = QuantizationAwareTraining()
    again = [resumed, pl.callbacks.EMAWeightAveraging(decay=0.5)]
    run = trainer(pl, tmp_path, again[::-1] if first else again, max_epochs=5)
    run.fit(task(pl), loader(64), ckpt_path=saver.last_model_path)
    assert run.current_epoch == 5
    assert resumed.report.int8_layers


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("freeze_bn", [0.5, None])
def test_the_stochastic_average_keeps_frozen_statistics_and_takes_others_anew(pl, tmp_path, first, freeze_bn):  # C36
    seen = {}

    class Watch(pl.callbacks.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            seen[trainer.current_epoch] = state_of(pl_module.net.bn1)

    average = pl.callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)
    _, callback, run = fit(pl, tmp_path, [average, Watch()], first, freeze_bn=freeze_bn)
    prepared = callback.prepared["net"]
    assert run.current_epoch == 5  # one pass more, for the statistics
    for p, expected in zip(prepared.parameters(), average._average_model.net.parameters(), strict=True):
        assert torch.equal(p, expected)
    if freeze_bn is None:
        assert not torch.equal(prepared.bn1.running_mean, seen[3]["running_mean"])
        assert prepared.bn1.num_batches_tracked == 8
    else:
        assert torch.equal(prepared.bn1.running_mean, seen[3]["running_mean"])
        assert torch.equal(prepared.bn1.running_var, seen[3]["running_var"])
    assert prepared.bn1.momentum == nn.BatchNorm2d(1).momentum
    for layer in (prepared.conv1, prepared.conv2, prepared.fc):
        expected = layer.weight.detach().abs().flatten(1).amax(1) / layer.weight_fake_quant.scheme.quant_max
        torch.testing.assert_close(layer.weight_fake_quant.scale, expected)
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(callback.int8_model(x), convert(prepared.eval())(x))


def test_a_copy_made_before_our_setup_has_the_prepared_form(pl, tmp_path):
    average = pl.callbacks.EMAWeightAveraging(decay=0.5)
    model, callback = task(pl), QuantizationAwareTraining(convert=False)
    trainer(pl, tmp_path, [average, callback], max_epochs=1).fit(model, loader())
    assert_same_state(
        {name: torch.zeros(()) for name in average._average_model.module.state_dict()},
        {name: torch.zeros(()) for name in model.state_dict()},
    )
    assert isinstance(average._average_model.module.net, Net)
    assert is_prepared(average._average_model.module.net)


def test_a_best_checkpoint_without_the_averages_is_refused(pl, tmp_path):
    """Lightning asks no callback for a checkpoint of weights only, so that it holds the current ones."""
    saver = pl.callbacks.ModelCheckpoint(tmp_path, monitor="val_loss", save_weights_only=True)
    with pytest.raises(ConfigError, match="save_weights_only=False"):
        fit(pl, tmp_path, [pl.callbacks.EMAWeightAveraging(decay=0.5), saver], True, convert="best")
    model, *_ = fit(pl, tmp_path, [pl.callbacks.StochasticWeightAveraging(0.01), saver], True, convert="best")
    assert has_int8_layers(model)


def test_two_averages_of_the_same_weights_are_refused(pl, tmp_path):
    averages = [pl.callbacks.EMAWeightAveraging(decay=0.5), pl.callbacks.StochasticWeightAveraging(0.01)]
    with pytest.raises(ConfigError, match="EMAWeightAveraging and StochasticWeightAveraging"):
        fit(pl, tmp_path, averages, True)
