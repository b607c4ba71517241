"""Tables in plain text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells under a head, in columns of equal width.

    Examples:
        >>> print(aligned(("layer", "bits"), [("conv", "8"), ("fc", "4")]))
        layer  bits
        -----  ----
        conv   8
        fc     4
    """
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    ruled = [head, ["-" * width for width in widths], *rows]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in ruled)
    return "\n".join(line.rstrip() for line in lines)
