"""What of a LightningModule is quantized, and under which of its names the user's patterns reach it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.loss import _Loss
from torchmetrics import Metric

from qlightning.callbacks.base import LIGHTNING_MODULES, overrides
from qlightning.errors import ConfigError, closest
from qlightning.graph.tracing import has_layers
from qlightning.nn.qat import layer_type
from qlightning.nn.quantized import has_int8_layers
from qlightning.qconfig import Pattern, QConfig, Resolver

OWN_FORWARD = ""
"""The name of the LightningModule itself, where its own forward is quantized."""


def find_targets(pl_module: nn.Module, modules: Iterable[str] | None = None) -> dict[str, nn.Module]:
    """Finds the modules of a LightningModule that are to be quantized, each with a graph of its own.

    With ``modules=None``: every child that holds a convolution or linear layer; but the LightningModule itself, by its
    own ``forward``, where such layers hang directly on it (also in a ModuleList or ModuleDict). Where it defines no
    ``forward``, these are taken one by one. Losses and torchmetrics are left alone.

    Args:
        pl_module: The LightningModule; only read.
        modules: Names of modules below it, which replace the search.

    Returns:
        From dotted name to module; the name is ``""`` for the LightningModule itself.

    Raises:
        ConfigError: A name matches nothing (names the nearest), holds nothing to quantize or stands for a part of
            another one; nothing to quantize is found; a module is compiled already.
    """
    targets = dict(_search(pl_module)) if modules is None else dict(_named(pl_module, modules))
    if not targets and has_int8_layers(pl_module):
        raise ConfigError(
            f"{type(pl_module).__name__} holds int8 nets, and not the prepared or float ones that they were made from: "
            "nothing is left to train or to calibrate. Give it the float net, or load a checkpoint into a new one."
        )
    if not targets:
        raise ConfigError(
            f"{type(pl_module).__name__} holds no convolution or linear layer to quantize. Layers have to be there "
            "after `__init__`, `setup` and `configure_model`, as modules that are attributes of it."
        )
    _check_not_compiled(pl_module, targets)
    return targets


def _search(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The targets below a LightningModule, or below a container whose elements are called one by one."""
    children = {id(child): (f"{prefix}{name}", child) for name, child in module.named_children() if _is_net(child)}
    calls_itself = isinstance(module, LIGHTNING_MODULES) and overrides(module, "forward")
    if calls_itself and any(_only_holds(child) or layer_type(child) for _, child in children.values()):
        yield prefix.rstrip("."), module
        return
    for name, child in children.values():
        if _only_holds(child):
            yield from _search(child, f"{name}.")
        else:
            yield name, child


def _only_holds(module: nn.Module) -> bool:
    """Whether a module cannot be called, so that the one above it calls its children."""
    if isinstance(module, LIGHTNING_MODULES):
        return not overrides(module, "forward")
    return type(module).forward is nn.Module.forward


def _is_net(module: nn.Module) -> bool:
    return has_layers(module) and not is_loss_or_metric(module)


def is_loss_or_metric(module: nn.Module) -> bool:
    """Whether a module measures and does not predict: a torchmetrics metric, a loss of torch or one called so."""
    return isinstance(module, (_Loss, Metric)) or type(module).__name__.endswith(("Loss", "Criterion"))


