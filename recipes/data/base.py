"""What the pipeline asks of a data module."""

from __future__ import annotations

from abc import ABC, abstractmethod

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader


class ClassificationData(pl.LightningDataModule, ABC):
    """Images and class numbers: training, validation and test, and training images as the test sees them.

    Every loader gives pairs of float images (N, 3, H, W), normalized, channels last in memory, and int64 labels (N,).
    """

    num_classes: int
    """Known after ``setup``."""

    @abstractmethod
    def train_dataloader(self) -> DataLoader: ...

    @abstractmethod
    def val_dataloader(self) -> DataLoader: ...

    @abstractmethod
    def test_dataloader(self) -> DataLoader: ...

    @abstractmethod
    def calibration_dataloader(self) -> DataLoader:
        """Training images without augmentation, in one fixed random order whatever the seed of the run.

        Calibration on augmented images would see values (padding, crops) that the shipped model never meets, and other
        images in every run.
        """


def calibration_order(size: int) -> list[int]:
    """Returns the fixed random order in which ``size`` training images are used for calibration."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(0)).tolist()
