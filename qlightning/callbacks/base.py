"""Where Lightning comes from: the classes of `pytorch_lightning` and of `lightning.pytorch`, whichever is installed."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch import nn

_PACKAGES = ("pytorch_lightning", "lightning.pytorch")


def _classes(name: str, submodule: str = "") -> tuple[type, ...]:
    found = []
    for package in _PACKAGES:
        try:
            found.append(getattr(importlib.import_module(f"{package}{submodule}"), name))
        except ImportError:
            continue
    if not found:
        raise ImportError(f"The callbacks need one of the packages {' or '.join(_PACKAGES)}.")
    return tuple(found)


# The two packages are the same code twice, with classes that do not know each other. A Trainer asks
# `isinstance(callback, Callback)` of its own (for a callback that is not in a list, and in is_overridden), so ours
# derives from both. The second import costs little: torch and torchmetrics, which both need, are most of the time.
if TYPE_CHECKING:
    from pytorch_lightning import Callback
else:
    Callback = type(
        "Callback", _classes("Callback"), {"__doc__": "A callback for either package.", "__module__": __name__}
    )

LIGHTNING_MODULES: tuple[type[nn.Module], ...] = _classes("LightningModule")
LIGHTNING_DATAMODULES: tuple[type, ...] = _classes("LightningDataModule")


class QuantizingCallback(Callback):
    """What other parts ask of our callbacks when they meet them in a Trainer."""

    def prepare_for_checkpoint(self, pl_module: nn.Module) -> None:
        """Prepares a float LightningModule for a checkpoint of the prepared form that does not say how."""
        raise NotImplementedError


def quantizing_callbacks(trainer: Any) -> list[QuantizingCallback]:
    """Our callbacks in a Trainer; None for a Trainer has none."""
    return [c for c in getattr(trainer, "callbacks", ()) if isinstance(c, QuantizingCallback)]


def is_a(instance: Any, *names: str) -> bool:
    """Whether an object is of a class of one of these names, or of a subclass: Lightning has each class twice."""
    return any(base.__name__ in names for base in type(instance).__mro__)


def overrides(instance: Any, method: str) -> bool:
    """Whether a LightningModule or LightningDataModule has its own version of a method, not Lightning's default."""
    own = getattr(type(instance), method, None)
    defaults = [getattr(base, method, None) for base in (*LIGHTNING_MODULES, *LIGHTNING_DATAMODULES)]
    return own is not None and all(own is not default for default in defaults)


def combined_loader(loaders: Any) -> Any:
    """An iterable of batches as Lightning's training loop makes them: several loaders give one batch of theirs each."""
    combined: Any = _classes("CombinedLoader", ".utilities")[0]
    if type(loaders).__name__ != "CombinedLoader":
        if not isinstance(loaders, (list, tuple, dict)):
            return loaders
        loaders = combined(loaders, "max_size_cycle")
    return (batch for batch, _, _ in loaders)
