import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from qlightning.errors import ConfigError
from recipes.pareto import Trial, front, marked, plot, table, write
from recipes.search import search

ROOT = Path(__file__).resolve().parents[2]
FAST = ("+recipe=resnet_ptq", "trainer=fast", "model.depth=8", "data.size=8", "float_training.epochs=1")
SPACE = {
    "observer@activation_observer": ["minmax", "mse"],
    "callbacks.quantization.calibration_batches": ["1", "0"],
    "exclude": ["none", "last"],
}


def test_the_best_are_those_that_no_other_dominates():
    generator = torch.Generator().manual_seed(0)
    figures = torch.randint(0, 6, (40, 2), generator=generator).tolist()
    trials = [Trial({}, float(accuracy), float(latency)) for accuracy, latency in figures]
    for trial in marked(trials):
        at_least = [other for other in trials if other.accuracy >= trial.accuracy and other.latency <= trial.latency]
        better = [other for other in at_least if (other.accuracy, other.latency) != (trial.accuracy, trial.latency)]
        assert trial.best is (not better)


def test_the_best_stand_once_and_from_the_fastest_on():
    first, second = Trial({"a": "1"}, 0.9, 0.5), Trial({"a": "2"}, 0.8, 0.4)
    best = front(marked([first, second, first, Trial({"a": "3"}, 0.7, 0.6)]))
    assert [trial.choices["a"] for trial in best] == ["2", "1"]


def test_trials_that_cannot_be_used_are_written_and_counted_and_have_no_figures(tmp_path, capsys):
    trials = marked([Trial({"a": "1"}, 0.9, 0.5), Trial({"a": "2"}, error="no kernel")])
    content = json.loads(write(trials, tmp_path).read_text(encoding="utf-8"))
    assert content[0] == {"choices": {"a": "1"}, "accuracy": 0.9, "latency": 0.5, "best": True}
    assert content[1] == {"choices": {"a": "2"}, "error": "no kernel", "best": False}
    shown = table(trials, 0.9)
    assert shown.row_count == 1
    assert "1 of 2 trials" in str(shown.caption)
    assert plot(trials, 0.9, tmp_path).read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def run_search(tmp_path):
    pytest.importorskip("optuna", reason="the search needs optuna")

    def run(space):
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            config = compose("search", [*FAST, "search.trials=6"])
            OmegaConf.update(config, "search.space", space, merge=False)
            return search(config, tmp_path, lambda more: compose("search", [*FAST, *more]))

    return run


def test_a_search_measures_on_validation_images_and_leaves_its_trials_and_a_plot(run_search, tmp_path, monkeypatch):
    monkeypatch.setattr("pytorch_lightning.Trainer.test", lambda *_, **__: pytest.fail("test images were used"))
    trials = run_search(SPACE)
    assert len(trials) == 6
    assert list(trials[0].choices.values()) == ["minmax", "1", "none"]
    for trial in trials:
        assert (trial.error is not None) is (trial.choices["callbacks.quantization.calibration_batches"] == "0")
    assert any(trial.best for trial in trials)
    assert len(json.loads((tmp_path / "trials.json").read_text(encoding="utf-8"))) == 6
    assert (tmp_path / "pareto.png").exists()


@pytest.mark.parametrize(("space", "message"), [({"seed": 1}, "list of values"), ({"exclude": ["frist"]}, "frist")])
def test_a_space_that_cannot_be_searched_is_an_error_before_any_training(run_search, monkeypatch, space, message):
    monkeypatch.setattr("pytorch_lightning.Trainer.fit", lambda *_, **__: pytest.fail("training began"))
    with pytest.raises(ConfigError, match=message):
        run_search(space)
