"""Fake-quantizers with learned scales, in nets and plain training loops."""

import copy

import pytest
import torch
from torch import nn

from qlightning import LearnedScales, QConfig, QScheme, calibrate, convert, prepare, ranges, unprepare
from qlightning.errors import ConfigError, NonFiniteError
from qlightning.fake_quantize import FakeQuantize, fake_quantizers, set_fake_quant, set_observers
from qlightning.learned import LearnedFakeQuantize, learned_fake_quantizers, settle_all

LOW_BITS = QScheme(bits=4, symmetric=True, axis=0, narrow_range=True)


def net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.Hardswish(),
        nn.ConvTranspose2d(8, 6, 3, stride=2, groups=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


def prepared(learned=True, **settings):
    return prepare(net(), QConfig(learned=learned, **settings), backend="reference").train()


def train(model, steps=6, optimizer=None, **settings):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **settings})
    for _ in range(steps):
        x = torch.randn(4, 3, 8, 8)
        optimizer.zero_grad()
        (model(x) - x.mean((1, 2, 3), keepdim=True).flatten(1)).square().mean().backward()
        optimizer.step()
    return optimizer


def grids(model):
    return {n: (fq.scale.clone(), fq.zero_point.clone()) for n, fq in fake_quantizers(model)}


def assert_same(actual, expected):
    for name, grid in expected.items():
        assert all(torch.equal(a, b) for a, b in zip(actual[name], grid, strict=True)), name


@pytest.mark.parametrize("weight", [QConfig().weight, LOW_BITS, QScheme(symmetric=True), QScheme(axis=0)])
def test_int8_computes_as_the_learned_grids_do(weight):
    model = prepared(weight=weight)
    train(model)
    int8 = convert(model)  # without a forward since the last step
    model.eval()
    x = torch.randn(8, 3, 8, 8)
    # Both round to the same grids: float32 sums differ by their last bits, so that a value at a tie may go either way.
    off = (int8(x) - model(x)).abs() > 1e-5 * model(x).abs().max()
    assert off.float().mean() < 0.05
    assert_same(grids(model), {n: (fq.step.detach(), fq.zero_point) for n, fq in learned_fake_quantizers(model)})


def test_the_first_batch_gives_the_scales_to_learn_from():
    torch.manual_seed(3)
    model, observing = prepared(), prepared(None)
    observing.load_state_dict(model.state_dict(), strict=False)
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(model(x), observing(x))
    expected = grids(observing)
    assert_same(grids(model), expected)
    model(10 * x)  # a larger batch moves no scale by itself
    assert_same(grids(model), expected)


def test_a_calibration_gives_the_scales_to_learn_from():
    model = prepared()
    calibrate(model, [torch.randn(4, 3, 8, 8) for _ in range(3)])
    expected = grids(model)
    model.train()(10 * torch.randn(4, 3, 8, 8))
    assert_same(grids(model), expected)
    assert all(fq.learning for _, fq in learned_fake_quantizers(model))
    train(model)
    calibrate(model, [torch.randn(4, 3, 8, 8)])  # anew
    assert not any(fq.learning for _, fq in learned_fake_quantizers(model))


def test_scales_are_observed_while_nothing_is_rounded():
    model = prepared()
    set_fake_quant(model, False)
    train(model, 3)
    assert not any(fq.learning for _, fq in learned_fake_quantizers(model))
    observed = grids(model)
    set_fake_quant(model, True)
    model(torch.randn(4, 3, 8, 8))
    activations = {n: g for n, g in observed.items() if "weight_fake_quant" not in n}
    assert activations
    assert_same(grids(model), activations)
    assert all(fq.learning for _, fq in learned_fake_quantizers(model))


def test_only_the_lower_end_of_ranges_with_negative_values_is_learned():  # LSQ+, for Hardswish
    model = prepared()
    train(model)
    zero = dict(learned_fake_quantizers(model))["graph_fake_quant.3"]
    assert zero.offset == 0
    assert zero.zero_point == 0
    below = dict(learned_fake_quantizers(model))["graph_fake_quant.0"]
    assert below.offset < 0
    assert 0 < below.zero_point < 255
    settled = -(below.zero_point * below.scale)
    assert (below.offset - settled).abs() <= below.scale / 2


@pytest.mark.parametrize("learned", ["activations", "weights"])
def test_one_kind_alone(learned):
    model = prepared(learned)
    kinds = {"weight_fake_quant" in name for name, _ in learned_fake_quantizers(model)}
    assert kinds == {learned == "weights"}
    train(model)
    convert(model)


