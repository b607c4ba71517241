"""Steps of post-training quantization: what they change, what they leave alone, and that they say so."""

import copy
from dataclasses import replace

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from qlightning import PostTrainingQuantization, QConfig, QScheme, calibrate, prepare, quantize_model, report, unprepare
from qlightning.errors import ConfigError
from qlightning.graph.calibrate import run_batches
from qlightning.steps import BiasCorrection, CrossLayerEqualization
from qlightning.steps.base import apply_steps, checked_steps
from qlightning.steps.subject import Subject

STEPS = {
    "equalization": CrossLayerEqualization(),
    "bias correction": BiasCorrection(),
}


class Residual(nn.Module):
    """conv-bn-relu-conv-bn, a sum, and a depthwise pair, with functional activations."""

    def __init__(self, activation=F.relu):
        super().__init__()
        self.activation = activation
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.conv3 = nn.Conv2d(8, 8, 3, padding=1)
        self.expand = nn.Conv2d(8, 16, 1)
        self.depthwise = nn.Conv2d(16, 16, 3, groups=16)
        self.project = nn.Conv2d(16, 6, 1)
        self.linear = nn.Linear(6, 4)

    def forward(self, x):
        x = self.activation(self.bn1(self.conv1(x)))
        y = self.activation(self.bn2(self.conv2(x)))
        x = F.relu(self.conv3(y) + x)
        x = F.relu(self.depthwise(F.relu(self.expand(x))))
        return self.linear(self.project(x).mean((2, 3)))


