"""FloatFunctional, the one here and torch.ao's: arithmetic with a name, on grids where int8 calls read it."""

from typing import Any

import pytest
import torch
import torch.ao.nn.quantized as nnq
import torch.nn.functional as F
from torch import Tensor, nn

from qlightning import QConfig, QuantizationError, calibrate, convert, prepare, unprepare
from qlightning.affine import sqnr
from qlightning.backends import available
from qlightning.fake_quantize import FakeQuantize, WeightFakeQuantize, fake_quantizers
from qlightning.nn import FloatFunctional
from qlightning.nn.bias import BiasRounding
from qlightning.observers import MinMaxObserver

BACKENDS = [name for name in ("onednn", "x86", "reference") if name in available()]
BOTH = pytest.mark.parametrize("functional", [FloatFunctional, nnq.FloatFunctional, nnq.FXFloatFunctional])
PLAIN = {
    "add": lambda x, y: x + y,
    "add_relu": lambda x, y: F.relu(x + y),
    "mul": lambda x, y: x * y,
    "matmul": lambda x, y: x @ y,
    "cat": lambda x, y: torch.cat([x, y]),
    "cat, dim": lambda x, y: torch.cat([x, y], -1),
    "add_scalar": lambda x, y: x + 1.5,
    "mul_scalar": lambda x, y: x * -0.3,
}


def call(f: Any, name: str, x: Tensor, y: Tensor) -> Tensor:
    if name.startswith("cat"):
        return f.cat([x, y], -1) if name == "cat, dim" else f.cat([x, y])
    return getattr(f, name)(x, {"add_scalar": 1.5, "mul_scalar": -0.3}.get(name, y))


class Attention(nn.Module):
    """Two linear layers, a product of what they make, a linear layer behind it; ``plain`` for ``@``."""

    def __init__(self, functional: Any, plain: bool = False):
        super().__init__()
        self.query, self.key, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(5, 3)
        self.product = functional()
        self.plain = plain

    def forward(self, x: Tensor, expose: bool = False) -> Any:
        query, key = self.query(x), self.key(x).transpose(-1, -2)
        scores = query @ key if self.plain else self.product.matmul(query, key)
        return (query, key, scores, self.head(scores)) if expose else self.head(scores)


class Twice(nn.Module):
    """One FloatFunctional for two sums of very different size."""

    def __init__(self, functional: Any):
        super().__init__()
        self.pool, self.last, self.f = nn.AvgPool2d(3, 1, 1), nn.Conv2d(3, 3, 1), functional()

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pool(x)
        return self.last(self.f.add(self.f.add(pooled, x), x * 100.0))


def activations(model: nn.Module) -> dict[str, FakeQuantize]:
    return {fq.name: fq for _, fq in fake_quantizers(model) if not isinstance(fq, WeightFakeQuantize)}


def observed(model: nn.Module, *batches: Tensor, **settings: Any) -> nn.Module:
    qconfig = QConfig(activation_observer=MinMaxObserver)
    return calibrate(prepare(model.eval(), qconfig, mode="ptq", **settings), batches)


@pytest.mark.parametrize("name", PLAIN)
def test_a_float_model_computes_the_plain_thing(name: str) -> None:
    x, y = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)
    expected, found = PLAIN[name](x, y), call(FloatFunctional(), name, x, y)
    assert torch.equal(found, expected)
    assert torch.equal(found, call(nnq.FloatFunctional(), name, x, y))
    (gradient,) = torch.autograd.grad(found.square().sum(), x)
    assert torch.equal(gradient, torch.autograd.grad(expected.square().sum(), x)[0])
    assert not FloatFunctional().state_dict()


@BOTH
def test_every_call_has_a_grid_of_its_own(functional: Any) -> None:
    x = torch.randn(2, 3, 4, 4)
    float_keys = set(Twice(functional).state_dict())
    prepared = observed(Twice(functional), x)
    grids = activations(prepared)
    first, second = (grids[name] for name in ("f.add", "f.add_1"))
    # An average lies within the values: the range of the first sum is 2 of x at most, that of the second 98 at least.
    assert float(second.scale) > 45 * float(first.scale)
    assert float_keys <= set(prepared.state_dict())
    assert not any(key.startswith("f.") for key in prepared.state_dict())
    assert type(prepared.f) is functional
    assert type(convert(prepared).f) is functional
    assert type(unprepare(prepared).f) is functional


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
@BOTH
def test_a_product_that_is_asked_for_is_that_of_the_operands_on_their_grids(functional: Any, backend: str) -> None:
    x = torch.randn(4, 5, 6)
    prepared = observed(Attention(functional), x, backend=backend)
    grids = {name: activations(prepared)[name] for name in ("query", "key", "product.matmul")}
    assert len(activations(prepared)) == 4  # these, and that of the input
    int8 = convert(prepared)
    for model in (prepared, int8):
        query, key, scores, _ = model(x, expose=True)
        for value, fq in ((query, grids["query"]), (key, grids["key"]), (scores, grids["product.matmul"])):
            codes = value.double() / float(fq.scale) + int(fq.zero_point)
            assert (codes - codes.round()).abs().max() < 1e-3
            assert codes.round().min() >= 0
            assert codes.round().max() <= 255
        grid = grids["product.matmul"]
        low, high = ((end - int(grid.zero_point)) * float(grid.scale) for end in (0, 255))
        error = scores.double() - (query.double() @ key.double()).clamp(low, high)
        assert 0 < error.abs().max() <= 0.5001 * float(grid.scale)  # half a step, and what float32 adds


@BOTH
def test_a_plain_product_stays_float(functional: Any) -> None:
    grids = activations(observed(Attention(functional, plain=True), torch.randn(4, 5, 6)))
    assert not {"query", "key"} & set(grids)


@torch.no_grad()
@BOTH
@pytest.mark.parametrize("exclude", ["f", FloatFunctional, nnq.FloatFunctional, nnq.FXFloatFunctional], ids=str)
def test_an_excluded_one_rounds_nothing(functional: Any, exclude: Any) -> None:
    net, x = Twice(functional), torch.randn(2, 3, 4, 4)
    if isinstance(exclude, type) and exclude is not functional:
        with pytest.raises(QuantizationError, match="matches no module"):
            prepare(net, exclude=[exclude])
        return
    pooled = net.pool(x)
    prepared = observed(net, x, exclude=[exclude])
    # The convolution alone rounds, what it reads; neither the sum before it nor the operands of both.
    ((_, grid),) = activations(prepared).items()
    rounding = next(m for m in prepared.modules() if isinstance(m, BiasRounding))
    expected = rounding(prepared.last(grid(pooled + x + x * 100.0)))
    assert torch.equal(prepared(x), expected)
    assert sqnr(expected, convert(prepared)(x)) >= 40


@torch.no_grad()
def test_one_with_hooks_is_called_in_one_piece() -> None:
    net = Twice(FloatFunctional)
    seen: list[Any] = []
    net.f.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    prepared = observed(net, x := torch.randn(2, 3, 4, 4))
    seen.clear()
    prepared(x)
    convert(prepared)(x)
    assert seen == ["add"] * 4


@torch.no_grad()
def test_hooks_on_that_of_torch_ao_run_no_more_than_without_qlightning() -> None:
    net = Twice(nnq.FloatFunctional)
    net.f.register_forward_pre_hook(lambda module, args: pytest.fail("torch.ao's is never called itself"))
    x = torch.randn(2, 3, 4, 4)
    net(x)
    prepared = observed(net, x)
    prepared(x)
    convert(prepared)(x)
