"""What a file says about its model: numbers and names of all kinds go in, nothing comes out that was not checked."""

import json
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from qlightning import quantize_model, save
from qlightning.errors import ArtifactError, ConfigError, QuantizationError
from qlightning.export import Metadata, metadata_of


@pytest.fixture(scope="module")
def int8():
    return quantize_model(nn.Sequential(nn.Linear(4, 2)), [torch.randn(8, 4)])


@pytest.fixture(scope="module")
def facts(int8, tmp_path_factory):
    return save(int8, tmp_path_factory.mktemp("facts") / "net.safetensors", class_names=["a", "b"], metrics={"x": 1})


NUMBERS = [1, 0.5, np.float32(0.5), np.float64(0.5), np.int64(3), np.array(0.5), Fraction(1, 2)]
NUMBERS += [torch.tensor(0.5), torch.tensor([2]), torch.tensor(0.5, requires_grad=True), torch.tensor(0.5).bfloat16()]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_metrics_are_what_has_one_number(int8, tmp_path, number):
    save(int8, tmp_path / "net.safetensors", metrics={"acc": number})
    value = number.detach() if isinstance(number, torch.Tensor) else number
    assert metadata_of(tmp_path / "net.safetensors").metrics == {"acc": float(value)}


WRONG = [float("nan"), float("inf"), np.float32("nan"), torch.tensor(float("nan")), "0.9", b"1", None, True, 1j]
WRONG += [10**400, [1], np.zeros(2), torch.zeros(2), torch.zeros(1, device="meta"), object()]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", WRONG, ids=lambda value: repr(value)[:20])
def test_metrics_that_are_none_are_refused(int8, tmp_path, number):
    with pytest.raises(ConfigError, match=r"metrics\['acc'\]=.*number"):
        save(int8, tmp_path / "net.safetensors", metrics={"acc": number})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        ({"metrics": [0.5]}, "numbers by name"),
        ({"metrics": {1: 0.5}}, "numbers by name"),
        ({"class_names": "abc"}, "a list of strings"),
        ({"class_names": b"abc"}, "a list of strings"),
        ({"class_names": 3}, "a list of strings"),
        ({"class_names": ["a", 1]}, "strings are needed, got 1"),
    ],
)
def test_notes_of_other_kinds_are_refused(int8, tmp_path, notes, message):
    with pytest.raises(ConfigError, match=message):
        save(int8, tmp_path / "net.safetensors", **notes)


def test_class_names_of_any_sequence(int8, tmp_path):
    for names in (("a", "b"), np.array(["a", "b"]), {"a": 0, "b": 1}.keys()):
        assert save(int8, tmp_path / "net.safetensors", class_names=names).class_names == ("a", "b")
        assert metadata_of(tmp_path / "net.safetensors").class_names == ("a", "b")


def test_more_than_can_be_read_again_is_not_written(int8, tmp_path):
    with pytest.raises(ArtifactError, match="far too much"):
        save(int8, tmp_path / "net.safetensors", class_names=["x" * 2**24])
    assert not list(tmp_path.iterdir())


def changed(facts, **entries):
    return json.dumps({**json.loads(facts.to_json()), **entries})


def with_input(**entries):
    spec = {"name": "x", "shape": [-1, 4], "dtype": "float32", "example": [8, 4]}
    return {"inputs": [{**spec, **entries}]}


DAMAGES = {
    "a negative size": with_input(shape=[-2, 4], example=[-2, 4]),
    "a negative example": with_input(example=[-8, 4]),
    "a huge example": with_input(example=[2**40, 4]),
    "a huge example with nothing in it": with_input(shape=[-1, 0], example=[2**62, 0]),
    "a number beyond 64 bits": with_input(example=[2**70, 4]),
    "an example of another size": with_input(shape=[8, 4], example=[8, 5]),
    "an example of other dimensions": with_input(example=[8, 4, 1]),
    "very many dimensions": with_input(shape=[1] * 65, example=[1] * 65),
    "sizes as a text": with_input(shape="12", example="12"),
    "sizes that are no integers": with_input(example=[8.0, 4]),
    "sizes that are flags": with_input(shape=[-1, True], example=[8, True]),
    "infinite sizes": with_input(example=[float("inf"), 4]),
    "a dtype that is a list": with_input(dtype=["float32"]),
    "an input that is none": {"inputs": [3]},
    "an input without a name": {"inputs": [{"shape": [], "dtype": "float32", "example": []}]},
    "an input of the name of another": {"inputs": with_input()["inputs"] * 2},
    "very many inputs": {"inputs": [with_input(name=f"x{i}")["inputs"][0] for i in range(1001)]},
    "class names as a text": {"class_names": "abc"},
    "class names as a table": {"class_names": {"a": 1}},
    "a pattern that is none": {"exclude": [["a"]]},
    "metrics as pairs": {"metrics": [["a", 1]]},
    "a metric that is NaN": {"metrics": {"a": float("nan")}},
    "a metric that is infinite": {"metrics": {"a": float("inf")}},
    "a metric beyond float": {"metrics": {"a": 10**400}},
    "a metric that is a text": {"metrics": {"a": "1"}},
    "a metric that is a flag": {"metrics": {"a": True}},
    "a version that is none": {"versions": {"torch": 2}},
    "a layer of other types": {"layers": [{"name": 1, "kind": "Linear", "int8": True, "scheme": "", "reason": ""}]},
    "a layer that is half in int8": {"layers": [{"name": "", "kind": "", "int8": "x", "scheme": "", "reason": ""}]},
    "full ranges that are no flag": {"full_range": "yes"},
    "a text that is none": {"backend": None},
}


@pytest.mark.parametrize("entries", DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_is_a_typed_error(facts, entries):
    with pytest.raises(ArtifactError, match=r"net\.pt2: its metadata is damaged"):
        Metadata.from_json(changed(facts, **entries), "net.pt2")


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"format": 1, "format": 1}', '{"format": ' + "9" * 5000 + "}", '{"format": 1e400}', "", "[]", "1"],
    ids=["nested", "a key twice", "digits", "infinite", "empty", "a list", "a number"],
)
def test_tricks_in_json_are_typed_errors(text):
    with pytest.raises(QuantizationError, match=r"net\.pt2"):
        Metadata.from_json(text, "net.pt2")


def test_a_number_written_beyond_float_is_noticed(facts):
    text = facts.to_json().replace('"x": 1.0', '"x": 1e400')
    assert "1e400" in text
    with pytest.raises(ArtifactError, match="the metric 'x' is no number"):
        Metadata.from_json(text, "net.pt2")


def test_facts_are_read_as_they_were_written(facts):
    read = Metadata.from_json(facts.to_json(), "net.pt2")
    assert read == facts
    assert replace(read, full_range=False) == Metadata.from_json(changed(facts, full_range=False), "net.pt2")
