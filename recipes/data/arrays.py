"""Image sets that fit in memory: batches are cut, augmented and normalized as whole arrays, not image by image."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import sklearn.datasets
import sklearn.model_selection
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from qlightning.errors import ConfigError
from recipes.data.base import ClassificationData, calibration_order

CIFAR_MEAN, CIFAR_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the published CIFAR-10 weights that the recipes start from (ImageNet's statistics, by their authors' choice)."""


@dataclass(frozen=True)
class Images:
    """A set of images, or a batch of them.

    Args:
        pixels: (N, H, W, 3) uint8 RGB; (N, H, W) uint8 gray becomes RGB.
        labels: (N,) or (N, 1) class numbers; becomes (N,) int64.

    Raises:
        ConfigError: Another dtype or shape, or not one label an image.
    """

    pixels: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        pixels, labels = self.pixels, self.labels.reshape(-1).long()
        if pixels.ndim == 3:
            pixels = pixels.unsqueeze(-1)
        if pixels.ndim == 4 and pixels.shape[-1] == 1:
            pixels = pixels.repeat(1, 1, 1, 3)
        if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[-1] != 3:
            raise ConfigError(
                f"Images of dtype {self.pixels.dtype} and shape {tuple(self.pixels.shape)}: uint8 of shape "
                "(N, H, W, 3), (N, H, W, 1) or (N, H, W) is possible."
            )
        if len(labels) != len(pixels):
            raise ConfigError(f"{len(pixels)} images with {len(labels)} labels: one class number an image is possible.")
        object.__setattr__(self, "pixels", pixels)
        object.__setattr__(self, "labels", labels)

    def __len__(self) -> int:
        return len(self.pixels)


