import copy
import io
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qlightning.affine import calculate_qparams, dequantize, quantize
from qlightning.errors import CalibrationError, ConfigError, NonFiniteError
from qlightning.observers import (
    EntropyObserver,
    FixedRangeObserver,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageObserver,
    MSEObserver,
    Observer,
    PercentileObserver,
)
from qlightning.observers.entropy import candidates as magnitudes
from qlightning.qscheme import QScheme

BITS = range(2, 9)
PER_TENSOR = [
    QScheme(bits=bits, signed=signed, symmetric=symmetric, narrow_range=narrow_range)
    for bits in BITS
    for signed, symmetric, narrow_range in itertools.product((False, True), repeat=3)
]
PER_CHANNEL = [QScheme(symmetric=True, axis=0), QScheme(axis=1), QScheme(bits=4, signed=False, axis=-1)]
FAMILY = [
    MinMaxObserver,
    MovingAverageObserver,
    HistogramObserver,
    PercentileObserver,
    MSEObserver,
    EntropyObserver,
    FixedRangeObserver,
]
# What is seen of elements that are skipped in a channel: an extreme once more, or nothing.
OF_EXTREMES = {MinMaxObserver, MovingAverageObserver, FixedRangeObserver}
CASES = [
    pytest.param(kind, scheme, id=f"{kind.__name__}-{scheme}") for kind in FAMILY for scheme in PER_TENSOR + PER_CHANNEL
]
FEW = [
    pytest.param(kind, scheme, id=f"{kind.__name__}-{scheme}")
    for kind in FAMILY
    for scheme in [QScheme(signed=False), QScheme(symmetric=True), *PER_CHANNEL[:2]]
]
SKIPPING = [case for case in FEW if case.values[0] in OF_EXTREMES or not case.values[1].per_channel]
every_case = pytest.mark.parametrize("kind, scheme", CASES)
every_kind = pytest.mark.parametrize("kind, scheme", FEW)
Kind = Callable[..., Observer]


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def batches(count: int = 3, shape: tuple[int, ...] = (4, 4, 3, 4)) -> list[Tensor]:
    return [torch.randn(shape) * (1 + index) + 0.5 for index in range(count)]


def fed(observer: Observer, data: list[Tensor]) -> Observer:
    for x in data:
        observer(x)
    return observer


def same_state(a: Observer, b: Observer) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


