"""Nets written for PyTorch's eager-mode quantization, under Lightning as they are."""

import torch
import torch.ao.quantization as ao
from torch import nn
from torchvision.models.quantization.mobilenetv2 import QuantizableInvertedResidual
from torchvision.ops.misc import Conv2dNormActivation

from qlightning import PostTrainingQuantization, QuantizationAwareTraining
from qlightning.affine import sqnr
from tests.callbacks.nets import CLASSES, loader, samples, task, trainer


class QuantizableNet(nn.Module):
    """The parts of torchvision's quantizable MobileNetV2, few of them."""

    def __init__(self):
        super().__init__()
        self.quant, self.dequant = ao.QuantStub(), ao.DeQuantStub()
        self.features = nn.Sequential(
            Conv2dNormActivation(3, 8, activation_layer=nn.ReLU6),
            QuantizableInvertedResidual(8, 8, stride=1, expand_ratio=2),
            QuantizableInvertedResidual(8, 8, stride=1, expand_ratio=2),
        )
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.dequant(self.fc(self.features(self.quant(x)).mean((2, 3))))


def assert_int8(callback, model, prepared):
    assert model.net is callback.int8_model
    assert [row.name for row in callback.report.float_layers] == []
    assert len(callback.report.int8_layers) == 1 + 3 + 3 + 1
    x, _ = samples(16, seed=1)
    with torch.no_grad():
        assert sqnr(prepared(x), model(x)) >= 30


def test_qat(pl, tmp_path):
    model, callback = task(pl, QuantizableNet()), QuantizationAwareTraining()
    float_keys = set(model.state_dict())
    run = trainer(pl, tmp_path, callback, max_epochs=1)
    run.fit(model, loader())
    prepared = callback.prepared["net"].eval()
    assert {f"net.{key}" for key in prepared.state_dict() if "fake_quant" not in key} == float_keys
    assert_int8(callback, model, prepared)


def test_ptq(pl, tmp_path):
    model = task(pl, QuantizableNet())
    callback = PostTrainingQuantization(calibration_data=loader(), calibration_batches=2)
    (metrics,) = trainer(pl, tmp_path, callback).test(model, loader(), verbose=False)
    assert metrics["val_loss"] > 0
    assert_int8(callback, model, callback.prepared["net"].eval())
