"""One run without quantization: a float net for the other recipes to start from."""

from __future__ import annotations

import time
from pathlib import Path

import safetensors.torch
from omegaconf import DictConfig
from rich.console import Console

from recipes import metrics
from recipes.build import build, build_callbacks
from recipes.stages import Stages, begin


def train(config: DictConfig, folder: Path) -> metrics.Metrics:
    """Trains a net in float and prints its figures.

    Args:
        config: The composed config; see ``conf/train.yaml``. Only ``float_training`` is trained; its ``resume`` names a
            checkpoint of the same run to go on from.
        folder: Gets ``config.yaml`` (resolved), ``float.safetensors``, ``metrics.json`` and what the callbacks write.

    Returns:
        What is in ``metrics.json``; the accuracy is a fraction of the test images.

    Raises:
        ConfigError: The config cannot be used; before any training.
    """
    start = time.perf_counter()
    begin(config, folder)
    callbacks = build_callbacks(config)
    stages = Stages(config, folder)
    net = build(config, "model")
    task = stages.fit(net, "float_training", callbacks, checkpoint=config.float_training.resume)
    weights = folder / "float.safetensors"
    safetensors.torch.save_model(net, str(weights))
    accuracy = stages.test(task)
    one_image = next(iter(stages.data.test_dataloader()))[0][:1]
    result = {
        "float": {
            "accuracy": accuracy,
            "size_mb": metrics.size_mb(net),
            "latency_ms": metrics.latency_ms({"float": net}, one_image)["float"],
        },
        "versions": metrics.versions(),
        "seconds": time.perf_counter() - start,
    }
    path = metrics.write(result, folder)
    console = Console()
    console.print(metrics.table(result))
    console.print(f"{path} and {weights}, after {result['seconds']:.0f} s", soft_wrap=True)
    return result