class TestContract:
    @every_case
    def test_qparams_are_those_of_a_range_within_the_data(self, kind: Kind, scheme: QScheme) -> None:
        data = batches()
        observer = fed(kind(scheme), data)
        low, high = observer.range()
        scale, zero_point = observer.calculate_qparams()
        shape = (4,) if scheme.per_channel else ()
        assert low.shape == high.shape == scale.shape == zero_point.shape == shape
        assert all(
            torch.equal(a, b) for a, b in zip((scale, zero_point), calculate_qparams(low, high, scheme), strict=True)
        )
        assert (low <= high).all()
        bound = torch.stack(data).abs().max() if kind is not FixedRangeObserver else 1.0
        assert (low >= -bound).all()
        assert (high <= bound).all()
        zeros = torch.zeros(4, 4)
        codes = quantize(zeros, scale, zero_point, scheme)
        assert torch.equal(dequantize(codes, scale, zero_point, scheme.axis), zeros), "zero is exact"

    @every_kind
    def test_the_tensor_passes_unchanged(self, kind: Kind, scheme: QScheme) -> None:
        x = torch.randn(4, 4).requires_grad_()
        before = x.detach().clone()
        assert kind(scheme)(x) is x
        assert torch.equal(x, before)

    @every_kind
    def test_nothing_is_recorded_for_autograd(self, kind: Kind, scheme: QScheme) -> None:
        observer = fed(kind(scheme), [torch.randn(4, 4).requires_grad_() * 2])
        assert not any(state.requires_grad for state in observer.buffers())

    @every_kind
    def test_observed_begins_with_data_and_ends_with_reset(self, kind: Kind, scheme: QScheme) -> None:
        observer = kind(scheme)
        assert not observer.observed
        with pytest.raises(CalibrationError, match="observed"):
            observer.calculate_qparams()
        observer(torch.zeros(4, 4))
        assert observer.observed
        observer.reset()
        assert not observer.observed
        assert observer.seen_dtype is None
        assert observer.seen_shapes == []
        assert same_state(observer, kind(scheme))

    @every_kind
    def test_state_dict_loads_into_a_fresh_observer(self, kind: Kind, scheme: QScheme) -> None:
        data = batches()
        observer = fed(kind(scheme), data)
        file = io.BytesIO()
        torch.save(observer.state_dict(), file)
        file.seek(0)
        state = torch.load(file)
        for assign in (False, True):
            fresh = kind(scheme)
            fresh.load_state_dict(state, strict=True, assign=assign)
            assert fresh.observed
            assert same_state(fresh, observer)
            assert torch.equal(fresh.calculate_qparams()[0], observer.calculate_qparams()[0])
        fed(observer, data)
        assert same_state(fed(fresh, data), observer), "it goes on as if it had never stopped"
        assert not state.keys() ^ kind(scheme).state_dict().keys()

    @every_kind
    def test_a_fresh_state_loads_into_a_used_observer(self, kind: Kind, scheme: QScheme) -> None:
        observer = fed(kind(scheme), batches())
        observer.load_state_dict(kind(scheme).state_dict())
        assert not observer.observed

    @every_kind
    def test_buffers_stay_the_same_tensors(self, kind: Kind, scheme: QScheme) -> None:
        # DDP broadcasts the buffers it found when it wrapped the module.
        observer = kind(scheme)
        buffers = [state.data_ptr() and id(state) for state in observer.buffers()]
        fed(observer, batches())
        observer.reset()
        fed(observer, batches())
        assert [id(state) for state in observer.buffers()] == buffers

    @every_kind
    def test_a_copy_goes_its_own_way(self, kind: Kind, scheme: QScheme) -> None:
        observer = fed(kind(scheme), batches(1))
        twin = copy.deepcopy(observer)
        assert same_state(twin, observer)
        twin(torch.full((4, 4), 99.0))
        assert kind is FixedRangeObserver or not same_state(twin, observer)
        twin.reset()
        assert observer.observed

    @every_kind
    @pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
    def test_state_stays_float32(self, kind: Kind, scheme: QScheme, cast: str) -> None:
        data = batches()
        observer = fed(kind(scheme), data)
        model = nn.Sequential(nn.Linear(2, 2), observer)
        getattr(model, cast)()
        assert {state.dtype for state in observer.buffers()} == {torch.float32}
        assert same_state(observer, fed(kind(scheme), data))
        weight = model[0].weight
        assert isinstance(weight, Tensor)
        model.to(torch.float32)
        observer(data[0].to(weight.dtype))

    @every_kind
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_any_floating_dtype_is_observed_as_float32(self, kind: Kind, scheme: QScheme, dtype: torch.dtype) -> None:
        data = [x.to(dtype) for x in batches()]
        observer = fed(kind(scheme), data)
        assert same_state(observer, fed(kind(scheme), [x.float() for x in data]))
        assert observer.seen_dtype is dtype

    @every_kind
    def test_memory_format_does_not_matter(self, kind: Kind, scheme: QScheme) -> None:
        data = batches()
        strange = [x.to(memory_format=torch.channels_last) for x in data[:-1]] + [data[-1].mT.contiguous().mT]
        assert same_state(fed(kind(scheme), strange), fed(kind(scheme), data))

    @every_kind
    def test_inference_mode_leaves_a_usable_observer(self, kind: Kind, scheme: QScheme) -> None:
        observer = kind(scheme)
        with torch.inference_mode():
            observer(torch.randn(4, 4))
        observer(torch.randn(4, 4))
        observer.load_state_dict(copy.deepcopy(observer.state_dict()))

    @every_kind
    def test_seen_shapes_are_a_bounded_record(self, kind: Kind, scheme: QScheme) -> None:
        observer = kind(scheme)
        for size in [*range(1, 100), 1]:
            observer(torch.ones(4, 4, size) if scheme.axis != -1 else torch.ones(size, 4, 4))
        assert (4, 4, 1) in observer.seen_shapes
        assert len(observer.seen_shapes) == len(set(observer.seen_shapes)) <= 8

    @every_kind
    @pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)], ids=str)
    def test_empty_tensors_are_ignored(self, kind: Kind, scheme: QScheme, shape: tuple[int, ...]) -> None:
        observer = kind(scheme)
        observer(torch.empty(shape))
        assert not observer.observed
        fed(observer, batches())
        observer(torch.empty(shape))
        assert same_state(observer, fed(kind(scheme), batches_again()))

    @every_kind
    @pytest.mark.parametrize(
        "x", [torch.ones(4, 4, dtype=torch.int64), torch.ones(4, 4, dtype=torch.bool), None, 1.0], ids=str
    )
    def test_what_is_not_floating_is_refused(self, kind: Kind, scheme: QScheme, x: Any) -> None:
        with pytest.raises(ConfigError, match="floating"):
            kind(scheme)(x)

    @every_kind
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_nonfinite_raises_before_anything_changes(
        self, kind: Kind, scheme: QScheme, bad: float, dtype: torch.dtype
    ) -> None:
        observer = fed(kind(scheme), batches())
        before = copy.deepcopy(observer)
        x = torch.randn(4, 4).to(dtype)
        x[2, 1] = bad
        with pytest.raises(NonFiniteError, match="NaN or infinity"):
            observer(x)
        assert same_state(observer, before)
        assert (observer.seen_dtype, observer.seen_shapes) == (before.seen_dtype, before.seen_shapes)

    # Each channel of the others is compared with an observer of its finite elements below.
    @pytest.mark.parametrize(
        "kind, scheme", [p for p in FEW if p.values[0] in OF_EXTREMES or not p.values[1].per_channel]
    )
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_nonfinite_can_be_skipped(self, kind: Kind, scheme: QScheme, bad: float, dtype: torch.dtype) -> None:
        # The same finite values: per tensor fewer of them, per channel a repeated one that moves no extreme.
        x = torch.randn(4, 4, 2).to(dtype)
        x[..., 1] = x[..., 0]
        clean = x.clone()
        x[2, 1, 1] = x[0, 3, 1] = bad
        expected = kind(scheme)
        expected(clean if scheme.per_channel else x[x.isfinite()])
        observer = kind(scheme, nonfinite="skip")
        assert observer(x) is x
        assert same_state(observer, expected)

    @pytest.mark.parametrize("kind", FAMILY)
    @pytest.mark.parametrize("axis", [0, 1, -1])
    @pytest.mark.parametrize("bits", [3, 8])
    def test_each_channel_is_observed_like_a_tensor_of_its_own(self, kind: Kind, axis: int, bits: int) -> None:
        data = [torch.randn(3, 4, 5) * 4**step * torch.logspace(-3, 3, 4)[:, None] for step in range(3)]
        data[1][0, 2, 1], data[2][:, 1], data[0][2] = math.nan, math.inf, -math.inf
        observer = fed(kind(QScheme(bits, axis=axis), nonfinite="skip"), data)
        low, high = observer.range()
        for channel in range(data[0].shape[axis]):
            alone = fed(kind(QScheme(bits), nonfinite="skip"), [x.select(axis, channel) for x in data])
            expected = alone.range()
            assert torch.equal(low[channel], expected[0])
            assert torch.equal(high[channel], expected[1])

    @every_kind
    def test_a_batch_of_nothing_finite_is_skipped_whole(self, kind: Kind, scheme: QScheme) -> None:
        observer = kind(scheme, nonfinite="skip")
        observer(torch.full((4, 4), math.nan))
        assert not observer.observed

    @every_kind
    @pytest.mark.parametrize(
        "values",
        [[0.0], [5.0], [-5.0], [1e-42, -1e-42], [1e-38, -1e-38], [1e30, -2e30], [3e38, -3e38], [1e-38, 1e30]],
        ids=str,
    )
    def test_extreme_data_has_usable_qparams(self, kind: Kind, scheme: QScheme, values: list[float]) -> None:
        x = torch.tensor(values * 16)[:16].reshape(4, 4)
        observer = fed(kind(scheme), [x, x, -x, x])
        scale, zero_point = observer.calculate_qparams()
        assert scale.isfinite().all()
        assert (scale > 0).all()
        assert ((zero_point >= scheme.quant_min) & (zero_point <= scheme.quant_max)).all()

    @every_kind
    def test_the_range_may_grow_over_all_of_float32(self, kind: Kind, scheme: QScheme) -> None:
        x = torch.tensor([-1.0, 1.0] * 8).reshape(4, 4)
        observer = fed(kind(scheme), [x * 10.0**exponent for exponent in range(-45, 39)])
        low, high = observer.range()
        assert low.isfinite().all()
        assert high.isfinite().all()
        assert (low <= high).all()
        assert observer.calculate_qparams()[0].isfinite().all()

    @every_kind
    def test_an_empty_merge_is_a_reset_and_one_state_is_itself(self, kind: Kind, scheme: QScheme) -> None:
        observer = fed(kind(scheme), batches())
        merged = kind(scheme)
        merged.merge([kind(scheme).state_dict(), observer.state_dict()])
        assert same_state(merged, observer), "a rank that saw nothing does not count"
        merged.merge([kind(scheme).state_dict()])
        assert not merged.observed

    @pytest.mark.parametrize("kind", FAMILY)
    def test_unknown_settings_are_refused(self, kind: Any) -> None:
        with pytest.raises(ConfigError, match="nonfinite"):
            kind(QScheme(), nonfinite="ignore")
        with pytest.raises(ConfigError, match="QScheme"):
            kind("int8")

    @pytest.mark.parametrize("kind", FAMILY)
    @pytest.mark.parametrize("axis", [2, -3])
    def test_a_missing_axis_is_refused(self, kind: Kind, axis: int) -> None:
        with pytest.raises(ConfigError, match="axis"):
            kind(QScheme(axis=axis))(torch.ones(4, 4))


