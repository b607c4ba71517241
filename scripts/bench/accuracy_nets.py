"""The float nets that the benchmark of accuracy quantizes, with the images to calibrate and to measure them on."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qlightning.errors import ConfigError
from recipes.data.arrays import ArrayData, Digits, Npz
from recipes.models.cifar import mobilenet_v2_cifar, mobilenet_v3_cifar, resnet_cifar
from recipes.models.weights import load_weights

BATCH = 250
"""Images that a net gets at once in the test."""


@dataclass(frozen=True)
class Question:
    """A float net, and the images that it and its int8 forms are asked about.

    Attributes:
        name: What the tables call the net.
        net: The net in eval mode.
        training: Normalized training images without augmentation (N, 3, H, W), to draw those of calibration from.
        images: Normalized test images (N, 3, H, W).
        labels: Their classes (N,).
    """

    name: str
    net: nn.Module
    training: Tensor
    images: Tensor
    labels: Tensor

    def calibration(self, seed: int, count: int, batch: int) -> tuple[Tensor, ...]:
        """Batches of training images drawn without replacement, the same for a seed."""
        order = torch.randperm(len(self.training), generator=torch.Generator().manual_seed(seed))
        return self.training[order[:count]].split(batch)


_BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "mobilenet_v2": mobilenet_v2_cifar,
    "mobilenet_v2_half": functools.partial(mobilenet_v2_cifar, width_mult=0.5),
    "mobilenet_v3": mobilenet_v3_cifar,
    "mobilenet_v3_half": functools.partial(mobilenet_v3_cifar, width_mult=0.5),
}


def build(name: str) -> nn.Module:
    """The net of a name, for 10 classes: ``resnet20`` (any depth of 6n + 2), or one of `_BUILDERS`.

    Raises:
        ConfigError: There is no net of that name.
    """
    if depth := re.fullmatch(r"resnet(\d+)", name):
        return resnet_cifar(int(depth[1]))
    if name in _BUILDERS:
        return _BUILDERS[name]()
    raise ConfigError(f"No net {name!r}: resnet20 (any depth of 6n + 2), {', '.join(_BUILDERS)} are possible.")


def published(name: str, weights: Path, data: Path) -> Question:
    """A net with the weights of a file, and the images of an ``.npz`` file (see `recipes.data.arrays.Npz`)."""
    return _question(name, load_weights(build(name), weights), Npz(data, eval_batch_size=BATCH))


def trained_on_digits(name: str, epochs: int) -> Question:
    """A net that is trained here and now, on scikit-learn's digits: for machines without the weights and images."""
    torch.manual_seed(0)
    net, data = build(name).train(), Digits(size=16, eval_batch_size=BATCH)
    steps = max(1, epochs * len(data.train_dataloader()))
    optimizer = torch.optim.AdamW(net.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    for _ in range(epochs):
        for x, y in data.train_dataloader():
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            schedule.step()
    return _question(f"{name}, digits", net, data)


def _question(name: str, net: nn.Module, data: ArrayData) -> Question:
    training = torch.cat([x for x, _ in data.calibration_dataloader()])
    images, labels = (torch.cat(part) for part in zip(*data.test_dataloader(), strict=True))
    return Question(name, net.eval(), training.contiguous(), images.contiguous(), labels)
