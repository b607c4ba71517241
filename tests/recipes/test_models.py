import pytest
import safetensors.torch
import torch
import torchvision

from qlightning import prepare
from qlightning.errors import ConfigError
from recipes.models import (
    CifarResNet,
    load_weights,
    mobilenet_v2_cifar,
    mobilenet_v3_cifar,
    resnet_cifar,
    torchvision_model,
)
from recipes.task import ClassificationTask


@pytest.mark.parametrize(("depth", "parameters"), [(20, 269_722), (32, 464_154), (44, 658_586), (56, 853_018)])
def test_cifar_resnets_have_the_published_sizes(depth, parameters):
    net = resnet_cifar(depth)
    assert sum(p.numel() for p in net.parameters()) == parameters
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("depth", [2, 18, 21])
def test_a_depth_that_is_not_6n_plus_2_is_an_error(depth):
    with pytest.raises(ConfigError, match="6n"):
        CifarResNet(depth)


@pytest.mark.parametrize("build", [mobilenet_v2_cifar, mobilenet_v3_cifar])
def test_mobilenets_for_cifar_keep_the_resolution_in_their_stem(build):
    net = build(num_classes=7, width_mult=0.5).eval()
    assert net.features[0](torch.zeros(1, 3, 32, 32)).shape[-2:] == (32, 32)
    assert net(torch.zeros(2, 3, 24, 24)).shape == (2, 7)


@pytest.mark.parametrize(
    ("build", "original"), [(mobilenet_v2_cifar, "mobilenet_v2"), (mobilenet_v3_cifar, "mobilenet_v3_large")]
)
def test_mobilenets_for_cifar_are_the_originals_but_for_the_stride_of_the_stem(build, original):
    with torch.device("meta"):
        nets = build(num_classes=1000), torchvision.models.get_model(original)
    nets[1].features[0][0].stride = (1, 1)
    assert str(nets[0]) == str(nets[1])
    shapes, originals = ({key: value.shape for key, value in net.state_dict().items()} for net in nets)
    assert shapes == originals


@pytest.mark.parametrize(
    "file",
    [
        lambda state, path: safetensors.torch.save_file(state, path / "net.safetensors") or path / "net.safetensors",
        lambda state, path: torch.save(state, path / "net.pt") or path / "net.pt",
        lambda state, path: (
            torch.save({"state_dict": {f"net.{k}": v for k, v in state.items()}, "epoch": 3}, path / "a.ckpt")
            or path / "a.ckpt"
        ),
    ],
    ids=["safetensors", "state dict", "Lightning checkpoint"],
)
def test_weights_load_from_every_kind_of_file(tmp_path, file):
    source = resnet_cifar(8)
    net = resnet_cifar(8, weights=str(file(source.state_dict(), tmp_path)))
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), source.state_dict().values(), strict=True))


def test_a_checkpoint_of_quantization_aware_training_loads_into_a_float_model(tmp_path):
    source = resnet_cifar(8)
    prepare(source, backend="reference")
    source.train()(torch.randn(2, 3, 16, 16))
    task = ClassificationTask(source, 10)
    torch.save({"state_dict": task.state_dict()}, tmp_path / "qat.ckpt")
    net = resnet_cifar(8, weights=tmp_path / "qat.ckpt")
    assert torch.equal(net.layer2[0].conv1.weight, source.layer2[0].conv1.weight)


def test_weights_that_do_not_fit_are_named(tmp_path):
    torch.save(resnet_cifar(8).state_dict(), tmp_path / "net.pt")
    with pytest.raises(ConfigError, match=r"lacks layer1\.1\.conv1\.weight.*and \d+ more"):
        load_weights(resnet_cifar(20), tmp_path / "net.pt")
    with pytest.raises(ConfigError, match=r"linear\.weight \(10, 64\) instead of \(5, 64\)"):
        load_weights(resnet_cifar(8, num_classes=5), tmp_path / "net.pt")
    torch.save(resnet_cifar(20).state_dict(), tmp_path / "net.pt")
    net = resnet_cifar(8)
    before = net.conv1.weight.clone()
    with pytest.raises(ConfigError, match=r"has beside them layer1\.1\.conv1\.weight"):
        load_weights(net, tmp_path / "net.pt")
    assert torch.equal(net.conv1.weight, before)


def test_files_that_hold_no_weights_are_named(tmp_path):
    with pytest.raises(ConfigError, match="No weights at"):
        load_weights(resnet_cifar(8), tmp_path / "missing.pt")
    for name in ("broken.safetensors", "broken.pt"):
        (tmp_path / name).write_bytes(b"not weights")
        with pytest.raises(ConfigError, match=name):
            load_weights(resnet_cifar(8), tmp_path / name)
    torch.save({"a": 1}, tmp_path / "numbers.pt")
    with pytest.raises(ConfigError, match="no state dict"):
        load_weights(resnet_cifar(8), tmp_path / "numbers.pt")


def test_torchvision_models_come_by_name(tmp_path):
    net = torchvision_model("resnet18", num_classes=10)
    assert net.fc.out_features == 10
    torch.save(net.state_dict(), tmp_path / "net.pt")
    assert torch.equal(torchvision_model("resnet18", 10, tmp_path / "net.pt").fc.weight, net.fc.weight)


def test_torchvision_names_that_do_not_exist_are_answered_with_those_that_do():
    with pytest.raises(ConfigError, match=r"Did you mean 'resnet18'"):
        torchvision_model("resnet_18")
    with pytest.raises(ConfigError, match="IMAGENET1K_V1"):
        torchvision_model("resnet18", weights="IMAGENET_V1")
    with pytest.raises(ConfigError, match=r"1000 classes, the data has 10.*new_head"):
        torchvision_model("resnet18", num_classes=10, weights="IMAGENET1K_V1")


@pytest.mark.parametrize("depth", [20, 56])
def test_the_published_weights_fit(shared_data, depth):
    net = resnet_cifar(depth, weights=shared_data / "weights" / f"resnet{depth}_cifar10.safetensors")
    assert net(torch.zeros(1, 3, 32, 32)).isfinite().all()
