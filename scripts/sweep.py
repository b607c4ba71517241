"""Searches settings of calibration with Optuna, as ``conf/search.yaml`` says: ``python scripts/sweep.py``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as in scripts/train.py
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # recipes/ stands beside scripts/ and is not installed

from recipes.search import search


@hydra.main(version_base="1.3", config_path="../conf", config_name="search")
def main(config: DictConfig) -> None:
    """Runs the composed search."""
    chosen = HydraConfig.get()
    base = list(chosen.overrides.task)
    folder = Path(chosen.runtime.output_dir)
    search(config, folder, lambda overrides: hydra.compose("search", [*base, *overrides]))


if __name__ == "__main__":
    main()
