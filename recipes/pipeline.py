"""One run: a float model, its quantization, and the figures of both."""

from __future__ import annotations

import copy
import logging
import time
import warnings
from pathlib import Path

import pytorch_lightning as pl
import safetensors.torch
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch import nn

from qlightning.callbacks import QuantizationAwareTraining
from qlightning.errors import ConfigError
from recipes import metrics
from recipes.build import build, build_callbacks
from recipes.data import ClassificationData
from recipes.task import ClassificationTask, OptimizerFactory, ScheduleFactory

_log = logging.getLogger(__name__)


def run(config: DictConfig, folder: Path) -> metrics.Metrics:
    """Runs a recipe and prints its figures.

    The float model comes from a file (``model.weights``) or from a float phase (``float_training``). It is then trained
    with quantization or calibrated, as its callback says, and evaluated in float, fake-quantized and in int8, on the
    CPU.

    Args:
        config: The composed config; see ``conf/train.yaml``.
        folder: Gets ``config.yaml`` (resolved), ``float.safetensors`` after a float phase, ``metrics.json``, and what
            ``callbacks.quantization.save`` names.

    Returns:
        What is in ``metrics.json``; accuracies are fractions of the test images.

    Raises:
        ConfigError: The config cannot be used; before any training.
    """
    start = time.perf_counter()
    # Sets in memory need no workers; and what Lightning 2.6 calls in torch is deprecated since torch 2.10.
    warnings.filterwarnings("ignore", ".*does not have many workers")
    warnings.filterwarnings("ignore", ".*LeafSpec")
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / "config.yaml", resolve=True)
    pl.seed_everything(config.seed, workers=True)
    callbacks, quantization = build_callbacks(config)
    stages = _Stages(config, folder)
    OmegaConf.update(config, "model.num_classes", stages.data.num_classes, force_add=True)
    OmegaConf.save(config, folder / "config.yaml", resolve=True)  # with all that builds the net again

    net = build(config, "model")
    quantization.check(stages.task(net))
    if config.model.weights is None or config.float_training.finetune:
        stages.fit(net, "float_training")
        safetensors.torch.save_model(net, str(folder / "float.safetensors"))
    float_net = copy.deepcopy(net)
    float_accuracy = stages.test(stages.task(float_net))

    if isinstance(quantization, QuantizationAwareTraining):
        teacher = float_net if config.qat_training.distill else None
        int8_accuracy = stages.test(stages.fit(net, "qat_training", callbacks, teacher))
    else:
        int8_accuracy = stages.test(stages.task(net), callbacks)
    int8_net = quantization.int8_model
    fake_quant_accuracy = stages.test(stages.task(quantization.prepared["net"]))

    assert isinstance(int8_net, nn.Module)
    assert quantization.report is not None
    one_image = next(iter(stages.data.test_dataloader()))[0][:1]
    latency = metrics.latency_ms({"float": float_net, "int8": int8_net}, one_image)
    result = {
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
        "int8_layers": len(quantization.report.int8_layers),
        "float_layers": len(quantization.report.float_layers),
        "files": [str(path) for path in quantization.saved],
        "versions": metrics.versions(),
        "seconds": time.perf_counter() - start,
    }
    path = metrics.write(result, folder)
    console = Console()
    console.print(metrics.table(result))
    console.print(f"{path}, after {result['seconds']:.0f} s", soft_wrap=True)
    return result


class _Stages:
    """Trains and tests nets on one data module, with Trainers of one config."""

    def __init__(self, config: DictConfig, folder: Path) -> None:
        self._config = config
        self._root = {} if "default_root_dir" in config.trainer else {"default_root_dir": str(folder)}
        self._trainer(max_epochs=1)  # what is wrong in the config shows before the data is read, let alone trained on
        self._rates = {name: _rates(config, name) for name in ("float_training", "qat_training")}
        self.data: ClassificationData = build(config, "data")
        self.data.prepare_data()
        self.data.setup()

    def task(self, net: nn.Module) -> ClassificationTask:
        """Puts a net into a task that only evaluates it."""
        return ClassificationTask(net, self.data.num_classes)

    def fit(
        self,
        net: nn.Module,
        training: str,
        callbacks: list[pl.Callback] | None = None,
        teacher: nn.Module | None = None,
    ) -> ClassificationTask:
        """Trains a net, in place, as ``training`` says."""
        epochs = self._config[training].epochs
        _log.info("%s: %s epochs", training, epochs)
        task = ClassificationTask(net, self.data.num_classes, *self._rates[training], teacher)
        trainer = self._trainer(callbacks, max_epochs=epochs)
        trainer.fit(task, datamodule=self.data)
        return task

    def test(self, task: ClassificationTask, callbacks: list[pl.Callback] | None = None) -> float:
        """Returns the fraction of test images that a task gets right on the CPU, as int8 kernels run there."""
        trainer = self._trainer(callbacks, accelerator="cpu", precision="32-true")
        accuracy = trainer.test(task, datamodule=self.data, verbose=False)[0]["test/accuracy"]
        return round(accuracy, 6)  # a float32 of whole images over whole images

    def _trainer(self, callbacks: list[pl.Callback] | None = None, **settings: object) -> pl.Trainer:
        logging.disable(logging.INFO)  # what hardware there is, from each of the Trainers
        try:
            trainer = build(self._config, "trainer", callbacks=callbacks or [], **self._root, **settings)
        finally:
            logging.disable(logging.NOTSET)
        if trainer.world_size > 1:
            raise ConfigError(
                f"trainer: {trainer.world_size} processes; the recipes run in one. Every process of a distributed "
                "strategy runs the script again, the whole sweep with it. Set trainer.devices=1, and run the jobs of a "
                "sweep side by side with one of Hydra's launchers."
            )
        return trainer


def _rates(config: DictConfig, training: str) -> tuple[OptimizerFactory, ScheduleFactory]:
    """Builds the factories of optimizer and schedule, and tries them out on one number."""
    optimizer, schedule = build(config, f"{training}.optimizer"), build(config, f"{training}.schedule")
    try:
        schedule(optimizer([nn.Parameter(torch.zeros(1))]), 1)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{training}: {error}") from error
    return optimizer, schedule
