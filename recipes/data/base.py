"""What the pipeline asks of a data module."""

from __future__ import annotations

from abc import ABC, abstractmethod

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader


class ClassificationData(pl.LightningDataModule, ABC):
    """Images and class numbers: training, validation and test, and training images as the test sees them.

    Every loader gives pairs of float images (N, 3, H, W), normalized, channels last in memory, and int64 labels (N,).

    Args:
        calibration_seed: Decides which training images calibration begins with.
    """

    num_classes: int
    """Known after ``setup``."""

    def __init__(self, calibration_seed: int = 0) -> None:
        super().__init__()
        self.calibration_seed = calibration_seed

    @abstractmethod
    def train_dataloader(self) -> DataLoader: ...

    @abstractmethod
    def val_dataloader(self) -> DataLoader: ...

    @abstractmethod
    def test_dataloader(self) -> DataLoader: ...

    @abstractmethod
    def calibration_dataloader(self) -> DataLoader:
        """Training images without augmentation, in the random order of ``calibration_seed`` whatever the run's seed.

        Calibration on augmented images would see values (padding, crops) that the shipped model never meets, and other
        images in every run.
        """


def calibration_order(size: int, seed: int) -> list[int]:
    """Returns the random order in which ``size`` training images are used for calibration."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
