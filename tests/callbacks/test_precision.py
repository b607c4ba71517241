"""Precisions of a Trainer: what autocast computes in bfloat16 has ranges in float32, and nearly the same int8 model."""

import math

import pytest
import pytorch_lightning as pl
import torch

from qlightning import PostTrainingQuantization, QuantizationAwareTraining
from qlightning.errors import ConfigError
from qlightning.fake_quantize import WeightFakeQuantize, fake_quantizers
from tests.callbacks.nets import Net, loader, samples, state_of, task, trainer

BFLOAT16 = 2.0**-8
"""The relative error of rounding to bfloat16, whose significand has 8 bits."""

LAYERS = 3


def still(net):
    """A task whose weights stay: ranges and BatchNorm statistics are all that a training changes."""
    model = task(pl, net)
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.0)
    return model


def fit(tmp_path, start, precision):
    net = Net()
    net.load_state_dict(start)
    model, callback = still(net), QuantizationAwareTraining(freeze_bn=None)
    run = trainer(pl, tmp_path, callback, precision=precision)
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.extend(t.dtype for t in pl_module.state_dict().values() if t.is_floating_point())

    run.callbacks.append(Watch())
    run.fit(model, loader(64))
    assert set(seen) == {torch.float32}
    return model, callback, run


def test_autocast_gives_nearly_the_same_int8_model(tmp_path):
    start = state_of(Net())
    (exact, full, _), (other, mixed, run) = (fit(tmp_path, start, p) for p in ("32-true", "bf16-mixed"))
    ranges = dict(fake_quantizers(mixed.prepared["net"]))
    differs = False
    for name, fq in fake_quantizers(full.prepared["net"]):
        if isinstance(fq, WeightFakeQuantize) or name.endswith("conv1_input"):
            # Weights and inputs are looked at before anything is rounded.
            assert torch.equal(fq.scale, ranges[name].scale), name
        else:
            # A layer rounds its inputs, its weights and its outputs; at worst all errors add up.
            error = (fq.scale - ranges[name].scale).abs() / fq.scale
            assert error <= 3 * LAYERS * BFLOAT16, name
            differs |= bool(error > 0)
    assert differs  # it was bfloat16
    x, _ = samples(64, seed=3)
    expected, actual = exact(x), other(x)
    assert actual.dtype == torch.float32
    # The int8 models round once for each layer, to 8 bits as bfloat16 does, each of the two.
    worst = (3 * LAYERS + 2 * LAYERS) * BFLOAT16
    sqnr = 10 * math.log10(expected.square().sum() / (expected - actual).square().sum())
    assert sqnr >= -20 * math.log10(worst)
    (metrics,) = run.test(other, loader(), verbose=False)
    outputs = other(samples(32)[0])
    assert metrics["val_acc"] == pytest.approx(float((outputs.argmax(1) == samples(32)[1]).float().mean()))


def test_calibration_under_autocast_keeps_float32(tmp_path):
    model, callback = task(pl).eval(), PostTrainingQuantization(calibration_data=loader())
    trainer(pl, tmp_path, callback, precision="bf16-mixed").test(model, loader(), verbose=False)
    dtypes = {t.dtype for t in callback.prepared["net"].state_dict().values() if t.is_floating_point()}
    assert dtypes == {torch.float32}
    assert model(samples(4)[0]).dtype == torch.float32


def test_half_precision_on_the_cpu_is_what_lightning_makes_of_it(tmp_path):
    with pytest.warns(UserWarning, match="bf16-mixed"):
        run = trainer(pl, tmp_path, callback := QuantizationAwareTraining(), precision="16-mixed")
    assert run.precision == "bf16-mixed"
    model = task(pl)
    run.fit(model, loader())
    assert model.net is callback.int8_model


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
@pytest.mark.parametrize("callback", [QuantizationAwareTraining, PostTrainingQuantization])
def test_parameters_of_half_precision_stop_a_run_before_a_batch(tmp_path, precision, callback):
    model = task(pl)
    model.training_step = model.test_step = lambda *_: pytest.fail("a batch ran")
    before = state_of(model)
    run = trainer(pl, tmp_path, callback(), precision=precision)
    loop = run.fit if callback is QuantizationAwareTraining else run.test
    with pytest.raises(ConfigError, match=f"{precision}.*bf16-mixed"):
        loop(model, loader())
    assert type(model.net) is Net
    assert state_of(model).keys() == before.keys()
