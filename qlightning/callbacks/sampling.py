"""What a training does to grids and weights: sampled every few steps, for the loggers and for the report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from qlightning.callbacks.schedule import Phase
from qlightning.graph.recording import Call
from qlightning.graph.sampling import Sample, keeping_calls, look_at
from qlightning.graph.source import Training
from qlightning.html import History, Stage

INTERVAL = 50
"""Training batches between two samples at least, where the user has not said."""
LOGGED = 32
"""Layers, and grids, of which a number is logged each: those that were worst at the first sample."""
KEPT = 128
"""Samples that are kept: where more come, every second is forgotten, and as many are left out from then on."""
KINDS = ("low", "high", "clip", "sqnr")


class Track:
    """The samples of a training, a bounded number of them, and the stages of its schedule.

    Attributes:
        steps: The optimizer steps so far, at each sample.
        stages: The stages of the schedule as they were entered.
        length: The optimizer steps of the whole training.
        batches: The training batches so far, by which samples are due; a resumed training goes on counting.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.stages: list[Stage] = []
        self.length = 0
        self.batches = 0
        self._rows: list[Sample] = []
        self._stride, self._seen = 1, 0

    def add(self, step: int, sample: Sample) -> None:
        """Keeps a sample, or leaves it out."""
        if self._seen % self._stride == 0:
            self.steps.append(step)
            self._rows.append(sample)
        self._seen += 1
        if len(self.steps) > KEPT:
            self.steps, self._rows, self._stride = self.steps[::2], self._rows[::2], 2 * self._stride

    def enter(self, step: int, epoch: int, phase: Phase) -> None:
        """Notes a stage of the schedule where it is another than before."""
        what = str(phase)
        if not self.stages or self.stages[-1].what != what:
            self.stages.append(Stage(step, epoch, phase.stage, what))

    def training(self) -> Training:
        """What the report shows."""
        columns = {kind: self._columns(kind) for kind in KINDS}
        history = History(tuple(self.steps), columns["low"], columns["high"], columns["clip"], columns["sqnr"])
        return Training(history, tuple(self.stages), self.length)

    def _columns(self, kind: str) -> dict[str, tuple[float | None, ...]]:
        rows = [getattr(row, kind) for row in self._rows]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: tuple(row.get(name) for row in rows) for name in names}

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        columns = {kind: {name: list(column) for name, column in self._columns(kind).items()} for kind in KINDS}
        stages = [(s.step, s.epoch, s.number, s.what) for s in self.stages]
        counts = {"batches": self.batches, "stride": self._stride, "seen": self._seen}
        return {"steps": list(self.steps), "columns": columns, "stages": stages, **counts}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state` gave."""
        columns, self.steps = state["columns"], list(state["steps"])
        self._rows = [
            Sample(**{k: {n: c[i] for n, c in columns[k].items() if c[i] is not None} for k in KINDS})
            for i in range(len(self.steps))
        ]
        self.stages = [Stage(*stage) for stage in state["stages"]]
        self.batches, self._stride, self._seen = state["batches"], state["stride"], state["seen"]


class Sampler:
    """Looks at prepared modules after some of the training batches; on rank zero.

    A sample keeps the first inputs of a batch, and runs a few of them through the eval graphs once more, node by node,
    to count what is clipped. Nothing that the training computes depends on it.

    Args:
        prepared: By target name.
        every: Training batches between two samples; 0: none but the first, for the report.

    Attributes:
        calls: The first inputs of the last sampled batch, by target and by captured part of it.
    """

    def __init__(self, prepared: Mapping[str, nn.Module], every: int) -> None:
        self.track = Track()
        self.calls: dict[str, dict[str, list[Call]]] = {}
        self._prepared, self._every = dict(prepared), every
        self._watching: ExitStack | None = None
        self._is_due = False
        self._works = True
        self._chosen: dict[str, list[str]] = {}

    def before_batch(self, pl_module: nn.Module) -> None:
        """Watches the batch, where it is one to be sampled; ``pl_module`` holds the prepared modules."""
        track = self.track
        self._is_due = track.batches == 0 or bool(self._every and (track.batches + 1) % self._every == 0)
        track.batches += 1
        wanted = self._is_due or not self.calls  # a resumed training has no inputs to show yet
        if not wanted or not self._works:
            return
        self.release()
        self._watching = ExitStack()
        self.calls = self._watching.enter_context(keeping_calls(self._prepared, pl_module))

    def after_batch(self, step: int) -> dict[str, float]:
        """Takes the sample, where one is due.

        Args:
            step: The optimizer steps so far.

        Returns:
            What is to be logged, by name; nothing at most batches.
        """
        if self._watching is None:
            return {}
        self.release()
        if not self._is_due:
            return {}
        try:
            sample = self._look()
        except Exception as error:  # a training is not lost for it
            self._works = False
            rank_zero_warn(
                f"Errors and ranges are no longer sampled for the log and the report, as looking at them failed: "
                f"{type(error).__name__}: {error}"
            )
            return {}
        self.track.add(step, sample)
        return self._scalars(sample) if self._every else {}

    def release(self) -> None:
        """Stops watching."""
        if self._watching is not None:
            self._watching.close()
            self._watching = None

    def finish(self, step: int) -> None:
        """Notes the end of the training."""
        self.release()
        self.track.length = step

    def _look(self) -> Sample:
        whole = Sample()
        for target, module in self._prepared.items():
            found, start = look_at(module, self.calls.get(target, {})), f"{target}." if target else ""
            for kind in KINDS:
                getattr(whole, kind).update({f"{start}{name}": v for name, v in getattr(found, kind).items()})
        return whole

    def _scalars(self, sample: Sample) -> dict[str, float]:
        scalars: dict[str, float] = {}
        for kind, worst in (("sqnr", min), ("clip", max)):
            values = {name: v for name, v in getattr(sample, kind).items() if math.isfinite(v)}
            if not values:
                continue
            if kind not in self._chosen:
                ordered = sorted(values, key=values.__getitem__, reverse=worst is max)
                self._chosen[kind] = ordered[:LOGGED]
            scalars |= {f"qat/{kind}/{name}": values[name] for name in self._chosen[kind] if name in values}
            scalars[f"qat/{kind}_worst"] = worst(values.values())
            scalars[f"qat/{kind}_median"] = statistics.median(values.values())
        return scalars


def interval_of(trainer: Any, log_every: int | None) -> int:
    """How many batches lie between two samples.

    Args:
        trainer: Its ``log_every_n_steps`` counts where that is more than 50, and ``log_every`` was not given.
        log_every: What the user has said.
    """
    return max(INTERVAL, trainer.log_every_n_steps) if log_every is None else log_every


def log(trainer: Any, scalars: Mapping[str, float]) -> None:
    """Hands numbers to the loggers alone: a progress bar, checkpoints and callbacks have no use for hundreds."""
    if not scalars:
        return
    step = trainer.fit_loop.epoch_loop._batches_that_stepped  # as Lightning counts; LearningRateMonitor does so too
    loggers: Iterable[Any] = trainer.loggers
    for logger in loggers:
        logger.log_metrics(dict(scalars), step=step)
