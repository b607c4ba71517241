"""Backend: one kernel family as a value: which schemes it takes, what it wants of the CPU, how it lowers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import fx, nn

from qlightning.errors import BackendError
from qlightning.qconfig import QConfig
from qlightning.qscheme import QScheme

Lower = Callable[[fx.Graph, nn.Module], fx.Graph]
RoundsLayer = Callable[[bool, str], bool]


def _rounds_once(in_sum: bool, activation: str) -> bool:
    """A block rounds at its end, and nowhere else."""
    return False


@dataclass(frozen=True)
class Backend:
    """A kernel family that int8 models run on.

    Args:
        name: What users call it.
        lower: Turns a QDQ graph and the module it belongs to into a graph of kernels.
        unavailable: Why this machine cannot run it; empty where it can.
        reduced: The operand that gets one bit less, where the kernels of this CPU add products of full 8-bit operands
            up in 16 bits and would saturate; None where they cannot.
        reason: Why they saturate, where it is not this CPU.
        accepts: Says what is wrong with a pair of schemes (activation, weight); empty where it takes them.
        centres_signed: Whether its kernels are faster on values of both signs where the zero point is in the middle.
        rounds_layer: Whether a layer is to be rounded before what follows it in its block: told whether a sum takes it
            in, and the name of the activation behind ("" for none). For kernels that would not be int8 otherwise.
        chosen: Why ``auto`` has chosen it; empty where it was asked for by name. Backends are equal whatever it says.
    """

    name: str
    lower: Lower
    unavailable: str = ""
    reduced: Literal["activation", "weight"] | None = None
    reason: str = ""
    accepts: Callable[[QScheme, QScheme], str] = lambda activation, weight: ""
    centres_signed: bool = False
    rounds_layer: RoundsLayer = _rounds_once
    chosen: str = field(default="", compare=False)

    def centred(self, activation: QScheme) -> QScheme:
        """The scheme of activations of both signs; affine ones of 8 bits become symmetric where that is faster."""
        wide = (activation.bits, activation.axis) == (8, None)
        return replace(activation, symmetric=True) if self.centres_signed and wide else activation

    def adapt(self, qconfig: QConfig) -> QConfig:
        """Returns the settings with the ranges that the kernels need.

        Raises:
            BackendError: The kernels do not take the schemes.
        """
        problem = self.accepts(qconfig.activation, qconfig.weight)
        if problem:
            raise BackendError(
                f"backend {self.name!r}: {problem} Change the scheme, or use backend='reference', which takes all."
            )
        if self.reduced is not None:
            scheme = getattr(qconfig, self.reduced)
            if scheme.bits == 8:
                qconfig = replace(qconfig, **{self.reduced: scheme.reduced()})
        overrides = {pattern: c if c is None else self.adapt(c) for pattern, c in qconfig.overrides.items()}
        return replace(qconfig, overrides=overrides)

    def saturates(self, activation: QScheme, weight: QScheme) -> bool:
        """Whether sums of these operands can exceed what the kernels add up in."""
        return self.reduced is not None and activation.bits == 8 and weight.bits == 8

    def explain_ranges(self) -> str:
        """Says why an operand has one bit less; empty where none has."""
        if self.reduced is None:
            return ""
        cpu = f"This CPU ({cpu_features()}) has neither VNNI nor AMX and adds pairs of products up in 16 bits"
        return f"{self.reason or cpu}: the {self.reduced}s have 7 bits, as full ranges would saturate."

    def explain_choice(self) -> str:
        """Says that ``auto`` has chosen this backend, and why; empty where it was asked for by name."""
        return f"backend {self.name}, chosen by auto: {self.chosen}" if self.chosen else ""

    def __str__(self) -> str:
        return self.name


def accepts_symmetric_weights(activation: QScheme, weight: QScheme) -> str:
    """What is wrong with schemes for kernels of unsigned activations and symmetric weights; empty if nothing is."""
    if activation.signed or activation.per_channel:
        return f"its activations are unsigned and per tensor, not {activation}."
    return accepts_int8(activation, weight)


def accepts_int8(activation: QScheme, weight: QScheme) -> str:
    """Likewise for kernels that take signed activations, too."""
    if activation.per_channel:
        return f"its activations are per tensor, not {activation}."
    if not (weight.signed and weight.symmetric) or weight.axis not in (None, 0):
        return f"its weights are signed, symmetric, per tensor or per output channel (axis 0), not {weight}."
    return ""


def missing_packages(extra: str, packages: tuple[str, ...]) -> str:
    """What has to be installed for a backend, by the name of its extra; empty where nothing has to."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"it needs {' and '.join(missing)}: pip install 'qlightning[{extra}]'." if missing else ""


def cpu_features() -> str:
    """The vector instructions that matter to int8 kernels, as a list in words.

    Examples:
        >>> bool(cpu_features())
        True
    """
    found = {
        "AVX2": torch.cpu._is_avx2_supported(),
        "AVX512": torch.cpu._is_avx512_supported(),
        "VNNI": torch.cpu._is_vnni_supported(),
        "AMX": torch.cpu._is_amx_tile_supported(),
    }
    return ", ".join(name for name, has in found.items() if has) or torch.backends.cpu.get_cpu_capability()


def cpu_has_int8_dot_products() -> bool:
    """Whether the CPU adds int8 products up in 32 bits (VNNI, AMX), so that nothing saturates."""
    return bool(torch.cpu._is_vnni_supported() or torch.cpu._is_amx_tile_supported())
