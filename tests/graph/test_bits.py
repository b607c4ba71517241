"""Fewer bits than 8: trained and calibrated, on the kernels and in files, with the codes that the scheme has."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qlightning import QConfig, QScheme, calibrate, convert, load, prepare, quantize_model, report, save
from qlightning.affine import sqnr
from qlightning.nn.quantized import QuantizedLayer


def weight(bits: int) -> QScheme:
    return QScheme(bits=bits, symmetric=True, axis=0, narrow_range=True)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU(), nn.Conv2d(16, 32, 1), nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 8),
    )  # fmt: skip
    return net.eval()


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(8, 3, 8, 8) for _ in range(2)]


def check_codes(int8: nn.Module, bits: int) -> None:
    layers = [layer for layer in int8.modules() if isinstance(layer, QuantizedLayer)]
    assert len(layers) == 4
    highest = 2 ** (bits - 1) - 1
    for layer in layers:
        codes = layer.weight().int_repr()
        assert codes.dtype == torch.int8
        assert codes.abs().max() == highest  # the extreme of every channel is on the outermost code


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_trained_weights_of_few_bits_run_as_they_were_trained(
    net: nn.Module, batches: list[Tensor], bits: int, tmp_path: Path
) -> None:
    prepared = prepare(copy.deepcopy(net), QConfig(weight=weight(bits)), backend="reference").train()
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    for x in batches:
        optimizer.zero_grad()
        prepared(x).square().mean().backward()
        optimizer.step()
    prepared.eval()
    int8 = convert(prepared)
    check_codes(int8, bits)
    # The same numbers summed in another order: ties aside, float32 is all that parts them.
    assert sqnr(prepared(batches[0]).detach(), int8(batches[0])) > 60
    save(int8, tmp_path / "net.pt2")
    assert torch.equal(load(tmp_path / "net.pt2", backend="reference")(batches[0]), int8(batches[0]))


def test_onnx_has_the_codes_too(net: nn.Module, batches: list[Tensor], tmp_path: Path) -> None:
    bits = 3
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    int8 = quantize_model(net, batches, qconfig=QConfig(weight=weight(bits)), backend="reference")
    save(int8, tmp_path / "net.onnx")
    model = onnx.load(tmp_path / "net.onnx")
    stored = [onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.data_type == onnx.TensorProto.INT8]
    weights = [codes for codes in stored if codes.ndim > 1]
    assert len(weights) == 4
    assert all(abs(codes.astype(int)).max() == 2 ** (bits - 1) - 1 for codes in weights)
    (found,) = reference.ReferenceEvaluator(model).run(None, {model.graph.input[0].name: batches[0].numpy()})
    assert sqnr(int8(batches[0]), torch.from_numpy(found)) > 60


def test_each_bit_of_a_weight_is_worth_what_its_step_is() -> None:
    """Noise goes with the square of the step, so 20 log10 of the ratio of steps: about 6 dB a bit."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(512, 512, bias=False))
    x = [torch.randn(256, 512)]
    exact = net(x[0]).detach()

    def noise(bits: int) -> float:
        prepared = calibrate(
            prepare(copy.deepcopy(net), QConfig(weight=weight(bits)), backend="reference", mode="ptq"), x
        )
        for module in prepared.modules():
            if type(module).__name__ == "FakeQuantize":
                module.fake_quant_enabled = False  # of the input: the weight alone rounds
        return sqnr(exact, prepared(x[0]).detach())

    found = {bits: noise(bits) for bits in range(3, 9)}
    for bits in range(4, 9):
        step_ratio = (2 ** (bits - 1) - 1) / (2 ** (bits - 2) - 1)
        # Errors of 262144 weights, which are uniform: their power is known to far less than a tenth of a dB.
        assert found[bits] - found[bits - 1] == pytest.approx(20 * math.log10(step_ratio), abs=0.1)


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_activations_of_few_bits_have_as_many_values(net: nn.Module, batches: list[Tensor], bits: int) -> None:
    config = QConfig(activation=QScheme(bits=bits, signed=False))
    prepared = calibrate(prepare(copy.deepcopy(net), config, backend="reference", mode="ptq"), batches)
    seen: list[Tensor] = []
    for name, module in prepared.named_modules():
        if type(module).__name__ == "FakeQuantize":
            module.register_forward_hook(lambda m, args, out: seen.append(out.detach()))
            assert module.scheme.bits == bits, name
    fake = prepared(batches[0]).detach()
    assert seen
    assert all(len(values.unique()) <= 2**bits for values in seen)
    assert sqnr(fake, convert(prepared)(batches[0])) > 40


def test_a_layer_has_the_bits_that_its_override_says(net: nn.Module, batches: list[Tensor]) -> None:
    config = QConfig(overrides={"5": QConfig(weight=weight(3)), nn.Linear: QConfig(weight=weight(4))})
    int8 = quantize_model(net, batches, qconfig=config, backend="reference")
    assert [row.scheme.split()[0] for row in report(int8).layers] == ["int8", "int8", "int3", "int4"]
    assert int(int8[5].weight().int_repr().abs().max()) == 3


def test_the_report_says_that_few_bits_run_on_kernels_of_8(net: nn.Module, batches: list[Tensor]) -> None:
    config = QConfig(overrides={"5": QConfig(weight=weight(3))})
    prepared = calibrate(prepare(copy.deepcopy(net), config, backend="reference", mode="ptq"), batches)
    for model in (prepared, convert(prepared)):
        (note,) = [note for note in report(model).notes if "bits" in note]
        assert note == (
            "Weights of less than 7 bits (5) are stored in 8 bits and run on the kernels of 8: as exact as fewer bits "
            "are, and no faster or smaller."
        )
    eight = quantize_model(net, batches, backend="reference")
    assert not [note for note in report(eight).notes if "bits" in note]
