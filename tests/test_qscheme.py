from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from qlightning.errors import ConfigError, QuantizationError
from qlightning.qscheme import QScheme


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("narrow_range", [False, True])
def test_signed_grid_is_twos_complement(bits: int, narrow_range: bool) -> None:
    scheme = QScheme(bits=bits, narrow_range=narrow_range)
    assert scheme.quant_max - scheme.quant_min + 1 == 2**bits - narrow_range
    assert scheme.quant_min == (-scheme.quant_max if narrow_range else -scheme.quant_max - 1)
    assert scheme.dtype is torch.int8


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("narrow_range", [False, True])
def test_unsigned_grid_begins_at_zero(bits: int, narrow_range: bool) -> None:
    scheme = QScheme(bits=bits, signed=False, narrow_range=narrow_range)
    assert (scheme.quant_min, scheme.quant_max) == (int(narrow_range), 2**bits - 1)
    assert scheme.dtype is torch.uint8


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("signed", [False, True])
def test_codes_fit_their_dtype(bits: int, signed: bool) -> None:
    scheme = QScheme(bits=bits, signed=signed)
    limits = torch.iinfo(scheme.dtype)
    assert limits.min <= scheme.quant_min < scheme.quant_max <= limits.max


@pytest.mark.parametrize(
    "setting",
    [
        {"bits": 1},
        {"bits": 9},
        {"bits": 8.0},
        {"bits": True},
        {"axis": 1.5},
        {"axis": True},
        {"axis": "0"},
        {"signed": 1},
        {"symmetric": "no"},
        {"narrow_range": None},
    ],
    ids=str,
)
def test_a_setting_off_its_limits_is_refused_by_name(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))) as caught:
        QScheme(**setting)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, QuantizationError)


def test_it_is_a_value() -> None:
    assert QScheme(bits=4) == QScheme(bits=4)
    assert len({QScheme(), QScheme(), QScheme(axis=0)}) == 2
    with pytest.raises(FrozenInstanceError):
        QScheme().bits = 4  # type: ignore[misc]


def test_reduced_has_one_bit_less_and_keeps_the_rest() -> None:
    scheme = QScheme(signed=False, symmetric=True, axis=1, narrow_range=True)
    assert scheme.reduced() == QScheme(bits=7, signed=False, symmetric=True, axis=1, narrow_range=True)
    with pytest.raises(ConfigError):
        QScheme(bits=2).reduced()


@pytest.mark.parametrize(
    ("scheme", "text"),
    [
        (QScheme(), "int8 affine per tensor"),
        (QScheme(bits=4, signed=False, symmetric=True, axis=0), "uint4 symmetric per channel (axis 0)"),
        (QScheme(symmetric=True, narrow_range=True), "int8 symmetric per tensor, narrow range"),
    ],
    ids=str,
)
def test_str_is_what_one_would_say(scheme: QScheme, text: str) -> None:
    assert str(scheme) == text


def test_axis_zero_is_per_channel() -> None:
    assert QScheme(axis=0).per_channel
    assert not QScheme().per_channel
