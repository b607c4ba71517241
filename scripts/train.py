"""Trains, quantizes and evaluates, as ``conf/`` says: ``python scripts/train.py +recipe=mobilenet_qat``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_method
from omegaconf import DictConfig

# Before torch is imported. Its threads wait for each other by spinning; where another process wants a core, a training
# step of a small net then takes 40 times as long, with sleeping threads not twice (measured on 2 cores).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # recipes/ stands beside scripts/ and is not installed


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(config: DictConfig) -> None:
    """Runs the composed config."""
    get_method(config.job)(config, Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    main()
