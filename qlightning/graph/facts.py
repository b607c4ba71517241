"""Facts: how a model was prepared, as plain values that its state dict carries in its metadata.

``torch.nn.Module.state_dict()`` has a place for such, which survives ``torch.save`` and
``torch.load(weights_only=True)``: a state dict of the prepared form says itself how to prepare a float model for it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

from torch import nn

from qlightning import observers
from qlightning.errors import ConfigError
from qlightning.graph.preparation import FloatChoice, Preparation, is_prepared
from qlightning.lsq import LearnedScales
from qlightning.qconfig import Mode, ObserverFactory, QConfig
from qlightning.qscheme import QScheme
from qlightning.version import __version__

KEY = "qlightning"
FORMAT = 1
_PLAIN = (bool, int, float, str, type(None))
_OWN = tuple(getattr(observers, name) for name in observers.__all__)

Facts = dict[str, Any]


def collect(qconfig: QConfig, backend: str, mode: Mode) -> Facts:
    """The settings of a preparation as plain values.

    Args:
        qconfig: As the backend has adapted it.
        backend: Name of the backend.
        mode: "qat" or "ptq".
    """
    return {
        "format": FORMAT,
        "version": __version__,
        "mode": mode,
        "backend": backend,
        "qconfig": _qconfig_facts(qconfig.with_observers(mode)),
    }


def of(module: nn.Module) -> Facts | None:
    """The facts of a module that was given to ``prepare``; None for any other."""
    preparation: Preparation | None = module.__dict__.get("_preparation")
    if preparation is None or not is_prepared(module):  # a converted copy knows how it was prepared, too
        return None
    found = collect(preparation.qconfig, preparation.backend.name, preparation.mode)
    if preparation.float_choice != FloatChoice():
        found["float_choice"] = asdict(preparation.float_choice)
    return {**found, "to_convert": True} if preparation.to_convert else found


def float_choice(facts: Facts) -> FloatChoice:
    """What facts say that is left in float when the model is converted."""
    found = facts.get("float_choice", {})
    return FloatChoice({str(k): str(v) for k, v in found.get("reasons", {}).items()}, str(found.get("note", "")))


def read(state_dict: Mapping[str, Any], prefix: str = "") -> dict[str, Facts]:
    """The facts in the metadata of a state dict, by the name of the prepared module; names count from ``prefix``."""
    metadata = getattr(state_dict, "_metadata", None) or {}
    start = prefix.removesuffix(".")
    below = {path: entry for path, entry in metadata.items() if not start or f"{path}.".startswith(prefix)}
    return {path[len(prefix) :]: entry[KEY] for path, entry in below.items() if KEY in entry}


def settings(facts: Facts) -> tuple[QConfig, str, Mode]:
    """The QConfig, the name of the backend and the mode that facts tell of.

    Raises:
        ConfigError: They are of another format, or name an observer that is not known here.
    """
    if facts.get("format") != FORMAT:
        raise ConfigError(
            f"This state dict was prepared by qlightning {facts.get('version')} in format {facts.get('format')}; "
            f"qlightning {__version__} reads format {FORMAT}."
        )
    return _qconfig(facts["qconfig"]), facts["backend"], facts["mode"]


def differences(saved: Facts, own: Facts) -> list[str]:
    """What differs between two preparations, a line for each setting; versions do not count."""
    lines = []
    for key in ("mode", "backend"):
        if saved[key] != own[key]:
            lines.append(f"{key} is {saved[key]!r} there and {own[key]!r} here")
    return lines + list(_qconfig_differences(saved["qconfig"], own["qconfig"], ""))


def _qconfig_facts(qconfig: QConfig) -> Facts:
    return {
        "activation": asdict(qconfig.activation),
        "weight": asdict(qconfig.weight),
        "activation_observer": _observer_facts(qconfig.activation_observer),
        "weight_observer": _observer_facts(qconfig.weight_observer),
        "overrides": {_spell(p): None if c is None else _qconfig_facts(c) for p, c in qconfig.overrides.items()},
        "exclude": sorted(_spell(pattern) for pattern in qconfig.exclude),
        "learned": _learned_facts(qconfig.learned_scales),
    }


def _qconfig(facts: Facts) -> QConfig:
    return QConfig(
        activation=QScheme(**facts["activation"]),
        weight=QScheme(**facts["weight"]),
        activation_observer=_observer(facts["activation_observer"]),
        weight_observer=_observer(facts["weight_observer"]),
        overrides={p: None if c is None else _qconfig(c) for p, c in facts["overrides"].items()},
        exclude=tuple(facts["exclude"]),
        learned=LearnedScales(**facts["learned"]) if facts.get("learned") else None,
    )


def _learned_facts(learned: LearnedScales | None) -> Facts | None:
    """Which scales are learned; at what rate is the training's affair."""
    return None if learned is None else {"activations": learned.activations, "weights": learned.weights}


