"""From a composed config to objects; whatever is malformed in it is a ConfigError that names the place."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qlightning.callbacks import PostTrainingQuantization, QuantizationAwareTraining
from qlightning.errors import ConfigError, QuantizationError, closest

QuantizationCallback = QuantizationAwareTraining | PostTrainingQuantization


def build(config: DictConfig, name: str, **more: Any) -> Any:
    """Builds the object that an entry of the config describes.

    Args:
        config: The composed config.
        name: The entry, such as ``data`` or ``qat_training.optimizer``.
        more: Further arguments of the object's constructor.

    Raises:
        ConfigError: There is no such entry, it has no ``_target_``, or the target does not take these arguments.
        QuantizationError: What the target itself raises.
    """
    return _build(OmegaConf.select(config, name), name, **more)


def build_callbacks(config: DictConfig) -> list[pl.Callback]:
    """Builds the callbacks of a run.

    Every entry has to be a callback: Hydra's ``instantiate`` gives back an entry without ``_target_`` as it is, and a
    run that skips it would train in float without a word.

    Raises:
        ConfigError: An entry is no callback.
    """
    entries = config.get("callbacks") or {}
    if not isinstance(entries, DictConfig | dict):
        raise ConfigError(f"callbacks={entries!r}: a mapping from names to callbacks is needed.")
    callbacks = []
    for name in map(str, entries):
        callback = _build(entries[name], f"callbacks.{name}")
        if not isinstance(callback, pl.Callback):
            raise ConfigError(f"callbacks.{name} is a {type(callback).__name__}, not a Lightning callback.")
        callbacks.append(callback)
    return callbacks


def build_quantization(config: DictConfig) -> tuple[list[pl.Callback], QuantizationCallback]:
    """Builds the callbacks of a run that quantizes.

    Returns:
        All callbacks, and the one among them that quantizes.

    Raises:
        ConfigError: An entry is no callback, or not exactly one of them quantizes.
    """
    callbacks = build_callbacks(config)
    quantizing = [callback for callback in callbacks if isinstance(callback, QuantizationCallback)]
    if len(quantizing) != 1:
        raise ConfigError(
            f"{len(quantizing)} of the callbacks ({', '.join(map(str, config.get('callbacks') or ())) or 'none'}) "
            "quantize, and a run needs one: choose callbacks=qat or callbacks=ptq."
        )
    return callbacks, quantizing[0]


def _build(entry: Any, name: str, **more: Any) -> Any:
    if not isinstance(entry, DictConfig):
        raise ConfigError(f"{name}={entry!r}: a mapping with a _target_ is needed; to leave it out, write ~{name}.")
    if "_target_" not in entry:
        keys = [str(key) for key in entry]
        raise ConfigError(
            f"{name} has no _target_, so it describes no object; its keys are {', '.join(keys) or 'none'}."
            + (f" Is {keys[0]!r} misspelt?" if closest("_target_", keys) else "")
        )
    try:
        return instantiate(entry, **more)
    except (InstantiationException, OmegaConfBaseException) as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, QuantizationError):
                raise cause from error
            cause = cause.__cause__
        raise ConfigError(f"{name}: {error}") from error
