"""Learned step size quantization: its values and gradients, against a reference in float64."""

import math

import pytest
import torch

from qlightning import LearnedScales, QConfig, QScheme
from qlightning.affine import calculate_qparams, fake_quantize
from qlightning.errors import ConfigError
from qlightning.lsq import gradient_scale, learned_fake_quantize
from qlightning.observers import MinMaxObserver, MSEObserver

SCHEMES = {
    "signed symmetric": QScheme(symmetric=True, narrow_range=True),
    "4 bits": QScheme(bits=4, symmetric=True, narrow_range=True),
    "unsigned symmetric": QScheme(signed=False, symmetric=True),
    "affine": QScheme(signed=False),
    "affine of 3 bits": QScheme(bits=3, signed=False),
    "per channel": QScheme(bits=4, symmetric=True, axis=0, narrow_range=True),
    "affine per channel": QScheme(bits=4, axis=0),
}
LAYOUTS = (torch.contiguous_format, torch.channels_last)


def rounded(v):
    """Round half to even, with the gradient of the identity."""
    return v + (v.round() - v).detach()


def lsq_plus(x, step, lower, scheme):
    """Bhalgat et al. 2020, equation 2 in float64, with a lower end that lies on the grid."""
    levels = scheme.quant_max - scheme.quant_min
    return rounded(((x - lower) / step).clamp(0, levels)) * step + lower


def grid_of(x, scheme, fraction=0.6):
    """A grid that covers a part of a tensor, so that some of it is clamped on both sides."""
    dims = [d for d in range(x.ndim) if scheme.axis is None or d != scheme.axis]
    return calculate_qparams(x.amin(dims) * fraction, x.amax(dims) * fraction, scheme)


@pytest.mark.parametrize("layout", LAYOUTS, ids=["contiguous", "channels last"])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_values_and_gradients_are_those_of_the_papers(scheme, layout):
    x = torch.randn(6, 5, 7, 3).add_(0.3).to(memory_format=layout).requires_grad_()
    upstream = torch.randn(6, 5, 7, 3)
    scale, zero_point = grid_of(x.detach(), scheme)
    step = scale.clone().requires_grad_()
    lower = (scheme.quant_min - zero_point) * scale
    offset = None if scheme.symmetric else lower.clone().requires_grad_()
    out = learned_fake_quantize(x, step, offset, scale, zero_point, scheme, 0.25)
    assert torch.equal(out, fake_quantize(x, scale, zero_point, scheme))
    (out * upstream).sum().backward()

    shape = [-1 if scheme.axis == d else 1 for d in range(4)]
    exact = x.detach().double().requires_grad_()
    exact_step = scale.double().reshape(shape).requires_grad_()
    fixed = (scheme.quant_min - zero_point).double().reshape(shape)
    exact_lower = (fixed * exact_step.detach()).requires_grad_()
    # Without a learned lower end, the zero point stays and the lower end moves with the scale.
    expected = lsq_plus(exact, exact_step, fixed * exact_step if scheme.symmetric else exact_lower, scheme)
    (expected * upstream.double()).sum().backward()
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(x.grad, exact.grad.float())
    # float32 sums of 630 terms of up to `levels` steps, in any order
    rounding = 630 * 2.0**-24 * upstream.abs().sum().item() * (scheme.quant_max - scheme.quant_min)
    torch.testing.assert_close(
        step.grad.double(), exact_step.grad.reshape(scale.shape) * 0.25, rtol=1e-4, atol=rounding / 100
    )
    if offset is not None:
        torch.testing.assert_close(
            offset.grad.double(), exact_lower.grad.reshape(scale.shape) * 0.25, rtol=1e-4, atol=1e-4
        )


def test_a_lower_end_at_zero_stays():
    scheme = QScheme(signed=False)
    x, step, offset = torch.tensor([-1.0, 0.3, 9.0]), torch.tensor(0.01), torch.tensor(0.0, requires_grad=True)
    out = learned_fake_quantize(x, step, offset, step, torch.tensor(0, dtype=torch.int32), scheme, 1.0)
    out.sum().backward()
    assert offset.grad == 0


def test_low_precision_counts_in_float32():
    scheme = QScheme(signed=False, symmetric=True)
    x = torch.randn(4096).bfloat16()
    scale, zero_point = grid_of(x.float(), scheme)
    grads = []
    for values in (x, x.float()):
        step = scale.clone().requires_grad_()
        out = learned_fake_quantize(values, step, None, scale, zero_point, scheme, 1.0)
        assert out.dtype == values.dtype
        out.float().sum().backward()
        grads.append(step.grad)
    assert torch.equal(*grads)


def test_without_gradients_nothing_is_kept():
    step = torch.tensor(0.1, requires_grad=True)
    with torch.no_grad():
        out = learned_fake_quantize(torch.randn(4), step, None, step.detach(), torch.tensor(0), QScheme(), 1.0)
    assert not out.requires_grad


def test_gradients_are_scaled_by_elements_and_levels():  # Esser et al. 2020, section 2.2
    assert gradient_scale(100, QScheme(bits=4, symmetric=True, narrow_range=True)) == 1 / math.sqrt(100 * 7)
    assert gradient_scale(100, QScheme(signed=False)) == 1 / math.sqrt(100 * 255)
    assert gradient_scale(100, QScheme(signed=False, symmetric=True)) == 1 / math.sqrt(100 * 127)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (None, None),
        (False, None),
        (True, LearnedScales()),
        ("lsq", LearnedScales()),
        ("weights", LearnedScales(activations=False)),
        ("activations", LearnedScales(weights=False)),
        (LearnedScales(lr_factor=0.1), LearnedScales(lr_factor=0.1)),
    ],
)
def test_a_qconfig_takes_words(written, value):
    assert QConfig(learned=written).learned == QConfig(learned=written).learned_scales == value


@pytest.mark.parametrize("written", ["lsqplus", 1.0, "", {"weights": True}])
def test_other_words_are_an_error(written):
    with pytest.raises(ConfigError, match=r"learned=.*LearnedScales"):
        QConfig(learned=written)


@pytest.mark.parametrize(
    "settings",
    [
        {"weights": "yes"},
        {"activations": False, "weights": False},
        {"lr_factor": 0},
        {"lr_factor": math.inf},
        {"lr_factor": True},
    ],
)
def test_settings_check_themselves(settings):
    with pytest.raises(ConfigError, match="LearnedScales"):
        LearnedScales(**settings)


def test_weights_of_few_bits_start_from_their_least_error():
    four = QScheme(bits=4, symmetric=True, axis=0, narrow_range=True)
    kinds = [
        type(QConfig(weight=weight, learned=learned).build_weight_observer())
        for weight, learned in ((four, "weights"), (four, "activations"), (four, None), (QConfig().weight, True))
    ]
    assert kinds == [MSEObserver, MinMaxObserver, MinMaxObserver, MinMaxObserver]
    chosen = QConfig(weight=four, weight_observer=MinMaxObserver, learned=True)
    assert type(chosen.build_weight_observer()) is MinMaxObserver