def uneven(net, seed=0):
    """Gives a net weights whose channels differ a hundredfold, and BatchNorms something to do."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if tensor.is_floating_point() and "var" not in name:
                spread = torch.exp(1.5 * torch.randn(tensor.shape[:1], generator=generator))
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / max(1, tensor[0].numel()) ** 0.5)
                tensor.mul_(spread.view(-1, *[1] * (tensor.dim() - 1)))
    return net.eval()


def images(count=3, seed=1):
    return list(torch.randn(count * 8, 3, 8, 8, generator=torch.Generator().manual_seed(seed)).split(8))


def subject_of(net, batches):
    return Subject({"": net}, lambda context: run_batches(net, batches, context), bar=False)


def prepared_with(net, *steps, qconfig=None, batches=None):
    """A prepared copy of a net that steps have gone over, calibrated."""
    batches = images() if batches is None else batches
    prepared = prepare(copy.deepcopy(net), qconfig, backend="reference", mode="ptq")
    subject = subject_of(prepared, batches)
    apply_steps(steps, subject, before_calibration=True)
    calibrate(prepared, batches)
    apply_steps(steps, subject, before_calibration=False)
    return prepared, subject


def rows(model):
    return {row.layer: row for step in report(model).steps for row in step.layers}


def float_twin(prepared):
    """The float net with the tensors that steps have left in a prepared one."""
    net = copy.deepcopy(prepared)
    net.__dict__["_preparation"] = replace(net.__dict__["_preparation"], changes={})
    return unprepare(net)


# All steps


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_leaves_the_float_model_as_it_is_and_reports_every_layer(step):
    net = uneven(Residual())
    before = copy.deepcopy(net.state_dict())
    int8 = quantize_model(net, images(), backend="reference", steps=[step])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    (found,) = report(int8).steps
    assert found.name == repr(step)
    assert {row.layer for row in found.layers} == {
        n for n, m in net.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))
    }
    assert found.changed
    assert all(row.what for row in found.layers)
    assert found.name in str(report(int8))


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_unprepare_gives_back_what_a_step_has_changed(step):
    net = uneven(Residual())
    prepared, _ = prepared_with(net, step)
    changed = {n for n, v in net.state_dict().items() if not torch.equal(v, prepared.state_dict()[n])}
    assert changed
    unprepare(prepared)
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in prepared.state_dict().items())


def test_unprepare_keeps_what_was_trained_since():
    net = uneven(Residual())
    prepared, _ = prepared_with(net, BiasCorrection())
    with torch.no_grad():
        prepared.bn1.bias.fill_(3.0)
    unprepare(prepared)
    assert torch.equal(prepared.bn1.bias, torch.full((8,), 3.0))
    assert torch.equal(prepared.bn2.bias, net.bn2.bias)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_gives_the_same_model_every_time(step):
    net = uneven(Residual())
    one, other = (quantize_model(net, images(), backend="reference", steps=[step]) for _ in range(2))
    assert torch.equal(one(images()[0]), other(images()[0]))


def test_batches_that_come_once_are_enough():
    net = uneven(Residual())
    chain = [CrossLayerEqualization(), BiasCorrection()]
    once = quantize_model(net, iter(images()), backend="reference", steps=chain)
    assert torch.equal(once(images()[0]), quantize_model(net, images(), backend="reference", steps=chain)(images()[0]))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ("best", "a list of steps"),
        (BiasCorrection(), "a list of steps"),
        (None, "a list of steps"),
        ([BiasCorrection], r"did you mean BiasCorrection\(\)"),
        (["adaround"], "no step of qlightning.steps"),
        ([BiasCorrection(), CrossLayerEqualization()], "put it before BiasCorrection"),
    ],
)
def test_a_chain_that_is_none_is_an_error_before_anything_runs(steps, message):
    with pytest.raises(ConfigError, match=message):
        checked_steps(steps)
    with pytest.raises(ConfigError, match=message):
        quantize_model(nn.Linear(2, 2), [torch.randn(1, 2)], steps=steps)
    with pytest.raises(ConfigError, match=message):
        PostTrainingQuantization(steps=steps)


# Under Lightning


class Task(pl.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def test_step(self, batch, batch_idx):
        self.log("loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def loader():
    return DataLoader(TensorDataset(torch.cat(images())), batch_size=8)


def trainer_with(callback, **settings):
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(accelerator="cpu", callbacks=callback, **{**quiet, **settings})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chain", [[step] for step in STEPS.values()], ids=STEPS)
def test_the_callback_gives_the_model_that_quantize_model_gives(chain):
    net = uneven(Residual())
    task = Task(copy.deepcopy(net))
    callback = PostTrainingQuantization(calibration_data=loader(), backend="reference", steps=chain)
    trainer_with(callback).test(task, loader(), verbose=False)
    want = quantize_model(net, images(), backend="reference", steps=chain)
    assert torch.equal(callback.int8_model(images()[0]), want(images()[0]))
    (mine,), (other,) = callback.report.steps, report(want).steps
    assert [row.layer for row in mine.layers] == [f"net.{row.layer}" for row in other.layers]
    assert [row.what for row in mine.layers] == [row.what for row in other.layers]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chain", [[step] for step in STEPS.values()], ids=STEPS)
def test_a_further_fit_trains_the_float_net_that_was_there(chain):
    net = uneven(Residual())
    task = Task(copy.deepcopy(net))
    callback = PostTrainingQuantization(calibration_data=loader(), backend="reference", steps=chain)
    trainer_with(callback).test(task, loader(), verbose=False)
    seen = {}

    class Look(pl.Callback):
        def on_train_start(self, trainer, pl_module):
            seen.update(copy.deepcopy(pl_module.net.state_dict()))

    trainer_with([callback, Look()], max_epochs=1).fit(task, loader())
    assert seen.keys() == net.state_dict().keys()
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in seen.items())


class Failing(BiasCorrection):
    def apply(self, subject):
        super().apply(subject)
        raise RuntimeError("no")


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_fails_leaves_the_float_net():
    net = uneven(Residual())
    task = Task(copy.deepcopy(net))
    chain = [CrossLayerEqualization(), Failing()]
    callback = PostTrainingQuantization(calibration_data=loader(), backend="reference", steps=chain)
    with pytest.raises(RuntimeError, match="no"):
        trainer_with(callback).test(task, loader(), verbose=False)
    assert task.net.state_dict().keys() == net.state_dict().keys()
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in task.net.state_dict().items())


# Equalization


def test_equalization_leaves_the_float_function_as_it_was():
    net = uneven(Residual())
    prepared, _ = prepared_with(net, CrossLayerEqualization())
    equalized = float_twin(prepared)
    assert not torch.equal(equalized.conv3.weight, net.conv3.weight)
    x = images()[0].double()
    want, got = copy.deepcopy(net).double()(x), copy.deepcopy(equalized).double()(x)
    # Each of the 9 layers adds what float32 rounds of its weights.
    assert (got - want).abs().max() <= 9 * 2**-22 * want.abs().max()


def test_equalization_evens_out_a_chain_with_a_depthwise_layer():
    net = uneven(Residual())
    prepared, _ = prepared_with(net, CrossLayerEqualization(passes=50))
    expand = prepared.expand.weight.abs().flatten(1).amax(1)
    depthwise = prepared.depthwise.weight.abs().flatten(1).amax(1)
    project = prepared.project.weight.abs().amax((0, 2, 3))
    # It stops where a pass moves no channel by more than a thousandth.
    for one, other in ((expand, depthwise), (depthwise, project)):
        assert ((one / other).log().abs() <= 4e-3).all()


def test_equalization_pays_where_a_whole_layer_has_one_grid():
    net = uneven(Residual())
    qconfig = QConfig(weight=QScheme(symmetric=True, narrow_range=True))
    x = images(8, seed=5)
    want = torch.cat([net(batch) for batch in x])

    def error(*steps):
        int8 = quantize_model(net, images(), qconfig=qconfig, backend="reference", steps=steps)
        return (torch.cat([int8(batch) for batch in x]) - want).square().sum()

    assert error(CrossLayerEqualization()) < error() / 2


@pytest.mark.parametrize("activation", [F.relu6, F.hardswish, F.silu, torch.sigmoid], ids=lambda f: f.__name__)
def test_equalization_leaves_pairs_alone_whose_activation_does_not_scale(activation):
    net = uneven(Residual(activation))
    prepared, _ = prepared_with(net, CrossLayerEqualization())
    row = rows(prepared)["conv2"]
    assert not row.changed
    assert activation.__name__ in row.what
    assert torch.equal(prepared.conv2.weight, net.conv2.weight)
    assert "conv3" in rows(prepared)


def test_equalization_leaves_values_alone_that_are_read_twice():
    prepared, _ = prepared_with(uneven(Residual()), CrossLayerEqualization())
    found = rows(prepared)
    assert not found["conv1"].changed  # read by conv2 and by the sum
    assert "several places" in found["conv1"].what
    assert not found["conv3"].changed
    assert "add stands between" in found["conv3"].what
    assert found["conv2"].changed
    assert "multiplied by it in conv3" in found["conv2"].what


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.c.weight = self.a.weight

    def forward(self, x):
        x = self.c(F.relu(self.b(F.relu(self.a(x)))))
        return self.b(F.relu(x))


def test_equalization_leaves_layers_alone_that_are_called_twice_or_share_weights():
    prepared, _ = prepared_with(uneven(Tied()), CrossLayerEqualization())
    assert not any(row.changed for row in rows(prepared).values())


class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x, features=False):
        x = F.relu(self.a(x))
        return x if features else self.b(x)


def test_equalization_leaves_values_alone_that_another_way_of_calling_gives_out():
    prepared, _ = prepared_with(uneven(Choice()), CrossLayerEqualization())
    assert not rows(prepared)["a"].changed


# Bias correction


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_bias_correction_takes_the_mean_error_out_of_every_channel(affine):
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8, affine=affine), nn.ReLU(), nn.Conv2d(8, 5, 3), nn.Flatten(2)
    )
    qconfig = QConfig(weight=QScheme(bits=3, symmetric=True, axis=0, narrow_range=True))
    uneven(net)
    x = images()

    def mean_error(*steps):
        prepared, _ = prepared_with(net, *steps, qconfig=qconfig)
        return sum((prepared(batch) - net(batch)).mean((0, 2)) for batch in x) / len(x)

    assert mean_error(BiasCorrection()).abs().max() < mean_error().abs().max() / 10
