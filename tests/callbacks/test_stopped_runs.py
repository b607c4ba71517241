"""A run that is stopped in the middle of a step and resumed in another process ends like one that never stopped."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.callbacks import stopped_run

# In each phase of the schedule, right behind a checkpoint (after steps 3, 6, ...) and before the next.
STOPS = ["kill@4", "term@7", "kill@11", "raise@13", "kill@18"]


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stopped")
    script, root = Path(stopped_run.__file__), Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    for what in ("stop", "resume"):
        subprocess.run([sys.executable, script, what, directory, *STOPS], env=environment, check=True, timeout=200)
    ends = {name: torch.load(directory / name / "end.pt", weights_only=False) for name in STOPS}
    statuses = {name: int((directory / name / "status").read_text()) for name in STOPS}
    saved = {name: stopped_run.last_checkpoint(directory / name).stem for name in STOPS}
    return stopped_run.run(directory / "whole"), ends, statuses, saved


def same(actual, expected, path=""):
    """To the last bit, whatever is below."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected), path
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), path
        for name, value in expected.items():
            same(actual[name], value, f"{path}.{name}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), path
        for i, value in enumerate(expected):
            same(actual[i], value, f"{path}.{i}")
    else:
        assert actual == expected, path


@pytest.mark.parametrize("name", STOPS)
def test_a_resumed_run_ends_like_one_that_never_stopped(ends, name):
    whole, resumed, statuses, saved = ends
    assert statuses[name] == {"kill": -signal.SIGKILL, "raise": 1, "term": 0}[name.split("@")[0]]  # as Lightning exits
    assert saved[name] == f"step={int(name.split('@')[1]) // 3 * 3}"
    assert whole["steps"] == 20
    same(resumed[name], whole)
    assert whole["stage"] == 3
    assert not any(whole["modes"].values())
