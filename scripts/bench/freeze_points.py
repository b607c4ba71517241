"""When observers and BatchNorm statistics should freeze: the int8 loss after QAT, over freeze points and seeds.

    python scripts/bench/freeze_points.py [--seeds 3] [--epochs 2] [--json FILE]
    python scripts/bench/freeze_points.py --model resnet20_cifar --weights FILE --npz FILE --epochs 1

One float net (from a file, or trained on handwritten digits first) goes through QAT once for each pair of points and
seed. The loss and accuracy of int8 are those of the validation images: the test images choose nothing.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from qlightning import QuantizationAwareTraining
from recipes.data import ArrayData, Digits, Npz
from recipes.models import mobilenet_v2_cifar, resnet_cifar
from recipes.schedule import warmup_cosine
from recipes.task import ClassificationTask

MODELS = {
    "mobilenet_v2_cifar": functools.partial(mobilenet_v2_cifar, width_mult=0.5),
    "resnet20_cifar": functools.partial(resnet_cifar, 20),
}
POINTS = (0.5, 0.75, 0.9, None)


def train(net: nn.Module, data: ArrayData, epochs: int, rate: float, seed: int, callbacks: list[Any]) -> None:
    """Trains a net in place."""
    pl.seed_everything(seed, verbose=False)
    optimizer = functools.partial(torch.optim.SGD, lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    task = ClassificationTask(net, data.num_classes, optimizer, functools.partial(warmup_cosine, warmup=0.1))
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=callbacks,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, datamodule=data)


def evaluate(net: nn.Module, data: ArrayData) -> tuple[float, float]:
    """The mean cross entropy and the accuracy (a fraction) on the validation images."""
    with torch.no_grad():
        outputs = [(net.eval()(images), labels) for images, labels in data.val_dataloader()]
    logits, labels = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item()


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each pair of freeze points."""
    data: ArrayData = Npz(args.npz) if args.npz else Digits()
    data.setup()
    pl.seed_everything(0, verbose=False)
    net = MODELS[args.model](num_classes=data.num_classes, weights=args.weights)
    if args.weights is None:
        train(net, data, 8, 0.05, 0, [])
    print(f"float: loss {evaluate(net, data)[0]:.4f}, accuracy {evaluate(net, data)[1]:.4f}", flush=True)
    runs: dict[tuple[Any, Any], list[tuple[float, float]]] = {}
    for seed, points in itertools.product(range(args.seeds), itertools.product(POINTS, POINTS)):
        callback = QuantizationAwareTraining(freeze_observers=points[0], freeze_bn=points[1])
        train(copy.deepcopy(net).train(), data, args.epochs, args.rate, seed, [callback])
        assert isinstance(callback.int8_model, nn.Module)
        runs.setdefault(points, []).append(evaluate(callback.int8_model, data))
        print(seed, points, *runs[points][-1], flush=True)
    return [
        {
            "freeze_observers": points[0],
            "freeze_bn": points[1],
            "loss": statistics.mean(loss for loss, _ in results),
            "spread": max(loss for loss, _ in results) - min(loss for loss, _ in results),
            "accuracy": statistics.mean(accuracy for _, accuracy in results),
        }
        for points, results in runs.items()
    ]


def main() -> None:
    """Measures, prints a table with the lowest loss first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="mobilenet_v2_cifar")
    parser.add_argument("--weights", type=Path, help="a file with float weights; without one the net is trained first")
    parser.add_argument("--npz", type=Path, help="images, with the keys of MedMNIST files; without: handwritten digits")
    parser.add_argument("--epochs", type=int, default=2, help="of each QAT")
    parser.add_argument("--rate", type=float, default=0.002, help="of SGD in each QAT")
    parser.add_argument("--seeds", type=int, default=3, help="trainings for each pair of points")
    parser.add_argument("--json", type=Path, help="write the rows here")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers")
    rows = sorted(measure(args), key=lambda row: row["loss"])
    table = Table("freeze_observers", "freeze_bn", "int8 loss", "spread", "accuracy")
    for row in rows:
        points = (str(row["freeze_observers"]), str(row["freeze_bn"]))
        table.add_row(*points, f"{row['loss']:.4f}", f"{row['spread']:.4f}", f"{row['accuracy']:.4f}")
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
