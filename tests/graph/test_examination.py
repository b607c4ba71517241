"""What the report says of layers, against references worked out here."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qlightning
from qlightning import QConfig, QScheme, calibrate, convert, prepare, quantize_model
from qlightning.errors import CalibrationError, ConfigError
from qlightning.graph.calibrate import run_batches
from qlightning.graph.code_use import CodeUse
from qlightning.graph.examination import examine
from qlightning.graph.recording import Call
from qlightning.steps import BiasCorrection, CrossLayerEqualization
from qlightning.steps.base import apply_steps
from qlightning.steps.subject import Subject
from tests.html.documents import parse


class Net(nn.Module):
    """Blocks that write in place, a residual sum, a depthwise layer with a negative gamma."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.bn2 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(8, 4)
        for bn in (self.bn1, self.bn2):
            nn.init.uniform_(bn.weight, -1.5, 1.5)
            nn.init.uniform_(bn.running_var, 0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(x + self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


@pytest.fixture(scope="module")
def made() -> tuple[nn.Module, nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    net = Net().eval()
    images = torch.randn(8, 3, 12, 12)
    prepared = prepare(copy.deepcopy(net), mode="ptq", backend="reference")
    calibrate(prepared, [images])
    return net, prepared, convert(prepared), images


def ratio(exact: Tensor, found: Tensor) -> float:
    a, b = exact.double().numpy(), found.double().numpy()
    return float(10 * np.log10((a**2).sum() / ((a - b) ** 2).sum()))


def test_weights_are_compared_with_batchnorm_folded_in(made) -> None:
    net, prepared, int8, _ = made
    found = examine(int8, prepared).layers
    for name, bn in (("conv1", net.bn1), ("conv2", net.bn2), ("fc", None)):
        exact = net.get_submodule(name).weight.detach().double()
        if bn is not None:
            exact = exact * (bn.weight / (bn.running_var + bn.eps).sqrt()).detach().double().view(-1, 1, 1, 1)
        weight = int8.get_submodule(name).weight()
        assert found[name].weight_sqnr == pytest.approx(ratio(exact, weight.dequantize()), abs=1e-3)
        channels = [ratio(a, b) for a, b in zip(exact, weight.dequantize(), strict=True)]
        worst, value = found[name].worst_channel
        assert worst == int(np.argmin(channels))
        assert value == pytest.approx(min(channels), abs=1e-3)
        assert found[name].weight.used == len(weight.int_repr().unique())
        assert sum(found[name].weight.counts) == weight.numel()


def test_results_are_those_of_the_two_models(made) -> None:
    net, prepared, int8, images = made
    found = examine(int8, prepared, {"": [Call((images,), {})]})
    with torch.no_grad():
        assert found.output_sqnr == pytest.approx(ratio(net(images), int8(images)), abs=1e-3)
        assert found.layers["fc"].output_sqnr == pytest.approx(found.output_sqnr, abs=1e-9)
        first = nn.Sequential(net.conv1, net.bn1)
        exact = first(images)
        stem = quantize_model(first, [images], backend="reference")(images)
    assert found.layers["conv1"].output_sqnr == pytest.approx(ratio(exact, stem), abs=1e-3)
    assert found.samples == 8
    assert 0 <= found.same_answer <= 1


def test_grids_say_what_rounding_to_them_does(made) -> None:
    _, prepared, int8, images = made
    found = examine(int8, prepared, {"": [Call((images,), {})]})
    grid = found.grids[found.layers["conv1"].grid]
    steps = images.double().numpy() / grid.step + grid.zero_point
    codes = np.clip(np.rint(steps), 0, 255)
    assert grid.sqnr == pytest.approx(ratio(images, torch.from_numpy((codes - grid.zero_point) * grid.step)), abs=1e-3)
    assert grid.codes.used == len(np.unique(codes))
    assert grid.codes.above == pytest.approx(float((np.rint(steps) > 255).mean()), abs=1e-9)
    assert sum(grid.codes.counts) == images.numel()
    assert (grid.low, grid.high) == pytest.approx((-grid.zero_point * grid.step, (255 - grid.zero_point) * grid.step))


def test_nothing_is_changed_by_a_look() -> None:
    torch.manual_seed(0)
    net = prepare(Net(), backend="reference").train()
    net(torch.randn(4, 3, 8, 8))
    int8 = convert(net)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    modes = [module.training for module in net.modules()]
    random = torch.get_rng_state()
    examine(int8, net, {"": [Call((torch.ones(2, 3, 8, 8),), {})]})
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert [module.training for module in net.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)


def test_layers_below_a_forward_that_cannot_be_traced_are_looked_into() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).mean((2, 3))
            return self.second(x) if x.sum() > -1e9 else x

    images = [torch.randn(4, 3, 8, 8)]
    net = Branching().eval()
    with pytest.warns(UserWarning, match="in one piece"):
        int8 = quantize_model(net, images)
    report = qlightning.report(int8)
    page = _page(report, data=images, model=net)
    assert {layer.name for layer in page.layers} == {"first.0", "second"}
    assert all(layer.weight_sqnr > 20 and layer.output_sqnr > 20 for layer in page.layers)


def _page(report, data=None, model=None, figures=None, sensitivity=None, latency=False):
    from qlightning.graph.dossier import page_of

    return page_of(report, data, model, figures or {}, sensitivity, latency)


@pytest.mark.parametrize("scheme", [QScheme(signed=False), QScheme(bits=4, signed=True), QScheme(bits=7, signed=False)])
def test_codes_and_what_lies_beyond_are_all_counted(scheme: QScheme) -> None:
    use = CodeUse(scheme.quant_min, scheme.quant_max, margin=True)
    x = torch.linspace(-300, 300, 6001) / 10
    use.add(x, 0.1, 5)
    found = use.result()
    exact = np.rint(x.double().numpy() / 0.1) + 5
    assert sum(found.counts) == 6001
    assert found.below == pytest.approx((exact < scheme.quant_min).mean())
    assert found.above == pytest.approx((exact > scheme.quant_max).mean())
    bins = np.floor((exact - found.first) / found.width).clip(0, len(found.counts) - 1)
    inside = (exact >= scheme.quant_min) & (exact <= scheme.quant_max)
    for index in range(len(found.counts)):
        first = found.first + index * found.width
        if scheme.quant_min <= first <= scheme.quant_max - found.width:
            assert found.counts[index] == int(((bins == index) & inside).sum())


def test_the_file_has_every_layer_and_says_what_it_lacks(made, tmp_path) -> None:
    net, _, _, images = made
    int8 = quantize_model(net, [images], qconfig=QConfig(exclude=("fc",)))
    report = qlightning.report(int8)
    bare = parse(report.save(tmp_path / "a" / "bare.html").read_text()).text()
    full = parse(report.save(tmp_path / "full.html", data=[images], model=net, latency=True).read_text())
    for text in (bare, full.text()):
        assert all(layer.name in text for layer in report.layers)
        assert "excluded by" in text
    assert "save(path, data=batches)" in bare
    assert "float_model" in bare
    assert "save(path, data=batches)" not in full.text()
    charts = full.find("figure", class_="chart")
    assert len(charts) == 1 + 2 + 2  # of the net, and for each int8 layer its weight and its input
    assert all(path.attributes["d"] for chart in charts for path in chart.find("path", class_="bars"))


def test_figures_and_sensitivities_of_others_are_shown(made, tmp_path) -> None:
    _, prepared, _, _ = made
    text = qlightning.report(prepared).save(
        tmp_path / "r.html",
        figures={"float": {"accuracy": 0.9173, "latency_ms": 2.0}, "fake_quant": {"accuracy": 0.9171}},
        sensitivity={"conv1": 1.5, "conv2": 0.25},
    )
    text = parse(text.read_text()).text()
    for shown in ("91.73", "91.71", "2.00 ms", "1.5", "0.25"):
        assert shown in text


@pytest.mark.parametrize("mode", ["only", "all_but"])
def test_a_sensitivity_analysis_is_shown_worst_first(made, tmp_path, mode) -> None:
    net, _, int8, images = made
    costs = qlightning.sensitivity(net, [images], mode=mode, backend="reference", progress=False)
    document = parse(qlightning.report(int8).save(tmp_path / "r.html", sensitivity=costs).read_text())
    names = [bar.text() for bar in document.find("span", class_="who")]
    assert names == [layer.name for layer in costs.ranking]
    assert f"{costs.sqnr_db:.1f} dB" in document.text()


def test_steps_are_shown_and_the_output_is_compared_with_the_original(tmp_path) -> None:
    torch.manual_seed(0)
    net = Net().eval()
    images = [torch.randn(8, 3, 12, 12)]
    prepared = prepare(copy.deepcopy(net), mode="ptq", backend="reference")
    steps = [CrossLayerEqualization(), BiasCorrection()]
    subject = Subject({"": prepared}, lambda context: run_batches(prepared, images, context))
    apply_steps(steps, subject, before_calibration=True)
    calibrate(prepared, images)
    apply_steps(steps, subject, before_calibration=False)
    int8 = convert(prepared)
    before = {name: tensor.clone() for name, tensor in prepared.state_dict().items()}
    found = examine(int8, prepared, {"": [Call((images[0],), {})]})
    with torch.no_grad():
        assert found.output_sqnr == pytest.approx(ratio(net(images[0]), int8(images[0])), abs=1e-2)
    assert all(torch.equal(before[name], tensor) for name, tensor in prepared.state_dict().items())
    text = parse(qlightning.report(prepared).save(tmp_path / "r.html").read_text()).text()
    for step in qlightning.report(prepared).steps:
        assert step.name in text
        assert all(row.what in text for row in step.layers)


def test_wrong_arguments_are_named_before_anything_is_written(made, tmp_path) -> None:
    _, _, int8, images = made
    path = tmp_path / "r.html"
    report = qlightning.report(int8)
    for arguments, message in (
        ({"figures": {"int4": {}}}, "int4"),
        ({"data": images}, "iterable of batches"),
        ({"sensitivity": 3}, "sensitivity"),
    ):
        with pytest.raises(ConfigError, match=message):
            report.save(path, **arguments)
    with pytest.raises(CalibrationError, match="no range was observed"):
        qlightning.report(prepare(Net())).save(path, data=[images])
    with pytest.raises(IsADirectoryError):
        report.save(tmp_path)
    assert not path.exists()
    unseen = parse(qlightning.report(prepare(Net())).save(path).read_text()).text()
    assert "no range was observed yet" in unseen


def test_a_report_can_be_copied_and_pickled(made) -> None:
    import pickle

    _, _, int8, _ = made
    report = qlightning.report(int8)
    assert copy.deepcopy(report) == report
    again = pickle.loads(pickle.dumps(report))
    assert again == report
    assert again.source.int8 == {}
    assert math.isfinite(len(str(again)))
