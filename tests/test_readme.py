"""The README does what it says: its code runs, its links and commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


class Net(nn.Module):
    """A net with the names that the README uses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.blocks = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.classifier = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.blocks(self.stem(x)))


class Task(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.filterwarnings("ignore")
def test_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 3, 32, 32), torch.randint(0, 4, (24,)))
    names = {
        "model": Task(),
        "float_model": Task(),
        "net": Net(),
        "train_loader": DataLoader(data, batch_size=8),
        "test_loader": DataLoader(data, batch_size=8),
    }
    for code in blocks("python"):
        exec(compile(code, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "layers in int8" in printed
    int8 = names["int8"]
    assert isinstance(int8, nn.Module)
    assert int8(torch.randn(2, 3, 16, 16)).shape == (2, 4)


def test_links_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", "\n".join(blocks("sh")), flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    for recipe in re.findall(r"\+recipe=(\w+)", README):
        assert (ROOT / "conf" / "recipe" / f"{recipe}.yaml").exists(), recipe
