"""Preparing the targets of a LightningModule, all or none, at the moment when its nets are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from qlightning.backends import Backend
from qlightning.callbacks.base import overrides
from qlightning.callbacks.placement import int8_modules, place_int8, restore_prepared
from qlightning.callbacks.rebuild import check_same
from qlightning.callbacks.targets import OWN_FORWARD, find_targets, localize
from qlightning.graph import facts, is_prepared, prepare, restore_forward, unprepare
from qlightning.qconfig import Mode, QConfig

# What each prepared module was prepared with, so that another callback can tell whether it can go on with it.
_settings: WeakKeyDictionary[nn.Module, tuple[Any, ...]] = WeakKeyDictionary()


@dataclass
class Preparation:
    """The prepared modules of a LightningModule.

    Attributes:
        modules: By target name.
        fresh: The names of those that were in float before.
        was_int8: The names of those that int8 modules stood in for.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    fresh: list[str] = field(default_factory=list)
    was_int8: list[str] = field(default_factory=list)

    def undo(self, pl_module: nn.Module, backend: Backend) -> dict[str, nn.Module]:
        """Makes float what was in float and int8 what was in int8; nothing is left to undo then.

        Returns:
            The int8 modules by target name.
        """
        for name in self.fresh:
            unprepare(self.modules.pop(name))
        left = {name: module for name, module in self.modules.items() if is_prepared(module)}
        again = {name: module for name, module in left.items() if name in self.was_int8}
        self.fresh, self.was_int8 = [], []
        return place_int8(pl_module, again, backend) if again else {}


def prepare_targets(
    pl_module: nn.Module, qconfig: QConfig, backend: Backend, modules: Iterable[str] | None, mode: Mode
) -> Preparation:
    """Prepares what is to be quantized in a LightningModule; goes on with what is prepared the same way already.

    Int8 modules that stand in it make room for the prepared ones that they came from. What was prepared in another way
    (another QConfig, backend or mode) is prepared anew, from its weights.

    Args:
        pl_module: Changed in place.
        qconfig: For all of it.
        backend: As for ``qlightning.prepare``.
        modules: As for :func:`find_targets`.
        mode: As for ``qlightning.prepare``.

    Raises:
        ConfigError, CaptureError, BackendError: As ``qlightning.prepare`` and :func:`find_targets`; what was in float
            is in float again, what was in int8 in int8.
    """
    preparation = Preparation(restore_prepared(pl_module, modules))
    if OWN_FORWARD not in int8_modules(pl_module):
        for module in pl_module.modules():
            restore_forward(module)  # of a copy that was made while validation ran on int8 forwards
    preparation.was_int8 = list(preparation.modules)
    try:
        targets = find_targets(pl_module, modules)
        configs = localize(qconfig, pl_module, targets)
        for name, target in targets.items():
            wanted = (mode, configs.get(name), backend)
            if is_prepared(target) and (name not in configs or _settings.get(target, wanted) != wanted):
                unprepare(target)
        for name, local in configs.items():
            target = targets[name]
            is_fresh = not is_prepared(target)
            prepare(target, local, backend=backend, mode=mode)
            preparation.modules[name] = target
            if is_fresh:
                preparation.fresh.append(name)
                _settings[target] = (mode, local, backend)
    except BaseException:
        preparation.undo(pl_module, backend)
        raise
    preparation.modules = {name: targets[name] for name in configs}
    return preparation


def adopt_targets(
    pl_module: nn.Module, qconfig: QConfig, backend: Backend, modules: Iterable[str] | None, mode: Mode
) -> Preparation:
    """Finds the prepared modules of a LightningModule that do not stand in int8 already.

    Args:
        pl_module: Left as it is.
        qconfig: The settings that they are expected to have, for all of it.
        backend: The backend that they are expected to be prepared for.
        modules: Their names; None: all that are there.
        mode: "qat" or "ptq".

    Raises:
        ConfigError: One of them is prepared in another way; lists the differences.
    """
    prepared = prepared_targets(pl_module, modules)
    for name, local in localize(qconfig, pl_module, prepared).items():
        saved, own = facts.of(prepared[name]), facts.collect(backend.adapt(local), backend.name, mode)
        check_same(saved or own, own, name or type(pl_module).__name__)
    return Preparation(prepared)


def prepared_targets(pl_module: nn.Module, modules: Iterable[str] | None) -> dict[str, nn.Module]:
    """The prepared modules of a LightningModule, by name, but those that stand in int8; of the names given, or all."""
    placed = int8_modules(pl_module)
    found = {name: m for name, m in pl_module.named_modules() if facts.of(m) is not None and name not in placed}
    return found if modules is None else {name: m for name, m in found.items() if name in set(modules)}


def builds_nets_late(pl_module: nn.Module) -> bool:
    """Whether a LightningModule has a hook after ``Callback.setup`` in which its nets may be built."""
    return overrides(pl_module, "setup") or overrides(pl_module, "configure_model")


def after_configure_model(pl_module: nn.Module, action: Callable[[], None]) -> None:
    """Runs an action once, as soon as Lightning has called ``pl_module.configure_model()``.

    ``Trainer._run`` calls Callback.setup, LightningModule.setup, configure_model, and then, without a hook in between,
    restores the checkpoint, wraps the model for the strategy and builds the optimizers. All of these have to see the
    prepared model, so ``configure_model`` itself is the only place: until then an attribute of the instance stands
    before the method, of the same signature, which removes itself when it is called.
    """
    before = pl_module.__dict__.get("configure_model")

    def configure_model() -> None:
        _step_back(pl_module)
        pl_module.configure_model()  # type: ignore[operator]
        action()

    configure_model.before = before  # type: ignore[attr-defined]
    pl_module.__dict__["configure_model"] = configure_model


def cancel_after_configure_model(pl_module: nn.Module) -> None:
    """Takes back what :func:`after_configure_model` has put in place, where it was never called."""
    while hasattr(pl_module.__dict__.get("configure_model"), "before"):
        _step_back(pl_module)


def _step_back(pl_module: nn.Module) -> None:
    before = pl_module.__dict__.pop("configure_model").before
    if before is not None:
        pl_module.__dict__["configure_model"] = before
