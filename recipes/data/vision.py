"""Image sets that torchvision fetches, held in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision

from qlightning.errors import ConfigError
from recipes.data.arrays import ArrayData, Images


class _TorchvisionData(ArrayData):
    dataset: Any

    def __init__(
        self,
        path: str | Path = "data",
        download: bool = False,
        val_size: int = 5000,
        batch_size: int = 128,
        eval_batch_size: int = 250,
        augment: bool = True,
        calibration_seed: int = 0,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, augment, calibration_seed)
        self.path = Path(path).expanduser()
        self.download = download
        self.val_size = val_size

    def prepare_data(self) -> None:
        for train in (True, False) if self.download else ():
            self.dataset(self.path, train=train, download=True)

    def load(self) -> tuple[Images, Images, Images]:
        train, test = self._read(train=True), self._read(train=False)
        kept = len(train) - self.val_size
        return (
            Images(train.pixels[:kept], train.labels[:kept]),
            Images(train.pixels[kept:], train.labels[kept:]),
            test,
        )

    def _read(self, train: bool) -> Images:
        try:
            found = self.dataset(self.path, train=train)
        except RuntimeError as error:
            raise ConfigError(
                f"{self.dataset.__name__} is not in {self.path.absolute()}: fetch it with data.download=true, or name "
                "the folder that has it with data.path=FOLDER."
            ) from error
        return self._images(found)

    def _images(self, found: Any) -> Images:
        return Images(torch.as_tensor(found.data), torch.as_tensor(found.targets))


class Cifar10(_TorchvisionData):
    """CIFAR-10: 32x32 RGB; crops and mirror images.

    Args:
        path: The folder where torchvision keeps its sets.
        download: Fetch the set where it is missing.
        val_size: The last so many of the 50,000 training images are for validation instead.
        batch_size: See ``ArrayData``.
        eval_batch_size: See ``ArrayData``.
        augment: See ``ArrayData``.
        calibration_seed: See ``ArrayData``.
    """

    dataset = torchvision.datasets.CIFAR10


class FashionMnist(_TorchvisionData):
    """Fashion-MNIST: 28x28 gray pixels in a black frame to 32x32; crops, no mirror images; arguments as ``Cifar10``."""

    dataset = torchvision.datasets.FashionMNIST
    flip = False
    mean = (0.219, 0.219, 0.219)
    std = (0.332, 0.332, 0.332)

    def _images(self, found: Any) -> Images:
        images = super()._images(found)
        return Images(F.pad(images.pixels, (0, 0, 2, 2, 2, 2)), images.labels)
