"""What every run is made of: Trainers of one config that train and test nets on one data module."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from qlightning.callbacks.ranks import is_spawned
from qlightning.errors import ConfigError
from recipes.build import build
from recipes.data import ClassificationData
from recipes.task import ClassificationTask, OptimizerFactory, ScheduleFactory

_log = logging.getLogger(__name__)


def begin(config: DictConfig, folder: Path) -> None:
    """Makes the folder of a run, with its resolved config in it, and seeds all random numbers."""
    # Sets in memory need no workers; and what Lightning 2.6 calls in torch is deprecated since torch 2.10.
    warnings.filterwarnings("ignore", ".*does not have many workers")
    warnings.filterwarnings("ignore", ".*LeafSpec")
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / "config.yaml", resolve=True)
    pl.seed_everything(config.seed, workers=True)


class Stages:
    """Trains and tests nets on one data module, with Trainers of one config."""

    def __init__(self, config: DictConfig, folder: Path) -> None:
        """Reads the data; the config gets the number of classes, and so does ``config.yaml`` in the folder."""
        self._config = config
        self._root = {} if "default_root_dir" in config.trainer else {"default_root_dir": str(folder)}
        self._trainer(max_epochs=1)  # what is wrong in the config shows before the data is read, let alone trained on
        self._rates = {name: _rates(config, name) for name in ("float_training", "qat_training")}
        self.data: ClassificationData = build(config, "data")
        self.data.prepare_data()
        self.data.setup()
        OmegaConf.update(config, "model.num_classes", self.data.num_classes, force_add=True)
        OmegaConf.save(config, folder / "config.yaml", resolve=True)  # with all that builds the net again

    def task(self, net: nn.Module) -> ClassificationTask:
        """Puts a net into a task that only evaluates it."""
        return ClassificationTask(net, self.data.num_classes)

    def fit(
        self,
        net: nn.Module,
        training: str,
        callbacks: list[pl.Callback] | None = None,
        teacher: nn.Module | None = None,
        checkpoint: str | None = None,
    ) -> ClassificationTask:
        """Trains a net, in place, as ``training`` says; goes on from a checkpoint where one is given."""
        epochs = self._config[training].epochs
        _log.info("%s: %s epochs", training, epochs)
        task = ClassificationTask(net, self.data.num_classes, *self._rates[training], teacher)
        trainer = self._trainer(callbacks, max_epochs=epochs)
        trainer.fit(task, datamodule=self.data, ckpt_path=checkpoint)
        return task

    def test(self, task: ClassificationTask, callbacks: list[pl.Callback] | None = None) -> float:
        """Returns the fraction of test images that a task gets right on the CPU, as int8 kernels run there."""
        return self._evaluate("test", task, callbacks)

    def validate(self, task: ClassificationTask, callbacks: list[pl.Callback] | None = None) -> float:
        """Returns the fraction of validation images that a task gets right on the CPU."""
        return self._evaluate("val", task, callbacks)

    def _evaluate(self, split: str, task: ClassificationTask, callbacks: list[pl.Callback] | None) -> float:
        alone = {"devices": 1, "num_nodes": 1, "strategy": "auto"}  # ranks would fill up their shares with repetitions
        trainer = self._trainer(callbacks, accelerator="cpu", precision="32-true", **alone)
        evaluate = trainer.test if split == "test" else trainer.validate
        accuracy = evaluate(task, datamodule=self.data, verbose=False)[0][f"{split}/accuracy"]
        return round(accuracy, 6)  # a float32 of whole images over whole images

    def _trainer(self, callbacks: list[pl.Callback] | None = None, **settings: object) -> pl.Trainer:
        logging.disable(logging.INFO)  # what hardware there is, from each of the Trainers
        try:
            trainer = build(self._config, "trainer", callbacks=callbacks or [], **self._root, **settings)
        finally:
            logging.disable(logging.NOTSET)
        if trainer.world_size > 1 and not is_spawned(trainer):
            raise ConfigError(
                f"trainer: {trainer.world_size} processes by {type(trainer.strategy).__name__}, each of which "
                "would run the script, and a sweep, again. Those of ddp_spawn train alone: trainer=ddp_cpu, or "
                "+trainer.strategy=ddp_spawn. The jobs of a sweep run side by side with one of Hydra's launchers."
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
