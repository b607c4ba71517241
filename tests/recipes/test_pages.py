"""The pages say what runs have left, and can be written anew from that."""

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipes import pages
from recipes.sweep import Run

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "recipes").glob("*.md"))
VERSIONS = {"torch": "2.14.1", "cpu": "a processor", "threads": 1}


def quantized(net, kind, seed, accuracy, backend="onednn"):
    key = "seed" if kind == "qat" else "data.calibration_seed"
    overrides = {"+recipe": f"resnet_{kind}", "model": net, "model.weights": "net.safetensors", key: str(seed)}
    figures = {"accuracy": accuracy, "size_mb": 0.3, "latency_ms": 2.0 + seed, "backend": backend}
    base = {"accuracy": 0.9, "size_mb": 1.2, "latency_ms": 4.0}
    return Run(overrides, {"float": base, "int8": figures, "versions": VERSIONS, "seconds": 60.0})


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "RESULTS", tmp_path)

    def write(*runs):
        content = [{"overrides": run.overrides, "metrics": run.metrics} for run in runs]
        (tmp_path / "set.json").write_text(json.dumps({"runs": content}), encoding="utf-8")

    return write


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_page_has_the_figures_of_the_kept_runs(path):
    page = path.read_text(encoding="utf-8")
    assert pages.rendered(page) == page, "run scripts/pages.py"


def test_the_commands_of_the_pages_compose(compose_run):
    for path in PAGES:
        for line in re.findall(r"^python scripts/train.py (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            overrides = [word.split(",")[0] for word in line.split() if word != "-m"]
            assert compose_run(*overrides).job


def test_a_page_shows_mean_and_spread_over_the_seeds_of_each_net(results):
    runs = [quantized("resnet20_cifar", "qat", seed, accuracy) for seed, accuracy in enumerate((0.89, 0.91, 0.93))]
    results(*runs, quantized("resnet56_cifar", "qat", 0, 0.8), quantized("resnet20_cifar", "ptq", 0, 0.5))
    page = pages.rendered("before\n<!-- figures: set resnet_qat -->\nold\n<!-- end of figures -->\nbehind\n")
    assert page.startswith("before\n")
    assert page.endswith("behind\n")
    assert "old" not in page
    row = "| ResNet-20 | onednn | 90.00 % | 91.00 % | 89.00 % to 93.00 % (3) | +1.00 | 1.20 → 0.30 | 4.00 → 3.00 | - |"
    assert row in page
    assert "| ResNet-56 | onednn | 90.00 % | 80.00 % | one run | -10.00 |" in page
    assert "50.00 %" not in page
    assert (
        "\npython scripts/train.py -m +recipe=resnet_qat model=resnet20_cifar model.weights=net.safetensors "
        "seed=0,1,2\npython scripts/train.py +recipe=resnet_qat model=resnet56_cifar " in page
    )
    assert pages.rendered(page) == page


def test_kept_runs_name_no_folder_of_the_machine_and_replace_those_of_the_same_command(results, tmp_path):
    for folder, accuracy in (("first", 0.5), ("second", 0.6)):
        run = tmp_path / folder / "0"
        (run / ".hydra").mkdir(parents=True)
        overrides = ["+recipe=resnet_ptq", f"data.path={tmp_path}/set.npz", "+trainer.enable_progress_bar=false"]
        OmegaConf.save(OmegaConf.create(overrides), run / ".hydra" / "overrides.yaml")
        OmegaConf.save(OmegaConf.create({"hydra": {"job": {"num": "???"}}}), run / ".hydra" / "hydra.yaml")
        figures = {"int8": {"accuracy": accuracy}, "files": [str(run / "net.pt2")]}
        (run / "metrics.json").write_text(json.dumps(figures), encoding="utf-8")
        pages.keep("set", [tmp_path / folder])
    (kept,) = pages.read("set")
    assert kept.overrides == {"+recipe": "resnet_ptq", "data.path": "set.npz"}
    assert kept.metrics == {"int8": {"accuracy": 0.6}, "files": ["net.pt2"]}
