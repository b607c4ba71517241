"""Tables of the benchmarks' page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def head(texts: Sequence[str], figures: Sequence[str]) -> Iterator[str]:
    """The head of a table: columns of text, then columns of figures."""
    yield line([*texts, *figures])
    yield line([*["---"] * len(texts), *["---:"] * len(figures)])


def line(cells: Sequence[str]) -> str:
    """A row."""
    return f"| {' | '.join(cells)} |"
