"""JSON of files that are not trusted."""

from __future__ import annotations

import json
from typing import Any


def parse(text: str | bytes) -> Any:
    """The value of a JSON text in which no object has a key twice, of which readers would take one or the other.

    Raises:
        ValueError: It is no such text, or nested deeper than Python can read.

    Examples:
        >>> parse('{"bits": 8}')
        {'bits': 8}
        >>> parse('{"bits": 8, "bits": 4}')
        Traceback (most recent call last):
        ValueError: the key 'bits' is there twice
    """
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:100]!r} is there twice")
        found[key] = value
    return found