def batches_again() -> list[Tensor]:
    torch.manual_seed(0)
    return batches()


AO_BATCHES = [(4, 4, 3, 4), (2, 4, 3, 4), (1, 4, 1, 4)]


def ao_observer(name: str, scheme: QScheme, **settings: Any) -> nn.Module:
    import torch.ao.quantization.observer as ao

    shape = "per_channel" if scheme.per_channel else "per_tensor"
    if scheme.per_channel:
        name = name.replace("MinMax", "PerChannelMinMax")
        settings["ch_axis"] = scheme.axis
    observer: nn.Module = getattr(ao, name)(
        dtype=torch.qint8 if scheme.signed else torch.quint8,
        qscheme=getattr(torch, f"{shape}_{'symmetric' if scheme.symmetric else 'affine'}"),
        **({} if scheme.bits == 8 else {"quant_min": scheme.quant_min, "quant_max": scheme.quant_max}),
        **settings,
    )
    return observer


AO_SCHEMES = [
    scheme
    for bits in BITS
    for signed, symmetric in itertools.product((False, True), repeat=2)
    for axis in (None, 1, -1)
    # torch.ao rounds the middle of an unsigned grid down where its limits are given.
    if not (symmetric and not signed and bits < 8)
    for scheme in [QScheme(bits, signed, symmetric, axis)]
]