def _spell(pattern: str | type) -> str:
    return pattern if isinstance(pattern, str) else f"{pattern.__module__}.{pattern.__qualname__}"


def _observer_facts(factory: ObserverFactory | None) -> Facts:
    """The path of an observer's class and the arguments it gets besides its scheme; those of others read only."""
    function: Any = factory
    options: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        options = {**function.keywords, **options}
        function = function.func
    home = observers.__name__ if function in _OWN else getattr(function, "__module__", type(function).__module__)
    path = f"{home}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    return {"class": path, "options": {k: v if isinstance(v, _PLAIN) else repr(v) for k, v in options.items()}}


def _observer(facts: Facts) -> ObserverFactory:
    """The factory again. A class of others is looked up among what is imported: a file imports nothing."""
    module, _, name = facts["class"].rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        raise ConfigError(
            f"This state dict was prepared with the observer {facts['class']}, which is not known here. Import its "
            "module first, or prepare the model with its QConfig before the state dict is loaded."
        )
    return functools.partial(found, **facts["options"]) if facts["options"] else found


def _qconfig_differences(saved: Facts, own: Facts, place: str) -> Iterator[str]:
    for field in fields(QConfig):
        key = field.name
        there: Any = saved.get(key)  # older state dicts know nothing of learned scales
        here: Any = own.get(key)
        if there == here:
            continue
        if key in ("activation", "weight"):
            yield f"{place}{key} is {QScheme(**there)} there and {QScheme(**here)} here"
        elif key == "overrides":
            yield from _override_differences(there, here, place)
        elif key == "learned":
            yield f"{place}learned scales are {_which(there)} there and {_which(here)} here"
        elif key == "exclude":
            yield f"{place}exclude is {_listed(there)} there and {_listed(here)} here"
        else:
            yield f"{place}{key} is {_named(there)} there and {_named(here)} here"


def _override_differences(saved: Facts, own: Facts, place: str) -> Iterator[str]:
    for pattern in dict.fromkeys((*saved, *own)):
        there, here = saved.get(pattern, ""), own.get(pattern, "")
        if isinstance(there, dict) and isinstance(here, dict):
            yield from _qconfig_differences(there, here, f"{place}{pattern}: ")
        elif there != here:
            words = ["none" if entry == "" else "float" if entry is None else "quantized" for entry in (there, here)]
            yield f"{place}the override for {pattern!r} is {words[0]} there and {words[1]} here"


def _which(learned: Facts | None) -> str:
    return ", ".join(name for name, is_learned in (learned or {}).items() if is_learned) or "none"


def _listed(patterns: Iterable[str]) -> str:
    return ", ".join(repr(pattern) for pattern in patterns) or "empty"


def _named(observer: Facts) -> str:
    options = ", ".join(f"{key}={value!r}" for key, value in observer["options"].items())
    return observer["class"].rpartition(".")[2] + (f"({options})" if options else "")
