"""The peak of the memory that tensors take, counted by torch's allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most bytes on the CPU that a call has allocated and not yet freed; what was there before does not count."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    results = profile.profiler.kineto_results
    changes = [event for event in results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def held_bytes(tensors: Iterable[Any]) -> int:
    """The bytes of different tensors."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if isinstance(t, Tensor)}
    return sum(storages.values())
