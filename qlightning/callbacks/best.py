"""The checkpoint that a ModelCheckpoint names best."""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from qlightning.callbacks.averaging import saves_averages
from qlightning.errors import ConfigError


def check_monitored(trainer: Any) -> None:
    """Checks that a Trainer will know a best checkpoint, and that this will hold the weights that were measured.

    Raises:
        ConfigError: No ModelCheckpoint monitors anything, or the one that does leaves the averaged weights (EMA) out.
    """
    if not _monitoring(trainer):
        raise ConfigError(
            "convert='best' needs a checkpoint that is best by something: give the Trainer a "
            "ModelCheckpoint(monitor=...), or use convert='last'."
        )
    averaging = saves_averages(trainer)
    if averaging and _monitoring(trainer)[0].save_weights_only:
        raise ConfigError(
            f"convert='best': ModelCheckpoint(save_weights_only=True) saves the current weights, and not those that "
            f"{averaging} averages and validation measures. Use save_weights_only=False."
        )


def load_best(trainer: Any, pl_module: nn.Module) -> str:
    """Loads the best checkpoint of the training into the LightningModule; where none was written, it stays as it is.

    Returns:
        The path of the checkpoint, or "".
    """
    path = next((callback.best_model_path for callback in _monitoring(trainer) if callback.best_model_path), "")
    if not path:
        rank_zero_warn("No checkpoint was written, so the best weights are not known: the last ones are converted.")
        return ""
    checkpoint = torch.load(path, map_location=pl_module.device, weights_only=True)  # type: ignore[arg-type]
    pl_module.load_state_dict(checkpoint["state_dict"], strict=pl_module.strict_loading)  # type: ignore[arg-type]
    rank_zero_info(f"Converting the weights of {path}.")
    return str(path)


def _monitoring(trainer: Any) -> list[Any]:
    return [c for c in trainer.checkpoint_callbacks if getattr(c, "monitor", None) is not None]
