"""The net that layers are judged in."""

from __future__ import annotations

import pytest
import torch
from torch import nn


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU6(),
        nn.Flatten(), nn.Linear(72, 4),
    )  # fmt: skip
    return net.eval()
