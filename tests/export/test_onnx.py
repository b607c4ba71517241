"""ONNX files: what is in them, and that ONNX Runtime and OpenVINO compute what the int8 model does."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from qlightning import QConfig, QScheme, convert, prepare, quantize_model
from qlightning.affine import sqnr
from qlightning.errors import ArtifactError, ConfigError
from qlightning.export import Metadata
from qlightning.export.onnx import save_onnx
from tests.callbacks.nets import samples
from tests.export.nets import encoder_int8, small_int8

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def int8():
    return small_int8()


@pytest.fixture(scope="module")
def path(int8, tmp_path_factory):
    path = tmp_path_factory.mktemp("onnx") / "small.onnx"
    save_onnx(int8, path, metrics={"accuracy": 0.5}, class_names=["red", "green", "blue"], source=__file__)
    return path


def outputs(path, *inputs, optimized=True):
    options = ort.SessionOptions()
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feed = {spec.name: x.numpy() for spec, x in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, feed)]


def step_of(logits):
    """A code of the 8-bit grid that logits of this range would have."""
    return (logits.max() - logits.min()) / 255


def test_the_graph_says_what_the_qdq_form_says(path):
    """Without optimizations ONNX Runtime computes each operator as it stands, in float."""
    x, _ = samples(300, seed=7)
    (found,) = outputs(path, x, optimized=False)
    expected = small_int8(backend="reference")(x)
    assert ((found - expected).abs() <= step_of(expected)).all()
    assert sqnr(expected, found) > 40


def test_onnx_runtime_gives_the_same_answers(path, int8):
    x, _ = samples(1000, seed=8)
    expected = int8(x)
    (found,) = outputs(path, x)
    assert torch.equal(found.argmax(1), expected.argmax(1))
    assert ((found - expected).abs() <= step_of(expected)).all()
    assert sqnr(expected, found) > 40


def test_openvino_gives_the_same_answers(path, int8):
    openvino = pytest.importorskip("openvino")
    x, _ = samples(1000, seed=8)
    expected = int8(x)
    model = openvino.compile_model(str(path), "CPU")
    found = torch.from_numpy(model([x.numpy()])[0].copy())
    # It rewrites the graph for its kernels (residual sums, say), so that the logits are not the same to the code.
    assert (found.argmax(1) == expected.argmax(1)).float().mean() >= 0.999
    assert model([x[:1].numpy()])[0].shape == (1, 3)


def test_the_batch_size_is_free(path, int8):  # C69
    for size in (1, 2, 7):
        x, _ = samples(size, seed=9)
        (found,) = outputs(path, x)
        assert found.shape == (size, 3)
        assert (found - int8(x)).abs().max() <= step_of(int8(samples(300, seed=7)[0]))


def test_weights_are_int8_and_biases_int32_in_the_file(path, int8):  # C68
    model = onnx.load(str(path))
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    sizes = {tensor.name: int(np.prod(tensor.dims)) for tensor in model.graph.initializer}
    made = {output: node for node in model.graph.node for output in node.output}
    layers = [node for node in model.graph.node if node.op_type in ("Conv", "Gemm")]
    assert len(layers) == 5
    for layer in layers:
        activation, weight, *bias = (made[name] for name in layer.input)
        assert [node.op_type for node in (activation, weight, *bias)] == ["DequantizeLinear"] * (2 + len(bias))
        assert kinds[weight.input[0]] == onnx.TensorProto.INT8
        for node in bias:
            assert kinds[node.input[0]] == onnx.TensorProto.INT32
    assert not any(node.op_type == "BatchNormalization" for node in model.graph.node)
    floats = sum(size for name, size in sizes.items() if kinds[name] == onnx.TensorProto.FLOAT)
    channels = sum(module.codes.shape[0] for module in int8.modules() if hasattr(module, "codes"))
    assert floats <= 3 * channels + 100  # scales of weights, scales of biases, and one for each activation
    codes = sum(module.codes.numel() for module in int8.modules() if hasattr(module, "codes"))
    stored = {made[layer.input[1]].input[0] for layer in layers}
    assert sum(sizes[name] for name in stored) == codes
    onnx.checker.check_model(str(path), full_check=True)


def test_the_file_says_what_it_is(path, int8):
    model = onnx.load(str(path))
    text = {prop.key: prop.value for prop in model.metadata_props}["qlightning"]
    found = Metadata.from_json(text, str(path))
    assert found.inputs[0].name == "x"
    assert found.inputs[0].shape == (-1, 3, 8, 8)
    assert [layer.name for layer in found.layers if layer.int8] == ["stem.0", "depthwise.0", "squeeze", "excite", "fc"]
    assert found.metrics == {"accuracy": 0.5}
    assert found.class_names == ("red", "green", "blue")
    assert len(found.source_sha256) == 64
    assert found.versions["torch"] == torch.__version__
    assert found.backend == "onednn" or found.backend == "reference"
    assert json.loads(text)["format"] == 1


def test_several_inputs_a_dict_and_float_parts(tmp_path):
    int8, batch = encoder_int8()
    found = save_onnx(int8, tmp_path / "encoder.onnx")
    assert [spec.name for spec in found.inputs] == ["tokens", "shift"]
    assert {layer.name for layer in found.layers if not layer.int8} == {"attention.out_proj"}
    results = outputs(tmp_path / "encoder.onnx", *batch)
    expected = int8(*batch)
    for result, name in zip(results, ("logits", "features"), strict=True):
        assert sqnr(expected[name], result) > 35


class Halves(nn.Module):
    """A part that cannot be traced stands between two that can."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return self.second(x) if x.sum() > 0 else x


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_exported_says_why(tmp_path):
    path = tmp_path / "net.onnx"
    parts = quantize_model(Halves(), [torch.randn(3, 4)])
    with pytest.raises(ConfigError, match=r"its int8 parts \(first, second\)"):
        save_onnx(parts, path)
    with pytest.raises(ConfigError, match="Convert it first"):
        save_onnx(nn.Linear(2, 2), path)
    with pytest.raises(ConfigError, match="Convert it first"):
        save_onnx(prepare(nn.Sequential(nn.Linear(2, 2))), path)
    int8 = small_int8()
    with pytest.raises(ConfigError, match="too many positional arguments"):
        save_onnx(int8, path, example_inputs=(torch.zeros(1, 3, 8, 8), torch.zeros(1)))
    with pytest.raises(ArtifactError, match=r"knows no call \(x=\*\)|knows no call \(None\)"):
        save_onnx(int8, path, example_inputs=(None,))
    with pytest.raises(ConfigError, match="example_inputs=int"):
        save_onnx(int8, path, example_inputs=3)
    with pytest.raises(ConfigError, match="metrics"):
        save_onnx(int8, path, metrics={"accuracy": "high"})
    with pytest.raises(FileNotFoundError):
        save_onnx(int8, path, source=tmp_path / "none.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch, int8):
    path = tmp_path / "net.onnx"
    path.write_bytes(b"old")

    def broken(proto, name):
        with open(name, "wb") as file:
            file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(onnx, "save_model", broken)
    with pytest.raises(KeyboardInterrupt):
        save_onnx(int8, path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_exporting_leaves_the_model_as_it_was(int8, tmp_path):
    x, _ = samples(8)
    before = int8(x)
    save_onnx(int8, tmp_path / "net.onnx")
    assert torch.equal(int8(x), before)
    prepared = prepare(nn.Sequential(nn.Linear(4, 2)))
    prepared(torch.randn(8, 4))
    again = convert(prepared)
    assert again(torch.zeros(1, 4)).shape == (1, 2)


@pytest.mark.parametrize(
    "scheme", [QScheme(bits=4), QScheme(bits=7, signed=False), QScheme(axis=1, signed=False)], ids=str
)
def test_grids_of_fewer_codes_and_of_channels(tmp_path, scheme):
    """QuantizeLinear saturates at the ends of its dtype alone: values are clamped before."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 3))
    config = QConfig(activation=scheme)
    int8 = quantize_model(net, [samples(32)[0]], qconfig=config, backend="reference", exclude=["4"])
    save_onnx(int8, tmp_path / "net.onnx")
    x, _ = samples(300, scale=2.0, seed=7)  # beyond the ranges
    (found,) = outputs(tmp_path / "net.onnx", x)
    expected = int8(x)
    step = (expected.max() - expected.min()) / (scheme.quant_max - scheme.quant_min)
    assert ((found - expected).abs() <= step).all()
    assert sqnr(expected, found) > 20  # -1 to 7 dB without the clamp


def test_grids_of_fewer_codes_for_each_channel_are_refused(tmp_path):
    config = QConfig(activation=QScheme(bits=4, axis=1))
    int8 = quantize_model(nn.Sequential(nn.Conv2d(3, 8, 3)), [samples(8)[0]], qconfig=config, backend="reference")
    with pytest.raises(ArtifactError, match="fewer than 8 bits a channel"):
        save_onnx(int8, tmp_path / "net.onnx")


def test_weights_with_zero_points_are_warned_of(tmp_path):
    config = QConfig(weight=QScheme(axis=0))
    int8 = quantize_model(nn.Sequential(nn.Conv2d(3, 8, 3)), [samples(8)[0]], qconfig=config, backend="reference")
    with pytest.warns(UserWarning, match="zero points, which the kernels of ONNX Runtime"):
        save_onnx(int8, tmp_path / "net.onnx")
    x, _ = samples(20, seed=7)
    assert sqnr(int8(x), outputs(tmp_path / "net.onnx", x, optimized=False)[0]) > 40
