"""Several ranks, each with batches of its own: one set of ranges for all of them, and which strategies can have it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data.distributed import DistributedSampler

from qlightning.callbacks.base import is_a
from qlightning.errors import CalibrationError, ConfigError
from qlightning.fake_quantize import FakeQuantize, WeightFakeQuantize, fake_quantizers, refresh_all
from qlightning.nn.qat import QATLayer
from qlightning.observers import Observer

_SHARDING = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy")
_IGNORED = "_ddp_params_and_buffers_to_ignore"


def check_strategy(trainer: Any) -> None:
    """Checks that every rank has whole weights, and that ranks can exchange their ranges.

    Raises:
        ConfigError: They cannot.
    """
    name = type(trainer.strategy).__name__
    if is_a(trainer.strategy, *_SHARDING):
        raise ConfigError(
            f"{name} parts the parameters among the ranks, but the grid of a weight needs all of it. Use "
            "strategy='ddp' or one device."
        )
    if trainer.world_size > 1 and not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"{name} has {trainer.world_size} ranks without torch.distributed, by which ranges are "
            "exchanged. Use strategy='ddp' or one device."
        )


def is_spawned(trainer: Any) -> bool:
    """Whether the Trainer runs its stages in processes of their own (``ddp_spawn``, ``ddp_fork``).

    Nothing of them comes back to the process that started them but rank zero's state dict, which Lightning loads into
    the LightningModule there.
    """
    launcher = trainer.strategy.launcher
    return is_a(launcher, "_MultiProcessingLauncher")


class RangeSync:
    """Gives every rank of a training the same ranges; does nothing where there is one rank.

    Statistics that are single numbers combined by min, max or mean are exchanged after each batch, all of them in one
    collective. Others (histograms, whose counts would be added up anew each time; one value for each channel) follow
    the rank's own batches, and are combined once, when the observers stop. Weights need nothing: they are the same on
    every rank.

    Args:
        trainer: The Trainer.
        pl_module: The LightningModule, before the strategy wraps it.
        prepared: The prepared modules in it, by target name.
    """

    def __init__(self, trainer: Any, pl_module: nn.Module, prepared: Mapping[str, nn.Module]) -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self._prepared = prepared
        self._follows = False
        self._numbers = _Numbers([])
        self._before: list[str] | None = None
        self._hides = _is_distributed(trainer)
        self._bns = list(_following_bns(prepared.values()))
        # DDP would write rank zero's buffers over the others' before each forward. Its own setter also marks the
        # buffers themselves, which would then be saved with the mark.
        if self._hides:
            self._before = pl_module.__dict__.get(_IGNORED)
            names = [f"{name}.{buffer}" for name, fq in fake_quantizers(pl_module) for buffer, _ in fq.named_buffers()]
            pl_module.__dict__[_IGNORED] = [*(self._before or ()), *names]

    def start(self) -> None:
        """Begins, when the strategy has wrapped the LightningModule."""
        self.release()
        self.relink()
        if _is_distributed(self._trainer):
            self._numbers = _Numbers([fq for _, fq in _activations(self._prepared) if _combines_by_number(fq.observer)])

    def release(self) -> None:
        """Takes off the LightningModule what DDP has read by now."""
        if self._hides:
            del self._pl_module.__dict__[_IGNORED]
            if self._before is not None:
                self._pl_module.__dict__[_IGNORED] = self._before
        self._hides = False

    def relink(self) -> None:
        """Shows layers the BatchNorm behind them anew.

        With ``sync_batchnorm`` Lightning puts others in their places, when it wraps the model and when it is done
        (plugins/layer_sync.py).
        """
        for layer, module, name in self._bns:
            layer.__dict__["following_bn"] = module.get_submodule(name)

    def follow(self, follows: bool) -> None:
        """Before a batch, and after the last one: whether observers follow the batches.

        When they begin to, all ranks hold the same counts (none, or those of a checkpoint), and each goes on with its
        share of these. When they stop, ranks combine what they have.
        """
        if follows == self._follows or not _is_distributed(self._trainer):
            return
        self._follows = follows
        if not follows:
            merge_ranges(self._trainer, self._prepared)
            return
        for _, fq in _activations(self._prepared):
            if isinstance(observer := fq.observer, Observer):
                for name in (name for name, reduction in observer.reductions.items() if reduction == "sum"):
                    observer.set_state(name, observer.get_buffer(name) / self._trainer.world_size)

    def after_batch(self) -> None:
        """Combines, in one collective, what the ranks' observers have seen so far."""
        if self._follows:
            self._numbers.exchange()


