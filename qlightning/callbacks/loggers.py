"""What the loggers of a Trainer get of an int8 model: its files, its report, figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from textwrap import indent
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from qlightning.analysis import describe
from qlightning.callbacks.base import is_a
from qlightning.export import Metadata, parts_of
from qlightning.graph.report import Report
from qlightning.nn.quantized import QuantizedLayer

FIGURES = 16
"""How many layers are drawn at most: each takes about a fifth of a second, and 20 kB of the event file."""


@dataclass(frozen=True)
class Outcome:
    """What there is to log.

    Attributes:
        int8: The int8 modules by target name.
        report: The report on them.
        files: The files that were written, and the facts that each carries.
        root: Files below it keep their folders.
        step: The optimizer steps so far.
    """

    int8: Mapping[str, nn.Module]
    report: Report
    files: Mapping[Path, Metadata]
    root: Path
    step: int

    @property
    def report_name(self) -> str:
        """What the report is called: by its nets where they are not the only ones, as several callbacks may work."""
        names = [re.sub(r"[^\w.-]", "-", name) for name in self.int8 if name]
        return "-".join(["report", *names])

    def named_files(self) -> Iterator[tuple[str, Path]]:
        """The files, each with its name: the path below the root, or the last part of another."""
        root = self.root.resolve()
        for path in [part for file in self.files for part in parts_of(file)]:
            whole = path.resolve()
            yield whole.relative_to(root).as_posix() if whole.is_relative_to(root) else path.name, path


def log_outcome(trainer: Any, outcome: Outcome) -> None:
    """Hands an outcome to those loggers of a Trainer that take such, on rank zero.

    - MLFlowLogger: the report as HTML and the files, as artifacts of the run in the folder ``int8``.
    - WandbLogger: the report as HTML, ``int8/report``; an artifact of type "model" with the files, named by the first
      of them and the run; backend, mode, activation and metrics are its metadata.
    - TensorBoardLogger: the report as text and, where matplotlib is installed, how often each code of a layer's weight
      occurs as figures, of the first 16 layers.

    Other loggers are left alone. One that fails is named in a warning: neither training nor files are lost for it.
    """
    if not trainer.is_global_zero:
        return
    for logger in trainer.loggers:
        log = next((log for name, log in _KNOWN.items() if is_a(logger, name)), None)
        try:
            if log is not None:
                log(logger, outcome)
        except Exception as error:  # no network, no credentials, a full disk, a run that is closed
            rank_zero_warn(
                f"{type(logger).__name__} did not take all of the int8 model ({type(error).__name__}: {error}). The "
                "training and the files that were written (saved of the callback) are as they would be without it."
            )


def _log_to_mlflow(logger: Any, outcome: Outcome) -> None:
    logger.experiment.log_text(logger.run_id, outcome.report.html(), f"int8/{outcome.report_name}.html")
    for name, path in outcome.named_files():
        logger.experiment.log_artifact(logger.run_id, str(path), (Path("int8") / name).parent.as_posix())


def _log_to_wandb(logger: Any, outcome: Outcome) -> None:
    import wandb  # installed, as there is a logger of it

    run = logger.experiment
    run.log({f"int8/{outcome.report_name}": wandb.Html(outcome.report.html(), inject=False)})
    if not outcome.files:
        return
    path, facts = next(iter(outcome.files.items()))
    artifact = wandb.Artifact(
        f"{re.sub('[^a-zA-Z0-9_.-]', '-', path.stem)}-{run.id}",  # no other characters are allowed
        type="model",
        metadata={key: getattr(facts, key) for key in ("backend", "mode", "activation", "metrics")},
    )
    for name, path in outcome.named_files():
        artifact.add_file(str(path), name)
    run.log_artifact(artifact)


def _log_to_tensorboard(logger: Any, outcome: Outcome) -> None:
    writer, targets = logger.experiment, ", ".join(name or "model" for name in outcome.int8)
    writer.add_text(f"int8/{targets}", indent(str(outcome.report), "    "), outcome.step)  # markdown for monospace
    if find_spec("matplotlib") is not None:
        for name, layer in islice(_layers(outcome), FIGURES):
            writer.add_figure(f"int8 weights/{name or 'model'}", describe(layer.weight()).plot(), outcome.step)


def _layers(outcome: Outcome) -> Iterator[tuple[str, QuantizedLayer]]:
    """The int8 layers by the names that they have in the report."""
    reported = {row.name for row in outcome.report.layers}
    for target, module in outcome.int8.items():
        for below, layer in module.named_modules():
            if isinstance(layer, QuantizedLayer):
                name = f"{target}.{below}".strip(".")
                # A layer that was captured on its own is called "layer" in there.
                yield name if name in reported else name.removesuffix("layer").rstrip("."), layer


# By name: `pytorch_lightning` and `lightning.pytorch` have classes of their own, and nothing is imported without need.
_KNOWN: Mapping[str, Callable[[Any, Outcome], None]] = {
    "MLFlowLogger": _log_to_mlflow,
    "WandbLogger": _log_to_wandb,
    "TensorBoardLogger": _log_to_tensorboard,
}
