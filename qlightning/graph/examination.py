"""What quantization does to every layer of a model: error and use of the codes, of weights and on batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from qlightning.affine import decibels
from qlightning.backends.qdq import QUANTIZE, QUANTIZE_PER_CHANNEL, layer_path
from qlightning.graph.capture import module_device
from qlightning.graph.changes import originals
from qlightning.graph.code_use import CodeUse, evenly
from qlightning.graph.preparation import Preparation, captured_roots
from qlightning.graph.recording import (
    Call,
    FloatRun,
    Int8Run,
    eval_programs,
    folded_bns,
    in_eval_mode,
    layer_names,
    program_of,
)
from qlightning.html import Code, Grid
from qlightning.nn.bias import folded_factor
from qlightning.nn.qat import QATLayer
from qlightning.nn.quantized import QuantizedLayer

KEPT = 2**16
"""Elements of a result that int8 and float are compared by, for each call."""


@dataclass
class Noise:
    """Sums of squares of a signal and of its error, of which many tensors can have a part."""

    signal: float = 0.0
    error: float = 0.0

    def add(self, exact: Tensor, found: Tensor) -> None:
        """Takes in a pair of tensors of the same shape."""
        self.signal += float(exact.double().square().sum())
        self.error += float((exact.double() - found.double()).square().sum())

    @property
    def sqnr(self) -> float | None:
        """The ratio in dB; None where there was no signal."""
        return decibels(self.signal, self.error) if self.signal else None


@dataclass
class LayerFindings:
    """What was found of one int8 layer; as `qlightning.html.Layer` has it."""

    weight: Code
    weight_sqnr: float | None = None
    worst_channel: tuple[int, float] | None = None
    output_sqnr: float | None = None
    grid: str = ""


@dataclass
class Examination:
    """What :func:`examine` has found.

    Attributes:
        layers: By the name of the int8 layer.
        grids: Of the activations, in the order of the graphs, by name.
        output_sqnr: Of what the model gives, in dB; None without a reference.
        same_answer: The share of samples for which int8 and float have the same largest output; None where the model
            gives no (samples, classes).
        samples: How many samples were run.
    """

    layers: dict[str, LayerFindings] = field(default_factory=dict)
    grids: dict[str, Grid] = field(default_factory=dict)
    output_sqnr: float | None = None
    same_answer: float | None = None
    samples: int = 0


@torch.no_grad()
def examine(
    int8: nn.Module, reference: nn.Module | None = None, calls: Mapping[str, Iterable[Call]] | None = None
) -> Examination:
    """Looks at the weights of an int8 model, and at its activations for some calls.

    Args:
        int8: A model from ``convert``; left as it is. Its graphs are run in QDQ form, whatever its backend.
        reference: A prepared model of the same structure, that stands for the float one: it is run without rounding,
            in eval mode, and left as it is. None: nothing is compared with float. Where steps of post-training
            quantization have changed it, layers are compared with what they left, and the output with what was before.
        calls: By the name of the captured module (as ``captured_roots`` has it), calls of it.
    """
    found = Examination()
    given = {name: list(several) for name, several in (calls or {}).items()}
    floats = dict(captured_roots(reference)) if reference is not None else {}
    for path, root in captured_roots(int8):
        _weights(path, root, floats.get(path), found)
        one = _RootExamination(path, root, floats.get(path), _before_steps(reference))
        for call in given.get(path, ()):
            one.run(call)
        one.report(found)
    return found


def _before_steps(reference: nn.Module | None) -> Callable[[], AbstractContextManager[None]] | None:
    """A context in which a prepared model is as it was before steps changed it; None where none has."""
    preparation: Preparation | None = None if reference is None else reference.__dict__.get("_preparation")
    if preparation is None or not preparation.changes:
        return None
    assert reference is not None
    return partial(originals, reference, preparation.changes)


def _weights(path: str, root: nn.Module, reference: nn.Module | None, found: Examination) -> None:
    exact = _folded_weights(reference) if reference is not None else {}
    for name, layer in root.named_modules():
        full = f"{path}.{name}".strip(".")
        if not isinstance(layer, QuantizedLayer) or full in found.layers:
            continue
        use = CodeUse(layer.scheme.quant_min, layer.scheme.quant_max, margin=False)
        # Where a factor has turned the signs of a channel, codes may be mirrored; they stay on the grid but for one.
        use.add_codes(layer.codes.int().clamp(layer.scheme.quant_min, layer.scheme.quant_max))
        row = found.layers[full] = LayerFindings(use.result())
        w = exact.get(name)
        if w is None or w.shape != layer.codes.shape:
            continue
        shape = (-1, *[1] * (w.dim() - 1))
        q = (layer.codes.float() - layer.zero_point.view(shape)) * layer.scale.view(shape)
        signal, noise = (part.square().flatten(1).sum(1, dtype=torch.float64) for part in (w, w - q))
        row.weight_sqnr = Noise(float(signal.sum()), float(noise.sum())).sqnr
        ratio = torch.where(signal > 0, 10 * torch.log10(signal / noise), torch.inf)
        row.worst_channel = int(ratio.argmin()), float(ratio.min())


def _folded_weights(root: nn.Module) -> dict[str, Tensor]:
    """The float weights of the layers of a prepared module, output channels first, BatchNorm folded in, by name."""
    bns: dict[str, Any] = {}
    for program in eval_programs(root):
        names = layer_names(program.graph, root)
        for norm, head in folded_bns(program.graph, root).items():
            bns[names.get(head, "")] = root.get_submodule(str(norm.target))
    weights = {}
    for name, layer in root.named_modules():
        if isinstance(layer, QATLayer):
            name = name or "layer"
            w = layer.weight_fake_quant.to_output_first(layer.weight.detach().float())
            if (bn := bns.get(name)) is not None:
                factor = folded_factor(torch.ones(w.shape[0], device=w.device), bn, None)
                if bn.weight is not None:
                    factor = factor.masked_fill(bn.weight == 0, 0.0)
                w = w * factor.view(-1, *[1] * (w.dim() - 1))
            weights[name] = w.cpu()
    return weights


class _RootExamination:
    """Runs calls of one captured module in int8 and in float, and compares."""

    def __init__(
        self,
        path: str,
        root: nn.Module,
        reference: nn.Module | None,
        before_steps: Callable[[], AbstractContextManager[None]] | None,
    ) -> None:
        self._path, self._root, self._reference = path, root, reference
        self._before_steps = before_steps
        self._prefix = f"{path}." if path else ""
        self._results: dict[str, Noise] = {}
        self._grids: dict[str, tuple[fx.Node, CodeUse]] = {}
        self._inputs: dict[str, str] = {}
        self._output = Noise()
        self._same = self._compared = self._samples = 0

    def run(self, call: Call) -> None:
        """Takes in one call; one that the model has no graph for is left out."""
        if (known := program_of(self._root, call)) is None or known[0].qdq is None:
            return
        program, leaves = known
        assert program.qdq is not None
        names = _grid_names(program.qdq, self._prefix)
        exact: dict[str, Tensor] = {}
        y = self._float(call, exact)

        def layer(name: str, value: Tensor) -> None:
            want = exact.pop(name, None)
            if want is not None and value.numel():
                self._results.setdefault(name, Noise()).add(want, evenly(value, KEPT))

        def grid(node: fx.Node, value: Tensor) -> None:
            name = names[node]
            ends: tuple[int, int] = node.args[-3:-1]  # type: ignore[assignment]
            _, use = self._grids.setdefault(name, (node, CodeUse(*ends, margin=True)))
            if value.numel():
                use.add(value, *self._qparams(node, value))

        self._inputs |= _input_grids(program.qdq, names)
        self._samples += call.samples
        result = Int8Run(self._root, program.qdq, layer, grid).run(*leaves)
        if y is not None:
            self._compare(y, result)

    def _float(self, call: Call, exact: dict[str, Tensor]) -> Any:
        """The result of the float model for a call, or None; fills in what its layers give."""
        if self._reference is None:
            return None
        call = call.to(module_device(self._reference))
        with in_eval_mode(self._reference.modules()):
            if (known := program_of(self._reference, call)) is None:
                return None

            def layer(name: str, value: Tensor) -> None:
                exact[name] = evenly(value, KEPT).float().cpu().clone()  # what follows may write in place

            result = FloatRun(self._reference, known[0].graph, layer).run(*known[1])
            if self._before_steps is None:
                return result
            with self._before_steps():
                return FloatRun(self._reference, known[0].graph, lambda *_: None).run(*known[1])

    def _compare(self, exact: Any, found: Any) -> None:
        pairs = [(a, b) for a, b in zip(tree_leaves(exact), tree_leaves(found), strict=False) if isinstance(a, Tensor)]
        for want, value in pairs:
            want = want.cpu()
            if isinstance(value, Tensor) and want.shape == value.shape and want.is_floating_point():
                self._output.add(want, value)
                if want.dim() == 2 and want.shape[1] > 1:
                    self._same += int((want.argmax(1) == value.argmax(1)).sum())
                    self._compared += len(want)

    def _qparams(self, node: fx.Node, value: Tensor) -> tuple[Any, Any]:
        scale, zero_point = node.args[1:3]
        if isinstance(scale, fx.Node) and isinstance(zero_point, fx.Node):
            shape = [1] * value.dim()
            shape[node.args[3]] = -1  # type: ignore[index]
            found = (getattr(self._root, str(place.target)) for place in (scale, zero_point))
            scale, zero_point = (tensor.double().view(shape) for tensor in found)
        return scale, zero_point

    def report(self, found: Examination) -> None:
        """Adds what was found to an examination."""
        for name, noise in self._results.items():
            if (row := found.layers.get(f"{self._prefix}{name}")) is not None:
                row.output_sqnr = noise.sqnr
        for name, grid in self._inputs.items():
            if (row := found.layers.get(f"{self._prefix}{name}")) is not None:
                row.grid = grid
        for name, (node, use) in self._grids.items():
            found.grids[name] = self._grid(name, node, use)
        found.samples = max(found.samples, self._samples)
        if not self._path:
            found.output_sqnr = self._output.sqnr
            found.same_answer = self._same / self._compared if self._compared else None

    def _grid(self, name: str, node: fx.Node, use: CodeUse) -> Grid:
        scale, zero_point = self._qparams(node, torch.zeros([1] * 8))
        scales, zeros = (torch.as_tensor(value, dtype=torch.float64).flatten() for value in (scale, zero_point))
        unsigned = node.args[-1] is torch.uint8
        bits = math.ceil(math.log2(use.quant_max - use.quant_min + 1))
        kind = "per tensor" if node.target is QUANTIZE else "per channel"
        return Grid(
            name,
            f"{'u' if unsigned else ''}int{bits} {kind}",
            low=float(((use.quant_min - zeros) * scales).min()),
            high=float(((use.quant_max - zeros) * scales).max()),
            step=float(scales.max()),
            zero_point=int(zeros[0]) if node.target is QUANTIZE else None,
            sqnr=use.sqnr,
            codes=use.result(),
        )


def _grid_names(graph: fx.Graph, prefix: str) -> dict[fx.Node, str]:
    """A name for every quantize call: that of the fake-quantizer, or else one that says what computes on it first."""
    names: dict[fx.Node, str] = {}
    inputs = {quantize: layer for layer, quantize in _quantize_of_layers(graph)}
    for number, node in enumerate(n for n in graph.nodes if n.target in (QUANTIZE, QUANTIZE_PER_CHANNEL)):
        own = f"{inputs[node]} (input)" if node in inputs else f"value {number}"
        names[node] = node.meta.get("grid") or f"{prefix}{own}"
    return names


def _input_grids(graph: fx.Graph, names: Mapping[fx.Node, str]) -> dict[str, str]:
    return {layer: names[quantize] for layer, quantize in _quantize_of_layers(graph)}


def _quantize_of_layers(graph: fx.Graph) -> Iterable[tuple[str, fx.Node]]:
    """The int8 layers of a QDQ graph, each with the quantize call of its input; the last layer first."""
    for node in reversed(graph.nodes):
        if (path := layer_path(node)) is None:
            continue
        value = node.args[0]
        while isinstance(value, fx.Node) and value.target not in (QUANTIZE, QUANTIZE_PER_CHANNEL):
            value = next((n for n in value.all_input_nodes), None)
        if value is not None:
            yield path, value
