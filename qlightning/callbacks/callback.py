"""What both callbacks are: their settings, checked when they are built, and the modules that they work on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from qlightning.backends import Backend, resolve_backend
from qlightning.callbacks.artifacts import checked_paths, finite_metrics, write
from qlightning.callbacks.base import QuantizingCallback
from qlightning.callbacks.loggers import Outcome, log_outcome
from qlightning.callbacks.max_drop import Decision, MaxDrop, decide
from qlightning.callbacks.placement import int8_modules, place_int8
from qlightning.callbacks.preparation import (
    Preparation,
    adopt_targets,
    builds_nets_late,
    cancel_after_configure_model,
    prepare_targets,
)
from qlightning.callbacks.ranks import show_forward
from qlightning.callbacks.targets import find_targets, localize
from qlightning.errors import BackendError, ConfigError
from qlightning.fake_quantize import WeightFakeQuantize, fake_quantizers
from qlightning.graph.preparation import FloatChoice, ask_to_convert, is_prepared
from qlightning.graph.recording import Call
from qlightning.graph.report import Report, report
from qlightning.graph.selection import leave_in_float
from qlightning.graph.source import Source
from qlightning.qconfig import Mode, Pattern, QConfig
from qlightning.version import __version__

_PRECISIONS = ("32-true", "16-mixed", "bf16-mixed")


class QuantizationCallback(QuantizingCallback):
    """What :class:`QuantizationAwareTraining` and :class:`PostTrainingQuantization` share.

    Attributes:
        prepared: The prepared modules by name; the name is ``""`` where it is the LightningModule's own forward.
        int8_modules: The int8 modules by the same names, once there are any.
        saved: The files that the last fit has left.
        report: What runs in int8, what in float and why; None until something was prepared.
        decision: With ``max_drop``, what was left in float for it, and the sensitivity of the layers; else None.
    """

    mode: Mode

    def __init__(
        self,
        qconfig: QConfig | None,
        backend: str | Backend,
        modules: Iterable[str] | None,
        exclude: Iterable[Pattern],
        save: str | Path | Iterable[str | Path] = (),
        max_drop: float | MaxDrop | None = None,
    ) -> None:
        super().__init__()
        self.max_drop = MaxDrop.parse(max_drop)
        self.decision: Decision | None = None
        self.save = checked_paths(save)
        self.saved: list[Path] = []
        if qconfig is not None and not isinstance(qconfig, QConfig):
            raise ConfigError(f"qconfig={qconfig!r}: a qlightning.QConfig or None is needed.")
        self.qconfig = (qconfig or QConfig()).excluding(_patterns(exclude, "exclude"))
        self.backend = resolve_backend(backend)
        self.modules = None if modules is None else _patterns(modules, "modules")
        if self.modules is not None and (not self.modules or not all(isinstance(name, str) for name in self.modules)):
            raise ConfigError(f"modules={modules!r}: names of modules below the LightningModule are needed, or None.")
        self._int8_modules: dict[str, nn.Module] = {}
        self._converted: nn.Module | None = None
        self.report: Report | None = None
        self._preparation = Preparation()
        self._modes: dict[nn.Module, bool] = {}
        self._calls: dict[str, dict[str, list[Call]]] = {}
        self._figures: dict[str, dict[str, float]] = {}

    @property
    def prepared(self) -> dict[str, nn.Module]:
        """The prepared modules by name."""
        return dict(self._preparation.modules)

    @property
    def int8_modules(self) -> dict[str, nn.Module]:
        """The int8 modules by name: those that stand in the LightningModule, where a checkpoint was loaded since."""
        placed = {} if self._converted is None else int8_modules(self._converted)
        return {name: placed.get(name, module) for name, module in self._int8_modules.items()}

    @int8_modules.setter
    def int8_modules(self, modules: dict[str, nn.Module]) -> None:
        self._int8_modules = modules

    @property
    def int8_model(self) -> nn.Module | dict[str, nn.Module] | None:
        """The int8 model; a dict by name where several modules were quantized, None before the conversion."""
        if len(self.int8_modules) > 1:
            return dict(self.int8_modules)
        return next(iter(self.int8_modules.values()), None)

    @property
    def state_key(self) -> str:
        """One for each set of modules, so that several callbacks can work on the nets of one LightningModule."""
        return self._generate_state_key(modules=self.modules)

    def state_dict(self) -> dict[str, Any]:
        """Plain facts about the quantization, for the checkpoint."""
        return {
            "version": __version__,
            "mode": self.mode,
            "backend": self.backend.name,
            "modules": list(self.prepared),
            "exclude": [str(pattern) for pattern in self.qconfig.exclude],
            "activation": str(self.qconfig.activation),
            "weight": str(self.qconfig.weight),
        }

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Saves how the nets were prepared also where others (averages of weights) have put a plain dict there."""
        if self.prepared and not hasattr(checkpoint["state_dict"], "_metadata"):
            checkpoint["state_dict"] = OrderedDict(checkpoint["state_dict"])
            checkpoint["state_dict"]._metadata = pl_module.state_dict()._metadata

    def prepare_for_checkpoint(self, pl_module: nn.Module) -> None:
        self._prepare(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leaves nothing waiting on the LightningModule."""
        cancel_after_configure_model(pl_module)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Keeps for the report what was measured of the int8 nets."""
        is_own = self._converted is pl_module
        if is_own and int8_modules(pl_module):
            self._figures["int8"] = finite_metrics(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leaves int8 modules in eval mode.

        After an evaluation Lightning gives all modules the mode back that those of the same names had before it, which
        is that of the float ones where it has begun with these.
        """
        for module in int8_modules(pl_module).values():
            module.eval()

    def _prepare(self, pl_module: nn.Module) -> None:
        show_forward(pl_module)
        self._preparation = Preparation()
        self.int8_modules, self._figures, self._calls = {}, {}, {}
        self._preparation = prepare_targets(pl_module, self.qconfig, self.backend, self.modules, self.mode)
        self.report = self._report(self.prepared)

    def _adopt(self, pl_module: nn.Module) -> None:
        """Takes over nets that a checkpoint or the user has prepared.

        Raises:
            ConfigError: They are prepared in another way than this callback would; lists the differences.
        """
        self._preparation = adopt_targets(pl_module, self.qconfig, self.backend, self.modules, self.mode)
        self.int8_modules = {}
        self.report = self._report(self.prepared)

    def _hand_back(self) -> None:
        """Lets the state dict that goes to the process that started this one be converted there."""
        for module in self.prepared.values():
            ask_to_convert(module)
        rank_zero_info(
            "The training ran in processes of its own: the int8 model goes to the LightningModule of the process that "
            "started them, but int8_model and report of the callback stay behind. strategy='ddp' keeps them."
        )
        if self.save:
            rank_zero_warn(f"{', '.join(self.save)} was not written: qlightning.save() the int8 model there.")

    def _remember_modes(self, pl_module: nn.Module) -> None:
        """Notes the modes that modules have before an evaluation, in which Lightning puts all of them in eval mode."""
        self._modes = {module: module.training for module in pl_module.modules()}

    def _recall_modes(self, pl_module: nn.Module) -> None:
        """Gives prepared nets their modes back before int8 ones take their places: Lightning will not find them.

        Nets that were built since have the mode of new ones.
        """
        built = builds_nets_late(pl_module)
        for module in (m for net in self.prepared.values() for m in net.modules()):
            module.training = self._modes.get(module, built or module.training)
        self._modes = {}

    def _decide(self, trainer: Any, pl_module: nn.Module, before: float | None = None) -> None:
        """Leaves in float what ``max_drop`` needs; without it nothing that another fit has chosen."""
        for module in self.prepared.values():
            leave_in_float(module, FloatChoice())
        self.decision = None
        if self.max_drop is not None:
            self.decision = decide(trainer, pl_module, self.prepared, self.backend, self.max_drop, before)
            rank_zero_info(self.decision.choice.note)

    def _recall_decision(self) -> None:
        """Lets what the last fit has chosen count for checkpoints from before it has."""
        unknown = [
            name for name, m in self.prepared.items() if m.__dict__["_preparation"].float_choice == FloatChoice()
        ]
        parts = {} if self.decision is None else self.decision.parts
        for name in unknown:
            if name in parts:
                leave_in_float(self.prepared[name], parts[name])
        if self.max_drop is not None and unknown and not parts and len(unknown) == len(self.prepared):
            rank_zero_warn(
                "max_drop is decided at the end of a fit, and this checkpoint was saved before: all of its layers that "
                "can be are in int8. trainer.save_checkpoint() after fit saves what was decided."
            )

    def _convert(self, pl_module: nn.Module) -> None:
        show_forward(pl_module)
        self.int8_modules = place_int8(pl_module, self.prepared, self.backend)
        self._converted = pl_module
        self.report = self._report(self.int8_modules)

    def _save(self, trainer: Any, source: str = "") -> None:
        """Writes the files that are asked for, and hands them and the report to the loggers that take such."""
        files = write(trainer, self.int8_modules, self.save, source)
        self.saved = list(files)
        assert self.report is not None
        root = Path(trainer.default_root_dir)
        log_outcome(trainer, Outcome(self.int8_modules, self.report, files, root, trainer.global_step))

    def _undo(self, pl_module: nn.Module) -> None:
        self.int8_modules = self._preparation.undo(pl_module, self.backend)
        self._converted = pl_module
        self.report = self._report(self.int8_modules) if self.int8_modules else None

    def _report(self, modules: dict[str, nn.Module]) -> Report:
        """One report for all modules, with the names that layers have in the LightningModule."""
        reports = {name: report(module) for name, module in modules.items()}
        layers = [
            replace(layer, name=f"{name}.{layer.name}".strip("."))
            for name, part in reports.items()
            for layer in part.layers
        ]
        notes = [note for part in reports.values() for note in part.notes]
        # The same chain of steps went over all modules.
        chains = zip(*([step.below(name) for step in part.steps] for name, part in reports.items()), strict=True)
        steps = [replace(parts[0], layers=sum((step.layers for step in parts), ())) for parts in chains]
        first = next(iter(reports.values()))
        source = self._source(modules)
        return replace(first, layers=tuple(layers), notes=tuple(notes), steps=tuple(steps), source=source)

    def _source(self, modules: dict[str, nn.Module]) -> Source:
        """What the report looks into, when it is saved."""
        return Source(
            title=", ".join(dict.fromkeys(type(module).__name__ for module in modules.values())),
            int8={name: module for name, module in modules.items() if not is_prepared(module)},
            prepared=self.prepared,
            calls=self._calls,
            figures=self._figures,
        )

    def _has_run(self) -> bool:
        """Whether a batch has gone through a graph of ours."""
        return any(has_run(module) for module in self.prepared.values())

    def _unobserved(self) -> list[str]:
        """The places that no batch has reached, by the names that they have in the LightningModule."""
        return [
            f"{name}.{fq.name or below}".strip(".")
            for name, module in self.prepared.items()
            for below, fq in fake_quantizers(module)
            if not fq.observed
        ]

    def check(self, pl_module: nn.Module) -> None:
        """Checks that the settings suit a LightningModule whose nets are there; leaves it as it is.

        Raises:
            ConfigError: A name of ``modules``, ``exclude`` or the QConfig matches nothing, or nothing can be quantized.
        """
        localize(self.qconfig, pl_module, find_targets(pl_module, self.modules))

    def _check_alone(self, trainer: Any) -> None:
        """Checks that no other callback quantizes the same modules.

        Raises:
            ConfigError: One does.
        """
        for other in trainer.callbacks:
            if not isinstance(other, QuantizationCallback) or other is self:
                continue
            if self.modules is None or other.modules is None or set(self.modules) & set(other.modules):
                raise ConfigError(
                    f"Two callbacks quantize the same modules: {type(self).__name__} and {type(other).__name__}. Use "
                    "one, or give each its own with modules=[...]."
                )

    def _check_precision(self, trainer: Any) -> None:
        """Checks that parameters and activations are float32 but where autocast computes in less.

        Raises:
            ConfigError: They are not.
        """
        if str(trainer.precision) not in _PRECISIONS:
            raise ConfigError(
                f"precision={trainer.precision!r} cannot be quantized: scales and int8 kernels need float32 parameters."
                f" Possible are {', '.join(_PRECISIONS)}."
            )

    def _check_device(self, trainer: Any) -> None:
        """Checks that the int8 model can run where the Trainer puts it.

        Raises:
            BackendError: It cannot.
        """
        device = trainer.strategy.root_device
        if device.type != "cpu" and self.backend.name != "reference":
            raise BackendError(
                f"The int8 kernels of backend {self.backend.name!r} run on the CPU, this Trainer on {device}. Evaluate "
                "with Trainer(accelerator='cpu'), or choose backend='reference', which runs anywhere."
            )


def _patterns(patterns: Any, name: str) -> tuple[Any, ...]:
    patterns = (patterns,) if isinstance(patterns, (str, type)) else tuple(patterns or ())
    for pattern in patterns:
        if not isinstance(pattern, (str, type)):
            raise ConfigError(f"{name}: {pattern!r} is no name, glob or type of a module.")
    return patterns


def has_run(module: nn.Module) -> bool:
    """Whether a batch has gone through the graph of a module; weights are seen also where others call the layers."""
    return any(fq.observed and not isinstance(fq, WeightFakeQuantize) for _, fq in fake_quantizers(module))


def unobserved_message(pl_module: nn.Module, prepared: Iterable[str]) -> str:
    """Says that nothing was ever run, and what to do."""
    names = ", ".join(repr(name) for name in prepared if name)
    what = f"The prepared modules ({names})" if names else f"The prepared forward of {type(pl_module).__name__}"
    children = [name for name, child in pl_module.named_children() if any(True for _ in child.parameters())]
    return (
        f"{what} never ran, so no range was observed: the steps of {type(pl_module).__name__} call other modules. Name "
        f"those that they call with modules=[...]; it has {', '.join(repr(child) for child in children)}."
    )
