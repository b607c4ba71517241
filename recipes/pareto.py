"""Trials with two aims, and those among them that no other beats in both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.table import Table

from recipes.metrics import percent

FILE = "trials.json"
PLOT = "pareto.png"


@dataclass(frozen=True)
class Trial:
    """What a choice of settings gave.

    Args:
        choices: Value by override, as on the command line.
        accuracy: Of the int8 net, the fraction of validation images.
        latency: Of the int8 net, as a part of the float net's time for the same image; both took turns.
        error: Why there are no figures, where the settings cannot be used.
        best: No other trial is better in one figure and as good in the other.
    """

    choices: dict[str, str]
    accuracy: float = 0.0
    latency: float = float("inf")
    error: str | None = None
    best: bool = False


def marked(trials: Sequence[Trial]) -> list[Trial]:
    """Says of each trial whether it is one of the best.

    Examples:
        >>> trials = [Trial({}, 0.9, 0.5), Trial({}, 0.8, 0.4), Trial({}, 0.8, 0.5), Trial({}, error="no such kernel")]
        >>> [trial.best for trial in marked(trials)]
        [True, True, False, False]
    """
    found = [(trial.accuracy, trial.latency) for trial in trials if trial.error is None]

    def is_best(trial: Trial) -> bool:
        own = (trial.accuracy, trial.latency)
        beaten = any(other != own and other[0] >= own[0] and other[1] <= own[1] for other in found)
        return trial.error is None and not beaten

    return [replace(trial, best=is_best(trial)) for trial in trials]


def front(trials: Sequence[Trial]) -> list[Trial]:
    """The best trials, from the fastest on, each choice of settings once."""
    best = sorted((trial for trial in trials if trial.best), key=lambda trial: (trial.latency, -trial.accuracy))
    return [trial for number, trial in enumerate(best) if trial not in best[:number]]


def write(trials: Sequence[Trial], folder: Path) -> Path:
    """Writes ``trials.json`` into a folder."""
    content = [
        {"choices": trial.choices, "error": trial.error, "best": False}
        if trial.error is not None
        else {key: value for key, value in asdict(trial).items() if key != "error"}
        for trial in trials
    ]
    path = folder / FILE
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def table(trials: Sequence[Trial], float_accuracy: float) -> Table:
    """Shows the trials from the most accurate on, the best marked, with what sets each apart from the first."""
    failed = sum(trial.error is not None for trial in trials)
    best = front(trials)
    shown = Table(
        title=f"float: {percent(float_accuracy)} of the validation images; the numbered are beaten by none in both",
        caption=f"{failed} of {len(trials)} trials cannot be used: see {FILE}" if failed else None,
    )
    for name in ("", "accuracy", "time / float's"):
        shown.add_column(name, no_wrap=True)
    shown.add_column("settings", overflow="fold")
    usable = [trial for trial in trials if trial.error is None]
    for trial in sorted(usable, key=lambda trial: (-trial.accuracy, trial.latency)):
        number = str(best.index(trial) + 1) if trial in best else ""
        shown.add_row(number, percent(trial.accuracy), f"{trial.latency:.2f}", _settings(trial, trials[0]))
    return shown


def _settings(trial: Trial, first: Trial) -> str:
    """Words how the settings of a trial differ from those of the first, with groups by the place they go to."""
    changes = {key: value for key, value in trial.choices.items() if value != first.choices[key]}
    return ", ".join(f"{key.rpartition('@')[2]}={value}" for key, value in changes.items()) or "as first tried"


def plot(trials: Sequence[Trial], float_accuracy: float, folder: Path) -> Path:
    """Draws ``pareto.png``: accuracy over latency, a line through the best, and their settings below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.add_subplot()
    usable = [trial for trial in trials if trial.error is None]
    best = front(trials)
    others = [trial for trial in usable if not trial.best]
    axes.axhline(100 * float_accuracy, color="0.6", linestyle="--", linewidth=1, label="float")
    axes.scatter([t.latency for t in others], [100 * t.accuracy for t in others], s=24, color="0.6", label="int8")
    corners = [trial.latency for trial in best], [100 * trial.accuracy for trial in best]
    axes.step(*corners, where="post", color="tab:blue", linewidth=1)
    axes.scatter(*corners, s=40, color="tab:blue", zorder=3, label="int8, beaten by none")
    for number, trial in enumerate(best, start=1):
        place = (trial.latency, 100 * trial.accuracy)
        axes.annotate(str(number), place, xytext=(5, 5), textcoords="offset points", fontsize=9)
        axes.plot([], [], " ", label=f"{number}: {_settings(trial, trials[0])}")
    axes.set_xlabel("time of an image, as a part of float's")
    axes.set_ylabel("accuracy on validation images (%)")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8, frameon=False)
    path = folder / PLOT
    figure.savefig(path, dpi=150)
    return path
