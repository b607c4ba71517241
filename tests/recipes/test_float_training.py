import json

import pytest
import torch

from qlightning.errors import ConfigError
from recipes.float_training import train
from recipes.pipeline import run
from recipes.task import ClassificationTask

FAST = (
    "+recipe=mobilenet_float",
    "trainer=fast",
    "trainer.enable_checkpointing=true",
    "data.size=8",
    "model.width_mult=0.25",
)


def test_a_float_training_leaves_weights_for_the_other_recipes(compose_run, tmp_path, capsys):
    result = train(compose_run(*FAST, "float_training.epochs=1"), tmp_path / "float")
    assert f"{100 * result['float']['accuracy']:.2f} %" in capsys.readouterr().out
    assert json.loads((tmp_path / "float" / "metrics.json").read_text(encoding="utf-8")) == result
    assert "int8" not in result
    more = ("trainer=fast", "data.size=8", "model.width_mult=0.25", "callbacks.quantization.calibration_batches=1")
    weights = f"model.weights={tmp_path / 'float' / 'float.safetensors'}"
    quantized = run(compose_run("+recipe=mobilenet_ptq", *more, weights, "backend=reference"), tmp_path / "int8")
    assert quantized["float"]["accuracy"] == result["float"]["accuracy"]


def test_a_float_training_goes_on_from_its_checkpoint(compose_run, tmp_path, monkeypatch):
    two = (*FAST, "float_training.epochs=2")
    train(compose_run(*two, "callbacks.checkpoint.save_top_k=-1", "+callbacks.checkpoint.filename='{epoch}'"), tmp_path)
    steps = []
    step = ClassificationTask.training_step
    monkeypatch.setattr(ClassificationTask, "training_step", lambda *args: steps.append(args[2]) or step(*args))
    first_epoch = tmp_path / "checkpoints" / "epoch=0.ckpt"
    train(compose_run(*two, f"float_training.resume='{first_epoch}'"), tmp_path / "resumed")
    assert steps == [0, 1]  # the two batches of the second epoch
    last = torch.load(tmp_path / "resumed" / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 4


def test_a_misspelt_callback_of_a_float_training_is_an_error(compose_run, tmp_path):
    with pytest.raises(ConfigError, match=r"callbacks\.checkpoint"):
        train(compose_run(*FAST, "callbacks.checkpoint._target_=torch.nn.ReLU"), tmp_path)