@torch.no_grad()
def merge_ranges(trainer: Any, prepared: Mapping[str, nn.Module]) -> None:
    """Combines the statistics of all ranks, and takes the grids from what comes out.

    What :class:`RangeSync` has combined batch by batch stays as it is: the min, max or mean of equal numbers.
    """
    if not _is_distributed(trainer):
        return
    ranks = gathered(trainer, {name: _facts(fq) for name, fq in _activations(prepared)})
    warned = False
    for name, fq in _activations(prepared):
        facts = [rank[name] for rank in ranks if name in rank]
        fq.seen_ndims = set().union(*(seen for _, seen in facts))
        states = [state for state, _ in facts]
        observer = fq.observer
        if not callable(getattr(observer, "merge", None)):
            if not warned:
                rank_zero_warn(
                    f"{fq.name or name}: {type(observer).__name__} cannot merge what several ranks have seen, so its "
                    "range is that of rank zero alone. Derive it from qlightning.observers.Observer."
                )
            warned = True
            fq.load_state_dict(states[0], strict=False)
        else:
            observer.merge([_below(state, "observer.") for state in states])  # type: ignore[operator]
            if any(bool((state["scale"] > 0).all()) for state in states):
                fq.refresh()


def sync_buffers(trainer: Any, prepared: Mapping[str, nn.Module]) -> None:
    """Gives all ranks the buffers of rank zero, BatchNorm statistics above all.

    DDP does so before each forward, so that after the last batch every rank has its own.
    """
    if not _is_distributed(trainer):
        return
    for module in prepared.values():
        own = dict(module.named_buffers())
        sent = trainer.strategy.broadcast({name: buffer.detach().cpu() for name, buffer in own.items()})
        for name, buffer in own.items():
            if name in sent:
                buffer.detach().resize_(sent[name].shape).copy_(sent[name])


@torch.no_grad()
def average_statistics(trainer: Any, norms: Iterable[_BatchNorm]) -> None:
    """Gives the BatchNorms of all ranks the average of their statistics, by the batches that went into them."""
    if not _is_distributed(trainer):
        return
    for bn in norms:
        own: list[Any] = [bn.running_mean, bn.running_var, bn.num_batches_tracked]
        ranks = gathered(trainer, [buffer.cpu() for buffer in own])
        total = sum(count for *_, count in ranks)
        for i in (0, 1):
            own[i].copy_(sum(rank[i].double() * rank[2] for rank in ranks) / total)
        own[2].copy_(total)


def gathered(trainer: Any, value: Any) -> list[Any]:
    """The values of all ranks, in their order."""
    if not _is_distributed(trainer):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def show_forward(pl_module: nn.Module) -> None:
    """Removes the attribute ``forward`` by which Lightning leaves the class's own on the instance after DDP.

    Its strategies call a step through the ``forward`` of the wrapped LightningModule (_ForwardRedirection in
    strategies/strategy.py) and then set what was there before, as an attribute: it would hide that of another class.
    """
    left = pl_module.__dict__.get("forward")
    if getattr(left, "__self__", None) is pl_module and getattr(left, "__name__", "") == "forward":
        del pl_module.__dict__["forward"]


