"""Trainings in processes of their own: the int8 model comes back to the process that started them."""

import sys

import pytest
import pytorch_lightning as pl
import torch

from qlightning import PostTrainingQuantization, QuantizationAwareTraining, convert
from qlightning.callbacks.placement import restore_prepared
from qlightning.nn.quantized import QuantizedLayer
from tests.callbacks.nets import loader, state_of, task, trainer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")


@pytest.mark.parametrize("kind", ["qat", "ptq"])
def test_the_int8_model_of_a_forked_training_comes_back(tmp_path, kind):
    model = task(pl)
    before = state_of(model)
    callback = QuantizationAwareTraining() if kind == "qat" else PostTrainingQuantization(calibration_data=loader())
    saver = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    run = trainer(
        pl, tmp_path, [callback, saver], strategy="ddp_fork", devices=2, enable_checkpointing=True, max_epochs=2
    )
    run.fit(model, loader(64))
    int8 = model.net
    assert isinstance(int8.conv1, QuantizedLayer)
    x = torch.randn(4, 3, 8, 8)
    prepared = restore_prepared(model)["net"]
    assert torch.equal(convert(prepared.eval())(x), int8(x))
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    for name in before:
        assert torch.equal(model.state_dict()[name], saved[name]), name
    assert not torch.equal(saved["net.conv1.weight"], before["net.conv1.weight"])
