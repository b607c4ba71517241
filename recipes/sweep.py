"""The table at the end of a sweep."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from recipes import metrics


@dataclass(frozen=True)
class Run:
    """A run of a sweep.

    Args:
        overrides: What the command line said, value by key.
        metrics: What is in its ``metrics.json``.
    """

    overrides: dict[str, str]
    metrics: metrics.Metrics


class CompareRuns(Callback):
    """A Hydra callback: prints one table of all runs of a sweep, each with the overrides in which they differ."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        console = Console()
        console.print(comparison(collect(folder)))
        console.print(str(folder), soft_wrap=True)


def collect(folder: Path) -> list[Run]:
    """Reads the runs below a sweep folder in their order; each left ``metrics.json`` and Hydra's ``.hydra``."""
    paths = [path.parent for path in folder.rglob(metrics.FILE)]
    paths.sort(key=_number_of)
    runs = []
    for path in paths:
        overrides = (str(override).partition("=") for override in OmegaConf.load(path / ".hydra" / "overrides.yaml"))
        figures = json.loads((path / metrics.FILE).read_text(encoding="utf-8"))
        runs.append(Run({key: value for key, _, value in overrides}, figures))
    return runs


def _number_of(folder: Path) -> int:
    """The number of a run in its sweep; 0 for one on its own."""
    return int(OmegaConf.select(OmegaConf.load(folder / ".hydra" / "hydra.yaml"), "hydra.job.num", default=0))


def comparison(runs: list[Run]) -> Table:
    """Shows the figures of several runs, with a column for every override in which they differ."""
    keys = list(dict.fromkeys(key for run in runs for key in run.overrides))
    keys = [key for key in keys if len({run.overrides.get(key) for run in runs}) > 1]
    table = Table()
    for key in keys:
        longest = max(len(run.overrides.get(key, "")) for run in runs)
        table.add_column(key, overflow="fold", min_width=min(longest, 40))  # values in one piece; a key may break
    for figure in ("float", "fake quant", "int8", "size (MB)", "latency (ms)"):
        table.add_column(figure, min_width=7)
    for run in runs:
        table.add_row(*(run.overrides.get(key, "") for key in keys), *metrics.summary(run.metrics))
    return table
