"""The data modules of the recipes."""

from recipes.data.arrays import ArrayData, Digits, Images, Npz
from recipes.data.base import ClassificationData
from recipes.data.imagenet import ImageNet
from recipes.data.vision import Cifar10, FashionMnist

__all__ = ["ArrayData", "Cifar10", "ClassificationData", "Digits", "FashionMnist", "ImageNet", "Images", "Npz"]
