import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from qlightning import QConfig
from qlightning.callbacks.targets import find_targets, localize
from qlightning.errors import ConfigError
from tests.callbacks.nets import Net


class FeatureDistance(Metric):
    """A metric with a net in it, as the Fréchet inception distance is."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def update(self, x):
        pass

    def compute(self):
        pass


class PerceptualLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()


class TwoNets(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = Net(), nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        self.accuracy = MulticlassAccuracy(3)
        self.distance = FeatureDistance()
        self.criterion = nn.CrossEntropyLoss()
        self.perceptual = PerceptualLoss()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.head(self.backbone(x))


class DirectLayers(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone, self.fc = Net(), nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(self.backbone(x))


class NoForward(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder, self.blocks = nn.Conv2d(3, 3, 1), nn.ModuleList([nn.Conv2d(3, 3, 1), Net()])


class Outer(pl.LightningModule):
    def __init__(self, inner):
        super().__init__()
        self.model = inner


def names(pl_module, modules=None):
    return list(find_targets(pl_module, modules))


def test_children_with_layers_are_targets_but_no_losses_and_metrics():
    model = TwoNets()
    assert find_targets(model) == {"backbone": model.backbone, "head": model.head}


def test_layers_that_hang_directly_on_the_module_make_its_own_forward_the_target():
    model = DirectLayers()
    assert find_targets(model) == {"": model}
    model = DirectLayers()
    del model.fc
    model.stages = nn.ModuleList([nn.Conv2d(3, 3, 1)])
    assert find_targets(model) == {"": model}


def test_without_a_forward_layers_and_list_elements_are_taken_one_by_one():
    assert names(NoForward()) == ["encoder", "blocks.0", "blocks.1"]


def test_a_nested_lightning_module_is_a_net_where_it_has_a_forward():
    assert names(Outer(TwoNets())) == ["model"]
    assert names(Outer(NoForward())) == ["model.encoder", "model.blocks.0", "model.blocks.1"]


def test_a_net_with_two_names_is_one_target():
    model = TwoNets()
    model.alias = model.backbone
    assert names(model) == ["backbone", "head"]


def test_modules_are_named_by_dotted_path():
    model = TwoNets()
    assert find_targets(model, ["backbone.conv1", "head"]) == {
        "backbone.conv1": model.backbone.conv1,
        "head": model.head,
    }


@pytest.mark.parametrize(
    "modules, message",
    [
        (["backbnoe"], "Did you mean 'backbone'"),
        (["net"], "It has: backbone"),
        (["backbone", "backbone.conv1"], "part of 'backbone'"),
        (["accuracy"], "no convolution or linear layer"),
        ([""], "It has"),
    ],
)
def test_a_wrong_module_name_is_an_error(modules, message):
    with pytest.raises(ConfigError, match=message):
        find_targets(TwoNets(), modules)


def test_nothing_to_quantize_is_an_error():
    with pytest.raises(ConfigError, match="no convolution or linear layer"):
        find_targets(Outer(nn.Sequential(nn.ReLU())))


@pytest.mark.parametrize("compiled", [lambda: Outer(torch.compile(Net())), lambda: pl_compiled()])
def test_a_compiled_module_is_an_error_that_says_to_compile_later(compiled):
    with pytest.raises(ConfigError, match=r"compiled .* before it was quantized"):
        find_targets(compiled())


def pl_compiled():
    from pytorch_lightning.utilities.compile import from_compiled

    return from_compiled(torch.compile(TwoNets()))


def local_excludes(model, exclude, modules=None):
    return {
        name: q.exclude for name, q in localize(QConfig(exclude=exclude), model, find_targets(model, modules)).items()
    }


@pytest.mark.parametrize(
    "pattern, backbone, head",
    [
        ("backbone.conv1", ("conv1",), ()),
        ("conv1", ("conv1",), ()),
        ("backbone.conv?", ("conv1", "conv2"), ()),
        ("*.conv1", ("conv1",), ()),
        ("conv*", ("conv*",), ()),
        ("0", (), ("0",)),
        (nn.Linear, (nn.Linear, nn.Linear), (nn.Linear, nn.Linear)),
    ],
)
def test_patterns_count_from_the_lightning_module_or_from_the_target(pattern, backbone, head):
    found = local_excludes(TwoNets(), (pattern,))
    assert {name: set(local) for name, local in found.items()} == {"backbone": set(backbone), "head": set(head)}


def test_a_target_that_is_excluded_as_a_whole_is_left_out():
    assert list(local_excludes(TwoNets(), ("head",))) == ["backbone"]
    assert list(local_excludes(TwoNets(), (Net,))) == ["head"]
    with pytest.raises(ConfigError, match="leaves nothing"):
        local_excludes(TwoNets(), ("head", "backbone"))


def test_a_pattern_for_what_is_not_quantized_anyway_does_no_harm():
    assert list(local_excludes(TwoNets(), ("head",), ["backbone"])) == ["backbone"]


def test_a_pattern_that_matches_nothing_is_an_error_that_names_the_nearest():
    with pytest.raises(ConfigError, match=r"Did you mean 'backbone.conv1'"):
        local_excludes(TwoNets(), ("backbone.conv11",))


def test_overrides_reach_their_target_too():
    qconfig, own = QConfig(overrides={"backbone.conv1": None, "fc": None}), QConfig()
    local = localize(qconfig, model := TwoNets(), find_targets(model))
    assert dict(local["backbone"].overrides) == {"conv1": None, "fc": None}
    assert local["head"] == own
