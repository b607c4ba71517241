"""Int8 state dicts, ONNX and OpenVINO files that are damaged or forged: a typed error, and nothing else."""

import json
import random

import pytest
import safetensors
import safetensors.torch
import torch

from qlightning import load, load_tensors, save
from qlightning.errors import QuantizationError
from qlightning.export import metadata_of
from qlightning.tensor_file import read_safetensors, write_safetensors
from tests.callbacks.nets import samples
from tests.export.nets import Small, small_int8
from tests.export.test_fuzz import _bounded_memory, mutated  # noqa: F401  a fixture


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "net.safetensors"
    save(small_int8(), path)
    return path


def outcome(path, expected):
    x, _ = samples(4, seed=3)
    try:
        net = load(path, model=Small())
    except QuantizationError as error:
        return type(error).__name__ if path.name in str(error) else str(error)
    return "same" if torch.equal(net(x), expected) else "other"


@pytest.fixture(scope="module")
def expected(state):
    return load(state, model=Small())(samples(4, seed=3)[0])


@pytest.mark.parametrize("count", [300, pytest.param(4000, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_damaged_state_dicts_are_noticed_or_do_not_matter(state, expected, tmp_path, count):
    generator, content, found = random.Random(0), state.read_bytes(), set()
    for _ in range(count):
        (tmp_path / "net.safetensors").write_bytes(mutated(content, generator))
        found.add(outcome(tmp_path / "net.safetensors", expected))
    assert found <= {"same", "ArtifactError"}
    assert "ArtifactError" in found


VALUES = [None, True, -1, 10**30, 1e308, float("nan"), "x" * 1000, [], [[]], {}, {"*": "*"}, "*", "__class__", "../x"]


def altered(value, generator):
    """JSON with one value, somewhere in it, replaced, dropped or doubled."""
    if isinstance(value, dict) and value and generator.random() < 0.9:
        key = generator.choice(sorted(value))
        if generator.random() < 0.1:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: altered(value[key], generator)}
    if isinstance(value, list) and value and generator.random() < 0.9:
        i = generator.randrange(len(value))
        if generator.random() < 0.1:
            return [*value, value[i]]
        return [*value[:i], altered(value[i], generator), *value[i + 1 :]]
    return generator.choice(VALUES)


@pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_forged_settings_lead_to_typed_errors(state, tmp_path, expected, count):
    """With a checksum that fits: whatever is loaded computes, and all else is refused."""
    generator, found = random.Random(1), set()
    tensors, metadata = read_safetensors(state)
    for _ in range(count):
        key = generator.choice(["qlightning", "qlightning.state", "qlightning.state"])
        forged = {**metadata, key: json.dumps(altered(json.loads(metadata[key]), generator))}
        write_safetensors(tmp_path / "net.safetensors", tensors, forged)
        found.add(outcome(tmp_path / "net.safetensors", expected))
    assert found <= {"same", "other", "ArtifactError", "ConfigError", "BackendError"}
    assert {"same", "ArtifactError"} <= found


def test_forged_tensors_lead_to_typed_errors(state, tmp_path, expected):
    tensors, metadata = read_safetensors(state)
    path = tmp_path / "net.safetensors"
    for change in (
        {"fc.codes": torch.zeros(3, 16)},
        {"fc.codes": torch.zeros(3, 17, dtype=torch.int8)},
        {"fc.scale": torch.zeros(0)},
        {"more": torch.zeros(1)},
        {"fc.bias": None},
        {"fc.scale": torch.full((3,), torch.nan)},
        {"fc.scale": torch.zeros(3)},
        {"fc.zero_point": torch.full((3,), 1000, dtype=torch.int32)},
    ):
        forged = {name: value for name, value in {**tensors, **change}.items() if value is not None}
        write_safetensors(path, forged, metadata)
        assert outcome(path, expected) == "ArtifactError", change


def test_a_header_that_claims_too_much(tmp_path):
    path = tmp_path / "net.safetensors"
    for size in (2**63, 2**40, 10**8 + 1):
        path.write_bytes(size.to_bytes(8, "little") + b"{}")
        with pytest.raises(QuantizationError, match="no whole safetensors file"):
            load(path, model=Small())
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(QuantizationError, match="no whole safetensors file"):
        load_tensors(path)


def test_files_of_others_are_refused(tmp_path):
    path = tmp_path / "net.safetensors"
    safetensors.torch.save_file({"weight": torch.zeros(2)}, str(path))
    with pytest.raises(QuantizationError, match="no metadata of qlightning"):
        load(path, model=Small())
    assert load_tensors(path)["weight"].shape == (2,)
    safetensors.torch.save_file({"weight": torch.zeros(2)}, str(path), {"qlightning": "{}"})
    with pytest.raises(QuantizationError, match="checksum"):
        load(path, model=Small())


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
def test_damaged_files_of_other_runtimes(tmp_path, suffix):
    """Their facts are read, or a typed error says what is wrong; nothing of their graphs is."""
    pytest.importorskip("onnxscript")
    if suffix == ".xml":
        pytest.importorskip("openvino")
    path = tmp_path / f"net{suffix}"
    save(small_int8(), path)
    facts, content, generator = metadata_of(path), path.read_bytes(), random.Random(2)
    found = set()
    for _ in range(300):
        path.write_bytes(mutated(content, generator))
        try:
            found.add("same" if metadata_of(path) == facts else "other")
        except QuantizationError as error:
            found.add(type(error).__name__ if path.name in str(error) else str(error))
    assert found <= {"same", "other", "ArtifactError"}
    assert "same" in found
    assert "ArtifactError" in found
