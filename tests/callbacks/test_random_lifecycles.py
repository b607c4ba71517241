"""Random trainings that are broken off and resumed: what holds for all of them, whatever is combined."""

import random
from dataclasses import dataclass

import pytest
import pytorch_lightning as pl
import torch

from qlightning import QuantizationAwareTraining
from tests.callbacks.nets import Net, assert_same_state, samples, state_of, task, trainer
from tests.callbacks.stopped_run import BATCHES, Numbered

EPOCHS = 3
# No ModelPruning: its checkpoints have no masks, so that no run with it can be resumed as if it had never stopped.
OTHERS = {
    "average": lambda: pl.callbacks.EMAWeightAveraging(decay=0.5),
    "accumulation": lambda: pl.callbacks.GradientAccumulationScheduler({0: 2, 1: 1}),
    "stopping": lambda: pl.callbacks.EarlyStopping("val_loss", patience=1),
    "timer": lambda: pl.callbacks.Timer(),
}


@dataclass(frozen=True)
class Draw:
    """A combination; printed by pytest where one fails."""

    seed: int

    def __post_init__(self):
        draw = random.Random(self.seed)
        start = draw.choice([0, 0, "2 steps", 0.2, 1])
        self.__dict__.update(
            precision=draw.choice(["32-true", "32-true", "bf16-mixed"]),
            points={
                "fake_quant_start": start,
                "freeze_observers": draw.choice([None, 0.5, "9 steps", 2]),
                "freeze_bn": draw.choice([None, 0.4, "4 steps", 1]),
            },
            others=draw.sample(sorted(OTHERS), draw.randrange(3)),
            position=draw.randrange(3),
            interval=draw.choice([2, 3, BATCHES]),
            validate_int8=draw.choice([False, True, 2]),
            stop=draw.randrange(2, EPOCHS * BATCHES),
        )
        if "accumulation" in self.others:
            # Lightning resumes in the middle of an epoch without telling GradientAccumulationScheduler, so that batches
            # are accumulated otherwise in the first, whatever quantizes.
            self.__dict__["stop"] = draw.randrange(BATCHES + 1, EPOCHS * BATCHES)
        self.__dict__["accumulate"] = 1 if "accumulation" in self.others else draw.choice([1, 1, 2])

    def __str__(self):
        return str(vars(self))


class Watch(pl.Callback):
    """Evaluation moves nothing; the names that the float net has stay."""

    def __init__(self):
        self.evaluations = 0

    def on_validation_start(self, trainer, pl_module):
        self.before = state_of(pl_module)

    def on_validation_end(self, trainer, pl_module):
        assert_same_state(state_of(pl_module), self.before)
        self.evaluations += 1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        assert Net().state_dict().keys() <= pl_module.net.state_dict().keys()


def run(draw, directory, stop=None, ckpt_path=None):
    callback = QuantizationAwareTraining(validate_int8=draw.validate_int8, **draw.points)
    callbacks = [OTHERS[name]() for name in draw.others]
    callbacks.insert(draw.position, callback)
    saver = pl.callbacks.ModelCheckpoint(directory, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    watch = Watch()
    fit = trainer(
        pl,
        directory,
        [*callbacks, watch, saver],
        enable_checkpointing=True,
        max_epochs=EPOCHS,
        precision=draw.precision,
        accumulate_grad_batches=draw.accumulate,
        val_check_interval=draw.interval,
    )
    model = Numbered(stop)
    try:
        fit.fit(model, ckpt_path=ckpt_path)
    except ZeroDivisionError:
        assert stop is not None
        assert callback.int8_model is None
    else:
        assert watch.evaluations or ckpt_path is not None
    return model, callback, fit


def last_checkpoint(directory):
    return max(directory.glob("step=*.ckpt"), key=lambda path: int(path.stem.removeprefix("step=")))


def check(draw, tmp_path):
    model, callback, fit = run(draw, tmp_path / "whole")
    x = samples(8, seed=5)[0]
    # What was converted is what the checkpoint holds.
    fresh, own = task(pl), QuantizationAwareTraining(**draw.points)
    val = model.val_dataloader()
    path = last_checkpoint(tmp_path / "whole")
    (expected,) = fit.test(model, val, verbose=False)
    tester = trainer(pl, tmp_path, own, precision=draw.precision)
    (actual,) = tester.test(fresh, val, ckpt_path=path, verbose=False)
    assert torch.equal(fresh(x), callback.int8_model(x))
    assert actual == expected
    # Broken off and resumed; where nothing was saved yet there is nothing to resume.
    run(draw, tmp_path / "part", ("raise", draw.stop))
    if not list((tmp_path / "part").glob("step=*.ckpt")):
        return
    _, resumed, again = run(draw, tmp_path / "resumed", ckpt_path=last_checkpoint(tmp_path / "part"))
    assert again.global_step == fit.global_step
    assert_same_state(state_of(resumed.prepared["net"]), state_of(callback.prepared["net"]))
    assert torch.equal(resumed.int8_model(x), callback.int8_model(x))


@pytest.mark.parametrize("draw", [Draw(seed) for seed in range(8)], ids=lambda draw: str(draw.seed))
def test_a_random_training(tmp_path, draw):
    check(draw, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("draw", [Draw(seed) for seed in range(8, 100)], ids=lambda draw: str(draw.seed))
def test_more_random_trainings(tmp_path, draw):
    check(draw, tmp_path)
