"""Files that are damaged or forged: the same model or a typed error, bounded memory and time, nothing executed."""

import io
import json
import random
import resource
import zipfile
from pathlib import Path

import pytest
import torch

from qlightning import load
from qlightning.errors import QuantizationError
from qlightning.export.archive import Archive
from qlightning.export.graph_json import decode
from tests.callbacks.nets import samples
from tests.export.nets import small_int8


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    from qlightning import save

    path = tmp_path_factory.mktemp("whole") / "net.pt2"
    save(small_int8(), path)
    return path


@pytest.fixture(autouse=True)
def _bounded_memory():
    """A claim of terabytes must not be tried."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def outcome(content, path, expected):
    """What loading gives: "same" or the type of the error; anything else fails."""
    path.write_bytes(content)
    x, _ = samples(4, seed=3)
    try:
        net = load(path)
    except QuantizationError as error:
        return type(error).__name__ if path.name in str(error) else str(error)
    return "same" if torch.equal(net(x), expected) else "other"


def members(whole):
    with zipfile.ZipFile(whole) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def packed(contents, names=None):
    """A torch-like archive of contents that may not be what they say."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in contents.items():
            archive.writestr((names or {}).get(name, name), content)
    return file.getvalue()


def mutated(content, generator):
    content = bytearray(content)
    kind = generator.choice(["flip", "flip", "byte", "cut", "swap", "insert", "zero"])
    place = generator.randrange(len(content))
    if generator.random() < 0.5:  # where the directory of the archive and the texts are
        place = generator.randrange(max(0, len(content) - 40_000), len(content))
    if kind == "flip":
        content[place] ^= 1 << generator.randrange(8)
    elif kind == "byte":
        content[place] = generator.randrange(256)
    elif kind == "cut":
        del content[place:]
    elif kind == "swap":
        content[place : place + 8] = content[place : place + 8][::-1]
    elif kind == "insert":
        content[place:place] = bytes(generator.randrange(256) for _ in range(4))
    else:
        content[place : place + 16] = bytes(min(16, len(content) - place))
    return bytes(content)


