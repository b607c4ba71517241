"""What test_ranks.py runs on two ranks: `python two_ranks.py DIRECTORY`; rank n leaves its results in `n.pt` there."""

import sys
import warnings
from collections import Counter
from pathlib import Path

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import nn

from qlightning import PostTrainingQuantization, QConfig, QuantizationAwareTraining
from qlightning.callbacks import ranks
from qlightning.fake_quantize import fake_quantizers
from qlightning.observers import HistogramObserver, MinMaxObserver, MovingAverageObserver
from tests.callbacks.nets import CLASSES, loader, samples, task, trainer

COUNT, BATCH = 32, 4
"""Samples of all ranks, and a batch of one rank: four batches each."""

FACTOR = 10.0
"""The second rank sees data so many times as large."""


class TorchAO(nn.Module):
    """An observer as others write them: nothing says how ranks combine."""

    def __init__(self, scheme):
        super().__init__()
        self.scheme = scheme
        self.register_buffer("bound", torch.tensor(0.0))

    def forward(self, x):
        self.bound.copy_(torch.maximum(self.bound, x.abs().max()))

    def calculate_qparams(self):
        return self.bound / 100, torch.tensor(100, dtype=torch.int32)


class Own(pl.LightningModule):
    """Layers hang directly on it, so that its own forward is quantized."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.fc(torch.relu(self.conv(x)).mean((2, 3)))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Counting:
    """torch.distributed as the code under test sees it; counts its collectives."""

    def __init__(self):
        self.calls = Counter()

    def __getattr__(self, name):
        attribute = getattr(dist, name)
        if not callable(attribute) or name in ("get_world_size", "is_available", "is_initialized"):
            return attribute

        def call(*args, **kwargs):
            self.calls[name] += 1
            return attribute(*args, **kwargs)

        return call


class Watch(pl.Callback):
    """Notes the grids and the collectives after every batch."""

    def __init__(self, counting):
        self.counting, self.batches, self.grids, self.collectives = counting, [], [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batches.append(batch[0] * FACTOR**trainer.global_rank)

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.grids.append(buffers(pl_module))
        self.collectives.append(sum(self.counting.calls.values()))

    def on_train_end(self, trainer, pl_module):
        self.late = dict(self.counting.calls)


def buffers(module):
    return {
        f"{name}.{key}": buffer.clone() for name, fq in fake_quantizers(module) for key, buffer in fq.named_buffers()
    }


def flags(module):
    return {name: (fq.observer_enabled, fq.fake_quant_enabled, fq.observed) for name, fq in fake_quantizers(module)}


def model_of(rank, net=None):
    torch.manual_seed(rank)  # DDP starts with the weights of rank zero
    model = task(pl, net)
    step = model.training_step
    model.training_step = lambda batch, batch_idx: step((batch[0] * FACTOR**rank, batch[1]), batch_idx)
    return model


def fit(tmp_path, observer, **settings):
    ranks.dist = counting = Counting()
    callback = QuantizationAwareTraining(QConfig(activation_observer=observer), freeze_bn=None, **settings)
    watch = Watch(counting)
    run = trainer(pl, tmp_path, [callback, watch], strategy="ddp", devices=2, max_epochs=1)
    model = model_of(run.global_rank)
    attributes = set(vars(model))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(model, loader(COUNT, BATCH))
    ranks.dist = dist
    run.test(model, loader(COUNT, BATCH), verbose=False)  # of the int8 model, in which ranks now differ in nothing
    (prepared,) = callback.prepared.values()
    x = samples(8, seed=2)[0]
    return {
        "batches": watch.batches,
        "grids": watch.grids,
        "collectives": watch.collectives,
        "late": watch.late,
        "flags": flags(prepared),
        "end": buffers(prepared),
        "int8": model(x),
        "attributes": set(vars(model)) - attributes - {"_hparams"},
        "warnings": [str(warning.message) for warning in caught if "rank zero alone" in str(warning.message)],
    }


def learn(tmp_path):
    """Scales that are learned: observed in float first, then learned, then frozen."""
    points = {"fake_quant_start": "1 steps", "freeze_observers": "3 steps", "freeze_bn": None}
    callback = QuantizationAwareTraining(QConfig(learned=True), **points)
    watch = Watch(Counting())
    run = trainer(pl, tmp_path, [callback, watch], strategy="ddp", devices=2, max_epochs=1)
    model = model_of(run.global_rank)
    run.fit(model, loader(COUNT, BATCH))
    return {"grids": watch.grids, "int8": model(samples(8, seed=2)[0])}


def fit_own_forward(tmp_path):
    model, callback = Own(), QuantizationAwareTraining()
    trainer(pl, tmp_path, callback, strategy="ddp", devices=2, max_epochs=1).fit(model, loader(COUNT, BATCH))
    x = samples(8, seed=2)[0]
    return {"called": model(x), "int8": callback.int8_model(x)}


def calibrate(tmp_path, observer):
    torch.manual_seed(0)
    model = task(pl)
    callback = PostTrainingQuantization(
        QConfig(activation_observer=observer), calibration_data=loader(COUNT, BATCH), calibration_batches=5
    )
    run = trainer(pl, tmp_path, callback, strategy="ddp", devices=2)
    run.test(model, loader(COUNT, BATCH), verbose=False)
    return {"end": buffers(callback.prepared["net"]), "int8": model(samples(8, seed=2)[0])}


def main(tmp_path):
    results = {
        "moving_average": fit(tmp_path, MovingAverageObserver, freeze_observers="3 steps"),
        "minmax": fit(tmp_path, MinMaxObserver, freeze_observers=None, reestimate_bn=3),
        "histogram": fit(tmp_path, HistogramObserver, freeze_observers="3 steps"),
        "other": fit(tmp_path, TorchAO, freeze_observers=None),
        "learned": learn(tmp_path),
        "own_forward": fit_own_forward(tmp_path),
        "ptq_minmax": calibrate(tmp_path, MinMaxObserver),
        "ptq_histogram": calibrate(tmp_path, HistogramObserver),
    }
    torch.save(results, tmp_path / f"{dist.get_rank()}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
