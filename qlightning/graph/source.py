"""What stands behind a report: the models, calls of them, and what a training has left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from qlightning.graph.recording import Call
from qlightning.html import History, Stage

Calls = Mapping[str, Mapping[str, list[Call]]]
"""Calls by the name of the module that was quantized, and by that of the captured module in it."""


@dataclass(frozen=True)
class Training:
    """What a training has left for the report.

    Attributes:
        history: What was sampled.
        stages: Of the schedule, as it happened.
        length: The optimizer steps.
    """

    history: History = field(default_factory=History)
    stages: tuple[Stage, ...] = ()
    length: int = 0


@dataclass
class Source:
    """The models of a report, each by its name in the whole; "" for the whole.

    A copy by pickle has the facts alone, without models and calls.

    Attributes:
        title: What the whole is called.
        int8: The converted ones.
        prepared: The prepared ones that these were made from, or that are not converted yet.
        calls: Calls of them that were kept.
        training: Gives what a training has left.
        figures: What was measured: by "float", "fake_quant" or "int8", the metrics by name.
        metrics: What was logged last.
        settings: Further settings, in words.
    """

    title: str = ""
    int8: Mapping[str, nn.Module] = field(default_factory=dict)
    prepared: Mapping[str, nn.Module] = field(default_factory=dict)
    calls: Calls = field(default_factory=dict)
    training: Callable[[], Training] | None = None
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "int8": {}, "prepared": {}, "calls": {}, "training": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Source:
        return self
