"""Timing that the benchmarks share: calls by turns in one process, and ratios with their confidence."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Call = Callable[[], Any]


class Seconds(NamedTuple):
    """How long a call took: on the CPU, all threads together, and on the wall."""

    cpu: float
    wall: float


class Ratio(NamedTuple):
    """The median of the rounds' ratios, and its 95 % confidence interval."""

    median: float
    low: float
    high: float


def timed(call: Call) -> Seconds:
    """Seconds of one call."""
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return Seconds(time.process_time() - cpu, time.perf_counter() - wall)


def by_turns(calls: Sequence[Call], rounds: int, measure: Callable[[Call], Seconds] = timed) -> list[list[Seconds]]:
    """Seconds of each call in each round, in an order that is drawn: what came before a call leaves it a cache."""
    generator = random.Random(0)
    times: list[list[Seconds]] = [[] for _ in calls]
    for round_number in range(rounds + 1):
        for which in generator.sample(range(len(calls)), len(calls)):
            seconds = measure(calls[which])
            if round_number:  # the first warms up
                times[which].append(seconds)
    return times


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """The ratio of two calls over the rounds; the interval is that of the sign test, by order statistics."""
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    rank = max(0, int(len(ratios) / 2 - 0.98 * len(ratios) ** 0.5))
    return Ratio(statistics.median(ratios), ratios[rank], ratios[-1 - rank])
