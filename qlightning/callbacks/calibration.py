"""Calibration under Lightning: which batches, and how a LightningModule passes them to its nets, without a trace."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader
from torchmetrics import Metric
from tqdm.auto import tqdm

from qlightning.callbacks.base import LIGHTNING_DATAMODULES, combined_loader, overrides
from qlightning.callbacks.ranks import gathered, merge_ranges, share_of, sync_buffers
from qlightning.errors import CalibrationError, ConfigError, NonFiniteError, QuantizationError
from qlightning.fake_quantize import calibrating

CalibrationFn = Callable[[Any, Any], Any]

# What a step of a LightningModule is tried for: its own stage first, training last, since it may step optimizers.
_STEPS = {
    "validate": ("validation_step", "test_step", "training_step"),
    "test": ("test_step", "validation_step", "training_step"),
    "predict": ("predict_step", "validation_step", "test_step", "training_step"),
    "fit": ("validation_step", "training_step"),
}


def calibration_batches(trainer: Any, pl_module: nn.Module, calibration_data: Any) -> Iterable[Any]:
    """Finds the batches to calibrate on.

    Args:
        trainer: The Trainer.
        pl_module: The LightningModule.
        calibration_data: A loader or another iterable of batches, a LightningDataModule, or None: the Trainer's
            LightningDataModule, or else the training loader of the Trainer or of the LightningModule. Of a
            LightningDataModule the ``calibration_dataloader()`` counts where there is one, else the
            ``train_dataloader()``.

    Raises:
        CalibrationError: There are none.
    """
    if calibration_data is not None and not isinstance(calibration_data, LIGHTNING_DATAMODULES):
        return calibration_data
    datamodule: Any = calibration_data if calibration_data is not None else trainer.datamodule
    if datamodule is not None:
        if datamodule is not trainer.datamodule and trainer.is_global_zero:
            datamodule.prepare_data()
        if datamodule is not trainer.datamodule or trainer.state.fn != "fit":
            # Lightning has called setup for the stage that runs; training data is promised after setup("fit").
            datamodule.setup("fit")
        if callable(own := getattr(datamodule, "calibration_dataloader", None)):
            return own()
        if overrides(datamodule, "train_dataloader"):
            return combined_loader(datamodule.train_dataloader())
    elif trainer.state.fn == "fit" and trainer.train_dataloader is not None:
        return combined_loader(tree_map(_apart, trainer.train_dataloader))
    elif overrides(pl_module, "train_dataloader"):
        try:
            return combined_loader(pl_module.train_dataloader())  # type: ignore[operator]
        except Exception as error:
            raise CalibrationError(
                f"{type(pl_module).__name__}.train_dataloader() gives no loader for the calibration: {error}. Give one "
                "with PostTrainingQuantization(calibration_data=...)."
            ) from error
    raise CalibrationError(
        "No data to calibrate on: there is neither a LightningDataModule nor a train_dataloader(). Give a loader of "
        "training batches with PostTrainingQuantization(calibration_data=...)."
    )


def calibrate_with_steps(
    trainer: Any,
    pl_module: nn.Module,
    prepared: dict[str, nn.Module],
    batches: Iterable[Any],
    num_batches: int | None,
    calibration_fn: CalibrationFn | None = None,
) -> int:
    """Lets the observers of prepared modules see batches, as the LightningModule passes these to its nets.

    Where there are several ranks, each takes its share of the batches, and all of them end with the same ranges.
    Runs in eval mode without gradients, with a progress bar where the Trainer has one. The random state, the metrics
    and plain attributes of the LightningModule, and the log are left as they are.

    Args:
        trainer: The Trainer.
        pl_module: The LightningModule that holds the prepared modules.
        prepared: By target name.
        batches: What its loader gives; moved to the device as Lightning does.
        num_batches: At most so many; None: all.
        calibration_fn: Called with the LightningModule and a batch instead of one of its steps.

    Returns:
        The number of batches, of all ranks together.

    Raises:
        NonFiniteError: NaN or infinity; names the batch and the layer.
        CalibrationError: There is no batch, or a step cannot run on one.
    """
    sync_buffers(trainer, prepared)
    observing = _calibrating(prepared.values())
    count = run_batches(trainer, pl_module, prepared, batches, num_batches, observing, calibration_fn)
    merge_ranges(trainer, prepared)
    return sum(gathered(trainer, count))


@torch.no_grad()
def run_batches(
    trainer: Any,
    pl_module: nn.Module,
    prepared: dict[str, nn.Module],
    batches: Iterable[Any],
    num_batches: int | None,
    context: AbstractContextManager[None],
    calibration_fn: CalibrationFn | None = None,
    label: str = "Calibrating",
    show: bool = True,
) -> int:
    """Passes batches to prepared modules as the LightningModule does, within a context that looks at them.

    As :func:`calibrate_with_steps`, which says what stays as it is; but each rank is left with what its own share of
    the batches gave, and returns their number. ``label`` is that of the progress bar, which
    there is where the Trainer has one and ``show`` is True.
    """
    run = calibration_fn or _step_of(trainer, pl_module, prepared)
    count = 0
    show = show and trainer.progress_bar_callback is not None and trainer.is_global_zero
    with (
        in_eval_mode(pl_module),
        context,
        torch.random.fork_rng(devices=[]),
        trainer.precision_plugin.forward_context(),
    ):
        total = _length(batches, num_batches)
        bar = tqdm(
            share_of(batches, num_batches, trainer),
            label,
            total=None if total is None else -(-total // trainer.world_size),
            disable=not show,
        )
        for batch in bar:
            batch = trainer.precision_plugin.convert_input(batch)
            batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=0)  # type: ignore[operator]
            # Not the strategy's own device: at fit end the model is on the CPU already.
            batch = trainer.strategy.batch_to_device(batch, device=pl_module.device, dataloader_idx=0)
            try:
                run(pl_module, batch)
            except NonFiniteError as error:
                raise NonFiniteError(f"calibration batch {count}: {error}") from error
            except QuantizationError:
                raise
            except Exception as error:
                raise CalibrationError(
                    f"Calibration batch {count}: {type(error).__name__}: {error}. If training batches need another "
                    "treatment, give PostTrainingQuantization(calibration_fn=lambda pl_module, batch: ...) or "
                    "calibration_data=..."
                ) from error
            count += 1
    return count


@contextmanager
def in_eval_mode(pl_module: nn.Module) -> Iterator[None]:
    """Within it a LightningModule is in eval mode, and told so; its modes come back as they were."""
    modes = {module: module.training for module in pl_module.modules()}
    pl_module.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def check_at_most(name: str, batches: Any) -> None:
    """Raises a ConfigError for a largest number of batches that is none."""
    if batches is not None and (isinstance(batches, bool) or not isinstance(batches, int) or batches < 1):
        raise ConfigError(f"{name}={batches!r}: a positive integer or None (all) is needed.")


@contextmanager
def _calibrating(modules: Iterable[nn.Module]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(calibrating(module))
        yield


def _apart(loader: Any) -> Any:
    """A loader with iterators of its own: one with persistent workers has a single one, which the training is using."""
    if isinstance(loader, DataLoader) and loader.persistent_workers:
        loader = copy.copy(loader)
        loader._iterator = None
    return loader


def _length(batches: Any, num_batches: int | None) -> int | None:
    try:
        length = len(batches)
    except TypeError:
        return num_batches
    return length if num_batches is None else min(length, num_batches)


def _step_of(trainer: Any, pl_module: nn.Module, prepared: dict[str, nn.Module]) -> CalibrationFn:
    """How to pass a batch: by a step of the LightningModule, else by its forward."""
    stand_in = without_side_effects(trainer, pl_module, prepared)
    for name in _STEPS[str(trainer.state.fn.value)]:
        step = getattr(stand_in, name)
        is_manual = name == "training_step" and not pl_module.automatic_optimization
        if not overrides(pl_module, name) or is_manual:
            continue
        parameters = list(inspect.signature(step).parameters.values())
        if any(parameter.name == "dataloader_iter" for parameter in parameters):
            continue
        required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        takes_index = len(required) > 1 or any(p.name == "batch_idx" for p in parameters)
        extra = (0,) * max(len(required) - 1, int(takes_index))
        return lambda _, batch, step=step, extra=extra: step(batch, *extra)  # type: ignore[misc]
    if overrides(pl_module, "forward"):
        return lambda _, batch: stand_in(batch[0] if isinstance(batch, (tuple, list)) else batch)
    raise ConfigError(
        f"{type(pl_module).__name__} has neither a step nor a forward to pass calibration batches by. Give "
        "PostTrainingQuantization(calibration_fn=lambda pl_module, batch: ...)."
    )


def without_side_effects(
    trainer: Any,
    pl_module: nn.Module,
    prepared: dict[str, nn.Module],
    log: Callable[..., None] = lambda *args, **kwargs: None,
) -> Any:
    """A stand-in for a LightningModule that shares its nets, and keeps what a step changes besides to itself.

    Metrics, lists, dicts, sets and plain attributes are its own; it has no loggers, and what it logs goes to ``log``,
    with the arguments of ``self.log``.
    """
    stand_in: Any = _shallow(pl_module, {id(module) for module in prepared.values()})
    stand_in._trainer = trainer

    def log_one(self: Any, *args: Any, **kwargs: Any) -> None:
        log(*args, **kwargs)

    def log_all(self: Any, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in dictionary.items():
            log(name, value, *args, **kwargs)

    silent: dict[str, Any] = {"log": log_one, "log_dict": log_all, "logger": None, "loggers": []}
    stand_in.__class__ = type(type(pl_module).__name__, (type(pl_module),), silent)
    return stand_in


def _shallow(module: nn.Module, shared: set[int]) -> nn.Module:
    """A copy of a module with containers and metrics of its own; all else below it is shared."""
    own = copy.copy(module)
    for name, value in list(own.__dict__.items()):
        if isinstance(value, (list, dict, set)):
            own.__dict__[name] = copy.copy(value)
    for name, child in own._modules.items():
        if child is not None:
            own._modules[name] = _with_own_metrics(child, shared)
    return own


def _with_own_metrics(module: nn.Module, shared: set[int]) -> nn.Module:
    """A module with its metrics copied and empty, while modules of the given ids stay what they are."""
    below = list(module.modules())
    if id(module) in shared or not any(isinstance(m, Metric) for m in below):
        return module
    if any(id(m) in shared for m in below):
        return _shallow(module, shared)
    own = copy.deepcopy(module)
    for metric in (m for m in own.modules() if isinstance(m, Metric)):
        metric.reset()
    return own