def test_overrides_choose_layers():
    model = prepare(net(), QConfig(overrides={"0": QConfig(weight=LOW_BITS, learned="weights")}), backend="reference")
    assert [name for name, _ in learned_fake_quantizers(model)] == ["0.weight_fake_quant"]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_scales_stay_positive_at_any_rate(optimizer):
    model = prepared()
    with torch.no_grad():
        train(model, 0)
    opt = optimizer([p for _, fq in learned_fake_quantizers(model) for p in fq.parameters(recurse=False)], lr=100.0)
    before = None
    for _ in range(5):
        train(model, 1, opt)
        settle_all(fq for _, fq in fake_quantizers(model))
        now = {name: fq.scale.clone() for name, fq in learned_fake_quantizers(model)}
        for name, fq in learned_fake_quantizers(model):
            assert bool((fq.scale > 0).all()), name
            assert bool(((fq.zero_point >= fq.scheme.quant_min) & (fq.zero_point <= fq.scheme.quant_max)).all()), name
            if before is not None:
                assert bool(((now[name] <= 2 * before[name]) & (now[name] >= before[name] / 2)).all()), name
        before = now


def test_frozen_scales_hold_still_under_momentum():
    model = prepared()
    optimizer = train(model)
    settle_all(fq for _, fq in fake_quantizers(model))
    set_observers(model, False)
    frozen = grids(model)
    weight = model[0].weight.detach().clone()
    train(model, 3, optimizer)
    settle_all(fq for _, fq in fake_quantizers(model))
    assert_same(grids(model), frozen)
    assert not torch.equal(model[0].weight, weight)


def test_state_dicts_have_the_float_keys_and_go_on():
    model = prepared()
    train(model)
    state = model.state_dict()
    assert set(net().state_dict()) < set(state)
    other = prepared()
    other.load_state_dict(state)
    x = torch.randn(4, 3, 8, 8)
    assert torch.equal(other(x), model(x))
    assert_same(grids(other), grids(model))
    assert all(fq.learning for _, fq in learned_fake_quantizers(other))


def test_what_was_observed_is_what_is_learned_from():
    observing = prepared(None)
    train(observing)
    model = prepared()
    model.load_state_dict(observing.state_dict())
    expected = grids(model)
    assert_same(expected, grids(observing))
    model(torch.randn(4, 3, 8, 8))
    assert_same(grids(model), expected)


def test_a_float_state_dict_forgets_what_was_learned():
    model = prepared()
    train(model)
    model.load_state_dict(net().state_dict())
    assert not any(fq.learning or fq.observed or fq.step.any() for _, fq in learned_fake_quantizers(model))


def test_copies_learn_on_their_own():
    model = prepared()
    train(model)
    twin = copy.deepcopy(model)
    before = grids(model)
    train(twin)
    assert_same(grids(model), before)


def test_unprepare_leaves_the_float_parameters():
    model = prepared()
    train(model)
    assert dict(unprepare(model).named_parameters()).keys() == dict(net().named_parameters()).keys()


def test_half_precision_keeps_the_grid():
    model = prepared()
    train(model)
    settle_all(fq for _, fq in fake_quantizers(model))
    before = grids(model)
    model.half()
    assert all(fq.step.dtype == torch.float32 for _, fq in learned_fake_quantizers(model))
    assert_same(grids(model), before)


def test_ranges_list_learned_scales():
    model = prepared()
    train(model)
    assert len(ranges(model).rows) == len(list(fake_quantizers(model)))


def test_nan_names_the_layer():
    model = prepared()
    train(model)
    _, fq = next(iter(learned_fake_quantizers(model)))
    with torch.no_grad():
        fq.step.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"0 .weight.*learned scale"):
        settle_all(fq for _, fq in fake_quantizers(model))


def test_calibration_alone_has_nothing_to_learn_by():
    model = net()
    with pytest.raises(ConfigError, match=r"mode='ptq'.*training"):
        prepare(model, QConfig(overrides={"0": QConfig(learned=True)}), mode="ptq")
    assert not list(fake_quantizers(model))


def test_an_activation_has_one_scale():
    config = QConfig(activation=QScheme(symmetric=True, axis=1), learned=LearnedScales())
    model = net()
    with pytest.raises(ConfigError, match="learned='weights'"):
        prepare(model, config, backend="reference")
    assert not list(fake_quantizers(model))


def test_without_learned_scales_nothing_is_added():
    model = prepared(None)
    assert all(type(fq) is FakeQuantize or not isinstance(fq, LearnedFakeQuantize) for _, fq in fake_quantizers(model))
    assert dict(model.named_parameters()).keys() == dict(net().named_parameters()).keys()
