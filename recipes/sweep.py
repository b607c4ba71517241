"""The table at the end of a sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from recipes import metrics


class CompareRuns(Callback):
    """A Hydra callback: prints one table of all runs of a sweep, each by the overrides in which it differs."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        Console().print(metrics.comparison(collect(folder), title=str(folder)))


def collect(folder: Path) -> dict[str, metrics.Metrics]:
    """Reads the figures of the runs below a sweep folder, in the order of the runs.

    Args:
        folder: Where each run left a folder with ``metrics.json`` and Hydra's ``.hydra``.

    Returns:
        The figures by the overrides that not all of the runs share.
    """
    runs = [path.parent for path in folder.rglob(metrics.FILE)]
    runs.sort(key=lambda run: int(OmegaConf.load(run / ".hydra" / "hydra.yaml").hydra.job.num))
    overrides = [list(OmegaConf.load(run / ".hydra" / "overrides.yaml")) for run in runs]
    shared = set(overrides[0]).intersection(*overrides) if len(runs) > 1 else set()
    found = {}
    for path, own in zip(runs, overrides, strict=True):
        name = " ".join(override for override in own if override not in shared) or path.name
        found[name] = json.loads((path / metrics.FILE).read_text(encoding="utf-8"))
    return found
