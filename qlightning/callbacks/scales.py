"""The groups that learned scales have in the optimizers of a Lightning training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from qlightning.callbacks.base import is_a
from qlightning.errors import ConfigError
from qlightning.learned import LearnedFakeQuantize, learned_fake_quantizers

# What an optimizer's group and a scheduler keep of learning rates; and what else schedulers keep, group by group.
_GROUP_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
_SCHEDULER_RATES = ("base_lrs", "max_lrs", "min_lrs", "_last_lr")
_SCHEDULER_VALUES = ("lr_lambdas", "base_momentums", "max_momentums")


def weights_of(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a prepared module that the float one has, too."""
    scales = {id(p) for _, fq in learned_fake_quantizers(module) for p in fq.parameters(recurse=False)}
    return [p for p in module.parameters() if id(p) not in scales]


def warn_frozen(prepared: Mapping[str, nn.Module], modules: Iterable[str] | None) -> None:
    """Says which nets are quantized though nothing in them is trained: teachers, losses that are nets.

    Args:
        prepared: The prepared modules, by target name.
        modules: The names that the user has given, who then knows; None: none.
    """
    trained = {name: any(p.requires_grad for p in weights_of(m)) for name, m in prepared.items()}
    frozen = [name for name, is_trained in trained.items() if not is_trained]
    if modules is None and frozen and any(trained.values()):
        rank_zero_warn(
            f"{', '.join(frozen)} has no parameter that is trained, and is quantized like the rest. If it is a teacher "
            f"or the like, leave it out: modules={[name for name in trained if name not in frozen]!r}."
        )


class ScaleGroups:
    """Puts the learned scales of prepared modules into groups of their own; does nothing where there are none.

    In the optimizers they have groups of their own, behind the user's: without weight decay, at the rate of the group
    that they come from times ``LearnedScales.lr_factor``. Learning rate schedulers of any class of torch move them
    along.

    Args:
        prepared: The prepared modules, by target name.
    """

    def __init__(self, prepared: Mapping[str, nn.Module]) -> None:
        self._prepared = prepared
        self._checkpoint: dict[str, Any] = {}

    def resume_from(self, checkpoint: dict[str, Any]) -> None:
        """Notes the checkpoint whose optimizers will be restored after :meth:`start`."""
        self._checkpoint = checkpoint

    def start(self, trainer: Any) -> None:
        """Gives the scales their groups; the optimizers are there, and not yet restored from a checkpoint.

        Raises:
            ConfigError: There is no optimizer, or one that takes no groups.
        """
        checkpoint, self._checkpoint = self._checkpoint, {}
        # Where configure_optimizers returns none, Lightning has one that does nothing and has no groups.
        optimizers = [optimizer for optimizer in trainer.optimizers if optimizer.param_groups]
        moves = _plan(self._prepared, optimizers)
        for index, optimizer in enumerate(optimizers):
            own = [move for move in moves if move.optimizer is optimizer]
            if not own:
                continue
            if is_a(optimizer, "LBFGS"):
                raise ConfigError("Learned scales need a parameter group of their own, which LBFGS does not take.")
            before = len(optimizer.param_groups)
            _take_out(optimizer, {id(p) for move in own for _, p in move.parameters})
            for move in own:
                optimizer.add_param_group(_group(optimizer.param_groups[move.source], move))
            for config in trainer.lr_scheduler_configs:
                if config.scheduler.optimizer is optimizer:
                    _extend_scheduler(config.scheduler, own, before)
            _extend_saved(checkpoint, index, trainer, optimizer, own, before)


@dataclass(frozen=True)
class _Move:
    """Parameters that get a group of their own.

    Attributes:
        optimizer: Where.
        source: The index of the group whose settings it takes.
        factor: Of the learning rate.
        parameters: With their names.
    """

    optimizer: Any
    source: int
    factor: float
    parameters: tuple[tuple[str, nn.Parameter], ...]


