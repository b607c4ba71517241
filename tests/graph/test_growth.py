"""What a deep net costs: work that grows with the number of layers, not with its square."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from qlightning import calibrate, convert, prepare
from qlightning.fake_quantize import fake_quantizers
from qlightning.observers import MinMaxObserver
from qlightning.qconfig import QConfig


def chain(depth: int) -> nn.Module:
    blocks = (nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(depth))
    return nn.Sequential(*blocks).eval()


@pytest.mark.parametrize("stage", ["prepare", "calibrate", "convert"])
def test_modules_are_gone_through_in_proportion_to_the_depth(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = nn.Module.named_modules
    visited = 0

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[Any]:
        nonlocal visited
        for item in original(self, *args, **kwargs):
            visited += 1
            yield item

    def visits(depth: int) -> int:
        nonlocal visited
        net = chain(depth)
        stages: dict[str, Callable[[], Any]] = {
            "prepare": lambda: prepare(net, QConfig(activation_observer=MinMaxObserver), mode="ptq"),
            "calibrate": lambda: calibrate(net, [torch.randn(1, 4, 2, 2)]),
            "convert": lambda: convert(net, backend="reference"),
        }
        for name, call in stages.items():
            visited = 0
            call()
            if name == stage:
                break
        return visited

    monkeypatch.setattr(nn.Module, "named_modules", counted)
    assert visits(80) <= 2.2 * visits(40)


def test_a_chain_of_many_sums_is_prepared() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.conv(x)
            for _ in range(600):  # more than Python's recursion takes, with two calls a sum
                x = x + self.conv(x).relu()
            return x

    assert len(list(fake_quantizers(prepare(Sums())))) >= 600
