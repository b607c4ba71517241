"""QuantizationAwareTraining: a Lightning training that ends in an int8 model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from qlightning.backends import Backend
from qlightning.callbacks.artifacts import finite_metrics
from qlightning.callbacks.averaging import averaging_callbacks, check_averaging, regrid, renew_copies
from qlightning.callbacks.best import check_monitored, load_best
from qlightning.callbacks.calibration import calibrate_with_steps, calibration_batches
from qlightning.callbacks.callback import QuantizationCallback, has_run, unobserved_message
from qlightning.callbacks.distillation import Distillation, Distiller
from qlightning.callbacks.int8_validation import Int8Validation
from qlightning.callbacks.loading import ensure
from qlightning.callbacks.max_drop import MaxDrop, float_value
from qlightning.callbacks.order import stand_behind
from qlightning.callbacks.phases import PhaseSwitch
from qlightning.callbacks.placement import int8_modules
from qlightning.callbacks.preparation import (
    after_configure_model,
    builds_nets_late,
    cancel_after_configure_model,
    prepared_targets,
)
from qlightning.callbacks.progress import check_finite, points_beyond, progress_of
from qlightning.callbacks.pruning import let_prune
from qlightning.callbacks.ranks import RangeSync, check_strategy, is_spawned, sync_buffers
from qlightning.callbacks.reestimation import reestimate_batchnorm
from qlightning.callbacks.sampling import Sampler, interval_of, log
from qlightning.callbacks.scales import ScaleGroups, warn_frozen
from qlightning.callbacks.schedule import FREEZE_BN, FREEZE_OBSERVERS, Phase, Schedule, SchedulePoint
from qlightning.errors import CalibrationError, ConfigError, NonFiniteError, QuantizationError
from qlightning.fake_quantize import fake_quantizers, raise_nonfinite, set_fake_quant, set_observers
from qlightning.graph import compile_graphs, is_prepared, uncompile_graphs, unprepare
from qlightning.graph.source import Source
from qlightning.learned import settle_all
from qlightning.qconfig import Mode, Pattern, QConfig

Point = int | float | str | SchedulePoint | None


class QuantizationAwareTraining(QuantizationCallback):
    """Trains the nets of a LightningModule with fake quantization, and puts int8 nets in their place at fit end.

    ``Trainer(callbacks=QuantizationAwareTraining())`` is all that most need. Afterwards ``trainer.test(model)``,
    ``model(x)`` and ``model.net(x)`` run in int8 on the CPU; a further ``fit`` goes on with the prepared nets. Ranges
    follow training batches only. Checkpoints always have the prepared form, the float state dict plus the ranges;
    with a ``ckpt_path``, ``trainer.test`` measures the int8 conversion of that checkpoint.

    ``fake_quant_start``, ``freeze_observers`` and ``freeze_bn`` are points of the training: an epoch (an integer), a
    fraction of the whole training (a float below 1), ``"1000 steps"`` (optimizer steps) or None (never). What they do
    is logged as ``qat/stage``, which counts how many of the three are past, also in the progress bar.

    Args:
        qconfig: What activations and weights are quantized to.
        backend: Name or value of the int8 kernels; ``"auto"`` picks by CPU.
        modules: Names of the modules to quantize, such as ``["backbone", "head.proj"]``. None: each child that holds
            convolution or linear layers, or the LightningModule's own ``forward`` where they hang directly on it.
            Losses and metrics are left alone.
        exclude: Names, globs or types of what stays float, counted from the LightningModule (``"net.conv1"``) or from
            the module that is quantized (``"conv1"``).
        fake_quant_start: From here on tensors are rounded to their grids.
        freeze_observers: From here on the ranges hold still.
        freeze_bn: From here on the statistics of every BatchNorm in the nets hold still.
        convert: Which weights int8 nets are made from at fit end, to take their places: ``"last"`` (or True) or
            ``"best"``, those of the checkpoint that ModelCheckpoint names best by what it monitors, which the whole
            LightningModule then has. False: none are made. After an exception or an interrupt they never are.
        validate_int8: Runs validation within fit on the int8 conversion of the current weights, so that what
            ModelCheckpoint and EarlyStopping monitor is the model that ships: True for every epoch, n for every n-th.
            The training is the same with and without it, bit for bit. The int8 kernels run on the CPU: on an
            accelerator it is refused, but with ``backend="reference"``.
        reestimate_bn: At fit end takes the BatchNorm statistics anew over so many training batches, with the final
            weights and ranges; 0: keeps those of the training.
        compile: Runs the graphs of the nets by ``torch.compile``, from the second training batch to the end of fit.
            They compile anew at each of the three points above, once. NaN and infinity are then found at the end of a
            step, after the optimizer.
        calibrate: Right before fake quantization starts, takes the ranges from so many training batches, in eval mode,
            as post-training quantization does; 0: from the batches that are trained on. Until then nothing is
            observed, so that a float phase costs what float training does. Nets that have ranges keep these. What is
            converted without ever having been rounded, as training ended before or was best before, is calibrated then.
        distillation: A second loss, on the difference from what a teacher answers: ``"float"`` (the nets themselves, as
            they stand when the training begins), a module, or a :class:`Distillation`. It is added to what
            ``training_step`` returns, and logged as ``qat/distillation``.
        save: Files to write the int8 net to at fit end: ``"net.pt2"``, ``["net.pt2", "net.onnx"]``, below the Trainer's
            ``default_root_dir``; with the metrics of the fit inside. MLFlowLogger and WandbLogger get them, too;
            TensorBoardLogger gets the report and figures of the weights' codes, with and without files.
        max_drop: How much worse than in float the int8 nets may be, in units of a metric that ``validation_step`` logs:
            0.5 of an accuracy in percent, 0.005 of a fraction. At fit end, when training has won back what it could,
            the fewest layers are kept in float that keep to it, measured on the validation data and checked in int8;
            the report says which and why. In float means before the training, or the trained weights where these are
            better. The metric is what ModelCheckpoint or
            EarlyStopping monitors, or ``MaxDrop(0.5, monitor="val_acc", mode="max")``. None: all in int8.
        log_every: After every so many training batches the loggers get ``qat/sqnr/<layer>`` (of the weight, in dB) and
            ``qat/clip/<place>`` (the share of an activation's values beyond its grid), each of the 32 that were worst
            at first, and their worst and median; the report shows them all, and how the ranges moved. None: 50, or the
            Trainer's ``log_every_n_steps`` where that is more. 0: never. The training is the same bit for bit.

    Attributes:
        int8_model: The int8 net after fit; a dict by name where there are several.
        prepared: The prepared nets by name.
        report: What runs in int8, what stayed float and why.
        decision: With ``max_drop``: the layers that were left in float, what they cost, and the metric of the rest.

    Raises:
        ConfigError: A setting cannot be used; when the callback is built, or when ``fit`` sets up and before it trains.
        CalibrationError: Fit has no training batch, or the first one ran none of the prepared nets.
        NonFiniteError: A training batch gave NaN or infinity; names epoch, batch and layer.
    """

    mode: Mode = "qat"

    def __init__(
        self,
        qconfig: QConfig | None = None,
        backend: str | Backend = "auto",
        modules: Iterable[str] | None = None,
        exclude: Iterable[Pattern] = (),
        fake_quant_start: Point = 0,
        freeze_observers: Point = FREEZE_OBSERVERS,
        freeze_bn: Point = FREEZE_BN,
        convert: bool | Literal["best", "last"] = True,
        validate_int8: bool | int = False,
        reestimate_bn: int = 0,
        compile: bool = False,  # noqa: A002  torch's name
        save: str | Path | Iterable[str | Path] = (),
        calibrate: int = 0,
        distillation: Distillation | nn.Module | str | None = None,
        max_drop: float | MaxDrop | None = None,
        log_every: int | None = None,
    ) -> None:
        super().__init__(qconfig, backend, modules, exclude, save, max_drop)
        if self.max_drop is not None and not convert:
            raise ConfigError(f"max_drop={self.max_drop.points:g} with convert=False: there is no int8 model to keep.")
        if self.save and not convert:
            raise ConfigError(f"save={self.save!r} with convert=False: there is no int8 model to save.")
        if not isinstance(convert, bool) and convert not in ("best", "last"):
            raise ConfigError(f"convert={convert!r}: 'best', 'last', True (the last) or False is possible.")
        if not isinstance(validate_int8, int) or validate_int8 < 0:
            raise ConfigError(f"validate_int8={validate_int8!r}: True, False or a number of epochs is possible.")
        _check_count("reestimate_bn", reestimate_bn, "none")
        _check_count("calibrate", calibrate, "none")
        if not isinstance(compile, bool):
            raise ConfigError(f"compile={compile!r}: True or False is possible.")
        if log_every is not None:
            _check_count("log_every", log_every, "never")
        self.schedule = Schedule(
            SchedulePoint.parse(fake_quant_start, "fake_quant_start"),
            SchedulePoint.parse(freeze_observers, "freeze_observers"),
            SchedulePoint.parse(freeze_bn, "freeze_bn"),
        )
        self.convert = convert
        self.validate_int8 = validate_int8
        self.reestimate_bn = reestimate_bn
        self.compile = compile
        self.calibrate = calibrate
        self.distillation = Distillation.of(distillation)
        self._distiller = Distiller(self.distillation) if self.distillation else None
        if self._distiller:
            self._distiller.check_start(self.schedule)
        self._float_before: float | None = None
        self.log_every = log_every
        self._sampler: Sampler | None = None
        self._metrics: dict[str, float] = {}
        self._int8_validation = Int8Validation()
        self._phase: Phase | None = None
        self._is_running = False
        self._is_set_up = False
        self._beyond: list[str] = []
        self._switch = PhaseSwitch(())
        self._ranges: RangeSync | None = None
        self._scales = ScaleGroups({})

    def state_dict(self) -> dict[str, Any]:
        points = {name: str(point) for name, point in self.schedule.points().items()}
        position = {"schedule": points, "position": str(self._phase) if self._phase else ""}
        before = {} if self._float_before is None else {"float_before": self._float_before}
        teacher = {"teacher": self._distiller.digest} if self._distiller else {}
        track = {"track": self._sampler.track.state()} if self._sampler else {}
        return {**super().state_dict(), **position, **before, **teacher, **track}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes from a checkpoint the teacher, how good the float net was, and what was sampled so far."""
        self._float_before = state_dict.get("float_before")
        if self._distiller:
            self._distiller.expect(state_dict.get("teacher", ""))
        if self._sampler and "track" in state_dict:
            self._sampler.track.load(state_dict["track"])

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Prepares the nets before Lightning restores a checkpoint, wraps the model and builds the optimizers."""
        self._check_precision(trainer)
        check_strategy(trainer)
        if stage != "fit":
            if int8_modules(pl_module):
                self._check_device(trainer)
            self._remember_modes(pl_module)
            ensure(pl_module)  # a checkpoint is loaded after this hook
            return
        self._check_alone(trainer)
        check_averaging(trainer)
        stand_behind(trainer, self)
        if trainer.limit_train_batches == 0:
            raise CalibrationError("limit_train_batches=0: without a training batch no range can be observed.")
        check_finite(self.schedule, trainer)
        self._phase, self._is_running = None, False
        self._float_before = None
        self._ranges = None
        self._is_set_up = True
        self._switch = PhaseSwitch(())
        self._sampler = None
        if self.validate_int8:
            self._check_device(trainer)
        if self.convert == "best" and not trainer.fast_dev_run:
            check_monitored(trainer)
        if self.max_drop is not None:
            self.max_drop.goal(trainer)

        def prepare() -> None:
            self._prepare(pl_module)
            warn_frozen(self.prepared, self.modules)
            renew_copies(trainer, pl_module)
            self._ranges = RangeSync(trainer, pl_module, self.prepared)
            self._switch = PhaseSwitch(self.prepared.values())
            self._scales = ScaleGroups(self.prepared)
            if self._distiller:
                self._distiller.find(pl_module, self.prepared, keep=self._has_run())
            if trainer.is_global_zero and not trainer.barebones:
                self._sampler = Sampler(self.prepared, interval_of(trainer, self.log_every))

        if builds_nets_late(pl_module):
            after_configure_model(pl_module, prepare)
        else:
            prepare()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Optimizers are restored from it later."""
        self._scales.resume_from(checkpoint)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The strategy has wrapped the model, and built the optimizers."""
        if self._ranges is not None:
            self._ranges.start()
        self._scales.start(trainer)
        if self._distiller and trainer.ckpt_path and not self._has_run():  # weights of a float checkpoint
            self._distiller.find(pl_module, self.prepared, keep=False)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Checks the schedule against the training, whose length is known now."""
        self._is_set_up = False  # a training now
        self._beyond = points_beyond(self.schedule, trainer)
        phase = self.schedule.at(progress_of(trainer))
        if phase.observers_frozen and not self._has_run() and not self.calibrate:
            raise CalibrationError(
                f"freeze_observers at {self.schedule.freeze_observers} freezes ranges that no batch has ever reached. "
                "Freeze later, or start from a checkpoint with ranges. Where this goes on with a float training by "
                "ckpt_path, points count from that one's start: rather load its weights, and fit without ckpt_path."
            )
        if self.max_drop is not None and trainer.global_step == 0:  # an early word on its errors, too
            self._float_before = float_value(trainer, pl_module, self.prepared, self.max_drop)
        if self._distiller:
            self._distiller.start(trainer, pl_module, self.prepared)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Applies the schedule; before every batch, because Lightning and users switch modes in between."""
        phase = self.schedule.at(progress_of(trainer))
        if phase.fake_quant:
            self._calibrate(trainer, pl_module)
        self._apply(phase, trainer)
        if self._sampler is not None:
            self._sampler.before_batch(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Logs the stage; after the first batch checks that the prepared nets are those that ran."""
        raise_nonfinite(self._switch.fake_quantizers)
        settle_all(self._switch.fake_quantizers)
        if self._ranges is not None:
            self._ranges.after_batch()
        if not self._is_running:
            if not (self._has_run() or self._awaits_calibration()):
                raise CalibrationError(unobserved_message(pl_module, self.prepared))
            self._is_running = True
            if self.compile:  # now that every flag and shape has settled
                compile_graphs(self.prepared.values())
        if self._sampler is not None:
            log(trainer, self._sampler.after_batch(trainer.global_step))
        if self._phase is not None and not trainer.barebones:
            # batch_size only keeps Lightning from searching the batch for it; a step's value is not averaged.
            pl_module.log(
                "qat/stage", float(self._phase.stage), prog_bar=True, on_step=True, on_epoch=False, batch_size=1
            )

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Holds the ranges still, also where a LightningModule keeps its nets in training mode."""
        for module in self.prepared.values():
            set_observers(module, False)

        if trainer.state.fn == "fit":
            return
        if self.convert and prepared_targets(pl_module, self.modules):
            self._check_device(trainer)
            self._adopt(pl_module)
            self._recall_decision()
            self._recall_modes(pl_module)
            self._convert(pl_module)
        if not (int8_modules(pl_module) or is_prepared(pl_module)):
            rank_zero_warn(
                f"{type(pl_module).__name__} runs in float: QuantizationAwareTraining has not trained it, and no"
                " checkpoint of a quantization-aware training was loaded."
            )

    on_test_start = on_validation_start
    on_predict_start = on_validation_start

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Puts int8 forwards in place before the first batch: averages of weights (EMA) are in place by now."""
        if batch_idx or dataloader_idx or trainer.state.fn != "fit" or trainer.sanity_checking or not self._has_run():
            return
        if averaging_callbacks(trainer):
            for module in self.prepared.values():
                regrid(module, weights=False)
        if self.validate_int8 and (trainer.current_epoch + 1) % self.validate_int8 == 0:
            self._int8_validation.start(self.prepared, self.backend)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Takes int8 forwards away again."""
        self._int8_validation.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Converts nothing. What fails before or in the first batch leaves the LightningModule in float, as it was."""
        super().on_exception(trainer, pl_module, exception)
        uncompile_graphs(self.prepared.values())
        self._is_set_up = False
        if self._sampler is not None:
            self._sampler.release()
        self._int8_validation.stop()
        self._stop_distilling(pl_module)
        if self._ranges is not None:
            self._ranges.release()
        if trainer.state.fn != "fit":
            return
        if isinstance(exception, NonFiniteError):
            # Not raised anew: Lightning is handling this one, and tears down what has to be torn down afterwards.
            batch = trainer.fit_loop.epoch_loop.batch_idx
            exception.args = (f"epoch {trainer.current_epoch}, training batch {batch}: {exception}",)
        self._switch.thaw()
        never_trained = self._phase is None
        if never_trained or (isinstance(exception, QuantizationError) and not self._is_running):
            self._undo(pl_module)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Undoes a preparation for a fit that never trained: a Tuner ends it before, with neither end nor exception."""
        if stage == "fit" and self._is_set_up:
            self._is_set_up = False
            cancel_after_configure_model(pl_module)
            if self._ranges is not None:
                self._ranges.release()
            self._undo(pl_module)
        super().teardown(trainer, pl_module, stage)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Ranks that ended apart come together, while they still can."""
        self._stop_distilling(pl_module)
        if self._ranges is not None:
            self._ranges.follow(False)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Puts the int8 nets in place. The strategy has moved the model to the CPU by now, checkpoints are written."""
        self._is_set_up = False  # also where the training was at its end before it began
        self._switch.thaw()
        uncompile_graphs(self.prepared.values())
        metrics = finite_metrics(trainer).items()
        self._metrics = {name: value for name, value in metrics if not name.startswith("qat/")}
        if self._sampler is not None:
            self._sampler.finish(trainer.global_step)
        if self._ranges is not None:
            self._ranges.relink()
        if self._is_running:  # it may have ended before fake quantization started
            self._calibrate(trainer, pl_module)
        if not self._has_run():
            raise CalibrationError(
                "Fit had no training batch, so no range was observed. Check the training loader, and whether epoch "
                f"{trainer.current_epoch}, where a checkpoint may have begun, is below max_epochs={trainer.max_epochs}."
            )
        self._drop_idle()
        if missing := self._unobserved():
            rank_zero_warn(f"No training batch has reached {', '.join(missing)}: what depends on them stays float.")
        progress = progress_of(trainer)
        open_points = [name for name, point in self.schedule.points().items() if not point.reached(progress)]
        if skipped := [name for name in open_points if name not in self._beyond]:
            rank_zero_info(f"Training ended before {', '.join(skipped)}.")
        for module in self.prepared.values():
            set_fake_quant(module, True)
            set_observers(module, False)
        if averaging := averaging_callbacks(trainer):
            self._switch.statistics.put_back()
            swa = any(hasattr(callback, "swa_end") for callback in averaging)  # averages no buffers: weights alone
            for module in self.prepared.values():
                regrid(module, weights=swa)
        sync_buffers(trainer, self.prepared)
        source = load_best(trainer, pl_module) if self.convert == "best" else ""
        self._calibrate(trainer, pl_module)  # the best may be from before fake quantization started
        if self.reestimate_bn:
            batches = calibration_batches(trainer, pl_module, None)
            reestimate_batchnorm(trainer, pl_module, self.prepared, batches, self.reestimate_bn)
        if self.convert:
            self._decide(trainer, pl_module, self._float_before)
        if self.convert and is_spawned(trainer):
            self._hand_back()
        elif self.convert:
            self._convert(pl_module)
            let_prune(trainer)
            self._save(trainer, source)

    def _source(self, modules: dict[str, nn.Module]) -> Source:
        points = {name: str(point) for name, point in self.schedule.points().items()}
        source = replace(super()._source(modules), settings=points, metrics=self._metrics)
        if self._sampler is None:
            return source
        return replace(source, calls=self._sampler.calls, training=self._sampler.track.training)

    def _calibrate(self, trainer: Any, pl_module: Any) -> None:
        """Takes the ranges from training batches, where that is asked for and there are none yet."""
        if self.calibrate and not self._has_run():
            batches = calibration_batches(trainer, pl_module, None)
            try:
                calibrate_with_steps(trainer, pl_module, self.prepared, batches, self.calibrate)
            except BaseException:  # a further fit starts afresh, and not with a part of the batches
                for fq in (fq for module in self.prepared.values() for _, fq in fake_quantizers(module)):
                    fq.reset()
                raise

    def _drop_idle(self) -> None:
        """Makes the nets float again that no training batch went through, such as a copy that only validation calls."""
        idle = [name for name, module in self.prepared.items() if not has_run(module)]
        for name in idle:
            unprepare(self._preparation.modules.pop(name))
        if idle:
            rank_zero_warn(
                f"No training batch went through {', '.join(idle)}: no ranges were observed, it stays float."
            )
            self.report = self._report(self.prepared)

    def _awaits_calibration(self) -> bool:
        return bool(self.calibrate and self._phase is not None and not self._phase.fake_quant)

    def _stop_distilling(self, pl_module: Any) -> None:
        if self._distiller:
            self._distiller.stop(pl_module)

    def _apply(self, phase: Phase, trainer: Any) -> None:
        observes = not phase.observers_frozen and (phase.fake_quant or not self.calibrate)
        self._switch.apply(phase, observes)
        if phase.bn_frozen and averaging_callbacks(trainer):
            self._switch.statistics.put_back()
        if self._ranges is not None:
            self._ranges.follow(observes)
        if self._sampler is not None and phase != self._phase:
            self._sampler.track.enter(trainer.global_step, trainer.current_epoch, phase)
        if phase != self._phase and (self._phase is not None or phase.stage != 1):
            rank_zero_info(f"Quantization, epoch {trainer.current_epoch}, step {trainer.global_step}: {phase}.")
        self._phase = phase


def _check_count(name: str, value: Any, zero: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{name}={value!r}: a number of training batches is possible; 0: {zero}.")
