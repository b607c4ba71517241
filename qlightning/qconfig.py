"""QConfig: what the activations and weights of a model are quantized to, and what stays float."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal

from torch import nn

from qlightning.errors import ConfigError, closest
from qlightning.lsq import LearnedScales
from qlightning.observers import HistogramObserver, MinMaxObserver, MovingAverageObserver, MSEObserver, foreign
from qlightning.qscheme import QScheme

ObserverFactory = Callable[[QScheme], nn.Module]
Mode = Literal["qat", "ptq"]
Pattern = str | type[nn.Module]

DEFAULT_ACTIVATION = QScheme(signed=False)
DEFAULT_WEIGHT = QScheme(symmetric=True, axis=0, narrow_range=True)
DEFAULT_OBSERVERS: Mapping[Mode, ObserverFactory] = {"qat": MovingAverageObserver, "ptq": HistogramObserver}


@dataclass(frozen=True)
class QConfig:
    """What activations and weights are quantized to.

    A pattern is the name of a module below the model (``"layer1.0.conv1"``), a glob over such names (``"layer?.*"``)
    or a type, also written as a dotted path (``torch.nn.Linear``, ``"torch.nn.Linear"``). A module that matches takes
    everything below it along. An exact name beats a glob, a glob beats a type, and ``exclude`` beats all.

    Args:
        activation: Scheme of the activations.
        weight: Scheme of the weights; axis 0 means the output channels.
        activation_observer: Builds the observer of an activation from its scheme: a class of `qlightning.observers`,
            one of torch.ao (or its ``with_args(...)``), or a function. None: a moving average in quantization-aware
            training, a histogram in post-training quantization.
        weight_observer: Builds the observer of a weight. None: min-max; for learned scales of fewer than 8 bits least
            squared error, as scales that start from the extremes stay too large for long.
        overrides: From patterns to the QConfig used there, or to None, which keeps the layer in float.
        exclude: Patterns of modules that stay float.
        learned: Scales that are learned by gradient in quantization-aware training, from the start that their
            observers give: a LearnedScales, or True or ``"lsq"`` (all of them), ``"activations"`` or ``"weights"``.

    Raises:
        ConfigError: A field has the wrong type.

    Examples:
        >>> config = QConfig(exclude=("head",), overrides={"stem.*": QConfig(weight=QScheme(symmetric=True))})
        >>> config.activation.bits
        8
    """

    activation: QScheme = DEFAULT_ACTIVATION
    weight: QScheme = DEFAULT_WEIGHT
    activation_observer: ObserverFactory | None = None
    weight_observer: ObserverFactory | None = None
    overrides: Mapping[Pattern, QConfig | None] = field(default_factory=dict)
    exclude: tuple[Pattern, ...] = ()
    learned: LearnedScales | bool | str | None = None

    def __post_init__(self) -> None:
        for name in ("activation", "weight"):
            if not isinstance(getattr(self, name), QScheme):
                raise ConfigError(f"QConfig {name}={getattr(self, name)!r}: a QScheme is needed.")
        for name in ("activation_observer", "weight_observer"):
            factory = getattr(self, name)
            if factory is not None and (not callable(factory) or isinstance(factory, nn.Module)):
                raise ConfigError(
                    f"QConfig {name}={factory!r}: a class or function that builds an observer from a QScheme is needed."
                )
        given: Any = self.exclude
        exclude = (given,) if isinstance(given, (str, type)) else tuple(given)
        object.__setattr__(self, "exclude", exclude)
        object.__setattr__(self, "overrides", MappingProxyType(dict(self.overrides)))
        for pattern in (*exclude, *self.overrides):
            if not isinstance(pattern, (str, type)):
                raise ConfigError(f"QConfig pattern {pattern!r}: a name, a glob or a module type is needed.")
        object.__setattr__(self, "learned", LearnedScales.of(self.learned))
        for pattern, override in self.overrides.items():
            if override is not None and not isinstance(override, QConfig):
                raise ConfigError(f"QConfig overrides[{pattern!r}]={override!r}: a QConfig or None is needed.")

    def __deepcopy__(self, memo: dict[int, Any]) -> QConfig:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle cannot take the read-only overrides; processes that a strategy spawns get their callbacks that way.
        values = {f.name: getattr(self, f.name) for f in fields(self)} | {"overrides": dict(self.overrides)}
        return QConfig, tuple(values.values())

    def excluding(self, patterns: Iterable[Pattern]) -> QConfig:
        """Returns the same settings with more patterns that stay float."""
        more = (patterns,) if isinstance(patterns, (str, type)) else tuple(patterns)
        return replace(self, exclude=self.exclude + more)

    @property
    def learned_scales(self) -> LearnedScales | None:
        """What ``learned`` has become."""
        return LearnedScales.of(self.learned)

    def all(self) -> Iterator[QConfig]:
        """Itself and all that its overrides hold."""
        yield self
        for override in self.overrides.values():
            if override is not None:
                yield from override.all()

    def with_observers(self, mode: Mode) -> QConfig:
        """Returns the same settings with the observers of a mode where the defaults are used."""
        return replace(
            self,
            activation_observer=self.activation_observer or DEFAULT_OBSERVERS[mode],
            weight_observer=self._weight_observer,
            overrides={pattern: c and c.with_observers(mode) for pattern, c in self.overrides.items()},
        )

    def build_activation_observer(self, mode: Mode) -> nn.Module:
        """Builds the observer of one activation."""
        return _build(self.activation_observer or DEFAULT_OBSERVERS[mode], self.activation)

    def build_weight_observer(self) -> nn.Module:
        """Builds the observer of one weight."""
        return _build(self._weight_observer, self.weight)

    @property
    def _weight_observer(self) -> ObserverFactory:
        learned = self.learned_scales
        default = MSEObserver if learned and learned.weights and self.weight.bits < 8 else MinMaxObserver
        return self.weight_observer or default


def _build(factory: ObserverFactory, scheme: QScheme) -> nn.Module:
    try:
        observer = foreign.build(factory, scheme) if foreign.is_of_torch_ao(factory) else factory(scheme)
    except TypeError as error:
        raise ConfigError(
            f"{factory!r} does not build an observer: it is called with a QScheme, and {error}."
        ) from error
    if not isinstance(observer, nn.Module) or not callable(getattr(observer, "calculate_qparams", None)):
        raise ConfigError(
            f"{factory!r} does not build an observer: a module with forward(x) and calculate_qparams() is needed."
        )
    foreign.check_grid(observer, scheme)
    return observer


class Resolver:
    """Answers for each module of a model which QConfig it has, by the patterns of the model's QConfig.

    Args:
        model: The model whose module names the patterns are matched with.
        qconfig: The settings.

    Raises:
        ConfigError: A pattern matches no module of the model.
    """

    def __init__(self, model: nn.Module, qconfig: QConfig) -> None:
        self._qconfig = qconfig
        modules = dict(model.named_modules(remove_duplicate=False))
        for pattern in (*qconfig.exclude, *qconfig.overrides):
            if not any(_rank(pattern, name, module) for name, module in modules.items()):
                raise ConfigError(
                    f"{pattern!r} matches no module of {type(model).__name__}."
                    + (closest(pattern, modules) if isinstance(pattern, str) else "")
                )
        self._excluded = {
            name: pattern for name, m in modules.items() for pattern in qconfig.exclude if _rank(pattern, name, m)
        }
        self._overridden: dict[str, tuple[int, QConfig | None, Pattern]] = {}
        for name, module in modules.items():
            for pattern, override in qconfig.overrides.items():
                rank = _rank(pattern, name, module)
                if rank and rank >= self._overridden.get(name, (0,))[0]:
                    self._overridden[name] = (rank, override, pattern)

    def resolve(self, name: str) -> tuple[QConfig | None, str]:
        """Returns the QConfig of a module, or None and the reason why it stays float."""
        parents = list(_self_and_parents(name))
        for parent in parents:
            if parent in self._excluded:
                return None, f"excluded by {_spell(self._excluded[parent])}"
        found = [self._overridden[parent] for parent in parents if parent in self._overridden]
        if not found:
            return self._qconfig, ""
        _, override, pattern = max(found, key=lambda entry: entry[0])
        return override, f"kept float by override {_spell(pattern)}" if override is None else ""


def _self_and_parents(name: str) -> Iterable[str]:
    while True:
        yield name
        if not name:
            return
        name = name.rpartition(".")[0]


def _spell(pattern: Pattern) -> str:
    return repr(pattern) if isinstance(pattern, str) else pattern.__name__


def _rank(pattern: Pattern, name: str, module: nn.Module) -> int:
    """How well a pattern matches: 3 by name, 2 by glob, 1 by type, 0 not at all."""
    if isinstance(pattern, type):
        return int(isinstance(module, pattern))
    if pattern == name:
        return 3
    if name and fnmatch.fnmatchcase(name, pattern):
        return 2
    return int(
        any(
            pattern == f"{cls.__module__}.{cls.__qualname__}" or pattern == _public(cls) for cls in type(module).__mro__
        )
    )


def _public(cls: type) -> str:
    """``torch.nn.Linear`` for ``torch.nn.modules.linear.Linear``."""
    return f"torch.nn.{cls.__name__}" if cls.__module__.startswith("torch.nn.modules.") else ""