@pytest.mark.parametrize("scheme", AO_SCHEMES, ids=str)
@pytest.mark.parametrize(
    "kind, name, settings",
    [
        (MinMaxObserver, "MinMaxObserver", {}),
        (MovingAverageObserver, "MovingAverageMinMaxObserver", {}),
        (MovingAverageObserver, "MovingAverageMinMaxObserver", {"averaging_constant": 0.3}),
    ],
)
def test_extremes_equal_torch_ao_to_the_bit(kind: Kind, name: str, settings: dict[str, Any], scheme: QScheme) -> None:
    ours = kind(scheme, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = ao_observer(name, scheme, **settings)
        for index in range(10):
            shape = (1 + index % 3, 4, 2, 4)
            x = torch.randn(shape) * 10 ** (index % 4 - 2)
            ours(x)
            theirs(x)
        scale, zero_point = theirs.calculate_qparams()  # type: ignore[operator]
    low, high = ours.range()
    assert torch.equal(low, theirs.min_val)  # type: ignore[arg-type]
    assert torch.equal(high, theirs.max_val)  # type: ignore[arg-type]
    our_scale, our_zero_point = ours.calculate_qparams()
    assert torch.equal(our_scale.reshape(-1), scale)
    assert torch.equal(our_zero_point.reshape(-1), zero_point.to(torch.int32))


class TestMovingAverage:
    @pytest.mark.parametrize("constant", [0.01, 0.3, 1.0])
    def test_one_range_moves_as_one_of_several(self, constant: float) -> None:
        batches = [torch.randn(64, 5) * 10 ** torch.empty(64, 1).uniform_(-40, 38) for _ in range(20)]
        channels = fed(MovingAverageObserver(QScheme(axis=0), constant), batches)
        for index in range(64):
            one = fed(MovingAverageObserver(QScheme(), constant), [batch[index] for batch in batches])
            assert torch.equal(torch.stack(one.range()), torch.stack(channels.range())[:, index])

    @pytest.mark.parametrize("constant", [0.0, -0.1, 1.5, math.nan])
    def test_the_constant_is_a_weight(self, constant: float) -> None:
        with pytest.raises(ConfigError, match="averaging_constant"):
            MovingAverageObserver(QScheme(), constant)

    def test_follows_ranges_whose_difference_is_no_float32(self) -> None:
        observer = fed(MovingAverageObserver(QScheme(), 0.5), [torch.tensor([-3e38]), torch.tensor([3e38])])
        low, high = observer.range()
        assert low.item() == high.item() == pytest.approx(0.0, abs=1e32)

    def test_a_channel_begins_when_it_is_first_seen(self) -> None:
        observer = MovingAverageObserver(QScheme(axis=0), 0.5, nonfinite="skip")
        observer(torch.tensor([[1.0, 2.0], [math.nan, math.nan]]))
        with pytest.raises(CalibrationError, match="1 of 2 channels"):
            observer.calculate_qparams()
        observer(torch.tensor([[math.nan, math.nan], [5.0, 6.0]]))
        observer(torch.tensor([[2.0, 4.0], [5.0, 8.0]]))
        low, high = observer.range()
        assert low.tolist() == [1.5, 5.0]
        assert high.tolist() == [3.0, 7.0]

    def test_ranks_combine_by_their_mean(self) -> None:
        ranks = [
            fed(MovingAverageObserver(QScheme(axis=0)), [torch.tensor([[-n, n], [0.0, 2 * n]])]) for n in (1.0, 3.0)
        ]
        merged = MovingAverageObserver(QScheme(axis=0))
        merged.merge([*(rank.state_dict() for rank in ranks), merged.state_dict()])
        assert [bound.tolist() for bound in merged.range()] == [[-2.0, 0.0], [2.0, 4.0]]


SUMMING = [HistogramObserver, PercentileObserver, MSEObserver, EntropyObserver]


@pytest.mark.parametrize("kind", SUMMING)
@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.parametrize("count", [1, 40])
def test_a_share_of_the_sums_has_the_range_of_the_whole(kind: Kind, axis: int | None, count: int) -> None:
    # Ranks that resume go on with equal shares of what was seen before; a quarter is exact.
    observer = fed(kind(QScheme(bits=4, axis=axis)), [torch.randn(1, 2, count) * 3 for _ in range(3)])
    low, high = observer.range()
    for name in (name for name, reduction in observer.reductions.items() if reduction == "sum"):
        observer.set_state(name, observer.get_buffer(name) / 4)
    assert torch.equal(observer.range()[0], low)
    assert torch.equal(observer.range()[1], high)


@pytest.mark.parametrize("kind", SUMMING)
def test_channels_of_ranks_combine_to_those_of_all_data(kind: Kind) -> None:
    data = [torch.randn(2, 3, 50) * 3**step for step in range(6)]
    data[0][:, 0], data[3][:, 2] = math.nan, math.nan
    for x in data[1::2]:
        x[:, 1] = math.nan  # only the first rank sees this channel
    scheme = QScheme(axis=1)
    ranks = [fed(kind(scheme, nonfinite="skip"), data[rank::2]) for rank in (0, 1)]
    merged = kind(scheme)
    merged.merge([*(rank.state_dict() for rank in ranks), kind(scheme).state_dict()])
    whole = fed(kind(scheme, nonfinite="skip"), data)
    for ours, expected in zip(merged.state_dict().values(), whole.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, expected)  # counts are exact, the sums of float32 are rounded in another order
    assert merged.calculate_qparams()[0].shape == (3,)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_graph_records_the_dtype_that_came_in(nonfinite: str) -> None:
    observer = MinMaxObserver(QScheme(), nonfinite=nonfinite)  # type: ignore[arg-type]
    graph = torch.compile(lambda x: observer(x) + 1, backend="eager", fullgraph=True)
    graph(torch.randn(4, 4).bfloat16())
    assert observer.seen_dtype is torch.bfloat16


def test_min_max_of_ranks_is_that_of_all_data() -> None:
    data = batches(4)
    ranks = [fed(MinMaxObserver(QScheme(axis=1)), data[half::2]) for half in (0, 1)]
    merged = MinMaxObserver(QScheme(axis=1))
    merged.merge([rank.state_dict() for rank in ranks])
    assert same_state(merged, fed(MinMaxObserver(QScheme(axis=1)), data))


class TestAddState:
    class Percentile(Observer):
        """A statistic as a user writes it."""

        def __init__(self, scheme: QScheme) -> None:
            super().__init__(scheme)
            self.add_state("total", torch.tensor(0.0), reduction="sum")
            self.add_state("batches", torch.zeros(1), reduction="sum")

        def update(self, x: Tensor) -> None:
            assert not torch.is_grad_enabled()
            assert x.dtype is torch.float32
            self.set_state("total", self.get_buffer("total") + x.abs().quantile(0.99))
            self.set_state("batches", self.get_buffer("batches") + 1)

        def range(self) -> tuple[Tensor, Tensor]:
            bound = self.get_buffer("total") / self.get_buffer("batches")[0]
            return -bound, bound

    def test_a_statistic_of_ten_lines(self) -> None:
        ranks = [fed(self.Percentile(QScheme(symmetric=True)), [x.bfloat16()]) for x in batches()]
        merged = self.Percentile(QScheme(symmetric=True))
        assert not merged.observed
        merged.merge([rank.state_dict() for rank in ranks])
        expected = torch.stack([rank.range()[1] for rank in ranks]).mean()
        torch.testing.assert_close(merged.range()[1], expected)
        assert merged.reductions == {"total": "sum", "batches": "sum"}

    def test_an_unknown_reduction_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="reduction"):
            MinMaxObserver(QScheme()).add_state("x", torch.zeros(()), reduction="median")  # type: ignore[arg-type]

    def test_only_scalar_defaults_may_grow(self) -> None:
        state = HistogramObserver(QScheme(), bins=512).state_dict()
        with pytest.raises(RuntimeError, match="size mismatch"):
            HistogramObserver(QScheme(), bins=1024).load_state_dict(state)


