"""What commands print."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO, TypeVar

T = TypeVar("T")


def shown(result: Any, text: str, as_json: bool) -> str:
    """A result as JSON or as text."""
    return json.dumps(_plain(result), indent=2) if as_json else text


def shortened(text: str, lines: int = 4, length: int = 300) -> str:
    """The first lines of a text, and of each its beginning."""
    kept = [line if len(line) <= length else f"{line[:length]} ..." for line in text.splitlines()]
    return "\n".join(kept[:lines] + ["..."] * (len(kept) > lines))


def write(text: str) -> None:
    """Prints a text on stdout, in the characters that it takes. A reader that has gone (``head``) is no error.

    Raises:
        OSError: The disk is full, say.
    """
    if sys.stdout is None:  # closed by the shell
        return
    try:
        if text:
            print(_spelled(text, sys.stdout))
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is not tried again at exit
        if not isinstance(error, BrokenPipeError):
            raise


def say(text: str) -> None:
    """Prints a text on stderr, where there is one."""
    if sys.stderr is not None:
        print(_spelled(text, sys.stderr), file=sys.stderr)


def _spelled(text: str, stream: TextIO) -> str:
    """The text without what a terminal would act on, and without characters that the stream does not take."""
    plain = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return plain.encode(encoding, "backslashreplace").decode(encoding)


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
