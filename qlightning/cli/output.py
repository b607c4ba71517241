"""What commands print."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def show(result: Any, text: str, as_json: bool) -> None:
    """Prints a result on stdout, as JSON or as text."""
    sys.stdout.write(f"{json.dumps(_plain(result), indent=2) if as_json else text}\n")


def progress(items: Sequence[T], what: str) -> Iterable[T]:
    """The items, with a progress bar on stderr where that is a terminal."""
    from tqdm import tqdm

    bar: Iterator[T] = iter(tqdm(items, desc=what, disable=None, leave=False))  # None: where stderr is no terminal
    return bar


def _plain(value: Any) -> Any:
    """The value with null in the place of numbers that JSON lacks."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None
