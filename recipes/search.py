"""A search over settings of calibration for two aims at once: accuracy and latency."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch import nn

from qlightning.errors import ConfigError, QuantizationError
from recipes import metrics
from recipes.build import build, build_quantization
from recipes.pareto import Trial, marked, plot, table, write
from recipes.pipeline import train_float
from recipes.stages import Stages, begin

Compose = Callable[[Sequence[str]], DictConfig]
_EXCLUDED = {"none": (), "first": (0,), "last": (-1,), "first and last": (0, -1)}


def search(config: DictConfig, folder: Path, compose: Compose) -> list[Trial]:
    """Tries out settings, and shows those that no other beats in both accuracy and latency.

    The float net comes from a file or a float phase, as in :func:`recipes.pipeline.run`. Every trial calibrates a copy
    of it and measures that on the validation images, so that the test images stay for the settings that are chosen in
    the end. Settings that cannot be used count as trials, with what is wrong.

    Args:
        config: The composed config; see ``conf/search.yaml``.
        folder: Gets ``config.yaml``, ``trials.json`` and ``pareto.png``.
        compose: Composes the config of a trial from its overrides, on top of those of ``config``.

    Returns:
        The trials, in their order.

    Raises:
        ConfigError: The config cannot be used, or optuna is not installed.
    """
    optuna = _optuna()
    space = _checked(OmegaConf.to_container(config.search.space))
    begin(config, folder)
    _, quantization = build_quantization(config)
    stages = Stages(config, folder)
    net = build(config, "model")
    quantization.check(stages.task(net))
    train_float(net, config, stages, folder)
    base = stages.validate(stages.task(net))
    one_image = next(iter(stages.data.val_dataloader()))[0][:1]

    known: dict[tuple[str, ...], tuple[float, float]] = {}

    def objective(trial: Any) -> tuple[float, float]:
        choices = {key: trial.suggest_categorical(key, values) for key, values in space.items()}
        if (same := tuple(choices.values())) in known:
            return known[same]
        try:
            accuracy, int8 = _quantized(compose(_overrides(choices, net)), stages, copy.deepcopy(net))
        except QuantizationError as error:
            trial.set_user_attr("error", str(error))
            raise optuna.TrialPruned from error
        times = metrics.latency_ms({"float": net, "int8": int8}, one_image)
        known[same] = accuracy, times["int8"] / times["float"]
        return known[same]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        directions=["maximize", "minimize"], sampler=optuna.samplers.TPESampler(seed=config.seed)
    )
    study.enqueue_trial({key: values[0] for key, values in space.items()})
    study.optimize(objective, n_trials=config.search.trials)
    trials = marked([_trial_of(trial) for trial in study.trials])
    write(trials, folder)
    plot(trials, base, folder)
    console = Console()
    console.print(table(trials, base))
    console.print(str(folder), soft_wrap=True)
    return trials


def _quantized(config: DictConfig, stages: Stages, net: nn.Module) -> tuple[float, nn.Module]:
    callbacks, _ = build_quantization(config)
    task = stages.task(net)
    return stages.validate(task, callbacks), task.net


def _overrides(choices: Mapping[str, str], net: nn.Module) -> list[str]:
    layers = [name for name, module in net.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    found = [f"{key}={value}" for key, value in choices.items() if key != "exclude"]
    names = [f"net.{layers[place]}" for place in _EXCLUDED[choices.get("exclude", "none")]]
    return [*found, f"callbacks.quantization.exclude=[{','.join(names)}]"]


def _checked(space: Any) -> dict[str, list[str]]:
    if not isinstance(space, dict) or not all(isinstance(values, list) and values for values in space.values()):
        raise ConfigError(f"search.space={space!r}: a list of values for each override is needed.")
    if unknown := [value for value in space.get("exclude", ()) if value not in _EXCLUDED]:
        raise ConfigError(f"search.space.exclude: {unknown[0]!r} is none of {', '.join(_EXCLUDED)}.")
    return {str(key): [str(value) for value in values] for key, values in space.items()}


def _trial_of(trial: Any) -> Trial:
    if trial.values is None:
        return Trial(dict(trial.params), error=trial.user_attrs["error"])
    return Trial(dict(trial.params), *trial.values)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ConfigError("The search needs optuna: pip install 'qlightning[sweep]'.") from error
    return optuna
