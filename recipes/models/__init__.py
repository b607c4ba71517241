"""The models of the recipes: torchvision's by name, and small ones for 32x32 images."""

from recipes.models.cifar import CifarResNet, mobilenet_v2_cifar, mobilenet_v3_cifar, resnet_cifar
from recipes.models.vision import torchvision_model
from recipes.models.weights import load_weights

__all__ = [
    "CifarResNet",
    "load_weights",
    "mobilenet_v2_cifar",
    "mobilenet_v3_cifar",
    "resnet_cifar",
    "torchvision_model",
]
