"""The backend onednn: what its calls compute, what they may overwrite, and that they share nothing between threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qlightning import calibrate, convert, prepare, report
from qlightning.backends import available, kernels, onednn_images
from qlightning.backends.onednn_calls import Conv, Geometry, PackedWeights, Result
from qlightning.nn.quantized import QuantizedLayer

pytestmark = pytest.mark.skipif("onednn" not in available(), reason="no onednn here")

# Sums and products of these are no ties of the results' grid, so that results are exact.
X, Y, GATE, OUT = (0.10131, 3), (0.13377, 9), (0.010317, 5), (0.20713, 7)
SHAPES = [(1, 8, 5, 5), (16, 72, 28, 28), (16, 480, 14, 14), (2, 33, 7, 7), (3, 24, 56, 56), (0, 8, 5, 5)]


def codes(*shape: int) -> Tensor:
    found = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))
    return found.contiguous(memory_format=torch.channels_last)


def values(found: Tensor, grid: tuple[float, int]) -> Tensor:
    return (found.double() - grid[1]) * grid[0]


def on_grid(exact: Tensor) -> Tensor:
    return ((exact / OUT[0]).round() + OUT[1]).clamp(0, 255).to(torch.uint8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("zero_point", [0, 3])
def test_images_are_added_scaled_and_averaged_exactly(shape: tuple[int, ...], zero_point: int) -> None:
    grid = (X[0], zero_point)
    x, y, gate = codes(*shape), codes(*shape), codes(*shape[:2], 1, 1)
    total = values(x, grid) + values(y, Y)
    product = values(x, grid) * values(gate, GATE)
    assert torch.equal(onednn_images.binary("add", x, *grid, y, *Y, *OUT), on_grid(total))
    assert torch.equal(onednn_images.binary("add_relu", x, *grid, y, *Y, *OUT), on_grid(total.relu()))
    assert torch.equal(onednn_images.binary("mul", x, *grid, gate, *GATE, *OUT), on_grid(product))
    assert torch.equal(onednn_images.binary("mul", gate, *GATE, x, *grid, *OUT), on_grid(product))
    averages = onednn_images.average(x, *grid, *OUT)
    off = averages.int() - on_grid(values(x, grid).mean((2, 3), keepdim=True)).int()
    assert off.abs().amax() <= 1 if off.numel() else averages.shape == (*shape[:2], 1, 1)
    assert torch.equal(x, codes(*shape))
    assert torch.equal(y, codes(*shape))


@pytest.mark.parametrize("zero_point, ends", [(0, (0, 255)), (131, (0, 255)), (31, (0, 63))])
@pytest.mark.parametrize("shape", [(2, 3, 37, 41), (3, 8, 5), (40, 3, 64, 64), (0, 3, 8, 8), (1, 3, 1, 1)], ids=str)
def test_pixels_have_the_codes_of_the_image(shape: tuple[int, ...], zero_point: int, ends: tuple[int, int]) -> None:
    x = 3 * torch.randn(shape)
    x.flatten()[:2] = torch.tensor([float("inf"), -1e30])[: x.numel()]
    expected = torch.ops.quantized_decomposed.quantize_per_tensor(x, 0.023, zero_point, *ends, torch.uint8)
    assert torch.equal(kernels.quantize(x, 0.023, zero_point, *ends), expected)
    pixels = kernels.quantize_pixels(x, 0.023, zero_point, *ends)
    assert torch.equal(pixels.narrow(-3, 0, 3), expected)
    if x.dim() == 4:
        assert pixels.is_contiguous(memory_format=torch.channels_last)


def test_pixels_of_other_images_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"three channels.*\(2, 4, 8, 8\)"):
        kernels.quantize_pixels(torch.randn(2, 4, 8, 8), 0.1, 0, 0, 255)


class Residual(nn.Module):
    """Two convolutions between a first and a last one, and what is done with them."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self, self.first(x).relu()))


def read_later(net: Any, y: Tensor) -> Tensor:
    total = (net.b(net.a(y).relu()) + y).relu()
    return (net.b(total) + y).relu()


def viewed(net: Any, y: Tensor) -> Tensor:
    view = y.flatten(2)
    return (net.b(net.a(y).relu()) + y).relu() + view.view(-1, 8, 6, 6)


RESIDUALS: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[bool]]] = {
    "read by the sum last": (lambda net, y: (net.b(net.a(y).relu()) + y).relu(), [True]),
    "read by another sum": (read_later, [False, True]),
    "the operand too": (lambda net, y: (net.a(y) + y).relu(), [False]),
    "seen through a view": (viewed, [False]),
    "of a layer each": (lambda net, y: net.a(y) + net.b(y), [True]),
}


