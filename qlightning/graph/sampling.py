"""A look at prepared modules in the middle of a training: on a few samples, from outside, without a trace in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from qlightning.affine import fake_quantize, sqnr
from qlightning.fake_quantize import FakeQuantize, fake_quantizers
from qlightning.graph.bind import COMPILED
from qlightning.graph.capture import module_device
from qlightning.graph.preparation import captured_roots
from qlightning.graph.ranges import ends_of
from qlightning.graph.recording import Call, in_eval_mode, is_activation, noting_calls, program_of
from qlightning.nn.qat import QATLayer

SAMPLES = 16
"""Samples of a call that are kept."""
RUN = 4
"""Samples that are run to count what is clipped."""
INPUTS = 2**22
"""Elements of the first input that are kept at most."""
WEIGHTS = 2**14
"""Elements of a weight that are looked at, about: whole output channels, evenly picked."""


@dataclass
class Sample:
    """What was found of a module, by the names that layers and grids have in it.

    Attributes:
        low: Of every grid of an activation: the lowest value that it represents.
        high: The highest.
        clip: The share of elements beyond it.
        sqnr: Of every layer's weight, in dB.
    """

    low: dict[str, float] = field(default_factory=dict)
    high: dict[str, float] = field(default_factory=dict)
    clip: dict[str, float] = field(default_factory=dict)
    sqnr: dict[str, float] = field(default_factory=dict)


@contextmanager
def keeping_calls(modules: Mapping[str, nn.Module], whole: nn.Module) -> Iterator[dict[str, dict[str, list[Call]]]]:
    """Within it the first call of every captured part of modules is kept, by both names: the first samples alone.

    Where ``torch.compile`` has taken in the calls themselves, anywhere in the whole that the modules are parts of,
    nothing is: a hook would compile them anew.
    """
    calls: dict[str, dict[str, list[Call]]] = {name: {} for name in modules}

    def keep(kept: dict[str, list[Call]], name: str, call: Call) -> None:
        if name not in kept:
            size = max((call.numel() // max(call.samples, 1)), 1)
            kept[name] = [call.cut(min(SAMPLES, max(INPUTS // size, 1)))]

    with ExitStack() as stack:
        if not any(vars(m).get(COMPILED) for m in whole.modules()):
            for name, module in modules.items():
                stack.enter_context(noting_calls(dict(captured_roots(module)), partial(keep, calls[name])))
        yield calls


@torch.no_grad()
def look_at(prepared: nn.Module, calls: dict[str, list[Call]]) -> Sample:
    """Looks at the grids and weights of a prepared module, and at what the grids clip.

    Observers, statistics, modes and random numbers stay as they are, and no hook is called.

    Args:
        prepared: The module, in whatever mode.
        calls: By captured part, calls to run; the first few samples of each.
    """
    found = Sample()
    for name, module in prepared.named_modules():
        if isinstance(module, QATLayer) and module.weight_fake_quant.observed:
            found.sqnr[name] = _weight_sqnr(module)
    for name, fq in fake_quantizers(prepared):
        if is_activation(fq) and fq.observed:
            place = fq.name or name
            found.low[place], found.high[place] = ends_of(fq)
    with in_eval_mode(prepared.modules()), torch.random.fork_rng(devices=[]):
        for path, root in captured_roots(prepared):
            for call in calls.get(path, ()):
                known = program_of(root, call := call.cut(RUN).to(module_device(root)))
                if known is not None:
                    _SampledRun(root, known[0].graph, found.clip).run(*known[1])
    return found


def _weight_sqnr(layer: QATLayer) -> float:
    fq, factor = layer.weight_fake_quant, layer.multiplier()
    w = fq.to_output_first(layer.weight.detach())
    picked = slice(None, None, -(-w.numel() // WEIGHTS))
    w, scale, zero_point = w[picked].float(), fq.scale, fq.zero_point
    if scale.ndim:
        scale, zero_point = scale[picked], zero_point[picked]
    if factor is not None:
        w = w * factor[picked].view(-1, *[1] * (w.dim() - 1))
    return sqnr(w, fake_quantize(w, scale, zero_point, fq.scheme))


class _SampledRun(fx.Interpreter):
    """Runs an eval graph of a prepared module, and counts what its grids clip."""

    def __init__(self, root: nn.Module, graph: fx.Graph, clip: dict[str, float]) -> None:
        super().__init__(root, graph=graph)
        self._clip = clip

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module: Any = self.submodules[str(target)]
        if is_activation(module) and module.observed and isinstance(args[0], Tensor) and args[0].numel():
            self._clip.setdefault(module.name or str(target), _clipped(args[0], module))
        return module.forward(*args, **kwargs)  # and not its hooks


def _clipped(x: Tensor, fq: FakeQuantize) -> float:
    """The share of elements whose code lies beyond the grid."""
    scale, zero_point = fq.scale, fq.zero_point
    if fq.scheme.axis is not None:
        shape = [1] * x.dim()
        shape[fq.scheme.axis] = -1
        scale, zero_point = scale.view(shape), zero_point.view(shape)
    codes = (x.float() / scale).round_().add_(zero_point)
    return float((codes != codes.clamp(fq.scheme.quant_min, fq.scheme.quant_max)).float().mean())
