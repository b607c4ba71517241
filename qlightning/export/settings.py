"""Settings of a preparation in files that are not trusted."""

from __future__ import annotations

from typing import Any

from qlightning.errors import ArtifactError, QuantizationError
from qlightning.graph import facts
from qlightning.observers import MinMaxObserver
from qlightning.qconfig import Mode, QConfig
from qlightning.qscheme import QScheme

MAX_PATTERNS = 10_000
MAX_PATTERN_LENGTH = 1_000
_MAX_DEPTH = 10
_MODES = ("qat", "ptq")


def read_settings(entry: Any, where: str, *, observers: bool = True) -> tuple[QConfig, str, Mode]:
    """The QConfig, the name of the backend and the mode that the facts in a file tell of.

    Args:
        entry: The facts, not trusted.
        where: The file, for messages.
        observers: Whether anything is to be observed; else the observers are such as are there wherever qlightning is.

    Raises:
        ArtifactError: They are damaged; names the entry.
        ConfigError: They are of another format, or name an observer that is not known here.
    """
    try:
        if _table(entry, "the whole").get("format") == facts.FORMAT:  # others are an error of their own
            _check(entry)
            entry = entry if observers else _without_observers(entry)
        return facts.settings(entry)
    except QuantizationError as error:
        raise type(error)(f"{where}: {error}") from error
    except Exception as error:  # what damaged values lead to
        raise ArtifactError(f"{where}: its quantization settings are damaged: {error}.") from error


def _without_observers(settings: dict[str, Any]) -> dict[str, Any]:
    def replaced(config: Any) -> Any:
        plain = {"class": f"{MinMaxObserver.__module__}.{MinMaxObserver.__qualname__}", "options": {}}
        overrides = {pattern: entry and replaced(entry) for pattern, entry in config["overrides"].items()}
        return {**config, "activation_observer": plain, "weight_observer": plain, "overrides": overrides}

    return {**settings, "qconfig": replaced(settings["qconfig"])}


def _check(entry: dict[str, Any]) -> None:
    if entry.get("mode") not in _MODES:
        raise ValueError(f"mode is {str(entry.get('mode'))[:100]!r}, not one of {', '.join(_MODES)}")
    _text(entry.get("backend"), "backend")
    if _check_qconfig(entry.get("qconfig"), "qconfig", 0) > MAX_PATTERNS:
        raise ValueError(f"qconfig has more than {MAX_PATTERNS} patterns")


def _check_qconfig(entry: Any, place: str, depth: int) -> int:
    """Checks a QConfig and those inside it, and counts their patterns."""
    config = _table(entry, place)
    if depth > _MAX_DEPTH:
        raise ValueError(f"{place} is nested too deeply")
    for key in ("activation", "weight"):
        try:
            QScheme(**_table(config.get(key), f"{place}.{key}"))
        except (TypeError, QuantizationError) as error:
            raise ValueError(f"{place}.{key}: {error}") from error
    for key in ("activation_observer", "weight_observer"):
        observer = _table(config.get(key), f"{place}.{key}")
        _text(observer.get("class"), f"{place}.{key}.class")
        _table(observer.get("options"), f"{place}.{key}.options")
    overrides = _table(config.get("overrides"), f"{place}.overrides")
    exclude = config.get("exclude")
    if not isinstance(exclude, (list, tuple)):
        raise ValueError(f"{place}.exclude is a {type(exclude).__name__}")
    patterns = [_text(pattern, f"a pattern in {place}") for pattern in (*overrides, *exclude)]
    if long := [pattern for pattern in patterns if len(pattern) > MAX_PATTERN_LENGTH]:
        raise ValueError(f"{place} has the pattern {long[0][:50]!r}... of {len(long[0])} characters")
    inner = (_check_qconfig(c, f"{place}.overrides[{p!r}]", depth + 1) for p, c in overrides.items() if c is not None)
    return len(patterns) + sum(inner)


def _table(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is a {type(value).__name__}")
    return value


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place} is a {type(value).__name__}")
    return value