def share_of(batches: Iterable[Any], num_batches: int | None, trainer: Any) -> Iterator[Any]:
    """The batches of a rank: each of them takes every n-th, unless a DistributedSampler has dealt them out already.

    Args:
        batches: The same number on all ranks.
        num_batches: So many at most, of all ranks together; None: all.
        trainer: The Trainer.

    Raises:
        CalibrationError: There is none, on any rank.
    """
    world, rank = trainer.world_size, trainer.global_rank
    if isinstance(getattr(batches, "sampler", None), DistributedSampler):
        num_batches = None if num_batches is None else -(-num_batches // world)
        world, rank = 1, 0
    count = 0
    for batch in islice(batches, num_batches):
        if count % world == rank:
            yield batch
        count += 1
    if not count:
        raise CalibrationError("The calibration loader gives no batch, so no range can be observed.")


class _Numbers:
    """The states of observers that are single numbers, exchanged as one row."""

    def __init__(self, fqs: list[FakeQuantize]) -> None:
        self._fqs = fqs
        self._states = [(i, fq.observer, name) for i, fq in enumerate(fqs) for name in fq.observer.reductions]  # type: ignore[union-attr]
        device = fqs[0].scale.device if fqs else None
        defaults: list[Tensor] = [observer._defaults[name] for _, observer, name in self._states]  # type: ignore[index]
        reductions = [observer.reductions[name] for _, observer, name in self._states]  # type: ignore[index]
        self._defaults = torch.stack(defaults).to(device) if fqs else torch.zeros(0)
        self._owner = torch.tensor([i for i, _, _ in self._states], device=device)
        self._is_min = torch.tensor([reduction == "min" for reduction in reductions], device=device)
        self._is_max = torch.tensor([reduction == "max" for reduction in reductions], device=device)

    @torch.no_grad()
    def exchange(self) -> None:
        """One collective."""
        if not self._fqs:
            return
        buffers: list[Tensor] = [getattr(observer, name) for _, observer, name in self._states]
        # A statistic may turn out to be no number (a state may grow on the first batch): it waits to be merged.
        grown = {i for (i, _, _), buffer in zip(self._states, buffers, strict=True) if buffer.ndim}
        row = torch.stack([self._defaults[j] if buffer.ndim else buffer for j, buffer in enumerate(buffers)])
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        combined, seen = self.combine(torch.stack(rows))
        changed = {i for i, is_seen in enumerate(seen.tolist()) if is_seen} - grown
        chosen = [j for j, (i, _, _) in enumerate(self._states) if i in changed]
        if chosen:
            values = combined.unbind()
            torch._foreach_copy_([buffers[j] for j in chosen], [values[j] for j in chosen])
        refresh_all(self._fqs[i] for i in sorted(changed))

    def combine(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What ``Observer.merge`` gives, for all observers at once.

        Args:
            rows: float32 (ranks, states).

        Returns:
            The combined states (states,), and whether a rank has seen anything (observers,).
        """
        differs = (rows != self._defaults).to(torch.float32)
        seen = rows.new_zeros(rows.shape[0], len(self._fqs)).index_add_(1, self._owner, differs) > 0
        counts = seen[:, self._owner]
        low = rows.masked_fill(~counts, torch.inf).amin(0)
        high = rows.masked_fill(~counts, -torch.inf).amax(0)
        mean = rows.masked_fill(~counts | rows.isinf(), torch.nan).nanmean(0)
        first = rows.gather(0, counts.int().argmax(0)[None])[0]
        mean = torch.where(mean.isnan(), first, mean)
        return torch.where(self._is_min, low, torch.where(self._is_max, high, mean)), seen.any(0)


def _is_distributed(trainer: Any) -> bool:
    return bool(trainer.world_size > 1)


def _activations(prepared: Mapping[str, nn.Module]) -> Iterator[tuple[str, FakeQuantize]]:
    for target, module in prepared.items():
        for name, fq in fake_quantizers(module):
            if not isinstance(fq, WeightFakeQuantize):
                yield f"{target}.{name}", fq


def _combines_by_number(observer: nn.Module) -> bool:
    return (
        isinstance(observer, Observer)
        and type(observer).merge is Observer.merge
        and observer.scheme.axis is None
        and "sum" not in observer.reductions.values()
        and all(default.ndim == 0 for default in observer._defaults.values())
    )


def _facts(fq: FakeQuantize) -> tuple[dict[str, Tensor], set[int]]:
    return {name: tensor.detach().cpu().clone() for name, tensor in fq.state_dict().items()}, fq.seen_ndims


def _below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _following_bns(modules: Iterable[nn.Module]) -> Iterator[tuple[QATLayer, nn.Module, str]]:
    """The layers that look at the BatchNorm behind them, with a module above it and its name there."""
    for module in modules:
        names = {id(child): name for name, child in module.named_modules()}
        for layer in module.modules():
            if isinstance(layer, QATLayer) and layer.following_bn is not None:
                yield layer, module, names[id(layer.following_bn)]