def signed_bins(observer: HistogramObserver) -> dict[int, float]:
    """The counts by the multiple of the width at which the bin begins."""
    first = math.floor(min(observer.min_val.item(), 0.0) / observer.width.item())
    return {first + i: count for i, count in enumerate(observer.histogram.tolist()) if count}


def numpy_bins(data: list[Tensor], width: float) -> dict[int, float]:
    numbers, counts = np.unique(
        np.floor(torch.cat([x.flatten() for x in data]).double().numpy() / width), return_counts=True
    )
    return {int(number): float(count) for number, count in zip(numbers, counts, strict=True)}


def rms_errors(x: Tensor, low: Tensor, high: Tensor, scheme: QScheme) -> np.ndarray[Any, Any]:
    """The root mean square errors of the data on the grids of ranges (1-d), in float64."""
    scale, zero_point = (qparam.double().numpy() for qparam in calculate_qparams(low, high, scheme))
    data, errors = x.double().numpy(), []
    for step, middle in zip(scale, zero_point, strict=True):
        codes = np.clip(np.rint(data / step) + middle, scheme.quant_min, scheme.quant_max)
        errors.append(np.sqrt(np.mean(np.square(data - (codes - middle) * step))))
    return np.array(errors)


def candidates(x: Tensor, scheme: QScheme) -> tuple[Tensor, Tensor]:
    """Ranges that shrink from either end, whatever the other does."""
    low, high = x.min().clamp(max=0.0), x.max().clamp(min=0.0)
    if scheme.symmetric:
        bounds = torch.maximum(-low, high) * torch.logspace(0, -9, 300, base=2)
        return -bounds, bounds
    shrink = torch.logspace(0, -9, 28, base=2)
    lows, highs = (bound * shrink if bound else bound.view(1) for bound in (low, high))
    return lows.repeat_interleave(len(highs)), highs.repeat(len(lows))


