"""BiasCorrection: takes the mean error that rounding makes out of every channel of every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from qlightning.graph.changes import LayerChange, StepReport
from qlightning.nn.qat import QATLayer, bn_factor
from qlightning.steps.base import Step
from qlightning.steps.replay import LayerCall, replay
from qlightning.steps.subject import Subject, full_name


@dataclass(frozen=True)
class BiasCorrection(Step):
    """Shifts each channel of each layer by the mean error that the rounding of weights and inputs makes in it.

    Layer by layer, in the order of the net: over all calibration images and positions, the mean of what the float net
    has behind the layer (behind the BatchNorm that folds into it) less that of the quantized net so far, whose layers
    before are corrected already. It goes into the bias, which int8 kernels add in 32 bits, so that it costs nothing.
    From section 4.2 and appendix C of Nagel et al., "Data-Free Quantization through Weight Equalization and Bias
    Correction", 2019.

    Example:
        >>> from torch import nn
        >>> from qlightning import quantize_model, report
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
        >>> int8 = quantize_model(net, [torch.randn(4, 3, 8, 8)], backend="reference", steps=[BiasCorrection()])
        >>> [row.changed for row in report(int8).steps[0].layers]
        [True, True]
    """

    def apply(self, subject: Subject) -> StepReport:
        rows: list[LayerChange] = []
        with subject.progress("Correcting biases", _layers(subject)) as bar:

            def visit(call: LayerCall) -> None:
                rows.append(_correct(subject, call))
                bar.update()

            replay(subject, visit)
        measure = "mean error of a channel, root mean square over channels, in units of the layer's result"
        return StepReport(repr(self), tuple(rows), measure)


def _layers(subject: Subject) -> int:
    return sum(isinstance(m, QATLayer) for model in subject.models.values() for m in model.modules())


def _correct(subject: Subject, call: LayerCall) -> LayerChange:
    problem = call.problem or ("" if _has_place(call) else "it has neither a bias nor a BatchNorm to shift")
    if problem:
        return LayerChange(call.name, False, problem)
    error = _mean_error(call)
    _shift(subject, call, error)
    return LayerChange(call.name, True, _place(call), _rms(error), _rms(_mean_error(call)))


def _mean_error(call: LayerCall) -> Tensor:
    """What the quantized net has more than the float one behind a layer, a mean for each channel: float32 (out,)."""
    total: Any = 0.0
    count = 0
    for x, target in zip(call.inputs, call.plain_targets(), strict=True):
        y = call.layer(x)
        difference = (y if call.bn is None else call.bn(y)).float() - target.float()
        axis = difference.dim() + _channel_axis(call)
        per_channel = difference.movedim(axis, 0).flatten(1)
        total = total + per_channel.double().sum(1)
        count += per_channel.shape[1]
    mean: Tensor = (total / count).float()
    return mean


def _channel_axis(call: LayerCall) -> int:
    layer: Any = call.layer
    return -1 if isinstance(layer, nn.Linear) else -1 - len(layer.kernel_size)


def _has_place(call: LayerCall) -> bool:
    return call.bn is not None or call.layer.bias is not None


def _place(call: LayerCall) -> str:
    if call.bn is not None and call.bn.bias is None and call.layer.bias is None:
        return "mean of its BatchNorm"
    return "bias of its BatchNorm" if call.bn is not None and call.bn.bias is not None else "bias"


def _shift(subject: Subject, call: LayerCall, error: Tensor) -> None:
    """Takes an error off what stands behind a layer and its BatchNorm."""
    layer, bn = call.layer, call.bn
    if bn is not None and bn.bias is not None:
        subject.write(call.model, full_name(call.bn_path, "bias"), bn.bias - error)
    elif layer.bias is not None:
        factor = 1.0 if bn is None else bn_factor(bn)
        subject.write(call.model, full_name(call.path, "bias"), layer.bias - error / factor)
    else:
        assert bn is not None
        subject.write(call.model, full_name(call.bn_path, "running_mean"), bn.running_mean + error / bn_factor(bn))


def _rms(error: Tensor) -> float:
    return float(error.square().mean().sqrt())
