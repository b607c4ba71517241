"""PostTrainingQuantization: calibrates a trained LightningModule on training batches and evaluates it in int8."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from qlightning.backends import Backend
from qlightning.callbacks.calibration import (
    CalibrationFn,
    calibrate_with_steps,
    calibration_batches,
    check_at_most,
    run_batches,
)
from qlightning.callbacks.callback import QuantizationCallback, has_run, unobserved_message
from qlightning.callbacks.max_drop import MaxDrop
from qlightning.callbacks.placement import int8_modules, prepared_in_place, restore_prepared
from qlightning.callbacks.preparation import builds_nets_late, prepared_targets
from qlightning.callbacks.pruning import let_prune
from qlightning.callbacks.ranks import check_strategy, is_spawned
from qlightning.errors import CalibrationError, ConfigError
from qlightning.graph import facts, unprepare
from qlightning.graph.sampling import keeping_calls
from qlightning.qconfig import Mode, Pattern, QConfig
from qlightning.steps.base import Step, apply_steps, checked_steps
from qlightning.steps.subject import Subject


class PostTrainingQuantization(QuantizationCallback):
    """Puts calibrated int8 nets in the place of the float ones of a LightningModule, without training.

    With ``trainer.validate``, ``trainer.test`` or ``trainer.predict`` the nets are calibrated once the weights are
    loaded, and the loop runs on int8; a further call goes on with the same int8 nets, but calibrates those of another
    callback anew. A checkpoint with ranges is evaluated with these, and not calibrated: it has to have been saved with
    the same settings. With ``trainer.fit`` the training is that of the float nets; at fit end these are calibrated on
    training batches and int8 nets take their places. A further ``fit`` gets the float nets back.

    Batches go the way that they go in the stage that runs: through ``validation_step``, ``test_step`` or
    ``predict_step``, in eval mode, without a trace in metrics or logs.

    Args:
        qconfig: What activations and weights are quantized to.
        backend: Name or value of the int8 kernels; ``"auto"`` picks by CPU.
        modules: As for :class:`QuantizationAwareTraining`.
        exclude: As for :class:`QuantizationAwareTraining`.
        calibration_data: An iterable of batches or a LightningDataModule. None: that of the Trainer, or the training
            loader. A LightningDataModule's ``calibration_dataloader()`` counts before its ``train_dataloader()``.
        calibration_batches: At most so many batches, whatever limits the Trainer has; None: all there are.
        calibration_fn: Called with the LightningModule and a batch, it passes the batch to the nets; for batches that
            no step takes.
        steps: Of `qlightning.steps`, in their order: what makes the int8 nets more accurate, at the cost of further
            passes over the calibration batches, which are then kept in memory. ``report.steps`` says what they did.
        save: Files to write the int8 net to once it is calibrated: ``"net.pt2"``, ``["net.pt2", "net.onnx"]``, below
            the Trainer's ``default_root_dir``; with the metrics of a fit inside. Loggers get them as from
            :class:`QuantizationAwareTraining`.
        max_drop: How much worse than in float the int8 nets may be, in units of a metric that ``validation_step`` logs:
            0.5 of an accuracy in percent, 0.005 of a fraction. After the calibration the fewest
            layers are kept in float that keep to it, measured on the validation data and checked in int8; the report
            says which and why. The metric is what ModelCheckpoint or EarlyStopping monitors, or
            ``MaxDrop(0.5, monitor="val_acc", mode="max")``. None: all in int8.

    Attributes:
        int8_model: The int8 net; a dict by name where there are several, None before the calibration.
        prepared: The calibrated nets by name.
        report: What runs in int8, what stayed float and why.

    Raises:
        ConfigError: A setting cannot be used.
        CalibrationError: There is no calibration batch, or the batches reach none of the nets.
        NonFiniteError: A calibration batch gave NaN or infinity; names batch and layer.
        BackendError: The Trainer would put the int8 nets on a device that the backend has no kernels for.
    """

    mode: Mode = "ptq"

    def __init__(
        self,
        qconfig: QConfig | None = None,
        backend: str | Backend = "auto",
        modules: Iterable[str] | None = None,
        exclude: Iterable[Pattern] = (),
        calibration_data: Any = None,
        calibration_batches: int | None = 32,
        calibration_fn: CalibrationFn | None = None,
        steps: Iterable[Step] = (),
        save: str | Path | Iterable[str | Path] = (),
        max_drop: float | MaxDrop | None = None,
    ) -> None:
        super().__init__(qconfig, backend, modules, exclude, save, max_drop)
        check_at_most("calibration_batches", calibration_batches)
        if calibration_fn is not None and not callable(calibration_fn):
            raise ConfigError(f"calibration_fn={calibration_fn!r}: a function of (pl_module, batch) is needed.")
        self.calibration_data = calibration_data
        self.calibration_batches = calibration_batches
        self.calibration_fn = calibration_fn
        self.steps = checked_steps(steps)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Finds what is to be quantized, so that a wrong name is an error before anything runs."""
        self._check_alone(trainer)
        self._check_precision(trainer)
        if self.steps and trainer.world_size > 1:
            raise ConfigError(
                f"steps={list(self.steps)!r}: steps run in one process, and this Trainer has {trainer.world_size}. "
                "Quantize with Trainer(devices=1), or without steps."
            )
        check_strategy(trainer)
        if stage == "fit":
            if self.max_drop is not None:
                self.max_drop.goal(trainer)
            for module in restore_prepared(pl_module, self.modules).values():
                unprepare(module)
            self.int8_modules = {}
        else:
            self._check_device(trainer)
            self._remember_modes(pl_module)
        if not self._is_placed(pl_module) and not builds_nets_late(pl_module):
            with prepared_in_place(pl_module):  # where others have placed int8 modules
                self.check(pl_module)

    # The weights of a `ckpt_path` are there, and the model is where it will run, when a loop starts.
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "validate":  # and not within fit
            self._quantize(trainer, pl_module)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._quantize(trainer, pl_module)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self._quantize(trainer, pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The training is that of the float nets, also where a checkpoint has prepared them."""
        for module in prepared_targets(pl_module, self.modules).values():
            unprepare(module)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Quantizes what was trained. The strategy has moved the model to the CPU by now, checkpoints are written."""
        self._quantize(trainer, pl_module)
        let_prune(trainer)

    def _is_placed(self, pl_module: nn.Module) -> bool:
        """Whether int8 modules of this callback stand in the LightningModule, and not those of others."""
        placed, own = int8_modules(pl_module), self.int8_modules
        return bool(placed) and all(name in placed and own.get(name) is placed[name] for name in self.modules or placed)

    def _quantize(self, trainer: Any, pl_module: nn.Module) -> None:
        if self._is_placed(pl_module):
            return
        # Lightning evaluates in inference mode, whose tensors could never be trained again.
        with torch.inference_mode(False), torch.no_grad():
            if trainer.state.fn != "fit" and self._is_calibrated(trainer, pl_module):
                with prepared_in_place(pl_module):
                    self._adopt(pl_module)
                restore_prepared(pl_module, self.modules)
                self._recall_decision()
                self._recall_modes(pl_module)
                self._convert(pl_module)
                self._save(trainer)
            else:
                self._calibrate(trainer, pl_module)

    def _is_calibrated(self, trainer: Any, pl_module: nn.Module) -> bool:
        """Whether the nets have the ranges of a checkpoint, and not those of another callback."""
        placed = int8_modules(pl_module)
        with prepared_in_place(pl_module):
            found = prepared_targets(pl_module, self.modules)
        if not found or not all(has_run(module) for module in found.values()):
            return False
        if trainer.ckpt_path is not None:
            return True
        return all(name not in placed and (facts.of(m) or {}).get("mode") == self.mode for name, m in found.items())

    def _calibrate(self, trainer: Any, pl_module: nn.Module) -> None:
        batches = calibration_batches(trainer, pl_module, self.calibration_data)
        for module in restore_prepared(pl_module, self.modules).values():
            unprepare(module)  # what others have quantized: with their ranges, and maybe otherwise than asked for
        if self.steps:  # which pass them several times, and a loader would shuffle them each time
            batches = list(itertools.islice(batches, self.calibration_batches))
        self._prepare(pl_module)
        try:
            subject = self._subject(trainer, pl_module, batches)
            apply_steps(self.steps, subject, before_calibration=True)
            with keeping_calls(self.prepared, pl_module) as self._calls:  # which the report looks at
                seen = calibrate_with_steps(
                    trainer, pl_module, self.prepared, batches, self.calibration_batches, self.calibration_fn
                )
            if self.calibration_batches is not None and seen < self.calibration_batches:
                rank_zero_info(f"Calibrated on {seen} batches, all that there are ({self.calibration_batches} wanted).")
            if not self._has_run():
                raise CalibrationError(unobserved_message(pl_module, self.prepared))
            apply_steps(self.steps, subject, before_calibration=False)
            self._decide(trainer, pl_module)
            if trainer.state.fn == "fit" and is_spawned(trainer):
                self._hand_back()
                return
            if trainer.state.fn != "fit":
                self._recall_modes(pl_module)
            self._convert(pl_module)
        except BaseException:
            self._undo(pl_module)
            raise
        self._save(trainer)

    def _subject(self, trainer: Any, pl_module: nn.Module, batches: Iterable[Any]) -> Subject:
        """The nets as steps see them."""

        def run(context: AbstractContextManager[None]) -> None:
            run_batches(
                trainer,
                pl_module,
                self.prepared,
                batches,
                self.calibration_batches,
                context,
                self.calibration_fn,
                show=False,
            )

        return Subject(self.prepared, run, bar=trainer.progress_bar_callback is not None and trainer.is_global_zero)