def distributions() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(2000, generator=generator)
    spread = torch.rand(2000, generator=generator)
    return {
        "normal": normal,
        "relu": normal.relu(),
        "negative": -normal.abs(),
        "uniform": spread * 3 - 1,
        "laplace": normal.sign() * -torch.log(spread.clamp_min(1e-6)),
        "heavy tail": normal / spread.clamp_min(1e-3),
        "outlier": torch.cat((normal, torch.tensor([60.0]))),
        "far bulk": torch.cat((normal, normal[:500] * 0.1 + 40)),
        "lopsided": torch.cat((-normal.abs() * 0.05, normal.abs() * 5)),
        "away from zero": spread + 10,
        "two values": torch.tensor([0.0, 1.0] * 1000),
    }


HISTOGRAM_SCHEMES = [
    QScheme(bits, signed, symmetric) for bits in (2, 3, 4, 8) for signed, symmetric in ((True, True), (False, False))
]


class TestHistogram:
    @pytest.mark.parametrize("scheme", HISTOGRAM_SCHEMES, ids=str)
    @pytest.mark.parametrize("name", distributions())
    def test_the_range_is_as_good_as_brute_force_on_the_data(self, name: str, scheme: QScheme) -> None:
        x = distributions()[name]
        observer = HistogramObserver(scheme, bins=2**14)
        fed(observer, list(x.split(500)))
        (error,) = rms_errors(x, *(bound.view(1) for bound in observer.range()), scheme)
        best = rms_errors(x, *candidates(x, scheme), scheme).min()
        # The distance to the nearest code is 1-Lipschitz, so evening values out within bins moves the root mean square
        # error of any grid by at most one width: once for the range we chose and once for the best one.
        assert error <= best + 2 * observer.width.item()

    @pytest.mark.parametrize("scheme", HISTOGRAM_SCHEMES, ids=str)
    def test_clips_a_lone_outlier_but_not_a_crowd(self, scheme: QScheme) -> None:
        # 2 million values on steps of 200 / 255 have a squared error of 1e5, all of them at 0 of 7e5; one value that is
        # clipped from 200 to 1 has 4e4.
        observer = fed(HistogramObserver(scheme), [torch.linspace(-1, 1, 200_000)] * 10)
        observer(torch.tensor([200.0]))
        assert observer.range()[1] < 100
        fed(observer, [torch.full((200_000,), 200.0)] * 10)
        assert observer.range()[1] == pytest.approx(200.0, rel=2 / 2**scheme.bits)

    def test_symmetric_ranges_are_symmetric(self) -> None:
        low, high = fed(HistogramObserver(QScheme(symmetric=True)), [torch.randn(1000).relu()]).range()
        assert low == -high

    def test_one_sided_data_gives_all_codes_to_its_side(self) -> None:
        assert fed(HistogramObserver(QScheme()), [torch.rand(1000) + 5]).range()[0] == 0
        assert fed(HistogramObserver(QScheme()), [-torch.rand(1000) - 5]).range()[1] == 0

    @pytest.mark.parametrize("value", [0.0, 5.0, -5.0, 1e-42, 1e30, -1e30])
    def test_a_constant_is_its_own_range(self, value: float) -> None:
        observer = fed(HistogramObserver(QScheme(signed=False)), [torch.full((100,), value)] * 2)
        assert [bound.item() for bound in observer.range()] == [torch.tensor(value).item()] * 2

    @pytest.mark.parametrize("bins", [256, 1000, 2048])
    def test_counts_are_exact_however_the_range_grew(self, bins: int) -> None:
        data = [torch.randn(2000) * 3**step - step for step in range(-5, 6)]
        for order in (data, data[::-1]):
            observer = HistogramObserver(QScheme(), bins=bins)
            fed(observer, order)
            assert signed_bins(observer) == numpy_bins(data, observer.width.item())
            assert math.frexp(observer.width.item())[0] == 0.5, "the width is a power of two"
            spread = observer.max_val - observer.min_val
            assert bins / 3 * observer.width <= spread <= bins * observer.width

    def test_ranks_combine_into_the_histogram_of_all_data(self) -> None:
        data = [torch.randn(2000) * 3**step - step for step in range(-3, 3)]
        ranks = [fed(HistogramObserver(QScheme()), data[third::3]) for third in range(3)]
        whole = fed(HistogramObserver(QScheme()), data)
        merged = HistogramObserver(QScheme())
        merged.merge([rank.state_dict() for rank in ranks])
        assert same_state(merged, whole)

    def test_memory_is_bounded(self) -> None:
        observer = HistogramObserver(QScheme(), bins=512)
        sizes = set()
        for step in range(50):
            observer(torch.randn(100) * step)
            sizes.add(sum(state.numel() for state in observer.buffers()))
        assert sizes == {512 + 3}

    @pytest.mark.parametrize("bins", [0, 255, 2048.0, True])
    def test_bins_are_enough(self, bins: Any) -> None:
        with pytest.raises(ConfigError, match="bins"):
            HistogramObserver(QScheme(), bins=bins)


