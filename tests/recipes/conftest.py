import os
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    """These nets are too small for threads, which only wait for each other where other processes run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def compose_run():
    """Composes a run's config from overrides, as scripts/train.py does."""

    def composed(*overrides):
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            return compose("train", list(overrides))

    return composed


@pytest.fixture
def shared_data():
    """The folder with real data and published weights, which are not part of the project."""
    folder = Path(os.environ.get("QLIGHTNING_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "cifar10.npz").exists():
        pytest.skip(f"no cifar10.npz and weights in {folder}; QLIGHTNING_DATA names the folder")
    return folder