def _named(pl_module: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    modules = dict(pl_module.named_modules(remove_duplicate=False))
    names = list(dict.fromkeys(names))
    for name in names:
        if not name or name not in modules:
            candidates = [other for other, module in modules.items() if other and has_layers(module)]
            hint = closest(name, candidates) or f" It has: {', '.join(candidates[:10]) or 'none'}."
            raise ConfigError(f"modules: {name!r} is no module of {type(pl_module).__name__}.{hint}")
        for other in names:
            if name.startswith(f"{other}."):
                raise ConfigError(f"modules: {name!r} is a part of {other!r}; name one of them.")
        if not has_layers(modules[name]):
            raise ConfigError(f"modules: {name!r} holds no convolution or linear layer to quantize.")
        yield name, modules[name]


def _check_not_compiled(pl_module: nn.Module, targets: Mapping[str, nn.Module]) -> None:
    taken = {id(module) for target in targets.values() for module in target.modules()}
    compiled = [
        name
        for name, module in pl_module.named_modules()
        if isinstance(module, torch._dynamo.OptimizedModule) and any(id(m) in taken for m in module.modules())
    ]
    # Lightning keeps here what it has replaced in a compiled LightningModule (utilities/compile.py, from_compiled).
    if getattr(pl_module, "_compiler_ctx", None) is not None:
        compiled.append(type(pl_module).__name__)
    if compiled:
        raise ConfigError(
            f"{', '.join(compiled)} was compiled with torch.compile before it was quantized, which changes what it "
            "computes. Pass it uncompiled to QuantizationAwareTraining(compile=True), or compile it in place, by "
            "net.compile() after qlightning.prepare(net)."
        )


def localize(qconfig: QConfig, pl_module: nn.Module, targets: Mapping[str, nn.Module]) -> dict[str, QConfig]:
    """Gives each target its QConfig, with the patterns of ``exclude`` and ``overrides`` that concern it.

    Names and globs count from the LightningModule (``"net.conv1"``) or from the target (``"conv1"``).

    Args:
        qconfig: The user's settings for the whole LightningModule.
        pl_module: The LightningModule.
        targets: As from :func:`find_targets`.

    Returns:
        By target; a target that is excluded as a whole is left out.

    Raises:
        ConfigError: A pattern matches nothing anywhere (names the nearest), or nothing is left.
    """
    excludes: dict[str, list[Pattern]] = {name: [] for name in targets}
    overridden: dict[str, dict[Pattern, QConfig | None]] = {name: {} for name in targets}
    for pattern in qconfig.exclude:
        for name, local in _matches(pattern, pl_module, targets).items():
            excludes[name].extend(local)
    for pattern, override in qconfig.overrides.items():
        for name, local in _matches(pattern, pl_module, targets).items():
            overridden[name].update(dict.fromkeys(local, override))
    left = {name: target for name, target in targets.items() if not _is_excluded(target, excludes[name])}
    if not left:
        raise ConfigError(
            f"exclude={_spell(qconfig.exclude)} leaves nothing of {type(pl_module).__name__} to quantize."
        )
    return {name: replace(qconfig, exclude=tuple(excludes[name]), overrides=overridden[name]) for name in left}


def _is_excluded(target: nn.Module, exclude: list[Pattern]) -> bool:
    return bool(exclude) and Resolver(target, QConfig(exclude=tuple(exclude))).resolve("")[0] is None


def _matches(pattern: Pattern, pl_module: nn.Module, targets: Mapping[str, nn.Module]) -> dict[str, list[Pattern]]:
    """The patterns, counted from each target, that say the same as one that may count from the LightningModule."""
    found: dict[str, list[Pattern]] = {}
    whole = _resolver(pl_module, pattern)
    for name, target in targets.items():
        if name and whole is not None:
            outermost: list[str] = []
            for below, _ in target.named_modules():
                inside = any(not top or below.startswith(f"{top}.") for top in outermost)
                if not inside and whole.resolve(f"{name}.{below}".rstrip("."))[0] is None:
                    outermost.append(below)
            if outermost:
                found[name] = [pattern] if isinstance(pattern, type) else list(outermost)
        if _resolver(target, pattern) is not None:
            found.setdefault(name, []).append(pattern)
    if not found and whole is None:
        raise ConfigError(
            f"{_spell((pattern,))} matches no module of {type(pl_module).__name__}."
            + (closest(pattern, _names(pl_module, targets)) if isinstance(pattern, str) else "")
        )
    return found


def _resolver(module: nn.Module, pattern: Pattern) -> Resolver | None:
    try:
        return Resolver(module, QConfig(exclude=(pattern,)))
    except ConfigError:
        return None


def _names(pl_module: nn.Module, targets: Mapping[str, nn.Module]) -> list[str]:
    below = [name for target in targets.values() for name, _ in target.named_modules() if name]
    return [name for name, _ in pl_module.named_modules() if name] + below


def _spell(patterns: Iterable[Any]) -> str:
    return ", ".join(repr(p) if isinstance(p, str) else p.__name__ for p in patterns)