class TestPercentile:
    @pytest.mark.parametrize("name", distributions())
    @pytest.mark.parametrize("lower, upper", [(0, 99.9), (0.1, 100), (1, 99), (0, 100), (0.01, 99.99), (45, 55)])
    def test_the_ends_are_those_of_numpy_within_a_bin(self, name: str, lower: float, upper: float) -> None:
        x = distributions()[name]
        observer = fed(PercentileObserver(QScheme(), lower, upper), list(x.split(300)))
        ranks = [max(math.ceil(Fraction(str(percent)) * len(x) / 100), 1) for percent in (lower, upper)]
        expected = np.sort(x.numpy())[np.array(ranks) - 1]
        low, high = (bound.item() for bound in observer.range())
        width = observer.width.item()
        assert expected[0] - width <= low <= expected[0]
        assert expected[1] <= high <= expected[1] + width
        assert x.min() <= low <= high <= x.max()
        if lower == 0:
            assert low == x.min()
        if upper == 100:
            assert high == x.max()

    @pytest.mark.parametrize("lower, upper", [(-1, 99), (5, 5), (60, 40), (0, 101), (math.nan, 99)])
    def test_percentiles_are_percent(self, lower: float, upper: float) -> None:
        with pytest.raises(ConfigError, match="lower"):
            PercentileObserver(QScheme(), lower, upper)


