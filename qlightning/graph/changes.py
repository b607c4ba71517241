"""What steps of post-training quantization have changed in a prepared model: to read about, and to undo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from qlightning.table import aligned


@dataclass(frozen=True)
class LayerChange:
    """What a step did to one layer, or why it left it alone.

    Attributes:
        layer: The layer's name in the model.
        changed: Whether anything of it was changed.
        what: In words: what was changed, or why nothing was.
        before: The step's measure before it, in the unit that :attr:`StepReport.measure` names; None: not measured.
        after: Likewise, after it.
    """

    layer: str
    changed: bool
    what: str
    before: float | None = None
    after: float | None = None


@dataclass(frozen=True)
class StepReport:
    """What one step did.

    Attributes:
        name: The step, with its settings.
        layers: A row for every layer that it looked at, in the order of the graph.
        measure: What ``before`` and ``after`` of the rows count; empty where nothing was measured.
    """

    name: str
    layers: tuple[LayerChange, ...]
    measure: str = ""

    @property
    def changed(self) -> tuple[LayerChange, ...]:
        """The layers that it changed."""
        return tuple(row for row in self.layers if row.changed)

    def below(self, name: str) -> StepReport:
        """The same with the names that the layers have above a module of this name."""
        return replace(self, layers=tuple(replace(row, layer=f"{name}.{row.layer}".strip(".")) for row in self.layers))

    def of(self, name: str) -> StepReport:
        """What it did to the layers below a module of this name, with the names that they have there."""
        prefix = f"{name}." if name else ""
        rows = [row for row in self.layers if row.layer.startswith(prefix)]
        return replace(self, layers=tuple(replace(row, layer=row.layer.removeprefix(prefix)) for row in rows))

    def __str__(self) -> str:
        title = f"{self.name}: {len(self.changed)} of {len(self.layers)} layers changed."
        if not self.layers:
            return title
        rows = [
            (
                row.layer or "(model)",
                _number(row.before),
                _number(row.after),
                row.what if row.changed else f"({row.what})",
            )
            for row in self.layers
        ]
        what = f"what changed{f'; before and after: {self.measure}' if self.measure else ''}"
        return f"{title}\n{aligned(('layer', 'before', 'after', what), rows)}"


@dataclass(frozen=True)
class Change:
    """A parameter or buffer that a step has set.

    Attributes:
        before: What it was when the model was prepared.
        after: What it was set to.
    """

    before: Tensor
    after: Tensor


@torch.no_grad()
def undo(model: nn.Module, changes: Mapping[str, Change]) -> None:
    """Gives tensors that steps have set their values back; what has been set to another value since stays.

    Args:
        model: Changed in place.
        changes: By the name of the tensor below the model.
    """
    for path, change in changes.items():
        tensor = tensor_at(model, path)
        if tensor.shape == change.after.shape and torch.equal(tensor.cpu(), change.after.cpu()):
            tensor.copy_(change.before)


@contextmanager
def originals(model: nn.Module, changes: Mapping[str, Change]) -> Iterator[None]:
    """Within it the tensors that steps have set have the values that they had before; as in :func:`undo`."""
    with with_values(model, {path: change.before for path, change in changes.items()}):
        yield


@contextmanager
def with_values(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Within it tensors of a model, by their names below it, have other values, and theirs again afterwards."""
    swapped: list[tuple[Tensor, Tensor]] = []
    try:
        for path, value in values.items():
            tensor = tensor_at(model, path)
            swapped.append((tensor, tensor.detach().clone()))
            _copy(tensor, value)
        yield
    finally:
        for tensor, before in swapped:
            _copy(tensor, before)


def tensor_at(model: nn.Module, path: str) -> Tensor:
    """The parameter or buffer of a name below a model."""
    owner, _, name = path.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(owner), name)
    return tensor


@torch.no_grad()
def _copy(tensor: Tensor, value: Tensor) -> None:
    tensor.copy_(value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
