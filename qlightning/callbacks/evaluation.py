"""What a LightningModule logs in its validation, measured apart from the Trainer's own, without a trace."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from qlightning.analysis.probe import Call
from qlightning.callbacks.base import LIGHTNING_DATAMODULES, overrides
from qlightning.callbacks.calibration import in_eval_mode, without_side_effects
from qlightning.callbacks.ranks import gathered
from qlightning.errors import ConfigError


def validation_loaders(trainer: Any, pl_module: nn.Module, data: Any) -> list[Any]:
    """The loaders to validate with: the data given, or those of the Trainer, its datamodule or the LightningModule.

    Raises:
        ConfigError: There are none.
    """
    datamodule: Any = trainer.datamodule
    if isinstance(data, LIGHTNING_DATAMODULES):
        datamodule, data = data, None
        datamodule.prepare_data()
    elif data is None and (loaders := trainer.val_dataloaders) is not None:
        return _listed(loaders)
    if data is not None:
        return [data]
    if datamodule is not None and overrides(datamodule, "val_dataloader"):
        datamodule.setup("validate")
        return _listed(datamodule.val_dataloader())
    if overrides(pl_module, "val_dataloader"):
        return _listed(pl_module.val_dataloader())  # type: ignore[operator]
    raise ConfigError(
        "max_drop is measured on validation data, and there is none: neither a val_dataloader() nor a loader of this "
        "Trainer. Give it: MaxDrop(..., data=loader). Test data is not taken: what it has chosen it cannot test."
    )


def _listed(loaders: Any) -> list[Any]:
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]


class Evaluation:
    """The validation of a LightningModule with its nets as they are at each run.

    Batches go through ``validation_step`` between the epoch's hooks, in eval mode without gradients. What is logged is
    kept here; the random state, metrics, lists and plain attributes of the LightningModule are left as they are.

    Args:
        trainer: The Trainer.
        pl_module: The LightningModule.
        prepared: Its nets, by target name.
        loaders: As from :func:`validation_loaders`.
        batches: At most so many of each loader; None: all.

    Raises:
        ConfigError: The LightningModule has no ``validation_step``.
    """

    def __init__(
        self, trainer: Any, pl_module: Any, prepared: dict[str, nn.Module], loaders: list[Any], batches: int | None
    ) -> None:
        if not overrides(pl_module, "validation_step"):
            raise ConfigError(
                f"max_drop is measured by what validation_step logs, and {type(pl_module).__name__} has none."
            )
        self._trainer, self._pl_module, self._prepared = trainer, pl_module, prepared
        self._loaders, self._batches = loaders, batches

    def value(self, monitor: str) -> float:
        """Runs the validation and gives what was logged under a name; the mean of all ranks.

        Raises:
            ConfigError: Nothing was logged under it.
        """
        log = _Log()
        self._run(log, self._batches)
        found = log.values()
        if monitor not in found:
            raise ConfigError(
                f"max_drop: {monitor!r} is not logged by the validation of {type(self._pl_module).__name__}. It logs "
                f"{', '.join(map(repr, found)) or 'nothing'}."
            )
        everywhere = gathered(self._trainer, found[monitor])
        value = sum(everywhere) / len(everywhere)
        if not math.isfinite(value):
            raise ConfigError(f"max_drop: {monitor} is {value} on the validation data: nothing compares with that.")
        return value

    def calls(self, batches: int) -> dict[str, list[Call]]:
        """The calls of the nets in the first batches, by target name."""
        found: dict[str, list[Call]] = {name: [] for name in self._prepared}
        with ExitStack() as stack:
            for name, module in self._prepared.items():

                def keep(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                    found[name].append((args, kwargs))

                stack.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
            self._run(_Log(), batches if self._batches is None else min(batches, self._batches))
        return found

    @torch.no_grad()
    def _run(self, log: _Log, batches: int | None) -> None:
        trainer, pl_module = self._trainer, self._pl_module
        with (
            in_eval_mode(pl_module),
            torch.inference_mode(False),
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            trainer.precision_plugin.forward_context(),
        ):
            stand_in = without_side_effects(trainer, pl_module, self._prepared, log.log)
            stand_in.on_validation_epoch_start()
            for index, loader in enumerate(self._loaders):
                several = len(self._loaders) > 1
                log.suffix = f"/dataloader_idx_{index}" if several else ""
                for number, batch in enumerate(islice(loader, batches)):
                    batch = trainer.precision_plugin.convert_input(batch)
                    batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=index)
                    batch = trainer.strategy.batch_to_device(batch, device=pl_module.device, dataloader_idx=index)
                    log.samples = _samples(batch)
                    _step(stand_in, batch, number, index if several else None)
            log.suffix, log.samples = "", 1
            stand_in.on_validation_epoch_end()


def _step(stand_in: Any, batch: Any, number: int, loader: int | None) -> None:
    names = inspect.signature(stand_in.validation_step).parameters
    count = len(names)
    extra = [number] if count > 1 else []
    if loader is not None and count > 2:
        extra.append(loader)
    stand_in.validation_step(batch, *extra)


def _samples(batch: Any) -> int:
    """The size of a batch: that of its first tensor, as Lightning takes it."""
    sizes = (leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim())
    return next(sizes, 1)


class _Log:
    """What ``self.log`` gets: means of numbers weighted by the sizes of their batches, and metrics."""

    def __init__(self) -> None:
        self.suffix = ""
        self.samples = 1
        self._sums: dict[str, tuple[float, int]] = {}
        self._metrics: dict[str, Metric] = {}

    def log(
        self,
        name: str,
        value: Any,
        *_: Any,
        batch_size: int | None = None,
        add_dataloader_idx: bool = True,
        reduce_fx: Any = "mean",
        **__: Any,
    ) -> None:
        name += self.suffix if add_dataloader_idx else ""
        if isinstance(value, Metric):
            self._metrics[name] = value
            return
        if reduce_fx not in ("mean", torch.mean):
            return  # another reduction than the mean is that of another quantity; value() says what there is
        samples = batch_size or self.samples
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + float(value) * samples, count + samples)

    def values(self) -> dict[str, float]:
        means = {name: total / count for name, (total, count) in self._sums.items()}
        return means | {name: float(metric.compute()) for name, metric in self._metrics.items()}


def iterable(data: Any) -> bool:
    """Whether data can be iterated over more than once."""
    return isinstance(data, Iterable) and iter(data) is not data
