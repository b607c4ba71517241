"""The machine's own limit: the best rate of int8 matrix products that oneDNN reaches here."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from scripts.bench.timing import timed

SIZES = (512, 1024, 2048)


def best_int8_rate(rounds: int = 10) -> float:
    """Operations (two a multiply-add) in a second of CPU time: the best of several sizes of uint8 times int8.

    Uses as many threads as torch is set to.
    """
    return max(_rate(rows, inner, columns, rounds) for rows, inner, columns in product(SIZES, repeat=3))


def _rate(rows: int, inner: int, columns: int, rounds: int) -> float:
    x = torch.randint(0, 256, (rows, inner), dtype=torch.uint8)
    codes = torch.randint(-127, 128, (columns, inner), dtype=torch.int8)
    weight = torch.ops.onednn.qlinear_prepack(codes, None)
    scale, zero_point = torch.full((columns,), 1e-3), torch.zeros(columns, dtype=torch.int32)

    def call() -> Tensor:
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            x, 1e-3, 0, weight, scale, zero_point, None, 1.0, 0, torch.uint8, "none", [], ""
        )
        return product

    call()
    seconds = min(timed(call).cpu for _ in range(rounds))
    return 2 * rows * inner * columns / seconds
