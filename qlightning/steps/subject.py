"""Subject: the prepared nets that a step works on, with the calibration batches, and what is set in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from qlightning.fake_quantize import FakeQuantize, fake_quantizers
from qlightning.graph.changes import Change, StepReport, tensor_at, with_values
from qlightning.graph.preparation import Preparation, PreparedModule
from qlightning.nn.qat import QATLayer

Run = Callable[[AbstractContextManager[None]], Any]


@dataclass(frozen=True)
class Subject:
    """Prepared nets, which steps change in place.

    Attributes:
        models: By the name that stands before those of their layers; "" for a model that is all there is.
        run: Passes every calibration batch, the same ones in the same order at each call, through the nets, within the
            context that it is given, in eval mode.
        bar: Whether steps show a progress bar; None: where there is a terminal.
        originals: What the tensors that were written to since the calibration are in the float nets, by the name of the
            model and their own below it.
    """

    models: Mapping[str, nn.Module]
    run: Run
    bar: bool | None = None
    originals: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def preparation(self, model: str) -> Preparation:
        """How one of the models was prepared."""
        preparation: Preparation = self.models[model].__dict__["_preparation"]
        return preparation

    def roots(self) -> Iterator[tuple[str, str, nn.Module]]:
        """The modules whose forward runs graphs: the name of their model, their own name below it, the module."""
        for name, model in self.models.items():
            for path, module in model.named_modules():
                if isinstance(module, PreparedModule):
                    yield name, path, module  # type: ignore[misc]

    @torch.no_grad()
    def write(self, model: str, path: str, value: Tensor) -> None:
        """Sets a parameter or buffer, in place, and notes what it was before the first step that set it."""
        tensor, preparation = tensor_at(self.models[model], path), self.preparation(model)
        now = tensor.detach().clone()
        known = preparation.changes.get(path)
        before = now if known is None else known.before
        self.originals.setdefault(model, {}).setdefault(path, now)
        tensor.copy_(value)
        changes = {**preparation.changes, path: Change(before, tensor.detach().clone())}
        self.models[model].__dict__["_preparation"] = replace(preparation, changes=changes)

    def note(self, step: StepReport) -> None:
        """Keeps the report of a step with each of the models, with the rows of its layers."""
        for name, model in self.models.items():
            preparation = self.preparation(name)
            model.__dict__["_preparation"] = replace(preparation, steps=(*preparation.steps, step.of(name)))

    def shared(self) -> set[int]:
        """The ids of parameters that several modules hold: what suits one of these would change the others."""
        modules = {id(module): module for model in self.models.values() for module in model.modules()}
        held = Counter(id(p) for module in modules.values() for p in module._parameters.values() if p is not None)
        return {key for key, count in held.items() if count > 1}

    def progress(self, label: str, total: int) -> Any:
        """A progress bar of so many layers; its ``update()`` counts one."""
        return tqdm(total=total, desc=label, unit="layer", disable=None if self.bar is None else not self.bar)

    @contextmanager
    def in_float(self) -> Iterator[None]:
        """Makes the nets float, as they were when they were calibrated, for as long as the context lasts."""
        fqs = [fq for model in self.models.values() for _, fq in fake_quantizers(model)]
        with unrounded(*fqs), ExitStack() as stack:
            for name, originals in self.originals.items():
                stack.enter_context(with_values(self.models[name], originals))
            yield


@contextmanager
def unrounded(*fqs: FakeQuantize) -> Iterator[None]:
    """Lets fake-quantizers pass on what they are given, for as long as the context lasts."""
    rounding = [fq for fq in fqs if fq.fake_quant_enabled]
    for fq in rounding:
        fq.fake_quant_enabled = False
    try:
        yield
    finally:
        for fq in rounding:
            fq.fake_quant_enabled = True


def layers_of(subject: Subject) -> int:
    """How many layers there are to go over."""
    return sum(isinstance(m, QATLayer) for model in subject.models.values() for m in model.modules())


def full_name(*parts: str) -> str:
    """The name of what stands below modules, by the names of these and its own."""
    return ".".join(part for part in parts if part)
