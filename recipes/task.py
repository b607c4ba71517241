"""Image classification as a LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics.classification import MulticlassAccuracy

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
ScheduleFactory = Callable[[Optimizer, int], LRScheduler]


class ClassificationTask(pl.LightningModule):
    """Trains ``net`` with cross entropy, or to answer as a teacher does.

    Logs ``train/loss``, ``val/accuracy`` and ``test/accuracy``; accuracies are fractions.

    Args:
        net: Images to logits (N, ``num_classes``).
        num_classes: How many classes there are.
        optimizer: Parameters to optimizer; None where the task is only evaluated.
        schedule: Optimizer and number of steps to a scheduler that is stepped after each batch; None for a constant
            rate.
        teacher: A trained net whose answers are learnt in place of the labels: the loss is the Kullback-Leibler
            divergence from its class probabilities. Half of a batch is mixed from two images each (mixup, Zhang et al.
            2018): on its own training images a net is nearly certain, and there is little to learn. It is not part of
            the task: nothing trains, quantizes or saves it.
    """

    def __init__(
        self,
        net: nn.Module,
        num_classes: int,
        optimizer: OptimizerFactory | None = None,
        schedule: ScheduleFactory | None = None,
        teacher: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self._optimizer = optimizer
        self._schedule = schedule
        self._teacher = (teacher,)  # in a tuple, so that it is no submodule
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        (teacher,) = self._teacher
        if teacher is None:
            loss = F.cross_entropy(self(images), labels)
        else:
            images = _half_mixed(images)
            loss = _distillation_loss(images, self(images), teacher)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.val_accuracy(self(images), labels)
        self.log("val/accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.test_accuracy(self(images), labels)
        self.log("test/accuracy", self.test_accuracy)

    def configure_optimizers(self) -> Any:
        assert self._optimizer is not None, "a task without an optimizer is only evaluated"
        optimizer = self._optimizer(self.parameters())
        if self._schedule is None:
            return optimizer
        scheduler = self._schedule(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _half_mixed(images: Tensor) -> Tensor:
    """Replaces the second half of a batch by weighted means of its images and others of that half."""
    plain, mixed = images.tensor_split(2)
    weight = torch.rand(len(mixed), 1, 1, 1, device=images.device)
    others = mixed[torch.randperm(len(mixed), device=images.device)]
    return torch.cat((plain, weight * mixed + (1 - weight) * others))


def _distillation_loss(images: Tensor, logits: Tensor, teacher: nn.Module) -> Tensor:
    with torch.no_grad():
        answers = teacher.to(images.device).eval()(images)
    return F.kl_div(logits.log_softmax(1), answers.log_softmax(1), reduction="batchmean", log_target=True)
