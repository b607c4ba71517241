"""Files whose contents are edited and whose checksums fit: the same model or a typed error; no name is executed."""

import copy
import hashlib
import json
import random
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from qlightning import load, quantize_model, save
from qlightning.errors import ArtifactError, QuantizationError
from tests.export.nets import small_int8

GRAPH, FACTS = "extra/qlightning.graph.json", "extra/qlightning.json"
HOSTILE = 'training", None), open("executed", "w"), getattr(self, "training'
VALUES = [None, True, -1, 10**30, float("inf"), "", "os.system", "import", [], {}, {"node": "none"}, {"dtype": "load"}]


class File:
    """A good file, and others made of it whose checksums are right."""

    def __init__(self, path):
        self.path = path
        with zipfile.ZipFile(path) as archive:
            self.members = {name: archive.read(name) for name in archive.namelist()}
        self.top = next(iter(self.members)).partition("/")[0]
        self.graph = json.loads(self.members[f"{self.top}/{GRAPH}"])
        self.facts = json.loads(json.loads(self.members[f"{self.top}/{FACTS}"])["facts"])

    def write(self, path, graph=None, facts=None):
        text = json.dumps(self.graph if graph is None else graph)
        digest = hashlib.sha256(text.encode()).hexdigest()
        header = {"facts": json.dumps(self.facts if facts is None else facts), "graph_sha256": digest}
        edited = {f"{self.top}/{GRAPH}": text, f"{self.top}/{FACTS}": json.dumps(header)}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name, content in {**self.members, **edited}.items():
                archive.writestr(name, content)
        return path


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "good.pt2"
    save(small_int8(), path)
    return File(path)


def edited(random_, value):
    """A copy with one part of it replaced, removed or renamed."""
    value = copy.deepcopy(value)
    places = []

    def walk(part):
        for key in part if isinstance(part, dict) else range(len(part)):
            places.append((part, key))
            if isinstance(part[key], (dict, list)):
                walk(part[key])

    walk(value)
    part, key = random_.choice(places)
    kind = random_.randrange(3)
    if kind == 0:
        part[key] = random_.choice([*VALUES, random_.randrange(-300, 300)])
    elif kind == 1 or isinstance(part, list):
        del part[key]
    else:
        part[random_.choice(["", "a.b", "import", "__class__", HOSTILE])] = part.pop(key)
    return value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_damage_gives_the_same_model_or_a_typed_error(good, tmp_path, seed):
    random_, content, path = random.Random(seed), good.path.read_bytes(), tmp_path / "net.pt2"
    x = torch.randn(2, 3, 8, 8)
    expected, refused = load(good.path)(x), 0
    for number in range(400):
        if damage := number % 4 < 2:
            bits = bytearray(content)
            bits[random_.randrange(len(bits))] ^= 1 << random_.randrange(8)
            path.write_bytes(bits if number % 4 else content[: random_.randrange(len(content))])
        elif number % 4 == 2:
            good.write(path, graph=edited(random_, good.graph))
        else:
            good.write(path, facts=edited(random_, good.facts))
        try:
            loaded = load(path)
        except QuantizationError:
            refused += 1
        else:
            assert not damage or torch.equal(loaded(x), expected)
    assert refused > 100


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("place", ["tensor", "layer"])
@pytest.mark.filterwarnings("ignore")
def test_names_in_a_file_are_not_executed(good, tmp_path, monkeypatch, place, backend):
    monkeypatch.chdir(tmp_path)
    graph = copy.deepcopy(good.graph)
    if place == "tensor":
        graph["tensors"][HOSTILE] = next(iter(graph["tensors"].values()))
        graph["nodes"].insert(-1, {"op": "tensor", "name": "hostile", "target": HOSTILE})
        graph["nodes"][-1]["args"] = {"tuple": [graph["nodes"][-1]["args"], {"node": "hostile"}]}
    else:
        path = next(iter(graph["layers"]))
        names = {name: name.replace(path, HOSTILE, 1) for name in graph["tensors"] if name.startswith(f"{path}.")}
        graph["layers"][HOSTILE] = graph["layers"].pop(path)
        graph["tensors"] = {names.get(name, name): value for name, value in graph["tensors"].items()}
        for node in graph["nodes"]:
            if node["op"] == "tensor":
                node["target"] = names.get(node["target"], node["target"])
    hostile = good.write(tmp_path / "hostile.pt2", graph)
    try:
        with pytest.raises(ArtifactError, match="has the name"):
            load(hostile, backend=backend)(torch.zeros(1, 3, 8, 8))
    finally:
        assert not Path("executed").exists()


@pytest.mark.parametrize("name", ["import", "None", "self"])
def test_an_input_without_a_usable_name_is_refused(good, tmp_path, name):
    (old,) = (spec["name"] for spec in good.facts["inputs"])
    graph = json.loads(json.dumps(good.graph).replace(f'"{old}"', f'"{name}"'))
    facts = {**good.facts, "inputs": [{**good.facts["inputs"][0], "name": name}]}
    with pytest.raises(ArtifactError, match="damaged"):
        load(good.write(tmp_path / "net.pt2", graph, facts))


def test_unusual_but_harmless_names_stay_possible(tmp_path):
    net = nn.Sequential()
    net.add_module("a-b c", nn.Linear(4, 2))
    x = torch.randn(8, 4)
    int8 = quantize_model(net, [x])
    save(int8, tmp_path / "net.pt2")
    assert torch.equal(load(tmp_path / "net.pt2")(x), int8(x))