def _plan(prepared: Mapping[str, nn.Module], optimizers: list[Any]) -> list[_Move]:
    """Which scales go where: from the group in which they are, else beside the first weight of their net."""
    places = {
        id(p): (optimizer, index)
        for optimizer in reversed(optimizers)
        for index, group in reversed(list(enumerate(optimizer.param_groups)))
        for p in group["params"]
    }
    grouped = _grouped_already(prepared, optimizers)
    found: dict[tuple[int, int, float], list[tuple[str, nn.Parameter]]] = {}
    taken: set[int] = set()
    for target, module in prepared.items():
        weights = (places[id(p)] for p in module.parameters() if id(p) in places)
        beside = next(weights, (optimizers[0], 0) if optimizers else None)
        for name, parameter, fq in _scales(target, module):
            if id(parameter) in taken or id(parameter) in grouped:
                continue
            taken.add(id(parameter))
            place = places.get(id(parameter), beside)
            if place is None:
                raise ConfigError("Learned scales need an optimizer: configure_optimizers returned none.")
            key = optimizers.index(place[0]), place[1], fq.settings.lr_factor
            found.setdefault(key, []).append((name, parameter))
    return [_Move(optimizers[i], source, factor, tuple(ps)) for (i, source, factor), ps in found.items()]


def _grouped_already(prepared: Mapping[str, nn.Module], optimizers: list[Any]) -> set[int]:
    """Scales in a group that holds nothing else: a finetuning callback has restored it."""
    scales = {id(p) for target, module in prepared.items() for _, p, _ in _scales(target, module)}
    groups = [{id(p) for p in group["params"]} for optimizer in optimizers for group in optimizer.param_groups]
    return set().union(*(group for group in groups if group <= scales))


def _scales(target: str, module: nn.Module) -> Iterator[tuple[str, nn.Parameter, LearnedFakeQuantize]]:
    for name, fq in learned_fake_quantizers(module):
        for own, parameter in fq.named_parameters(recurse=False):
            yield f"{target}.{name}.{own}".strip("."), parameter, fq


def _take_out(optimizer: Any, chosen: set[int]) -> None:
    for group in optimizer.param_groups:
        kept = [i for i, p in enumerate(group["params"]) if id(p) not in chosen]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [group[key][i] for i in kept]


def _group(source: dict[str, Any], move: _Move) -> dict[str, Any]:
    """A group with the settings of another one, for scales."""
    group = {key: value for key, value in source.items() if key not in ("params", "param_names")}
    _settings(group, move.factor)
    named = "param_names" in source
    return {**group, "params": [pair if named else pair[1] for pair in move.parameters]}


def _settings(group: dict[str, Any], factor: float) -> None:
    for key in _GROUP_RATES:
        if isinstance(group.get(key), (float, int, Tensor)):
            group[key] = group[key] * factor
    if "weight_decay" in group:
        group["weight_decay"] = 0.0
    if "name" in group:  # LearningRateMonitor wants each to have another
        group["name"] = f"{group['name']}_scales"


def _extend_scheduler(scheduler: Any, moves: list[_Move], groups: int) -> None:
    for inner in getattr(scheduler, "_schedulers", ()):
        _extend_scheduler(inner, moves, groups)
    _extend(vars(scheduler), moves, groups)


def _extend(values: dict[str, Any], moves: list[_Move], groups: int) -> None:
    """Gives what a scheduler keeps for each group an entry for each new one."""
    for key in (*_SCHEDULER_RATES, *_SCHEDULER_VALUES):
        kept = values.get(key)
        if isinstance(kept, (list, tuple)) and len(kept) == groups:
            factors = [move.factor if key in _SCHEDULER_RATES else None for move in moves]
            added = [kept[m.source] if f is None else kept[m.source] * f for m, f in zip(moves, factors, strict=True)]
            values[key] = [*kept, *added]


def _extend_saved(
    checkpoint: dict[str, Any], index: int, trainer: Any, optimizer: Any, moves: list[_Move], groups: int
) -> None:
    """Gives the saved state of an optimizer that knew no scales (of a float training) their groups, in place."""
    saved = checkpoint.get("optimizer_states", [])
    if index >= len(saved) or len(saved[index]["param_groups"]) != groups:
        return
    kept = saved[index]["param_groups"]
    first = max((key for group in kept for key in group["params"]), default=-1) + 1
    for move, new in zip(moves, optimizer.param_groups[groups:], strict=True):
        group = dict(kept[move.source])
        _settings(group, move.factor)
        group["params"] = list(range(first, first + len(move.parameters)))
        if "param_names" in group:
            group["param_names"] = new["param_names"]
        first += len(move.parameters)
        kept.append(group)
    for config, state in zip(trainer.lr_scheduler_configs, checkpoint.get("lr_schedulers", ()), strict=False):
        if config.scheduler.optimizer is optimizer:
            _extend_states(state, moves, groups)


def _extend_states(state: dict[str, Any], moves: list[_Move], groups: int) -> None:
    for inner in state.get("_schedulers", ()):
        _extend_states(inner, moves, groups)
    _extend(state, moves, groups)