@pytest.mark.parametrize("name", RESIDUALS)
@torch.no_grad()
def test_only_what_nothing_reads_any_more_is_overwritten(name: str) -> None:
    function, overwritten = RESIDUALS[name]
    torch.manual_seed(0)
    net, x = Residual(function).eval(), torch.randn(4, 8, 6, 6)
    calibrate(prepare(net, backend="onednn", mode="ptq"), [x])
    int8, reference = convert(net), convert(net, backend="reference")
    (program,) = int8.__dict__["_captured"].programs[next(iter(int8.__dict__["_captured"].programs))]
    sums = [node for node in program.graph.nodes if node.target is kernels.call and len(node.args) == 4]
    assert [node.args[3] for node in sums] == overwritten
    before = x.clone()
    expected, found = reference(x), int8(x)
    assert torch.equal(x, before)
    assert torch.equal(found, int8(x))
    assert (expected - found).abs().max() <= 0.05 * expected.abs().max()


@torch.no_grad()
def test_threads_and_shapes_do_not_disturb_each_other() -> None:
    torch.manual_seed(0)
    net = Residual(read_later).eval()
    inputs = [torch.randn(n, 8, size, size) for n in (1, 2, 5) for size in (6, 9)]
    calibrate(prepare(net, backend="onednn", mode="ptq"), inputs)
    expected = [convert(net)(x) for x in inputs]
    int8 = convert(net)

    def run(number: int) -> bool:
        with torch.no_grad():
            return torch.equal(int8(inputs[number % len(inputs)]), expected[number % len(inputs)])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(120)))


@pytest.mark.parametrize("first", [0, 3])
def test_weights_packed_for_any_shape_and_zero_point_are_right(first: int) -> None:
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (16, 8, 3, 3), dtype=torch.int8)
    layer = QuantizedLayer(weight, torch.rand(16) / 1e3 + 1e-4, torch.zeros(16, dtype=torch.int32), torch.randn(16))
    for zero_point in (first, 3 - first):
        geometry = Geometry(0.1, zero_point, [1, 1], [1, 1], [1, 1], 1)
        run = Conv(geometry, Result())(layer)
        for shape in ((1, 8, 7, 7), (16, 8, 7, 7), (3, 8, 5, 9), (1, 8, 7, 7), (2, 8, 11, 4)):
            x = codes(*shape)
            exact = torch.nn.functional.conv2d(
                values(x, (0.1, zero_point)),
                weight.double() * layer.scale.double().view(-1, 1, 1, 1),
                layer.bias.double(),
                padding=1,
            )
            torch.testing.assert_close(run(x).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2])
def test_weights_are_packed_once_for_a_shape(
    count: int, threads: Callable[[int], None], capfd: pytest.CaptureFixture[str]
) -> None:
    threads(count)
    for zero_point in (0, 3):
        for out, *shape in ((672, 1, 168, 1, 1), (168, 1, 672, 1, 1), (20, 1, 480, 1, 1), (32, 4, 8, 14, 14)):
            weight = torch.randint(-127, 128, (out, shape[1], 1, 1), dtype=torch.int8)
            layer = QuantizedLayer(weight, torch.ones(out), torch.zeros(out, dtype=torch.int32), torch.ones(out))
            run = Conv(Geometry(0.1, zero_point, [1, 1], [0, 0], [1, 1], 1), Result(0.1, 3, torch.uint8))(layer)
            x = codes(*shape)
            run(x)
            with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
                run(x)
    calls = [line for line in capfd.readouterr().out.splitlines() if ",exec," in line]
    assert len(calls) == sum(",convolution," in line for line in calls) == 8


def test_weights_are_kept_for_few_shapes() -> None:
    layer = QuantizedLayer(
        torch.ones(4, 4, 1, 1, dtype=torch.int8), torch.ones(4), torch.zeros(4, dtype=torch.int32), None
    )
    weights = PackedWeights(Geometry(0.1, 0, [1, 1], [0, 0], [1, 1], 1), layer)
    for batch in range(1, 9):
        weights.add(1, torch.Size((batch, 4, 6, 6)))
    assert [batch for batch in range(1, 9) if weights.find((1, torch.Size((batch, 4, 6, 6)))) is not None] == [1, 2]
    weights.add(2, torch.Size((5, 4, 6, 6)))
    assert weights.find((2, torch.Size((5, 4, 6, 6)))) is not None
    assert weights.find((1, torch.Size((1, 4, 6, 6)))) is None


@torch.no_grad()
def test_gates_stay_in_int8() -> None:
    torch.manual_seed(0)

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = nn.AdaptiveAvgPool2d(1)
            self.first, self.gate, self.last = nn.Conv2d(8, 16, 3), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = nn.functional.hardswish(self.first(x))
            return self.last(y * nn.functional.hardsigmoid(self.gate(self.pool(y))))

    net, x = Gated().eval(), torch.randn(4, 8, 12, 12)
    calibrate(prepare(net, backend="onednn", mode="ptq"), [x])
    int8 = convert(net)
    assert {row.name: row.kernel for row in report(int8).layers}["gate"] == "onednn qconv2d+hardsigmoid to uint8"
    (program,) = int8.__dict__["_captured"].programs[next(iter(int8.__dict__["_captured"].programs))]
    assert not [node for node in program.graph.nodes if node.target is kernels.dequantize]
    expected = convert(net, backend="reference")(x)
    assert (expected - int8(x)).abs().max() <= 0.02 * expected.abs().max()
