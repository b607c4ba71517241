"""Distillation: a frozen teacher's answers as a second loss of every training step, without a change to the step."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from qlightning.callbacks.schedule import Schedule
from qlightning.errors import ConfigError
from qlightning.graph import unprepare

DistillationLoss = Callable[[Any, Any], Tensor]
_LOSSES = ("kl", "mse")


@dataclass(frozen=True, eq=False)
class Distillation:
    """A loss on the difference between the answers of the nets and those of their teachers, added to the user's.

    Args:
        teacher: ``"float"``: the nets themselves, in float, as they stood when the training began. Or a module that
            takes what the net takes; where several nets are quantized, a dict of such by the names of these.
        weight: The loss is multiplied by it before it is added.
        temperature: Both answers are divided by it before the softmax, and the loss multiplied by its square (Hinton et
            al., Distilling the Knowledge in a Neural Network, 2015).
        loss: ``"kl"``: the Kullback-Leibler divergence from the teacher's class probabilities, over dimension 1 of an
            output (N, classes, ...), averaged over the rest. ``"mse"``: the mean squared difference, averaged over all
            float tensors of an output of any structure. Or a function of the net's output and the teacher's, to a
            scalar. None: ``"kl"`` for an output (N, classes), else ``"mse"``.

    Raises:
        ConfigError: A value cannot be used.

    Examples:
        >>> Distillation.of("float").temperature
        1.0
    """

    teacher: str | nn.Module | Mapping[str, nn.Module] = "float"
    weight: float = 1.0
    temperature: float = 1.0
    loss: str | DistillationLoss | None = None

    def __post_init__(self) -> None:
        given = dict(self.teacher) if isinstance(self.teacher, Mapping) else {"": self.teacher}
        if self.teacher != "float" and not (given and all(isinstance(m, nn.Module) for m in given.values())):
            raise ConfigError(
                f"Distillation teacher={self.teacher!r}: 'float', a module, or a dict of modules by the names of the "
                "nets is possible."
            )
        for name in ("weight", "temperature"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ConfigError(f"Distillation {name}={value!r}: a number above zero is needed.")
        if not (self.loss is None or self.loss in _LOSSES or callable(self.loss)):
            raise ConfigError(
                f"Distillation loss={self.loss!r}: 'kl', 'mse', a function of the output and the teacher's, or None is "
                "possible."
            )

    @classmethod
    def of(cls, value: Any) -> Distillation | None:
        """Reads what a callback was given: itself, a teacher, or None.

        Raises:
            ConfigError: It is none of these.
        """
        return value if value is None or isinstance(value, cls) else cls(value)

    def between(self, output: Any, answer: Any) -> Tensor:
        """The loss between the output of a net and the answer of its teacher, times ``weight``; 0-d.

        Raises:
            ConfigError: They do not match, or the loss does not suit them.
        """
        if callable(self.loss):
            return self.weight * self.loss(output, answer)
        is_logits = isinstance(output, Tensor) and output.ndim == 2
        if self.loss == "kl" or (self.loss is None and is_logits):
            return self.weight * _divergence(output, answer, self.temperature)
        return self.weight * _mean_square(output, answer)


class Distiller:
    """The teachers of the nets of a LightningModule, asked in every training step.

    They are no part of the LightningModule: nothing trains, quantizes or saves them.

    Args:
        settings: What is asked for.
    """

    def __init__(self, settings: Distillation) -> None:
        self.settings = settings
        self._teachers: dict[str, nn.Module] = {}
        self._digest = ""
        self._expected = ""
        self._pairs: list[tuple[nn.Module, nn.Module]] = []
        self._losses: list[Tensor] = []
        self._step: Any = None
        self._warned = False

    @property
    def digest(self) -> str:
        """What tells the float twins from others, for the checkpoint; empty for teachers that were given."""
        return self._digest

    def check_start(self, schedule: Schedule) -> None:
        """Checks that float twins as they stand when the training begins are fit to teach.

        Raises:
            ConfigError: A float phase comes first.
        """
        start = schedule.fake_quant_start
        if self.settings.teacher == "float" and start is not None and start.value > 0:
            raise ConfigError(
                f"distillation with teacher='float' and fake_quant_start at {start}: the nets as they stand when the "
                "training begins would teach, before their float phase. Fit twice, first without the callback, or give "
                "the teacher as a module."
            )

    def expect(self, digest: str) -> None:
        """Notes the digest that a checkpoint tells of."""
        self._expected = digest

    def find(self, pl_module: Any, prepared: Mapping[str, nn.Module], keep: bool) -> None:
        """Makes the float twins of prepared nets, or finds the teachers that were given.

        Args:
            pl_module: The LightningModule.
            prepared: The nets, by target name.
            keep: Whether twins that are there stay: these nets have been trained since.

        Raises:
            ConfigError: It optimizes by hand; the names of the teachers are not those of the nets; several nets and no
                word on the loss; a teacher is a net that it teaches, or trained along with it.
        """
        for teacher in self._given():
            _check_apart(teacher, prepared)
        if not pl_module.automatic_optimization:
            raise ConfigError(
                f"distillation with {type(pl_module).__name__}.automatic_optimization=False: the step calls backward "
                "itself, so that no loss can be added to it. Add one there, or leave optimization to Lightning."
            )
        if len(prepared) > 1 and self.settings.loss is None:
            raise ConfigError(
                f"distillation of several nets ({', '.join(prepared)}): say which loss suits the outputs of all of "
                "them, with Distillation(loss='mse') or a function."
            )
        if self.settings.teacher == "float":
            if not (keep and self._teachers.keys() == prepared.keys()):
                self._teachers = {name: unprepare(copy.deepcopy(module)) for name, module in prepared.items()}
                self._digest = _digest(self._teachers)
            return
        given: Any = self.settings.teacher
        self._teachers = dict(given) if isinstance(given, Mapping) else dict.fromkeys(prepared, given)
        if self._teachers.keys() != prepared.keys() or (len(prepared) > 1 and not isinstance(given, Mapping)):
            raise ConfigError(
                f"distillation: teachers for {', '.join(map(repr, self._teachers))}, but the nets are "
                f"{', '.join(map(repr, prepared))}. Give a dict with a teacher for each name."
            )

    def _given(self) -> list[nn.Module]:
        """The teachers that the user has given."""
        given = self.settings.teacher
        if isinstance(given, nn.Module):
            return [given]
        return list(given.values()) if isinstance(given, Mapping) else []

    def start(self, trainer: Any, pl_module: Any, prepared: Mapping[str, nn.Module]) -> None:
        """Adds the loss to every training step from now on.

        Raises:
            ConfigError: The checkpoint that this goes on from had another float twin.
        """
        expected, self._expected = self._expected, ""
        if expected and self._digest and expected != self._digest:
            raise ConfigError(
                "distillation with teacher='float': the nets of this LightningModule are not those that the training "
                "of the checkpoint began with, which were its teachers and are not saved in it. Load the same float "
                "weights into it before fit, or give the teacher as a module."
            )
        self.stop(pl_module)
        for teacher in self._teachers.values():
            teacher.to(pl_module.device)
        self._pairs = [(module, self._teachers[name]) for name, module in prepared.items()]
        original = pl_module.training_step
        self._step = pl_module.__dict__.get("training_step")

        @functools.wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            with self._asking():
                output = original(*args, **kwargs)
            losses, self._losses = self._losses, []
            if not losses and output is not None and not self._warned:
                self._warned = True
                rank_zero_warn(
                    f"distillation: a training step of {type(pl_module).__name__} called none of the nets with "
                    "gradients, so that nothing is added to its loss. With gradient checkpointing around a whole net "
                    "use_reentrant=False is needed."
                )
            is_dict = isinstance(output, Mapping)
            # None: Lightning skips the step. A dict without a loss: it says what is wrong.
            if output is None or not losses or (is_dict and "loss" not in output):
                return output
            loss = torch.stack(losses).mean()
            if not trainer.barebones:
                pl_module.log("qat/distillation", loss.detach(), on_step=True, on_epoch=False, batch_size=1)
            if is_dict:
                return {**output, "loss": output["loss"] + loss}
            return output + loss

        training_step.distills = True  # type: ignore[attr-defined]
        pl_module.__dict__["training_step"] = training_step

    def stop(self, pl_module: Any) -> None:
        """Leaves the training step as it was."""
        if hasattr(pl_module.__dict__.get("training_step"), "distills"):
            del pl_module.__dict__["training_step"]
            if self._step is not None:
                pl_module.__dict__["training_step"] = self._step
        self._pairs, self._losses = [], []

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Within it each call of a net in training mode is one of its teacher, too.

        Hooks of a net would be in the way at other times: what has hooks is not converted (int8 validation).
        """
        self._losses = []
        hooks = [
            module.register_forward_hook(functools.partial(self._compare, teacher), with_kwargs=True)
            for module, teacher in self._pairs
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _compare(self, teacher: nn.Module, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if teacher.training:
            teacher.eval()
        with torch.no_grad():
            answer = teacher(*args, **kwargs)
        # Gradient checkpointing around the net must not expect these tensors of a forward that it repeats without us.
        with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
            self._losses.append(self.settings.between(output, answer))


def _check_apart(teacher: nn.Module, prepared: Mapping[str, nn.Module]) -> None:
    """Raises a ConfigError for a teacher that is quantized, or that has parameters of a net and is trained with it."""
    own = {id(parameter) for parameter in teacher.parameters()}
    for name, module in prepared.items():
        net = repr(name) if name else "the LightningModule"
        if module is teacher:
            others = [other for other in prepared if other != name]
            leave = f" Where others are to be quantized and not it, name them: modules={others!r}." if others else ""
            raise ConfigError(
                f"distillation: the teacher is {net}, which is quantized itself. As it stands when the training begins "
                f"it teaches with teacher='float'; otherwise give a copy.deepcopy() of it.{leave}"
            )
        if any(parameter.requires_grad and id(parameter) in own for parameter in module.parameters()):
            raise ConfigError(
                f"distillation: the teacher shares parameters with {net} that are trained, so that it would not stand "
                "still. Give a copy.deepcopy() of it, or set requires_grad_(False) on it where it is frozen."
            )


def _divergence(output: Any, answer: Any, temperature: float) -> Tensor:
    if not (isinstance(output, Tensor) and isinstance(answer, Tensor) and output.ndim >= 2):
        raise ConfigError(
            f"Distillation loss='kl' needs logits (N, classes, ...), not {_shown(output)}. Use loss='mse', or a "
            "function of the output and the teacher's."
        )
    _check_shapes(output, answer)
    student = (output.float() / temperature).log_softmax(1)
    teacher = (answer.float() / temperature).log_softmax(1)
    return F.kl_div(student, teacher, reduction="none", log_target=True).sum(1).mean() * temperature**2


def _mean_square(output: Any, answer: Any) -> Tensor:
    outputs, answers = list(_float_tensors(output)), list(_float_tensors(answer))
    if not outputs or len(outputs) != len(answers):
        raise ConfigError(
            f"Distillation: {len(outputs)} float tensors in the output of the net, {len(answers)} in that of the "
            "teacher. Give a function of both as loss."
        )
    for mine, other in zip(outputs, answers, strict=True):
        _check_shapes(mine, other)
    return torch.stack([F.mse_loss(a.float(), b.float()) for a, b in zip(outputs, answers, strict=True)]).mean()


def _check_shapes(output: Tensor, answer: Tensor) -> None:
    if output.shape != answer.shape:
        raise ConfigError(
            f"Distillation: the net gives {tuple(output.shape)}, its teacher {tuple(answer.shape)}. Give a function of "
            "both as loss."
        )


def _float_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _float_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _float_tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _float_tensors(getattr(value, field.name))


def _shown(output: Any) -> str:
    return f"a tensor {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"


def _digest(modules: Mapping[str, nn.Module]) -> str:
    """SHA-256 of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, module in modules.items():
        for key, tensor in module.state_dict().items():
            digest.update(f"{name}.{key}".encode())
            digest.update(
                tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
                if tensor.ndim
                else repr(tensor.item()).encode()
            )
    return digest.hexdigest()
