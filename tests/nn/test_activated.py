"""An activation and its rounding in one step: bit for bit what both give one after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qlightning import QScheme, prepare
from qlightning.blocks import BLOCK_NUMEL
from qlightning.errors import NonFiniteError
from qlightning.fake_quantize import FakeQuantize, set_observers
from qlightning.nn import activated
from qlightning.nn.activated import activate_and_round
from qlightning.observers import HistogramObserver, MinMaxObserver, MovingAverageObserver, Observer

ACTIVATIONS = [nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.Hardtanh(-0.7, 1.1), nn.Hardtanh(0.0, 0.1), nn.SiLU()]
SCHEMES = [
    QScheme(signed=False),
    QScheme(signed=False, symmetric=True),
    QScheme(bits=4),
    QScheme(bits=3, symmetric=True, narrow_range=True),
]
SMALL, LARGE = (2, 3, 5, 7), (3, 5, 80, BLOCK_NUMEL // 600)


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def apart() -> mock._patch_dict:
    """Within it activations and roundings are taken one after the other."""
    return mock.patch.dict(activated.STEPS, clear=True)


def trained(
    step: Callable[[nn.Module, FakeQuantize, Tensor], Tensor], activation: nn.Module, fq: FakeQuantize, x: Tensor
) -> tuple[list[Tensor], FakeQuantize]:
    """The result of a step, its gradient, the gradient's gradient, and the fake-quantizer as it has become."""
    fq = copy.deepcopy(fq)
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    result = step(activation, fq, x * 1.0)
    (plain,) = torch.autograd.grad(result, x, gradient, retain_graph=True)
    (again,) = torch.autograd.grad(result, x, gradient, create_graph=True)
    (second,) = torch.autograd.grad(again.square().sum(), gradient)
    return [result.detach(), plain, again.detach(), second], fq


def assert_same(activation: nn.Module, fq: FakeQuantize, x: Tensor) -> None:
    ours, joined = trained(activate_and_round, activation, fq, x)
    theirs, one_by_one = trained(lambda activation, fq, x: fq(activation(x)), activation, fq, x)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert ours[0].stride() == theirs[0].stride()
    assert torch.equal(ours[0].signbit(), theirs[0].signbit())
    states = joined.state_dict(), one_by_one.state_dict()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])
    assert joined.seen_ndims == one_by_one.seen_ndims
    assert joined.observer.seen_shapes == one_by_one.observer.seen_shapes
    assert joined.observed is one_by_one.observed


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("shape", [SMALL, LARGE, ()], ids=str)
def test_both_at_once_are_both_in_turn(activation: nn.Module, scheme: QScheme, shape: tuple[int, ...]) -> None:
    fq = FakeQuantize(scheme, MovingAverageObserver(scheme, 0.3)).train()
    x = 3 * torch.randn(shape)
    assert_same(activation, fq, x)  # the first range that is observed
    fq(activation(x.clone()))
    assert_same(activation, fq, 2 * x)  # one that lags behind
    fq.observer_enabled = False
    assert_same(activation, fq, 2 * x)
    if len(shape) == 4:
        assert_same(activation, fq, (2 * x).to(memory_format=torch.channels_last))
        assert_same(activation, fq, (2 * x)[:, :, ::2])
    with torch.no_grad():
        assert torch.equal(activate_and_round(activation, fq, x.clone()), fq(activation(x.clone())))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_a_mask_of_a_large_tensor_is_what_the_input_is(activation: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activated, "MASKED_NUMEL", 1)
    fq = FakeQuantize(SCHEMES[0], MovingAverageObserver(SCHEMES[0], 0.3)).train()
    for shape in (SMALL, LARGE):
        x = torch.randn(shape)
        fq(x)
        assert_same(activation, fq, 4 * x)
        assert_same(activation, fq, (4 * x).to(memory_format=torch.channels_last))


@pytest.mark.parametrize("observer", [MinMaxObserver, HistogramObserver])
def test_whatever_the_observer_takes_it_gets(observer: type[Observer]) -> None:
    scheme = QScheme(signed=False)
    assert_same(nn.ReLU(), FakeQuantize(scheme, observer(scheme)).train(), torch.randn(SMALL))


@pytest.mark.parametrize("step", [2.0**-60, 1e-12, 0.0123, 1 / 3, 1.0, 6 / 255, 3e30])
def test_the_interval_of_a_grid_ends_where_codes_begin_to_be_clipped(step: float) -> None:
    scale = torch.tensor(step)
    for code in range(256):
        last = torch.tensor(activated._last_of(code, scale.item()))
        following = torch.nextafter(last, torch.tensor(torch.inf))
        assert (last * scale.reciprocal()).round() == code
        assert (following * scale.reciprocal()).round() == code + 1


def test_beyond_float32_nothing_is_clipped() -> None:
    assert activated._last_of(255, float(torch.tensor(2e36))) == torch.inf


def test_grids_of_any_scale_that_was_loaded() -> None:
    for scale in (1e-30, 1e-20, 1.0, 3e38):
        fq = FakeQuantize(SCHEMES[0], MovingAverageObserver(SCHEMES[0])).train()
        fq.scale.fill_(scale)
        fq.observed, fq.observer_enabled = True, False
        assert_same(nn.ReLU(), fq, torch.randn(SMALL))


def test_hooks_of_either_run() -> None:
    fq = FakeQuantize(SCHEMES[0], MovingAverageObserver(SCHEMES[0])).train()
    activation, seen = nn.ReLU(), []
    handles = [m.register_forward_hook(lambda m, args, y: seen.append(type(m))) for m in (activation, fq, fq.observer)]
    x = torch.randn(SMALL)
    activate_and_round(activation, fq, x)
    assert seen == [nn.ReLU, MovingAverageObserver, FakeQuantize]
    for handle in handles:
        handle.remove()
    with torch.nn.modules.module.register_module_forward_hook(lambda m, args, y: seen.append(type(m))):
        activate_and_round(activation, fq, x)
    assert len(seen) == 6


def test_values_that_are_none_raise_with_the_name_of_the_layer() -> None:
    fq = FakeQuantize(SCHEMES[0], MovingAverageObserver(SCHEMES[0]), "net.conv").train()
    for value in (torch.nan, torch.inf):
        x = torch.randn(SMALL)
        x[0, 0, 0, 0] = value
        with pytest.raises(NonFiniteError, match=r"net\.conv"):
            activate_and_round(nn.ReLU(), fq, x)
    assert not fq.observed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU6(inplace=True))
        self.second, self.third, self.last = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = F.relu(self.second(x), inplace=True)
        y = (self.third(y) + x).relu_()
        return self.last(y.mean((2, 3)))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_training_step_is_the_same_to_the_bit(frozen: bool) -> None:
    net = prepare(Net().train())
    x = torch.randn(4, 3, 12, 12)
    net(x)
    set_observers(net, not frozen)
    results = []
    for joined in (True, False):
        copied = copy.deepcopy(net)
        calls = mock.Mock(wraps=activated._Clamped.apply)
        with mock.patch.object(activated._Clamped, "apply", calls):
            if joined:
                loss = copied(2 * x).square().sum()
            else:
                with apart():
                    loss = copied(2 * x).square().sum()
        assert calls.call_count == (3 if joined else 0)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in copied.parameters()), *copied.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
