"""ResNet, MobileNetV2 and MobileNetV3 for images of 32x32 pixels."""

from __future__ import annotations

from pathlib import Path

import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.models.mobilenetv3 import InvertedResidualConfig as _V3Block

from qlightning.errors import ConfigError
from recipes.models.weights import load_weights

_V3_LARGE = (
    (16, 3, 16, 16, False, "RE", 1, 1),
    (16, 3, 64, 24, False, "RE", 2, 1),
    (24, 3, 72, 24, False, "RE", 1, 1),
    (24, 5, 72, 40, True, "RE", 2, 1),
    (40, 5, 120, 40, True, "RE", 1, 1),
    (40, 5, 120, 40, True, "RE", 1, 1),
    (40, 3, 240, 80, False, "HS", 2, 1),
    (80, 3, 200, 80, False, "HS", 1, 1),
    (80, 3, 184, 80, False, "HS", 1, 1),
    (80, 3, 184, 80, False, "HS", 1, 1),
    (80, 3, 480, 112, True, "HS", 1, 1),
    (112, 3, 672, 112, True, "HS", 1, 1),
    (112, 5, 672, 160, True, "HS", 2, 1),
    (160, 5, 960, 160, True, "HS", 1, 1),
    (160, 5, 960, 160, True, "HS", 1, 1),
)
"""Of Howard et al. 2019, table 1: channels in, kernel, channels expanded, out, SE, activation, stride, dilation."""


class _Shortcut(nn.Module):
    """Every second pixel, then zero channels on both sides: option A of He et al. 2015, section 4.2; no parameters."""

    def __init__(self, stride: int, added_channels: int) -> None:
        super().__init__()
        self.stride = stride
        self.padding = added_channels // 2

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))


class _BasicBlock(nn.Module):
    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        same = stride == 1 and in_channels == channels
        self.shortcut = nn.Identity() if same else _Shortcut(stride, channels - in_channels)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out)) + self.shortcut(x)
        return F.relu(out)


class CifarResNet(nn.Module):
    """The ResNet for CIFAR of He et al. 2015, section 4.2: three stages of 16, 32 and 64 channels.

    Takes images (N, 3, H, W), 32x32 as a rule, and gives logits (N, ``num_classes``). Parameter names (``conv1``,
    ``bn1``, ``layer1.0.conv1``, ..., ``linear``) are those of github.com/akamaster/pytorch_resnet_cifar10, whose
    weights load.

    Args:
        depth: 6n + 2 with n blocks a stage: 20, 32, 44, 56, 110.
        num_classes: Width of the last layer.

    Raises:
        ConfigError: ``depth`` is not 6n + 2.
    """

    def __init__(self, depth: int = 20, num_classes: int = 10) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 2, 6)
        if rest or blocks < 1:
            raise ConfigError(f"CifarResNet depth={depth!r}: 6n + 2 is possible, such as 20, 32, 44 or 56.")
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, stride=1, blocks=blocks)
        self.layer2 = _stage(16, 32, stride=2, blocks=blocks)
        self.layer3 = _stage(32, 64, stride=2, blocks=blocks)
        self.linear = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        return self.linear(F.adaptive_avg_pool2d(out, 1).flatten(1))


def _stage(in_channels: int, channels: int, *, stride: int, blocks: int) -> nn.Sequential:
    first = _BasicBlock(in_channels, channels, stride)
    return nn.Sequential(first, *(_BasicBlock(channels, channels, 1) for _ in range(blocks - 1)))


def resnet_cifar(depth: int, num_classes: int = 10, weights: str | Path | None = None) -> CifarResNet:
    """Builds a ``CifarResNet``, with the weights of a file where one is given (see ``load_weights``).

    Examples:
        >>> sum(p.numel() for p in resnet_cifar(20).parameters())
        269722
    """
    net = CifarResNet(depth, num_classes)
    if weights is not None:
        load_weights(net, weights)
    return net


def mobilenet_v2_cifar(
    num_classes: int = 10, width_mult: float = 1.0, weights: str | Path | None = None
) -> torchvision.models.MobileNetV2:
    """Builds torchvision's MobileNetV2 with stride 1 in the stem, for 32x32 images; parameter names as there.

    Args:
        num_classes: Width of the last layer.
        width_mult: Channels against the original.
        weights: A file of weights (see ``load_weights``), or None for random ones.
    """
    net = torchvision.models.MobileNetV2(num_classes=num_classes, width_mult=width_mult)
    net.features[0][0].stride = (1, 1)
    if weights is not None:
        load_weights(net, weights)
    return net


def mobilenet_v3_cifar(
    num_classes: int = 10, width_mult: float = 1.0, weights: str | Path | None = None
) -> torchvision.models.MobileNetV3:
    """Builds torchvision's MobileNetV3-Large with stride 1 in the stem, for 32x32 images; parameter names as there.

    Args:
        num_classes: Width of the last layer.
        width_mult: Channels against the original.
        weights: A file of weights (see ``load_weights``), or None for random ones.

    Examples:
        >>> mobilenet_v3_cifar(width_mult=0.5).classifier[-1].out_features
        10
    """
    blocks = [_V3Block(*block, width_mult=width_mult) for block in _V3_LARGE]
    last_channel = _V3Block.adjust_channels(1280, width_mult)
    net = torchvision.models.MobileNetV3(blocks, last_channel, num_classes=num_classes)
    net.features[0][0].stride = (1, 1)
    if weights is not None:
        load_weights(net, weights)
    return net
