"""What commands print."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def shown(result: Any, text: str, as_json: bool) -> str:
    """A result as JSON or as text."""
    return json.dumps(_plain(result), indent=2) if as_json else text


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


def positive(text: str) -> int:
    """A number from 1 on, of the command line."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return number
