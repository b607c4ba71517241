"""Files that the callbacks leave at fit end."""

import hashlib

import pytest
import torch
from torch import nn

from qlightning import PostTrainingQuantization, QuantizationAwareTraining, load
from qlightning.errors import ConfigError
from qlightning.export import metadata_of
from tests.callbacks.nets import loader, samples, task, trainer


@pytest.mark.parametrize("kind", [QuantizationAwareTraining, PostTrainingQuantization])
def test_a_fit_leaves_the_int8_model_as_files(pl, tmp_path, kind):
    pytest.importorskip("onnx")
    callback, model = kind(save=["net.pt2", "files/net.onnx"]), task(pl)
    run = trainer(pl, tmp_path, callback, max_epochs=1)
    run.fit(model, loader(), loader())
    assert callback.saved == [tmp_path / "net.pt2", tmp_path / "files/net.onnx"]
    x, _ = samples(8)
    assert torch.equal(load(tmp_path / "net.pt2")(x), model(x))
    facts = metadata_of(tmp_path / "net.pt2")
    assert facts.metrics["val_loss"] == pytest.approx(float(run.callback_metrics["val_loss"]))
    assert facts.mode == callback.mode
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["net.onnx", "net.pt2"]


def test_the_best_checkpoint_is_named_by_its_hash(pl, tmp_path):
    saver = pl.callbacks.ModelCheckpoint(tmp_path, monitor="val_loss")
    callback, model = QuantizationAwareTraining(convert="best", save="best.pt2"), task(pl)
    trainer(pl, tmp_path, [callback, saver], enable_checkpointing=True).fit(model, loader(), loader())
    with open(saver.best_model_path, "rb") as file:
        expected = hashlib.sha256(file.read()).hexdigest()
    assert metadata_of(tmp_path / "best.pt2").source_sha256 == expected
    assert torch.equal(load(tmp_path / "best.pt2")(samples(4)[0]), model(samples(4)[0]))


def test_metrics_that_are_no_finite_numbers_do_not_keep_a_fit_from_its_files(pl, tmp_path):
    class Broken(pl.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            pl_module.log_dict({"nan": float("nan"), "inf": float("inf"), "fine": 0.5})

    trainer(pl, tmp_path, [QuantizationAwareTraining(save="net.pt2"), Broken()], max_epochs=1).fit(task(pl), loader())
    metrics = metadata_of(tmp_path / "net.pt2").metrics
    assert metrics["fine"] == 0.5
    assert not {"nan", "inf"} & metrics.keys()


def test_several_nets_get_a_file_each(pl, tmp_path):
    model = task(pl, nn.Identity())
    model.first, model.second = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Linear(4, 3)
    model.forward = lambda x: model.second(model.first(x).mean((2, 3)))
    callback = PostTrainingQuantization(modules=["first", "second"], save="net.pt2", calibration_data=loader())
    trainer(pl, tmp_path, callback).test(model, loader(), verbose=False)
    assert [path.name for path in callback.saved] == ["net.first.pt2", "net.second.pt2"]
    features = load(tmp_path / "net.first.pt2")(samples(4)[0])
    assert torch.equal(load(tmp_path / "net.second.pt2")(features.mean((2, 3))), model(samples(4)[0]))


def test_settings_are_checked_when_the_callback_is_built():
    with pytest.raises(ConfigError, match=r"possible are \.pt2, \.safetensors"):
        QuantizationAwareTraining(save="net.pth")
    with pytest.raises(ConfigError, match="convert=False"):
        QuantizationAwareTraining(save="net.pt2", convert=False)
    with pytest.raises(ConfigError, match="save: 3"):
        PostTrainingQuantization(save=[3])
