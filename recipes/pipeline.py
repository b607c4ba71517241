"""One run: a float model, its quantization, and the figures of both."""

from __future__ import annotations

import copy
import time
from pathlib import Path

import safetensors.torch
from omegaconf import DictConfig
from rich.console import Console
from torch import nn

from qlightning import report, save
from qlightning.callbacks import QuantizationAwareTraining
from qlightning.callbacks.placement import restore_prepared
from recipes import metrics
from recipes.build import build, build_quantization
from recipes.stages import Stages, begin

REPORT = "report.html"


def run(config: DictConfig, folder: Path) -> metrics.Metrics:
    """Runs a recipe and prints its figures.

    The float model comes from a file (``model.weights``) or from a float phase (``float_training``). It is then trained
    with quantization or calibrated, as its callback says, and evaluated in float, fake-quantized and in int8, on the
    CPU.

    Args:
        config: The composed config; see ``conf/train.yaml``.
        folder: Gets ``config.yaml`` (resolved), ``float.safetensors`` after a float phase, ``metrics.json``,
            ``report.html``, and what ``callbacks.quantization.save`` names.

    Returns:
        What is in ``metrics.json``; accuracies are fractions of the test images.

    Raises:
        ConfigError: The config cannot be used; before any training.
    """
    start = time.perf_counter()
    begin(config, folder)
    callbacks, quantization = build_quantization(config)
    stages = Stages(config, folder)
    net = build(config, "model")
    quantization.check(stages.task(net))
    train_float(net, config, stages, folder)
    float_net = copy.deepcopy(net)
    float_accuracy = stages.test(stages.task(float_net))

    task = stages.task(net)
    if isinstance(quantization, QuantizationAwareTraining):
        teacher = float_net if config.qat_training.distill else None
        task = stages.fit(net, "qat_training", callbacks, teacher)
        int8_accuracy = stages.test(task)
    else:
        int8_accuracy = stages.test(task, callbacks)
    int8_net = task.net
    layers = report(int8_net)
    for name in () if quantization.saved else quantization.save:  # the processes of ddp_spawn write none
        save(int8_net, folder / name)
    fake_quant_accuracy = stages.test(stages.task(restore_prepared(task)["net"]))

    one_image = next(iter(stages.data.test_dataloader()))[0][:1]
    latency = metrics.latency_ms({"float": float_net, "int8": int8_net}, one_image)
    result: metrics.Metrics = {
        "float": {
            "accuracy": float_accuracy,
            "size_mb": metrics.size_mb(float_net),
            "latency_ms": latency["float"],
        },
        "fake_quant": {"accuracy": fake_quant_accuracy},
        "int8": {
            "accuracy": int8_accuracy,
            "size_mb": metrics.size_mb(int8_net),
            "latency_ms": latency["int8"],
            "backend": quantization.backend.name,
        },
        "int8_layers": len(layers.int8_layers),
        "float_layers": len(layers.float_layers),
        "files": [str(folder / name) for name in quantization.save],
        "versions": metrics.versions(),
        "seconds": time.perf_counter() - start,
    }
    path = metrics.write(result, folder)
    shown = layers if quantization.report is None else quantization.report  # which knows of the training
    shown.save(folder / REPORT, figures={kind: _numbers(result[kind]) for kind in metrics.KINDS})
    console = Console()
    console.print(metrics.table(result))
    console.print(f"{path}, after {result['seconds']:.0f} s", soft_wrap=True)
    return result


def train_float(net: nn.Module, config: DictConfig, stages: Stages, folder: Path) -> None:
    """Trains a net in float, in place, where it has no weights yet, and leaves them in ``float.safetensors``."""
    if config.model.weights is None or config.float_training.finetune:
        stages.fit(net, "float_training")
        safetensors.torch.save_model(net, str(folder / "float.safetensors"))


def _numbers(figures: metrics.Metrics) -> dict[str, float]:
    return {name: figures[name] for name in ("accuracy", "latency_ms") if name in figures}
