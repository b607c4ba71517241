"""Steps of post-training quantization: what they change, what they leave alone, and that they say so."""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from qlightning import (
    PostTrainingQuantization,
    QConfig,
    QScheme,
    calibrate,
    convert,
    prepare,
    quantize_model,
    report,
    unprepare,
)
from qlightning.errors import ConfigError
from qlightning.fake_quantize import WeightFakeQuantize, fake_quantizers
from qlightning.graph.calibrate import run_batches
from qlightning.steps import AdaRound, BiasCorrection, CrossLayerEqualization, ReestimateBatchNorm
from qlightning.steps.base import apply_steps, checked_steps
from qlightning.steps.normal import clipped_normal_mean
from qlightning.steps.subject import Subject

STEPS = {
    "equalization": CrossLayerEqualization(),
    "bias correction": BiasCorrection(),
    "analytic bias correction": BiasCorrection(mode="analytic"),
    "rounding": AdaRound(iterations=8, batch_size=8),
    "batch norm": ReestimateBatchNorm(),
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
    kinds = nn.BatchNorm2d if isinstance(step, ReestimateBatchNorm) else (nn.Conv2d, nn.Linear)
    assert [row.layer for row in found.layers] == [n for n, m in net.named_modules() if isinstance(m, kinds)]
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


@pytest.mark.filterwarnings("ignore")
def test_several_processes_are_refused_before_anything_runs():
    callback = PostTrainingQuantization(calibration_data=loader(), steps=[BiasCorrection()])
    trainer = trainer_with(callback, devices=2, strategy="ddp_spawn")
    with pytest.raises(ConfigError, match=r"steps run in one process, and this Trainer has 2.*devices=1"):
        callback.setup(trainer, Task(Residual()), "test")


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


def test_a_clipped_normal_has_the_mean_of_its_samples():
    generator = torch.Generator().manual_seed(0)
    mean, std = torch.tensor([-1.0, 0.3, 5.5, 9.0]), torch.tensor([0.5, 2.0, 1.0, 3.0])
    samples = mean + std * torch.randn(1_000_000, 4, generator=generator, dtype=torch.float64)
    for low, high in ((0.0, math.inf), (0.0, 6.0), (-math.inf, math.inf), (-math.inf, 1.0)):
        got = clipped_normal_mean(mean, std, low, high)
        clipped = samples.clamp(low, high)
        # Five standard errors of the mean of so many samples.
        assert ((got - clipped.mean(0)).abs() <= 5 * clipped.std(0) / 1000).all()
    assert torch.equal(clipped_normal_mean(mean, torch.zeros(4), 0.0, 6.0), mean.clamp(0.0, 6.0))


def test_analytic_correction_is_that_of_the_mean_input_of_its_distribution():
    conv, bn, second = nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1, groups=2)
    net = uneven(nn.Sequential(conv, bn, nn.ReLU6(), second))
    qconfig = QConfig(weight=QScheme(bits=3, symmetric=True, axis=0, narrow_range=True))
    prepared, _ = prepared_with(net, BiasCorrection(mode="analytic"), qconfig=qconfig)
    rounding = (prepared[3].fake_quantized_weight() - second.weight)[:, :, 0, 0].double()
    mean = clipped_normal_mean(bn.bias, bn.weight.abs(), 0.0, 6.0).double().view(2, 3)
    want = second.bias - torch.stack([rounding[i] @ mean[i // 2] for i in range(4)])
    assert torch.allclose(prepared[3].bias.double(), want, rtol=1e-5, atol=1e-5)
    assert "no BatchNorm stands before" in rows(prepared)["0"].what


class Shortcut(nn.Module):
    """A block whose shortcut is cut and padded behind its last layer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, stride=2, padding=1)

    def forward(self, x):
        y = self.conv(x)
        return F.relu(y + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 2)))


def test_bias_correction_puts_a_residual_stream_right():
    net = uneven(Shortcut())
    net.conv.weight.data.mul_(0.01)
    qconfig = QConfig(activation=QScheme(bits=2, signed=False))
    x = images()
    prepared, _ = prepared_with(net, BiasCorrection(), qconfig=qconfig, batches=x)

    def before_relu(model, batch, given):
        return model.conv(given) + F.pad(given[:, :, ::2, ::2], (0, 0, 0, 0, 1, 2))

    fq = next(fq for _, fq in fake_quantizers(prepared) if not isinstance(fq, WeightFakeQuantize))  # of the input
    error = [before_relu(prepared, b, fq(b)) - before_relu(net, b, b) for b in x]
    assert torch.cat(error).mean((0, 2, 3)).abs().max() < 1e-5


# Learned rounding


class Pair(nn.Module):
    """Two convolutions and a sum."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.bn(self.conv1(x)))
        return F.relu(self.conv2(x) + x)


def low_bits(bits=3):
    return QConfig(weight=QScheme(bits=bits, symmetric=True, axis=0, narrow_range=True))


@pytest.mark.parametrize(
    "weight",
    [{"axis": 0, "symmetric": True}, {"symmetric": True}, {"axis": 0}],
    ids=["per channel", "per tensor", "affine"],
)
def test_learned_rounding_moves_weights_by_one_code_at_most_and_convert_gives_these_codes(weight):
    net = uneven(Pair())
    qconfig = QConfig(weight=QScheme(bits=3, **weight))
    plain, _ = prepared_with(net, qconfig=qconfig)
    learned, _ = prepared_with(net, AdaRound(iterations=40, batch_size=8, lr=0.1), qconfig=qconfig)
    nearest, chosen = convert(plain), convert(learned)
    moved = 0
    for name, row in rows(learned).items():
        one, other = (model.get_submodule(name).weight().int_repr().int() for model in (nearest, chosen))
        assert (one - other).abs().max() <= 1
        assert bool((one != other).any()) == row.changed
        moved += int((one != other).sum())
    assert moved > 0


def test_learned_rounding_leaves_weights_on_a_code_where_they_are():
    net = uneven(Pair())
    with torch.no_grad():
        net.conv2.weight[:, ::2] = 0
    prepared, _ = prepared_with(net, AdaRound(iterations=40, batch_size=8, lr=0.1), qconfig=low_bits())
    assert rows(prepared)["conv2"].changed
    assert not prepared.conv2.weight[:, ::2].any()


def test_learned_rounding_is_better_in_every_layer_that_it_changes():
    prepared, _ = prepared_with(uneven(Pair()), AdaRound(iterations=40, batch_size=8), qconfig=low_bits())
    found = [row for row in rows(prepared).values() if row.changed]
    assert found
    assert all(row.after < row.before for row in found)


def test_learned_rounding_finds_what_trying_all_finds():
    """A layer of two outputs and four inputs has 256 ways to round; the best of them is the least error."""
    torch.manual_seed(3)
    layer = nn.Linear(4, 2).requires_grad_(False)
    x = torch.randn(256, 1) + 0.1 * torch.randn(256, 4)  # alike, so that errors of weights add up or cancel out
    prepared, _ = prepared_with(
        nn.Sequential(layer), AdaRound(iterations=400, batch_size=256, lr=0.03), qconfig=low_bits(), batches=[x]
    )
    fq = prepared[0].weight_fake_quant
    scale, inputs = fq.scale.view(-1, 1), next(iter(prepared.graph_fake_quant.values()))(x)
    floor = (layer.weight / scale).floor()

    def error(codes):
        return float((inputs @ (codes * scale).T + layer.bias - layer(x)).square().mean())

    errors = [
        error((floor + torch.tensor(up).view(2, 4)).clamp(-3, 3)) for up in itertools.product((0.0, 1.0), repeat=8)
    ]
    nearest = error((layer.weight / scale).round().clamp(-3, 3))
    chosen = error(prepared[0].weight / scale)
    assert min(errors) < nearest
    assert chosen - min(errors) <= (nearest - min(errors)) / 4


def test_learned_rounding_depends_on_its_seed_alone():
    net, chain = uneven(Pair()), AdaRound(iterations=20, batch_size=4)
    torch.manual_seed(1)
    one, _ = prepared_with(net, chain, qconfig=low_bits())
    torch.manual_seed(2)
    state = torch.get_rng_state()
    other, _ = prepared_with(net, chain, qconfig=low_bits())
    assert torch.equal(torch.get_rng_state(), state)
    third, _ = prepared_with(net, replace(chain, seed=1), qconfig=low_bits())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), third.parameters(), strict=True))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("iterations", 0),
        ("iterations", True),
        ("batch_size", 1.5),
        ("lr", 0.0),
        ("regularization", -1.0),
        ("warmup", 1.0),
        ("beta", (2.0, 20.0)),
        ("beta", (2.0,)),
    ],
)
def test_a_setting_of_learned_rounding_that_cannot_be_is_an_error(setting, value):
    with pytest.raises(ConfigError, match=f"AdaRound {setting}="):
        AdaRound(**{setting: value})


# BatchNorm


def test_batch_norms_get_the_statistics_of_what_reaches_them_in_the_quantized_net():
    net = uneven(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, momentum=0.3), nn.ReLU()))
    x = torch.cat(images())
    prepared, _ = prepared_with(net, ReestimateBatchNorm(), batches=[x], qconfig=low_bits())
    y = prepared[0](next(iter(prepared.graph_fake_quant.values()))(x)).double()
    assert torch.allclose(prepared[1].running_mean.double(), y.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    assert torch.allclose(prepared[1].running_var.double(), y.movedim(1, 0).flatten(1).var(1), rtol=1e-4)
    assert prepared[1].momentum == 0.3
    assert not prepared[1].training