class _ImageDataset(Dataset):
    """Gives a whole batch at once: the loader's fetcher asks ``__getitems__`` where there is one."""

    def __init__(self, images: Images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Images:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> Images:
        chosen = torch.as_tensor(indices)
        return Images(self.images.pixels[chosen], self.images.labels[chosen])


@dataclass(frozen=True)
class _Collate:
    """Batch of uint8 images -> normalized float images (N, 3, H, W), after a random crop and flip where asked.

    Random numbers come from torch's global generator, so that ``seed_everything`` decides them.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_padding: int = 0
    flip: bool = False

    def __call__(self, batch: Images) -> tuple[Tensor, Tensor]:
        pixels = batch.pixels
        if self.crop_padding or self.flip:
            pixels = self._augment(pixels)
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        return ((pixels / 255 - mean) / std).permute(0, 3, 1, 2), batch.labels

    def _augment(self, pixels: Tensor) -> Tensor:
        count, height, width, _ = pixels.shape
        reach = 2 * self.crop_padding + 1
        rows = torch.arange(height) + torch.randint(reach, (count, 1))
        flipped = torch.rand(count, 1) < (0.5 if self.flip else 0.0)
        columns = torch.where(flipped, torch.arange(width).flip(0), torch.arange(width)) + torch.randint(
            reach, (count, 1)
        )
        padded = F.pad(pixels, (0, 0, *[self.crop_padding] * 4))
        return padded[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


class ArrayData(ClassificationData):
    """A data module over arrays in memory; a subclass says where they come from.

    Args:
        batch_size: Images in a batch of training and calibration.
        eval_batch_size: Images in a batch of validation and test.
        augment: Crop and flip the training images at random, as suits the set (``crop_padding``, ``flip``).
        calibration_seed: Decides which training images calibration begins with.
    """

    mean: tuple[float, ...] = CIFAR_MEAN
    std: tuple[float, ...] = CIFAR_STD
    crop_padding: int = 4
    flip: bool = True

    def __init__(
        self, batch_size: int = 128, eval_batch_size: int = 250, augment: bool = True, calibration_seed: int = 0
    ) -> None:
        super().__init__(calibration_seed)
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.augment = augment
        self._splits: tuple[Images, Images, Images] | None = None

    @abstractmethod
    def load(self) -> tuple[Images, Images, Images]:
        """Reads training, validation and test images; all of one size.

        Raises:
            ConfigError: The set is not there; says how to get it.
        """

    def setup(self, stage: str | None = None) -> None:
        if self._splits is None:
            self._splits = self.load()
            self.num_classes = 1 + max(int(images.labels.max()) for images in self._splits)

    def train_dataloader(self) -> DataLoader:
        collate: Any = _Collate(self.mean, self.std)
        if self.augment:
            collate = _Collate(self.mean, self.std, self.crop_padding, self.flip)
        return DataLoader(self._dataset(0), self.batch_size, shuffle=True, drop_last=True, collate_fn=collate)

    def val_dataloader(self) -> DataLoader:
        return self._evaluation(self._dataset(1), self.eval_batch_size)

    def test_dataloader(self) -> DataLoader:
        return self._evaluation(self._dataset(2), self.eval_batch_size)

    def calibration_dataloader(self) -> DataLoader:
        training = self._dataset(0)
        return self._evaluation(
            Subset(training, calibration_order(len(training), self.calibration_seed)), self.batch_size
        )

    def _dataset(self, split: int) -> _ImageDataset:
        self.setup()
        assert self._splits is not None
        return _ImageDataset(self._splits[split])

    def _evaluation(self, dataset: Dataset, batch_size: int) -> DataLoader:
        collate: Any = _Collate(self.mean, self.std)  # takes the batch that __getitems__ gives, not a list
        return DataLoader(dataset, batch_size, collate_fn=collate)


class Digits(ArrayData):
    """scikit-learn's handwritten digits (bundled with it): 1797 gray images of 8x8 pixels, enlarged.

    The split is fixed whatever the seed: 1200 for training, 197 for validation, 400 for test, classes in proportion.

    Args:
        size: Height and width in pixels after bilinear enlargement.
        batch_size: See ``ArrayData``.
        eval_batch_size: See ``ArrayData``.
        augment: See ``ArrayData``; crops only, since a mirrored digit is none.
        calibration_seed: See ``ArrayData``.
    """

    mean = (0.305, 0.305, 0.305)
    std = (0.324, 0.324, 0.324)
    crop_padding = 2
    flip = False

    def __init__(
        self,
        size: int = 32,
        batch_size: int = 32,
        eval_batch_size: int = 200,
        augment: bool = True,
        calibration_seed: int = 0,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, augment, calibration_seed)
        self.size = size

    def load(self) -> tuple[Images, Images, Images]:
        gray, labels = sklearn.datasets.load_digits(return_X_y=True)
        small = torch.from_numpy(gray).reshape(-1, 1, 8, 8) * (255 / 16)  # the set counts from 0 to 16
        large = F.interpolate(small, size=self.size, mode="bilinear", align_corners=False)
        pixels, targets = large.round().byte().squeeze(1), torch.from_numpy(labels)

        def cut(indices: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
            kept, taken = sklearn.model_selection.train_test_split(
                indices, test_size=size, random_state=0, stratify=labels[indices]
            )
            return kept, taken

        rest, test = cut(np.arange(len(labels)), 400)
        train, val = cut(rest, 197)
        first, second, third = (Images(pixels[part], targets[part]) for part in (train, val, test))
        return first, second, third


class Npz(ArrayData):
    """An ``.npz`` file with the keys of MedMNIST files: ``train_images``, ``train_labels``, ``val_...``, ``test_...``.

    Args:
        path: The file. Images (N, H, W), (N, H, W, 1) or (N, H, W, 3) uint8, labels (N,) or (N, 1) class numbers.
        mean: Of each channel of the images as numbers from 0 to 1, taken off.
        std: Of each channel likewise; what is left is divided by it.
        batch_size: See ``ArrayData``.
        eval_batch_size: See ``ArrayData``.
        augment: See ``ArrayData``; crops and mirror images.
        calibration_seed: See ``ArrayData``.

    Raises:
        ConfigError: No path, no file there, or keys are missing in it.
    """

    def __init__(
        self,
        path: str | Path | None,
        mean: Sequence[float] = CIFAR_MEAN,
        std: Sequence[float] = CIFAR_STD,
        batch_size: int = 128,
        eval_batch_size: int = 250,
        augment: bool = True,
        calibration_seed: int = 0,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, augment, calibration_seed)
        self.mean, self.std = tuple(mean), tuple(std)
        hint = "give data.path=FILE.npz with the keys of MedMNIST files (train_images, train_labels, val_..., test_...)"
        if path is None:
            raise ConfigError(f"data=npz has no path: {hint}.")
        self.path = Path(path).expanduser()
        if not self.path.is_file():
            raise ConfigError(f"No file at data.path={self.path}: {hint}; MedMNIST offers such files at medmnist.com.")

    def load(self) -> tuple[Images, Images, Images]:
        try:
            with np.load(self.path) as arrays:
                keys = [f"{split}_{kind}" for split in ("train", "val", "test") for kind in ("images", "labels")]
                missing = [key for key in keys if key not in arrays]
                if missing:
                    raise ConfigError(
                        f"{self.path} lacks {', '.join(missing)}; it has {', '.join(arrays) or 'nothing'}."
                    )
                tensors = [torch.from_numpy(arrays[key]) for key in keys]
        except (BadZipFile, OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{self.path} cannot be read as .npz: {error}") from error
        train, val, test = (Images(*tensors[index : index + 2]) for index in (0, 2, 4))
        return train, val, test
