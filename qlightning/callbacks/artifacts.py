"""The files that a callback leaves: int8 models, written once a fit has ended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from qlightning.errors import ConfigError
from qlightning.export import SUFFIXES, Metadata
from qlightning.export import save as save_model


def checked_paths(paths: str | Path | Iterable[str | Path]) -> tuple[str, ...]:
    """The files that a callback is asked for.

    Raises:
        ConfigError: One has a suffix that no kind of file has.
    """
    listed = [paths] if isinstance(paths, (str, Path)) else list(paths)
    for path in listed:
        if not isinstance(path, (str, Path)) or Path(path).suffix not in SUFFIXES:
            raise ConfigError(f"save: {path!r} is no file of a kind that there is; possible are {', '.join(SUFFIXES)}.")
    return tuple(str(path) for path in listed)


def finite_metrics(trainer: Any) -> dict[str, float]:
    """What was logged last, where it is finite: a file takes no others."""
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {name: value for name, value in logged.items() if math.isfinite(value)}


def write(trainer: Any, int8: Mapping[str, nn.Module], paths: Iterable[str], source: str = "") -> dict[Path, Metadata]:
    """Writes int8 models, on rank zero.

    Args:
        trainer: Paths are relative to its ``default_root_dir``; its metrics go into the files, where they are finite.
        int8: By target name; of several each gets a file of its own, ``net.pt2`` becomes ``net.backbone.pt2``.
        paths: The files.
        source: The checkpoint that the models were made from, or empty.

    Returns:
        The files that were written, and the facts that each carries.

    Raises:
        ConfigError, ArtifactError: As ``qlightning.save``; files that were written before stay.
    """
    if not trainer.is_global_zero:
        return {}
    if trainer.fast_dev_run:
        rank_zero_info("fast_dev_run: no file of an int8 model is written.")
        return {}
    metrics = finite_metrics(trainer)
    written: dict[Path, Metadata] = {}
    for path in paths:
        for name, model in int8.items():
            target = Path(trainer.default_root_dir) / path
            if len(int8) > 1:
                target = target.with_name(f"{target.stem}.{name or 'model'}{target.suffix}")
            written[target] = save_model(model, target, metrics=metrics, source=source or None)
            rank_zero_info(f"Saved the int8 model {name or type(model).__name__} as {target}.")
    return written
