"""Learning rates over a training."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_cosine(optimizer: Optimizer, total_steps: int, warmup: float = 0.0) -> LambdaLR:
    """Rises linearly from near 0 to the optimizer's rate, then falls to 0 along half a cosine; stepped each batch.

    Args:
        optimizer: Whose rate it sets.
        total_steps: Optimizer steps in the training.
        warmup: The fraction of them in which the rate rises, 0 to 1.
    """
    rising = round(warmup * total_steps)

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / (rising + 1)
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, total_steps - rising)))

    return LambdaLR(optimizer, factor)
