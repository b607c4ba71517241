"""BatchNorm statistics taken anew over training batches, with the weights and ranges as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from qlightning.callbacks.calibration import run_batches
from qlightning.callbacks.ranks import average_statistics, gathered
from qlightning.steps.batchnorm import averaging, has_statistics


def reestimate_batchnorm(
    trainer: Any, pl_module: nn.Module, prepared: dict[str, nn.Module], batches: Iterable[Any], num_batches: int
) -> int:
    """Replaces the statistics of every BatchNorm by their plain average over batches.

    Everything else is in eval mode and holds still: ranges, dropout, and ``eps`` and ``momentum`` of the BatchNorms.

    Args:
        trainer: The Trainer.
        pl_module: The LightningModule that holds the prepared modules.
        prepared: By target name.
        batches: Training batches.
        num_batches: At most so many, of all ranks together.

    Returns:
        The number of batches.
    """
    found = [m for module in prepared.values() for m in module.modules() if isinstance(m, _BatchNorm)]
    norms = list(dict.fromkeys(bn for bn in found if has_statistics(bn)))
    if not norms:
        return 0
    count = run_batches(
        trainer, pl_module, prepared, batches, num_batches, averaging(norms), label="Re-estimating BatchNorm"
    )
    average_statistics(trainer, norms)
    return sum(gathered(trainer, count))
