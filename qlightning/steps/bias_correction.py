"""BiasCorrection: takes the mean error that rounding makes out of every channel of every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from qlightning.errors import ConfigError
from qlightning.graph.changes import LayerChange, StepReport
from qlightning.nn.qat import bn_factor
from qlightning.steps.base import Step
from qlightning.steps.replay import LayerCall, replay
from qlightning.steps.subject import Subject, full_name, layers_of


@dataclass(frozen=True)
class BiasCorrection(Step):
    """Shifts each channel of each layer by the mean error that rounding makes in it.

    It goes into the bias, which int8 kernels add in 32 bits, so that it costs nothing. From section 4.2 and appendices
    C and D of Nagel et al., "Data-Free Quantization through Weight Equalization and Bias Correction", 2019.

    Args:
        mode: ``"empirical"``: layer by layer, in the order of the net, the mean over all calibration images and
            positions of what the quantized net so far has behind the layer (behind its BatchNorm, and the sum that
            takes it in, so that a residual stream is put right after each block), less that of the float net. It sees
            what weights, activations and all layers before do.
            ``"analytic"``: the rounding error of the weights times the mean input that the BatchNorm before the layer
            stands for, a normal distribution with its weight and bias, clipped by the ReLU behind it. It needs a
            BatchNorm, and neither activations nor what padding leaves out count.

    Raises:
        ConfigError: ``mode`` is another one.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from qlightning import quantize_model, report
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
        >>> int8 = quantize_model(net, [torch.randn(4, 3, 8, 8)], backend="reference", steps=[BiasCorrection()])
        >>> [row.changed for row in report(int8).steps[0].layers]
        [True, True]
    """

    mode: Literal["empirical", "analytic"] = "empirical"

    def __post_init__(self) -> None:
        if self.mode not in ("empirical", "analytic"):
            raise ConfigError(f"BiasCorrection mode={self.mode!r}: 'empirical' or 'analytic' is possible.")

    def apply(self, subject: Subject) -> StepReport:
        rows: list[LayerChange] = []
        correct = _correct_empirically if self.mode == "empirical" else _correct_analytically
        with subject.progress("Correcting biases", layers_of(subject)) as bar:

            def visit(call: LayerCall) -> None:
                problem = call.problem or ("" if _has_place(call) else "it has neither a bias nor a BatchNorm to shift")
                rows.append(LayerChange(call.name, False, problem) if problem else correct(subject, call))
                bar.update()

            replay(subject, visit)
        measure = "mean error of a channel, which is taken out, in units of the layer's result, root mean square"
        return StepReport(repr(self), tuple(rows), measure)


def _correct_empirically(subject: Subject, call: LayerCall) -> LayerChange:
    error = _mean_error(call)
    _shift(subject, call, error)
    return LayerChange(call.name, True, f"{_place(call)} shifted", _rms(error))


def _correct_analytically(subject: Subject, call: LayerCall) -> LayerChange:
    layer, mean = call.layer, call.input_mean()
    if mean is None:
        return LayerChange(call.name, False, "no BatchNorm stands before it")
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        return LayerChange(call.name, False, "a transposed convolution is left alone")
    groups = int(getattr(layer, "groups", 1))
    path = full_name(call.path, "weight")
    weight = subject.originals.get(call.model, {}).get(path, layer.weight)
    rounding = (layer.fake_quantized_weight() - weight).flatten(2 if weight.dim() > 2 else 1)
    if weight.shape[1] * groups != mean.numel():
        return LayerChange(call.name, False, "the BatchNorm before it has other channels")
    per_input = rounding.sum(2) if weight.dim() > 2 else rounding
    given = mean.view(groups, -1).repeat_interleave(weight.shape[0] // groups, 0)  # what each output channel reads
    error = (per_input * given).sum(1)
    if call.bn is not None:
        error = error * bn_factor(call.bn)
    _shift(subject, call, error)
    return LayerChange(call.name, True, f"{_place(call)} shifted", _rms(error))


def _mean_error(call: LayerCall) -> Tensor:
    """What the quantized net has more than the float one before the activation, a mean a channel: float32 (out,)."""
    total: Any = 0.0
    count = 0
    for batch, (x, target) in enumerate(zip(call.inputs, call.sum_targets(), strict=True)):
        difference = (call.sum(call.layer(x), batch) - target).movedim(_channel_axis(call), 0).flatten(1)
        total = total + difference.double().sum(1)
        count += difference.shape[1]
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
