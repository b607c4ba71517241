"""The numbers of the README are those that the benchmarks have written."""

from __future__ import annotations

from pathlib import Path

from scripts.bench.render_front import numbers

ROOT = Path(__file__).parents[2]


def test_the_numbers_of_the_readme_are_those_of_the_benchmarks() -> None:
    assert numbers() in (ROOT / "README.md").read_text()
