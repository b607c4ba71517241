"""The layers of a prepared model: each computes with its weight on the grid, and keeps its parameters by name."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize, prune

from qlightning.errors import ConfigError
from qlightning.fake_quantize import WeightFakeQuantize
from qlightning.learned import LearnedWeightFakeQuantize
from qlightning.qconfig import QConfig
from qlightning.qscheme import QScheme


class QATLayer(nn.Module):
    """What all of these layers share: a float layer becomes one in place, and comes back.

    Attributes:
        weight_fake_quant: The fake-quantizer of the weight.
        following_bn: The BatchNorm that scales the layer's channels, where the weight's grid has to know; else None.
    """

    weight: Tensor
    bias: Any
    weight_fake_quant: WeightFakeQuantize
    following_bn: _BatchNorm | None

    def fake_quantized_weight(self) -> Tensor:
        """The weight on its grid, in the layer's layout and dtype; gradients pass straight through."""
        return self.weight_fake_quant(self.weight, self.multiplier())

    def observe_weight(self) -> None:
        """Takes the grid from the weight as it is now, whether its observer is frozen or not."""
        self.weight_fake_quant.observe(self.weight, self.multiplier())

    def multiplier(self) -> Tensor | None:
        """What the weight is multiplied by on its grid, float32 (out,); None for nothing."""
        return None if self.following_bn is None else bn_factor(self.following_bn)


class _Conv(QATLayer):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        return self._conv_forward(input, self.fake_quantized_weight(), self.bias)  # type: ignore[operator]


class Conv1d(_Conv, nn.Conv1d):
    """nn.Conv1d with its weight on the grid."""


class Conv2d(_Conv, nn.Conv2d):
    """nn.Conv2d with its weight on the grid."""


class Conv3d(_Conv, nn.Conv3d):
    """nn.Conv3d with its weight on the grid."""


class Linear(QATLayer, nn.Linear):
    """nn.Linear with its weight on the grid."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        return F.linear(input, self.fake_quantized_weight(), self.bias)


class _ConvTranspose(QATLayer):
    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:  # noqa: A002  torch's name
        dims = len(self.kernel_size)  # type: ignore[arg-type]
        output_padding = self._output_padding(  # type: ignore[operator]
            input, output_size, self.stride, self.padding, self.kernel_size, dims, self.dilation
        )
        conv = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
        weight = self.fake_quantized_weight()
        return conv(input, weight, self.bias, self.stride, self.padding, output_padding, self.groups, self.dilation)  # type: ignore[arg-type]


class ConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    """nn.ConvTranspose1d with its weight on the grid."""


class ConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    """nn.ConvTranspose2d with its weight on the grid."""


class ConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    """nn.ConvTranspose3d with its weight on the grid."""


TWINS: dict[type[nn.Module], type[QATLayer]] = {
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
    nn.Conv3d: Conv3d,
    nn.ConvTranspose1d: ConvTranspose1d,
    nn.ConvTranspose2d: ConvTranspose2d,
    nn.ConvTranspose3d: ConvTranspose3d,
    nn.Linear: Linear,
}


def layer_type(module: nn.Module) -> type[nn.Module] | None:
    """The torch layer that a module computes as, if it is one that can be quantized.

    A subclass counts while it keeps the forward of its torch layer.
    """
    if "forward" in vars(module):
        return None
    for cls in type(module).__mro__:
        if cls in TWINS:
            same = isinstance(module, QATLayer) or (
                type(module).forward is cls.forward
                and getattr(type(module), "_conv_forward", None) is getattr(cls, "_conv_forward", None)
            )
            return cls if same else None
    return None


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a call of a module runs hooks, other than those that apply a pruning mask to its weight."""
    before = [hook for hook in module._forward_pre_hooks.values() if not isinstance(hook, prune.BasePruningMethod)]
    return bool(module._forward_hooks or before)