class TestMSE:
    @pytest.mark.parametrize("scheme", HISTOGRAM_SCHEMES, ids=str)
    @pytest.mark.parametrize("power", [1.0, 2.0, 2.4])
    def test_the_range_is_that_of_brute_force(self, scheme: QScheme, power: float) -> None:
        for x in distributions().values():
            observer = fed(MSEObserver(scheme, power=power, steps=40), [x])
            low, high = min(x.min().item(), 0.0), max(x.max().item(), 0.0)
            bounds = torch.tensor(max(-low, high)) * (torch.arange(40, 0, -1) / 40)
            scale, zero_point = calculate_qparams(bounds.neg().clamp(min=low), bounds.clamp(max=high), scheme)
            values, errors = x.double().numpy(), []
            for step, middle in zip(scale.double().numpy(), zero_point.numpy(), strict=True):
                codes = np.clip(np.rint(values / step) + middle, scheme.quant_min, scheme.quant_max)
                errors.append((np.abs(values - (codes - middle) * step) ** power).sum())
            chosen = max(-observer.range()[0].item(), observer.range()[1].item()) / max(-low, high)
            error = errors[round((1 - chosen) * 40)]
            assert error <= min(errors) * (1 + 1e-4)  # sums of 2,000 float32 numbers against float64

    def test_batches_are_averaged_and_sampled(self) -> None:
        data = [torch.randn(5000) * (1 + step) for step in range(3)]
        ranges = [fed(MSEObserver(QScheme(bits=4)), [x]).range() for x in data]
        low, high = fed(MSEObserver(QScheme(bits=4)), data).range()
        torch.testing.assert_close(low, torch.stack([r[0] for r in ranges]).mean())
        torch.testing.assert_close(high, torch.stack([r[1] for r in ranges]).mean())
        x = data[0].sort().values  # every 50th value in order has nearly the same distribution
        low, high = fed(MSEObserver(QScheme(bits=2), samples=100), [x]).range()
        whole = fed(MSEObserver(QScheme(bits=2)), [x]).range()
        step = (x.max() - x.min()) / 100
        assert (low - whole[0]).abs() <= 10 * step
        assert (high - whole[1]).abs() <= 10 * step

    @pytest.mark.parametrize("scheme", [QScheme(), QScheme(axis=1)], ids=str)
    def test_a_sample_reaches_every_place_of_every_dimension(self, scheme: QScheme) -> None:
        # Every 32nd value of all is the first of each row; every 8th of a channel too. All rows and channels are equal.
        row = torch.linspace(-1, 1, 32)
        row[0] = 0.01
        x = row.expand(64, 4, 32).contiguous()
        numel = x.numel() if scheme.axis is None else x.numel() // 4
        low, high = fed(MSEObserver(scheme, samples=numel // 32), [x]).range()
        # All of a uniform distribution is worth covering: clipping one step of 100 saves less than it costs.
        assert (low <= -0.9).all()
        assert (high >= 0.9).all()

    @pytest.mark.parametrize("wrong", [{"power": 0.0}, {"power": math.inf}, {"steps": 1}, {"samples": True}])
    def test_settings_have_limits(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            MSEObserver(QScheme(), **wrong)


def divergence(values: np.ndarray[Any, Any], width: float, bound: int, scheme: QScheme) -> float:
    """The divergence of EntropyObserver's definition from the values themselves, bin by bin."""
    bins = np.floor(values / width).astype(int)
    inside = bins[(bins >= -bound) & (bins < bound)]
    start, end = max(-bound, min(bins.min(), 0)), min(bound, bins.max() + 1)
    end = max(end, min(bound, math.floor(min(values.min(), 0) / width) + 512))
    scale, zero_point = (
        float(q) for q in calculate_qparams(torch.tensor(float(start)), torch.tensor(float(end)), scheme)
    )
    p: dict[int, float] = {}
    for b in bins:
        place = min(max(b, start), end - 1)
        p[place] = p.get(place, 0.0) + 1
    q: dict[int, float] = {}
    members: dict[int, set[int]] = {}
    sums: dict[int, int] = {}
    for b in inside:
        code = int(np.clip(np.rint((b + 0.5) / scale) + zero_point, scheme.quant_min, scheme.quant_max))
        members.setdefault(code, set()).add(int(b))
        sums[code] = sums.get(code, 0) + 1
    for code, found in members.items():
        for b in found:
            q[b] = sums[code] / len(found) / max(len(inside), 1)
    return sum(n / len(bins) * math.log(n / len(bins) / max(q.get(b, 0.0), 1e-12)) for b, n in p.items())


class TestEntropy:
    @pytest.mark.parametrize(
        "scheme", [QScheme(bits=4, symmetric=True), QScheme(bits=4), QScheme(signed=False)], ids=str
    )
    @pytest.mark.parametrize("name", ["relu", "outlier", "away from zero"])
    def test_the_range_has_the_least_divergence(self, name: str, scheme: QScheme) -> None:
        x = distributions()[name][-400:]
        observer = fed(EntropyObserver(scheme, bins=512), [x])
        low, high = (bound.item() for bound in observer.range())
        width = observer.width.item()
        first = math.floor(min(x.min().item(), 0.0) / width)
        tried = magnitudes(observer.histogram.double(), first)
        found = [divergence(x.double().numpy(), width, bound, scheme) for bound in tried]
        chosen = max(-low, high) / width
        index = min(
            range(len(tried)), key=lambda i: abs(min(tried[i], max(-x.min().item(), x.max().item()) / width) - chosen)
        )
        assert found[index] <= min(found) + 1e-9

    def test_outliers_are_clipped(self) -> None:
        x = torch.cat((torch.randn(50_000, generator=torch.Generator().manual_seed(0)), torch.tensor([100.0])))
        low, high = fed(EntropyObserver(QScheme()), [x]).range()
        assert -low < 10
        assert 2 < high < 10


class TestFixedRange:
    def test_the_range_is_the_given_one_whatever_is_seen(self) -> None:
        observer = fed(FixedRangeObserver(QScheme(axis=0), -0.5, 2.0), [torch.randn(3, 4) * 100])
        assert [bound.tolist() for bound in observer.range()] == [[-0.5] * 3, [2.0] * 3]

    @pytest.mark.parametrize("low, high", [(1.0, 0.0), (math.nan, 1.0), (0.0, math.inf)])
    def test_it_is_a_range(self, low: float, high: float) -> None:
        with pytest.raises(ConfigError, match="low"):
            FixedRangeObserver(QScheme(), low, high)


def test_a_histogram_merges_its_own_state_too():
    observer = HistogramObserver(QScheme())
    observer(torch.linspace(-1, 2, 100))
    low, high = observer.range()
    own = observer.state_dict()  # the buffers themselves
    observer.merge([own, own])
    assert observer.histogram.sum() == 200
    assert observer.range() == (low, high)
