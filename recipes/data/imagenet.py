"""ImageNet, or any set of large images with one folder a class."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from qlightning.errors import ConfigError
from recipes.data.arrays import CIFAR_MEAN as MEAN
from recipes.data.arrays import CIFAR_STD as STD
from recipes.data.base import ClassificationData, calibration_order


class ImageNet(ClassificationData):
    """An ImageFolder root: ``train/CLASS/*.jpg`` and ``val/CLASS/*.jpg``.

    The labels of ImageNet's test set are not public, so ``val`` serves for validation and for the test.

    Args:
        path: The root folder.
        batch_size: Images in a batch, of training, calibration and evaluation.
        resize: The shorter side before the centre crop of evaluation and calibration, in pixels.
        crop: Height and width of the images that the model sees, in pixels.
        num_workers: Processes that decode images.
        calibration_seed: Decides which training images calibration begins with.

    Raises:
        ConfigError: No path, or no ``train`` and ``val`` folders there.
    """

    def __init__(
        self,
        path: str | Path | None,
        batch_size: int = 64,
        resize: int = 256,
        crop: int = 224,
        num_workers: int = 2,
        calibration_seed: int = 0,
    ) -> None:
        super().__init__(calibration_seed)
        hint = (
            "give data.path=ROOT with ROOT/train/CLASS/*.JPEG and ROOT/val/CLASS/*.JPEG; the images of ILSVRC 2012 are "
            "at image-net.org for those who register"
        )
        if path is None:
            raise ConfigError(f"data=imagenet has no path: {hint}.")
        self.path = Path(path).expanduser()
        for split in ("train", "val"):
            if not (self.path / split).is_dir():
                raise ConfigError(f"No folder {self.path / split}: {hint}.")
        self.batch_size = batch_size
        self.num_workers = num_workers
        finish = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        self._augmented = v2.Compose([v2.RandomResizedCrop(crop), v2.RandomHorizontalFlip(), *finish])
        self._plain = v2.Compose([v2.Resize(resize), v2.CenterCrop(crop), *finish])

    def setup(self, stage: str | None = None) -> None:
        self.num_classes = len(self._folder("train", self._plain).classes)

    def train_dataloader(self) -> DataLoader:
        return self._loader(self._folder("train", self._augmented), shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(self._folder("val", self._plain))

    def test_dataloader(self) -> DataLoader:
        return self.val_dataloader()

    def calibration_dataloader(self) -> DataLoader:
        training = self._folder("train", self._plain)
        return self._loader(Subset(training, calibration_order(len(training), self.calibration_seed)))

    def _folder(self, split: str, transform: v2.Compose) -> ImageFolder:
        try:
            return ImageFolder(self.path / split, transform)
        except FileNotFoundError as error:
            raise ConfigError(f"{self.path / split} holds no images in one folder a class: {error}") from error

    def _loader(self, dataset: Dataset, shuffle: bool = False, drop_last: bool = False) -> DataLoader:
        return DataLoader(dataset, self.batch_size, shuffle=shuffle, drop_last=drop_last, num_workers=self.num_workers)
