"""What the benchmark of training steps times: the float net, ours, and the peers, each from the same float net."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qlightning import prepare
from qlightning.fake_quantize import set_observers

PHASES = ("observers on", "observers frozen", "all frozen")


@dataclass(frozen=True)
class Trainee:
    """One way to train a net.

    Attributes:
        name: What the tables call it.
        kind: "float", "ours" or "peer".
        build: From a float net in training mode, which may be changed, and images to what trains.
        freeze: Brings it from the first phase into another; None where it has one phase only.
        phases: Those that it has.
    """

    name: str
    kind: str
    build: Callable[[nn.Module, Tensor], nn.Module]
    freeze: Callable[[nn.Module, str], None] | None = None
    phases: tuple[str, ...] = PHASES


def trainees() -> list[Trainee]:
    """All of them; those whose package is not there fail to build."""
    return [
        Trainee("float", "float", lambda net, x: net, lambda net, phase: _freeze_bn(net, phase)),
        Trainee("qlightning", "ours", lambda net, x: prepare(net), _freeze_ours),
        Trainee("torch.ao FX", "peer", _fx, _freeze_fx),
        Trainee("torchao PT2E", "peer", _pt2e, _freeze_pt2e, PHASES[:2]),
        Trainee("NNCF", "peer", _nncf, None, PHASES[:1]),
        Trainee("Brevitas", "peer", _brevitas, None, PHASES[:1]),
    ]


def _freeze_bn(net: nn.Module, phase: str) -> None:
    if phase == "all frozen":
        for module in net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()


def _freeze_ours(net: nn.Module, phase: str) -> None:
    set_observers(net, False)
    _freeze_bn(net, phase)


def _fx(net: nn.Module, x: Tensor) -> nn.Module:
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    prepared: nn.Module = prepare_qat_fx(net, get_default_qat_qconfig_mapping("x86"), (x,))
    return prepared


def _freeze_fx(net: nn.Module, phase: str) -> None:
    from torch.ao.nn.intrinsic.qat import freeze_bn_stats
    from torch.ao.quantization import disable_observer

    net.apply(disable_observer)
    if phase == "all frozen":
        net.apply(freeze_bn_stats)


def _pt2e(net: nn.Module, x: Tensor) -> nn.Module:
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    exported = torch.export.export(net, (x,), strict=True).module()  # not strict, prepare fails on ResNets
    config = x86.get_default_x86_inductor_quantization_config(is_qat=True)
    prepared: nn.Module = prepare_qat_pt2e(exported, x86.X86InductorQuantizer().set_global(config))
    return prepared


def _freeze_pt2e(net: nn.Module, phase: str) -> None:
    from torchao.quantization.pt2e import disable_observer

    net.apply(disable_observer)


def _nncf(net: nn.Module, x: Tensor) -> nn.Module:
    import nncf

    quantized: nn.Module = nncf.quantize(net.eval(), nncf.Dataset([x]), subset_size=1)
    return quantized.train()


def _brevitas(net: nn.Module, x: Tensor) -> nn.Module:
    from brevitas.graph.quantize import preprocess_for_quantize, quantize

    quantized: nn.Module = quantize(preprocess_for_quantize(net.eval()))
    return quantized.train()


def frozen(trainee: Trainee, net: nn.Module, x: Tensor, phase: str) -> nn.Module:
    """Brings what a trainee has built into a phase; it sees a batch before anything is frozen."""
    with torch.no_grad():
        net(x)
    if phase != PHASES[0] and trainee.freeze is not None:
        trainee.freeze(net, phase)
    return net


def parameters(net: Any) -> list[nn.Parameter]:
    """What an optimizer trains."""
    return [parameter for parameter in net.parameters() if parameter.requires_grad]