@pytest.mark.parametrize("count", [300, pytest.param(4000, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_damaged_bytes_are_noticed_or_do_not_matter(whole, tmp_path, count):
    generator, content = random.Random(0), whole.read_bytes()
    expected = load(whole)(samples(4, seed=3)[0])
    found = {outcome(mutated(content, generator), tmp_path / "net.pt2", expected) for _ in range(count)}
    assert found <= {"same", "ArtifactError"}
    assert "ArtifactError" in found


def forged(whole, change):
    """The file with another graph, whose checksum fits again."""
    import hashlib

    contents = members(whole)
    graph_name = next(name for name in contents if name.endswith("extra/qlightning.graph.json"))
    header_name = next(name for name in contents if name.endswith("extra/qlightning.json"))
    graph, header = json.loads(contents[graph_name]), json.loads(contents[header_name])
    facts = json.loads(header["facts"])
    change(graph, facts)
    contents[graph_name] = json.dumps(graph).encode()
    header = {"facts": json.dumps(facts), "graph_sha256": hashlib.sha256(contents[graph_name]).hexdigest()}
    contents[header_name] = json.dumps(header).encode()
    return packed(contents)


def first_call(graph):
    return next(node for node in graph["nodes"] if node["op"] == "call")


def layer_tensor(graph):
    return next(place for name, place in graph["tensors"].items() if name.endswith("codes"))


def layer_tensors(graph):
    return [place for name, place in graph["tensors"].items() if name.endswith("codes")]


FORGERIES = {
    "another function": lambda g, f: first_call(g).update(target="os.system"),
    "a method of a file": lambda g, f: first_call(g).update(target="aten.from_file.default"),
    "a call that saves": lambda g, f: first_call(g).update(target="aten.save.default"),
    "another namespace": lambda g, f: first_call(g).update(target="prims.add.default"),
    "attributes of torch": lambda g, f: first_call(g).update(target="aten.__class__.__init__"),
    "no such operator": lambda g, f: first_call(g).update(target="aten.launch.default"),
    "no text": lambda g, f: first_call(g).update(target=["aten"]),
    "a node that is not there": lambda g, f: first_call(g)["args"].__setitem__(0, {"node": "ghost"}),
    "a node that comes later": lambda g, f: first_call(g)["args"].__setitem__(0, {"node": g["nodes"][-2]["name"]}),
    "code as a name": lambda g, f: first_call(g).update(name="x = __import__('os')"),
    "a name twice": lambda g, f: g["nodes"].insert(1, dict(g["nodes"][0])),
    "another kind of node": lambda g, f: first_call(g).update(op="call_module"),
    "a tensor that is not there": lambda g, f: g["nodes"].insert(0, {"op": "tensor", "name": "t", "target": "a.b"}),
    "a tensor by another path": lambda g, f: g["nodes"].insert(0, {"op": "tensor", "name": "t", "target": "__class__"}),
    "no end": lambda g, f: g["nodes"].pop(),
    "two ends": lambda g, f: g["nodes"].append(dict(g["nodes"][-1], name="again")),
    "no nodes": lambda g, f: g.update(nodes=[]),
    "nodes of another kind": lambda g, f: g.update(nodes={"op": "input"}),
    "a huge shape": lambda g, f: layer_tensor(g).update(shape=[2**40, 2**40]),
    "a negative shape": lambda g, f: layer_tensor(g).update(shape=[-1, 3]),
    "a stride beyond": lambda g, f: layer_tensor(g).update(stride=[2**50, 1, 1, 1]),
    "a negative stride": lambda g, f: layer_tensor(g).update(stride=[-1, 1, 1, 1]),
    "another dtype": lambda g, f: layer_tensor(g).update(dtype="complex64"),
    "a dtype that is none": lambda g, f: layer_tensor(g).update(dtype="__doc__"),
    "a member outside": lambda g, f: layer_tensor(g).update(member="../../etc/passwd"),
    "a layer of other bits": lambda g, f: next(iter(g["layers"].values()))["scheme"].update(bits=99),
    "a layer of unknown settings": lambda g, f: next(iter(g["layers"].values()))["scheme"].update(code="x"),
    "groups that are none": lambda g, f: next(iter(g["layers"].values())).update(transposed_groups="2"),
    "no layers": lambda g, f: g.pop("layers"),
    "an unknown argument": lambda g, f: first_call(g)["args"].append({"code": "print(1)"}),
    "another version": lambda g, f: f.update(format=2),
    "unknown facts": lambda g, f: f.update(command="rm"),
    "facts of other types": lambda g, f: f.update(layers=3),
    "another number of inputs": lambda g, f: f.update(inputs=f["inputs"] * 2),
    "an input that is no name": lambda g, f: f["inputs"][0].update(name="x): import os #"),
    "a number beyond 64 bits": lambda g, f: first_call(g)["args"].append(2**63),
    "layers that share their codes": lambda g, f: layer_tensors(g)[1].update(layer_tensors(g)[0]),
    "a member of another size": lambda g, f: layer_tensors(g)[1].update(member=layer_tensors(g)[0]["member"]),
    "a path of very many parts": lambda g, f: g["tensors"].update({"a" + ".a" * 50_000: layer_tensor(g)}),
    "an input of another dtype": lambda g, f: f["inputs"][0].update(dtype="Tensor"),
}


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES.keys())
@pytest.mark.filterwarnings("ignore")
def test_a_forged_file_is_a_typed_error(whole, tmp_path, change):
    path = tmp_path / "net.pt2"
    path.write_bytes(forged(whole, change))
    with pytest.raises(QuantizationError):
        load(path)


def test_a_key_that_is_there_twice_is_a_typed_error(whole, tmp_path):
    contents = members(whole)
    name = next(name for name in contents if name.endswith("extra/qlightning.json"))
    contents[name] = contents[name].replace(b"{", b'{"graph_sha256": "0", ', 1)
    (tmp_path / "net.pt2").write_bytes(packed(contents))
    with pytest.raises(QuantizationError, match="'graph_sha256' is there twice"):
        load(tmp_path / "net.pt2")


@pytest.mark.filterwarnings("ignore")
def test_many_names_of_one_tensor_take_no_more_memory_than_the_file(whole, tmp_path):
    """Eight MB under a thousand names, of which each would have a copy of its own: eight GB."""
    contents = members(whole)
    top = next(iter(contents)).partition("/")[0]
    contents[f"{top}/data/weights/big"] = bytes(2**23)

    def change(graph, facts):
        place = {"member": "data/weights/big", "dtype": "uint8", "shape": [2**23], "stride": [1]}
        graph["tensors"].update({f"big.t{i}": place for i in range(1000)})

    (tmp_path / "big.pt2").write_bytes(packed(contents))
    path = tmp_path / "net.pt2"
    path.write_bytes(forged(tmp_path / "big.pt2", change))
    x = samples(4, seed=3)[0]
    loaded = load(path)  # within the bound of memory that all tests here have
    assert torch.equal(loaded(x), load(whole)(x))
    assert len({tensor.data_ptr() for name, tensor in loaded.named_buffers() if name.startswith("big.")}) == 1


def test_an_honest_copy_of_the_members_loads(whole, tmp_path):
    expected = load(whole)(samples(4, seed=3)[0])
    assert outcome(forged(whole, lambda g, f: None), tmp_path / "net.pt2", expected) == "same"


def test_a_graph_without_its_checksum_is_an_error(whole, tmp_path):
    contents = members(whole)
    name = next(name for name in contents if name.endswith("extra/qlightning.graph.json"))
    contents[name] = contents[name].replace(b"aten.relu.default", b"aten.tanh.default", 1)
    path = tmp_path / "net.pt2"
    path.write_bytes(packed(contents))
    with pytest.raises(QuantizationError, match="checksum"):
        load(path)


def claims_more(content):
    """The directory says of the first member that it is enormous."""
    place = content.rfind(b"PK\x01\x02")
    return content[: place + 20] + (2**32 - 2).to_bytes(4, "little") * 2 + content[place + 28 :]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda whole: packed(members(whole), {next(iter(members(whole))): "net/../../evil"}),
        lambda whole: packed(members(whole), {next(iter(members(whole))): "/etc/evil"}),
        lambda whole: packed(members(whole), {next(iter(members(whole))): "other/data"}),
        lambda whole: claims_more(whole.read_bytes()),
        lambda whole: b"PK\x05\x06" + bytes(18),
        lambda whole: b"",
        lambda whole: whole.read_bytes()[:-30],
        lambda whole: packed({f"net/{i}": b"" for i in range(100_001)}),
    ],
    ids=["parent folder", "absolute", "two folders", "huge", "empty archive", "empty", "cut", "very many"],
)
def test_tricks_in_archives_are_typed_errors(whole, tmp_path, spoil):
    path = tmp_path / "net.pt2"
    path.write_bytes(spoil(whole))
    with pytest.raises(QuantizationError, match=r"net\.pt2"):
        load(path)


def test_bombs_and_doubles_are_refused(tmp_path):
    path = tmp_path / "net.pt2"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("net/zeros", bytes(10**8))
    with pytest.raises(QuantizationError, match="compressed"):
        Archive(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("net/a", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("net/a", b"2")
    with pytest.raises(QuantizationError, match="twice"):
        Archive(path)


def test_deep_nesting_is_a_typed_error():
    value = 0
    for _ in range(5000):
        value = {"list": [value]}
    with pytest.raises(QuantizationError, match="damaged"):
        decode([{"op": "output", "name": "output", "args": value}], set(), "f")
