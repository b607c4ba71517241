"""The benchmark of accuracy: its figures, what it requires, and a whole run on digits, ours alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from qlightning.errors import ConfigError
from scripts.bench import render_accuracy
from scripts.bench.accuracy import OURS, Bench, compared, main
from scripts.bench.accuracy_nets import build, trained_on_digits


def test_figures_are_those_of_counting() -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(500, 7, generator=generator)
    found = reference + 0.5 * torch.randn(500, 7, generator=generator)
    labels = torch.where(torch.rand(500, generator=generator) < 0.7, reference.argmax(1), 3)
    row = compared(reference, found, labels)

    before, after, truth = reference.numpy().argmax(1), found.numpy().argmax(1), labels.numpy()
    assert row["accuracy"] == pytest.approx(100 * np.mean(after == truth))
    assert row["drop"] == pytest.approx(100 * np.mean(before == truth) - row["accuracy"])
    assert row["flipped"] == np.count_nonzero(before != after)
    assert row["broken"] == np.count_nonzero((before == truth) & (after != truth))
    assert row["mended"] == np.count_nonzero((before != truth) & (after == truth))
    assert row["agreement"] == pytest.approx(100 * np.mean(before == after))
    signal, noise = reference.double().numpy(), (reference.double() - found.double()).numpy()
    assert row["sqnr_db"] == pytest.approx(10 * np.log10((signal**2).sum() / (noise**2).sum()), abs=1e-4)


def _rows(tool: str, kind: str, drops: list[float], agreement: float) -> list[dict[str, object]]:
    case = {"net": "net", "tool": tool, "kind": kind}
    return [{**case, "seed": seed, "drop": drop, "agreement": agreement} for seed, drop in enumerate(drops)]


@pytest.mark.parametrize(
    "drops, agreement, missed", [([0.0, 0.06], 99.5, 0), ([0.0, 0.06], 99.3, 1), ([0.1, 0.0], 99.4, 1)]
)
def test_ours_is_held_against_the_best_peer_of_each_figure(drops: list[float], agreement: float, missed: int) -> None:
    rows = _rows(OURS, "ours", drops, agreement)
    rows += _rows("careful", "peer", [0.4, 0.2], 99.4) + _rows("lucky", "peer", [0.0, 0.04], 98.0)
    assert len(Bench([], [0, 1], 512, {"nets": [{"net": "net"}], "rows": rows}).missed()) == missed
    peerless = {"nets": [{"net": "net"}], "rows": rows[:2]}
    assert not Bench([], [0, 1], 512, peerless).missed()


def test_calibration_images_follow_from_the_seed() -> None:
    question = trained_on_digits("resnet8", epochs=0)
    first, again, other = (torch.cat(question.calibration(seed, 40, 16)) for seed in (0, 0, 1))
    assert first.shape == (40, 3, 16, 16)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(first.flatten(1).unique(dim=0)) > 35  # drawn without replacement; the set has some twins


def test_unknown_nets_are_named() -> None:
    with pytest.raises(ConfigError, match=r"lenet.*resnet20"):
        build("lenet")


def test_a_run_is_written_kept_and_rendered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, threads = tmp_path / "accuracy.json", torch.get_num_threads()
    quick = ["--epochs", "1", "--calibration", "64", "--json", str(path)]
    try:
        assert main([*quick, "--seeds", "0", "1", "--only", "onednn"]) == 0
        record = json.loads(path.read_text())
        assert [(row["tool"], row["seed"]) for row in record["rows"][:2]] == [(OURS, 0), (OURS, 1)]
        assert all(row["agreement"] == pytest.approx(100 - row["flipped"] / 4) for row in record["rows"])
        assert main([*quick, "--seeds", "0", "--only", "FX, full"]) in (0, 1)
    finally:
        torch.set_num_threads(threads)
    assert "agreement" in capsys.readouterr().out
    added = json.loads(path.read_text())
    kept = len(record["rows"])
    assert added["rows"][:kept] == record["rows"]
    assert [row["tool"] for row in added["rows"][kept:]] == ["torch.ao FX, full 8-bit ranges"]

    page = tmp_path / "accuracy.md"
    render_accuracy.main(["--json", str(path), "--out", str(page)])
    text = page.read_text()
    assert f"## resnet8, digits: {added['nets'][0]['accuracy']:.2f} % in float" in text
    (row,) = re.findall(rf"^\| {re.escape(OURS)} \|.*$", text, flags=re.MULTILINE)
    assert f"{np.mean([r['sqnr_db'] for r in record['rows'][:2]]):.1f} (" in row
    assert "<svg" in (tmp_path / "benchmarks" / "accuracy.svg").read_text()