def check_layer(name: str, module: nn.Module) -> None:
    """Raises a ConfigError for a weight that is computed (parametrized, weight norm), not there yet, or no float32."""
    advice = f"or keep it float with exclude=({name!r},)."
    if parametrize.is_parametrized(module, "weight"):
        raise ConfigError(
            f"{name}: its weight is parametrized; call torch.nn.utils.parametrize.remove_parametrizations({name}, "
            f"'weight') first, {advice}"
        )
    if "weight" not in module._parameters:
        pruned = any(isinstance(hook, prune.BasePruningMethod) for hook in module._forward_pre_hooks.values())
        if not pruned:
            raise ConfigError(
                f"{name}: its weight is computed by a hook (weight norm, spectral norm); remove it first, {advice}"
            )
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        raise ConfigError(f"{name}: a lazy layer without shapes; run one batch through the model first, {advice}")
    check_dtype(name, module.weight)  # type: ignore[arg-type]


def check_dtype(name: str, weight: Tensor) -> None:
    """Raises a ConfigError for a weight of another precision than the one that int8 is simulated in."""
    if weight.dtype != torch.float32:
        raise ConfigError(
            f"{name}: its weight is {weight.dtype}, and only float32 can be quantized; call model.float() first, or "
            f"keep it as it is with exclude=({name!r},). (Mixed precision leaves the weights float32.)"
        )


def build_weight_fake_quant(
    weight: Tensor, name: str, qconfig: QConfig, transposed_groups: int | None = None
) -> WeightFakeQuantize:
    """Builds the fake-quantizer of a weight, on its device and with a scale for every output channel from the start.

    Args:
        weight: The weight, in its layer's layout.
        name: For messages.
        qconfig: Its scheme and observer.
        transposed_groups: As for WeightFakeQuantize.
    """
    scheme, observer, learned = qconfig.weight, qconfig.build_weight_observer(), qconfig.learned_scales
    if learned is not None and learned.weights:
        fq: WeightFakeQuantize = LearnedWeightFakeQuantize(scheme, observer, name, transposed_groups, learned)
    else:
        fq = WeightFakeQuantize(scheme, observer, name, transposed_groups)
    if qconfig.weight.axis is not None:
        # Others keep copies of these buffers (averages of the weights, DDP), which a change of shape would break.
        fq.allocate(fq.to_output_first(weight).shape[qconfig.weight.axis])
    return fq.to(weight.device)


def swap_in(layer: nn.Module, name: str, qconfig: QConfig, following_bn: _BatchNorm | None) -> None:
    """Turns a float layer into its QAT twin, in place."""
    base = layer_type(layer)
    assert base is not None
    groups = layer.groups if isinstance(layer, nn.modules.conv._ConvTransposeNd) else None
    fq = build_weight_fake_quant(layer.weight, f"{name} (weight)", qconfig, groups)  # type: ignore[arg-type]
    twin = TWINS[base]
    original = type(layer)
    layer.__class__ = twin if original is base else type(original.__name__, (twin, original), {})
    # Not a submodule of the layer: it keeps its own place in the model.
    layer.__dict__["following_bn"] = None if grid_scales_with_channel(qconfig.weight) else following_bn
    layer.__dict__["_float_class"] = original
    layer.weight_fake_quant = fq.train(layer.training)


def swap_out(layer: nn.Module) -> None:
    """Turns a QAT twin back into the float layer it was, in place."""
    layer.__class__ = layer.__dict__.pop("_float_class")
    layer.__dict__.pop("following_bn")
    del layer.weight_fake_quant


def grid_scales_with_channel(scheme: QScheme) -> bool:
    """Whether scaling a channel by any factor, negative ones included, scales its grid along exactly."""
    return scheme.per_channel and scheme.signed and scheme.symmetric and scheme.narrow_range


@torch.no_grad()
def bn_factor(bn: Any) -> Tensor:
    """Gamma / sqrt(running_var + eps), float32 (channels,); 1 where it is 0, as no grid can be had from zero."""
    factor = torch.rsqrt(bn.running_var.float() + bn.eps)
    if bn.weight is not None:
        factor = factor * bn.weight.float()
    return torch.where(factor == 0, torch.ones_like(factor), factor)
