"""ReestimateBatchNorm: the statistics of BatchNorms anew, as the quantized net has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from qlightning.graph.changes import LayerChange, StepReport
from qlightning.steps.base import Step
from qlightning.steps.subject import Subject, full_name


@dataclass(frozen=True)
class ReestimateBatchNorm(Step):
    """Takes the statistics of every BatchNorm anew, over the calibration batches that the quantized net is given.

    Each gets the plain average over the batches of their means and variances, with weights and ranges as they are.
    That takes out what rounding has shifted and scaled, but also puts the statistics of the calibration images in the
    place of those of the whole training. It is for images that went through the augmentation of the training, in
    batches that are not small: on others it cost 1.0 to 3.5 points of accuracy (docs/ptq.md). BiasCorrection has no
    such risk.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from qlightning import quantize_model, report
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
        >>> images = [torch.randn(16, 3, 8, 8)]
        >>> int8 = quantize_model(net, images, backend="reference", steps=[ReestimateBatchNorm()])
        >>> [row.layer for row in report(int8).steps[0].layers]
        ['1']
    """

    def apply(self, subject: Subject) -> StepReport:
        norms = {
            (model, path): bn
            for model, net in subject.models.items()
            for path, bn in net.named_modules()
            if isinstance(bn, _BatchNorm) and has_statistics(bn)
        }
        names = ("running_mean", "running_var", "num_batches_tracked")
        before = {key: [getattr(bn, name).clone() for name in names] for key, bn in norms.items()}
        subject.run(averaging(norms.values()))
        rows = []
        for (model, path), bn in norms.items():
            mean, var, ran = (getattr(bn, name).clone() for name in names)
            for name, value in zip(names, before[model, path], strict=True):
                getattr(bn, name).copy_(value)
            if not ran:
                rows.append(LayerChange(full_name(model, path), False, "no batch has passed it"))
                continue
            old_mean, old_var, _ = before[model, path]
            moved = (mean - old_mean).abs() / (old_var + bn.eps).sqrt()
            subject.write(model, full_name(path, "running_mean"), mean)
            subject.write(model, full_name(path, "running_var"), var)
            what = f"means moved by {float(moved.mean()):.3g} standard deviations on average"
            rows.append(LayerChange(full_name(model, path), True, what))
        return StepReport(repr(self), tuple(rows))


def has_statistics(bn: _BatchNorm) -> bool:
    """Whether a BatchNorm keeps running statistics."""
    return bn.track_running_stats and bn.running_mean is not None


@contextmanager
def averaging(norms: Iterable[_BatchNorm]) -> Iterator[None]:
    """Lets BatchNorms take their statistics anew, as the plain average over the batches that pass them."""
    norms = list(dict.fromkeys(norms))
    before: list[Any] = [bn.momentum for bn in norms]
    for bn in norms:
        bn.reset_running_stats()
        bn.momentum = None  # torch's way to ask for a cumulative average
        bn.training = True
    try:
        yield
    finally:
        for bn, momentum in zip(norms, before, strict=True):
            bn.momentum = momentum
