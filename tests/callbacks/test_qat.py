"""A whole quantization-aware training, from setup to the int8 model."""

import copy

import pytest
import pytorch_lightning
import torch
from torch import nn

from qlightning import PostTrainingQuantization, QConfig, QuantizationAwareTraining, convert
from qlightning.callbacks.placement import prepared_in_place
from qlightning.errors import BackendError, CalibrationError, ConfigError, NonFiniteError
from qlightning.fake_quantize import WeightFakeQuantize, fake_quantizers
from qlightning.graph import is_prepared
from tests.callbacks.nets import Net, assert_same_state, loader, samples, state_of, task, trainer


def fit(pl, tmp_path, model, callback, train=None, val=None, **options):
    run = trainer(pl, tmp_path, callback, **options)
    run.fit(model, train if train is not None else loader(), val)
    return run


def activations(module):
    return {name: fq for name, fq in fake_quantizers(module) if not isinstance(fq, WeightFakeQuantize)}


def test_the_callback_is_one_of_either_package(pl):
    callback = QuantizationAwareTraining()
    assert isinstance(callback, pl.Callback)
    assert pl.Trainer(callbacks=callback, logger=False, accelerator="cpu").callbacks.count(callback) == 1


def test_fit_ends_in_an_int8_model_that_has_learned_the_task(pl, tmp_path):
    model, callback = task(pl), QuantizationAwareTraining()
    run = fit(pl, tmp_path, model, callback, loader(96), loader(), max_epochs=6)
    assert model.net is callback.int8_model
    assert not is_prepared(model.net)
    assert [row.name for row in callback.report.float_layers] == []
    x, y = samples(64, seed=1)
    assert (model(x).argmax(1) == y).float().mean() > 0.8
    prepared = callback.prepared["net"].eval()
    # The rounding of ties and of intermediate sums is all that tells int8 from fake quantization.
    error = (model(x) - prepared(x)).abs().max() / prepared(x).abs().max()
    assert error < 0.05
    (metrics,) = run.test(model, loader(), verbose=False)
    assert metrics["val_acc"] == (model(samples(32)[0]).argmax(1) == samples(32)[1]).float().mean()


def test_the_lightning_module_and_its_net_are_called_with_floats_after_fit(pl, tmp_path):  # C11
    model = task(pl)
    fit(pl, tmp_path, model, QuantizationAwareTraining())
    x = torch.randn(1, 3, 8, 8)
    assert model(x).dtype == model.net(x).dtype == torch.float32
    assert torch.equal(model(x), model.net(x))
    assert model.net(torch.randn(5, 3, 16, 16)).shape == (5, 3)


def test_the_net_keeps_identity_class_methods_and_parameters_during_fit(pl, tmp_path):  # C31, C01
    model = task(pl)
    net, parameters, cls = model.net, dict(model.net.named_parameters()), type(model.net)
    seen = []

    class Probe(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            net_now = pl_module.net
            assert net_now is net
            assert isinstance(net_now, cls)
            assert net_now.num_classes == 3
            assert net_now.loss(torch.zeros(1, 3), torch.zeros(1, dtype=torch.long)) > 0
            assert all(net_now.get_parameter(name) is parameter for name, parameter in parameters.items())
            assert is_prepared(net_now)
            seen.append(batch_idx)

    fit(pl, tmp_path, model, [QuantizationAwareTraining(), Probe()], max_epochs=1)
    assert seen


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, a, b, *, softmax=False):
        logits = self.a(a) + self.b(b)
        return logits.softmax(1) if softmax else logits


class KeywordTask(pytorch_lightning.LightningModule):
    """Positional in training, keywords in validation; a dict batch."""

    def __init__(self):
        super().__init__()
        self.net = TwoInputs()

    def forward(self, x, y=None, *, softmax=False):
        return self.net(x, b=x if y is None else y, softmax=softmax)

    def training_step(self, batch, batch_idx):
        return self(batch["x"], batch["x"]).square().mean() + self.net(batch["x"], batch["x"]).mean()

    def validation_step(self, batch, batch_idx):
        self.log(
            "sum", self(x=batch["x"], softmax=True).sum(1).mean() + 0 * self.net(b=batch["x"], a=batch["x"]).mean()
        )

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def dict_loader():
    return torch.utils.data.DataLoader([{"x": torch.randn(4)} for _ in range(10)], batch_size=4)


def test_keywords_and_flags_work_in_every_step(tmp_path):  # C01, C02, C69: the last batch is smaller
    model = KeywordTask()
    run = fit(pytorch_lightning, tmp_path, model, QuantizationAwareTraining(), dict_loader(), dict_loader())
    (metrics,) = run.test(model, dict_loader(), verbose=False)
    assert metrics["sum"] == pytest.approx(1, abs=0.01)
    assert model(x=torch.randn(1, 4), softmax=True).shape == (1, 3)
    assert model.net(torch.randn(7, 4), b=torch.randn(7, 4)).shape == (7, 3)


@pytest.mark.parametrize("in_training_mode", [False, True])
def test_only_training_batches_move_observers(tmp_path, in_training_mode):  # C08
    def state(pl_module):
        # BatchNorm statistics move where a user validates in training mode; ranges must not even then.
        return {k: v for k, v in state_of(pl_module).items() if not (in_training_mode and ".bn" in f".{k}")}

    class Stays(pytorch_lightning.Callback):
        def on_sanity_check_start(self, trainer, pl_module):
            self.before = state(pl_module)

        def on_sanity_check_end(self, trainer, pl_module):
            assert_same_state(state(pl_module), self.before)
            self.checked = True

        def on_validation_start(self, trainer, pl_module):
            self.during = state(pl_module)

        def on_validation_end(self, trainer, pl_module):
            assert_same_state(state(pl_module), self.during)

    model, callback = task(pytorch_lightning), QuantizationAwareTraining(convert=False, freeze_observers=None)
    if in_training_mode:
        model.on_validation_model_eval = lambda: None
    probe = Stays()
    run = fit(pytorch_lightning, tmp_path, model, [callback, probe], val=loader(scale=100.0), val_check_interval=2)
    assert probe.checked
    before = state(model)
    run.validate(model, loader(scale=100.0), verbose=False)
    run.test(model, loader(scale=100.0), verbose=False)
    assert_same_state(state(model), before)


def test_batchnorm_trains_until_the_schedule_freezes_it_and_through_validation(tmp_path):  # C09, C22
    class Net2(Net):
        def __init__(self):
            super().__init__()
            self.unfused = nn.BatchNorm2d(3)

        def forward(self, x):
            return super().forward(self.unfused(x))

    stats, modes = {}, {}

    class Probe(pytorch_lightning.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            net = pl_module.net
            stats[trainer.current_epoch, batch_idx] = [
                bn.running_mean.clone() for bn in (net.bn1, net.bn2, net.unfused)
            ]
            modes[trainer.current_epoch, batch_idx] = [bn.training for bn in (net.bn1, net.bn2, net.unfused)]
            assert net.bn1.weight.grad.abs().sum() > 0
            assert (net.bn1.eps, net.bn1.momentum) == (1e-5, 0.1)

        def on_validation_end(self, trainer, pl_module):
            pl_module.on_validation_model_train = pl_module.train  # as users do; it puts BatchNorm into training mode

    model = task(pytorch_lightning, Net2())
    callback = QuantizationAwareTraining(freeze_bn=1, freeze_observers=None)
    fit(pytorch_lightning, tmp_path, model, [callback, Probe()], val=loader(), max_epochs=3, val_check_interval=2)
    for batch in range(1, 4):
        assert all(not torch.equal(a, b) for a, b in zip(stats[0, batch], stats[0, batch - 1], strict=True))
        assert modes[0, batch] == [True] * 3
    for epoch, batch in ((1, 0), (1, 3), (2, 0), (2, 3)):
        assert all(torch.equal(a, b) for a, b in zip(stats[epoch, batch], stats[0, 3], strict=True))
        assert modes[epoch, batch] == [False] * 3
    # The mode belongs to the run: afterwards the prepared net is as its user left it.
    assert all(bn.training for bn in callback.prepared["net"].modules() if isinstance(bn, nn.BatchNorm2d))


def test_batchnorm_that_its_user_keeps_in_eval_mode_stays_there(tmp_path):
    model = task(pytorch_lightning)
    model.net.bn1.eval()
    callback = QuantizationAwareTraining(freeze_bn=1, convert=False)
    fit(pytorch_lightning, tmp_path, model, callback, max_epochs=2)
    assert not model.net.bn1.training
    assert model.net.bn2.training


def test_observers_freeze_on_schedule(tmp_path):
    ranges = {}

    class Probe(pytorch_lightning.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            ranges[trainer.global_step] = [fq.scale.clone() for fq in activations(pl_module.net).values()]

    callback = QuantizationAwareTraining(fake_quant_start="2 steps", freeze_observers="4 steps", freeze_bn=None)
    fit(pytorch_lightning, tmp_path, task(pytorch_lightning), [callback, Probe()], loader(64), max_epochs=1)
    assert len(ranges) == 8
    assert ranges[4] != ranges[3]
    assert ranges[5] == ranges[4] == ranges[8]


def test_before_fake_quantization_starts_the_training_is_that_of_the_float_net(tmp_path):
    start = state_of(Net())
    losses = {}
    for name, callbacks in {
        "float": [],
        "late": [QuantizationAwareTraining(fake_quant_start=1, freeze_bn=None)],
    }.items():
        net = Net()
        net.load_state_dict(start)
        model, seen = task(pytorch_lightning, net), losses.setdefault(name, [])

        class Probe(pytorch_lightning.Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, seen=seen):
                seen.append(float(outputs["loss"]))

        fit(pytorch_lightning, tmp_path, model, [*callbacks, Probe()], max_epochs=2)
    assert losses["late"][:4] == losses["float"][:4]
    assert losses["late"][5:] != losses["float"][5:]


def test_the_stage_is_logged_and_shown(pl, tmp_path, caplog):
    stages = []

    class Probe(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            stages.append(float(trainer.progress_bar_metrics["qat/stage"]))

    with caplog.at_level("INFO"):
        callback = QuantizationAwareTraining(freeze_observers=0.5, freeze_bn=0.75)
        fit(pl, tmp_path, task(pl), [callback, Probe()], max_epochs=2)
    assert stages[-1] == 3
    assert sorted(set(stages)) == [1, 2, 3]
    said = [record.getMessage() for record in caplog.records]
    assert any("epoch 1, step 4: fake quantization on, observers frozen" in line for line in said)
    assert any("epoch 1, step 6" in line and "BatchNorm statistics frozen" in line for line in said)


def test_barebones_and_fast_dev_run_work(tmp_path):
    for options in ({"barebones": True}, {"fast_dev_run": True}):
        if "barebones" in options:
            options = {
                **dict.fromkeys(("enable_checkpointing", "logger", "enable_progress_bar", "enable_model_summary")),
                **options,
            }
        callback = QuantizationAwareTraining()
        model = task(pytorch_lightning)
        fit(pytorch_lightning, tmp_path, model, callback, **options)
        assert model.net is callback.int8_model


def test_a_part_of_the_model_is_quantized(tmp_path):  # C10
    class Parts(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.backbone(x).mean((2, 3)))

        training_step = type(task(pytorch_lightning)).training_step
        configure_optimizers = type(task(pytorch_lightning)).configure_optimizers

    model = Parts()
    head, callback = model.head, QuantizationAwareTraining(modules=["backbone"])
    fit(pytorch_lightning, tmp_path, model, callback)
    assert list(callback.prepared) == ["backbone"]
    assert model.backbone is callback.int8_model
    assert model.head is head
    assert type(head) is nn.Linear

    for exclude in (("net.conv1",), ("conv1",), ("net.conv1*",)):
        model, callback = task(pytorch_lightning), QuantizationAwareTraining(exclude=exclude)
        fit(pytorch_lightning, tmp_path, model, callback, max_epochs=1)
        assert [row.name for row in callback.report.float_layers] == ["net.conv1"]
        assert [row.name for row in callback.report.int8_layers] == ["net.conv2", "net.fc"]


def test_the_net_of_a_nested_lightning_module_is_quantized(tmp_path):  # C12
    model = task(pytorch_lightning, task(pytorch_lightning))
    callback = QuantizationAwareTraining()
    fit(pytorch_lightning, tmp_path, model, callback)
    assert list(callback.prepared) == ["net"]
    assert model.net is callback.int8_model
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 3)


def test_optimizers_hold_the_parameters_of_the_live_model(tmp_path):  # C13
    model = task(pytorch_lightning)

    def configure_optimizers():
        decayed = [p for n, p in model.named_parameters() if n.endswith("weight")]
        others = [p for n, p in model.named_parameters() if not n.endswith("weight")]
        return torch.optim.SGD([{"params": decayed, "lr": 0.1}, {"params": others, "lr": 0.2}])

    model.configure_optimizers = configure_optimizers
    names = {name for name, _ in model.named_parameters()}

    class Probe(pytorch_lightning.Callback):
        def on_train_end(self, trainer, pl_module):
            groups = trainer.optimizers[0].param_groups
            assert [group["lr"] for group in groups] == [0.1, 0.2]
            held = {id(p) for group in groups for p in group["params"]}
            assert held == {id(p) for p in pl_module.parameters()}
            assert {name for name, _ in pl_module.named_parameters()} == names

    fit(pytorch_lightning, tmp_path, model, [QuantizationAwareTraining(), Probe()])


class Direct(pytorch_lightning.LightningModule):
    """Its layers hang directly on it (C32); `self.log` and the Trainer are at hand while it is traced (C33)."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(torch.relu(self.bn(self.conv(x))).mean((2, 3)))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_layers_that_hang_on_the_lightning_module_are_quantized_by_its_own_forward(tmp_path):  # C32, C33
    model, callback = Direct(), QuantizationAwareTraining()
    attributes, state = set(model.__dict__), set(model.state_dict())
    run = fit(pytorch_lightning, tmp_path, model, callback)
    assert callback.prepared == {"": model}
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(model(x), callback.int8_model(x))
    assert not isinstance(callback.int8_model, pytorch_lightning.LightningModule)
    assert all(not isinstance(value, pytorch_lightning.Trainer) for value in vars(callback.int8_model).values())
    (metrics,) = run.test(model, loader(), verbose=False)
    assert 0 <= metrics["acc"] <= 1
    assert isinstance(model, Direct)
    assert state < set(model.state_dict())  # still that of the prepared model
    run = fit(pytorch_lightning, tmp_path, model, callback)
    assert {name for name in set(model.__dict__) - attributes if not name.startswith("_")} == set()


class DirectCalls(Direct):
    """The steps call the layers, not the forward."""

    def training_step(self, batch, batch_idx):
        logits = self.fc(torch.relu(self.bn(self.conv(batch[0]))).mean((2, 3)))
        return nn.functional.cross_entropy(logits, batch[1])


def test_a_forward_that_the_steps_do_not_call_is_an_error_that_names_the_remedy(tmp_path):  # C27, C32
    model = DirectCalls()
    callback = QuantizationAwareTraining()
    with pytest.raises(CalibrationError, match=r"modules=\[...\]; it has 'conv', 'bn', 'fc'"):
        fit(pytorch_lightning, tmp_path, model, callback)
    assert type(model) is DirectCalls
    assert set(model.state_dict()) == set(DirectCalls().state_dict())
    callback = QuantizationAwareTraining(modules=["conv", "fc"])
    fit(pytorch_lightning, tmp_path, model, callback)
    assert set(callback.int8_model) == {"conv", "fc"}
    assert model.conv is callback.int8_model["conv"]


@pytest.mark.parametrize("train", [{"limit_train_batches": 0}, {"max_epochs": 0}, "empty"])
def test_no_training_batch_is_an_error(tmp_path, train):  # C27
    model, callback = task(pytorch_lightning), QuantizationAwareTraining()
    before = state_of(model)
    options = {} if train == "empty" else train
    with pytest.raises(CalibrationError, match="batch"):
        fit(pytorch_lightning, tmp_path, model, callback, loader(0) if train == "empty" else None, **options)
    assert type(model.net) is Net
    assert_same_state(state_of(model), before)


def test_layers_that_no_batch_reached_are_listed(tmp_path):  # C27
    class Branches(Net):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(8, 3)

        def forward(self, x, aux: bool = False):
            features = self.features(x)
            return self.unused(features) if aux else self.fc(features)

    model = task(pytorch_lightning, Branches())
    model.validation_step = lambda batch, batch_idx: model.net(batch[0], aux=True)
    callback = QuantizationAwareTraining()
    with pytest.warns(UserWarning, match="unused"):
        fit(pytorch_lightning, tmp_path, model, callback, val=loader())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("batch", [0, 2])
def test_a_non_finite_batch_is_an_error_that_names_epoch_batch_and_layer(tmp_path, bad, batch):
    x, y = samples(32)
    x[8 * batch + 3, 0, 0, 0] = bad
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    model, callback = task(pytorch_lightning), QuantizationAwareTraining()
    with pytest.raises(NonFiniteError, match=rf"epoch 0, training batch {batch}: .*conv1"):
        fit(pytorch_lightning, tmp_path, model, callback, data)
    assert is_prepared(model.net) == (batch > 0)


@pytest.mark.parametrize(
    "error, raised",
    [(ZeroDivisionError("mine"), ZeroDivisionError), (KeyboardInterrupt(), (KeyboardInterrupt, SystemExit))],
)
def test_a_broken_run_converts_nothing_and_leaves_a_usable_prepared_net(tmp_path, error, raised):  # C50
    model, callback = task(pytorch_lightning), QuantizationAwareTraining()
    net, original = model.net, model.training_step

    def training_step(batch, batch_idx):
        if model.trainer.global_step == 3:
            raise error
        return original(batch, batch_idx)

    model.training_step = training_step
    with pytest.raises(raised):
        fit(pytorch_lightning, tmp_path, model, callback)
    assert model.net is net
    assert callback.int8_model is None
    assert is_prepared(net)
    assert convert(net.eval())(torch.randn(2, 3, 8, 8)).shape == (2, 3)
    model.training_step = original
    fit(pytorch_lightning, tmp_path, model, callback)
    assert model.net is callback.int8_model


def test_a_further_fit_goes_on_with_the_prepared_net(pl, tmp_path):  # C84
    model, callback = task(pl), QuantizationAwareTraining()
    net = model.net
    fit(pl, tmp_path, model, callback)
    prepared, first = state_of(callback.prepared["net"]), callback.int8_model
    seen = []

    class Probe(pl.Callback):
        def on_fit_start(self, trainer, pl_module):
            seen.append(pl_module.net)
            assert_same_state(state_of(pl_module.net), prepared)

    fit(pl, tmp_path, model, [callback, Probe()])
    assert seen == [net]
    assert model.net is callback.int8_model is not first
    # also by another callback: the same settings go on with the ranges, others begin anew from the weights
    fit(pl, tmp_path, model, [other := QuantizationAwareTraining(), Probe2(pl, net)])
    assert other.prepared["net"] is net
    fit(pl, tmp_path, model, other := QuantizationAwareTraining(exclude=("conv1",)))
    assert other.prepared["net"] is net
    assert type(net.conv1) is nn.Conv2d


def Probe2(pl, net):  # noqa: N802
    class Probe(pl.Callback):
        def on_fit_start(self, trainer, pl_module):
            assert pl_module.net is net
            assert all(fq.observed for _, fq in fake_quantizers(net))

    return Probe()


def test_two_callbacks_work_on_two_nets(tmp_path):
    model = task(pytorch_lightning, nn.Sequential())
    model.net = nn.Identity()
    model.first, model.second = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Linear(4, 3)
    model.forward = lambda x: model.second(model.first(x).mean((2, 3)))
    one, two = QuantizationAwareTraining(modules="first"), QuantizationAwareTraining(modules=["second"])
    for _ in range(2):
        fit(pytorch_lightning, tmp_path, model, [one, two])
        assert model.first is one.int8_model
        assert model.second is two.int8_model


def test_nets_that_are_built_in_later_hooks_are_quantized(pl, tmp_path):
    class Late(type(task(pl))):
        hook = "configure_model"

        def __init__(self):
            super().__init__()
            self.net = None

        def build(self):
            if self.net is None:
                self.net = Net()

        def configure_model(self):
            if self.hook == "configure_model":
                self.build()

        def setup(self, stage):
            if self.hook == "setup":
                self.build()

        def configure_optimizers(self):
            assert is_prepared(self.net)
            return super().configure_optimizers()

    for hook in ("configure_model", "setup"):
        model, callback = Late(), QuantizationAwareTraining()
        model.hook = hook
        run = fit(pl, tmp_path, model, callback)
        assert model.net is callback.int8_model
        run.test(model, loader(), verbose=False)
        assert "configure_model" not in vars(model)
        assert "net" in model._modules

    model = Late()
    model.build = lambda: None
    with pytest.raises(ConfigError, match="no convolution or linear layer"):
        fit(pl, tmp_path, model, QuantizationAwareTraining())
    assert "configure_model" not in vars(model)


def test_what_fails_in_setup_leaves_the_model_as_it_was(tmp_path):  # C83
    model = task(pytorch_lightning)
    model.other = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    before = state_of(model)
    with pytest.raises(ConfigError, match="parametrized"):
        fit(pytorch_lightning, tmp_path, model, QuantizationAwareTraining())
    assert type(model.net) is Net
    assert_same_state(state_of(model), before)

    def broken():
        raise ZeroDivisionError

    model = task(pytorch_lightning)
    callback, works = QuantizationAwareTraining(), model.configure_optimizers
    model.configure_optimizers = broken
    with pytest.raises(ZeroDivisionError):
        fit(pytorch_lightning, tmp_path, model, callback)
    assert type(model.net) is Net

    # and after a training it was in int8
    model.configure_optimizers = works
    fit(pytorch_lightning, tmp_path, model, callback)
    x = torch.randn(2, 3, 8, 8)
    wanted, model.configure_optimizers = model(x), broken
    with pytest.raises(ZeroDivisionError):
        fit(pytorch_lightning, tmp_path, model, callback)
    assert model.net is callback.int8_model
    assert torch.equal(model(x), wanted)


def test_what_cannot_be_traced_is_said_in_setup_and_in_the_report(tmp_path):  # C83
    class DataDependent(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            x = self.fc(x.mean((2, 3)))
            return x if x.sum() > 0 else -x

    model, callback, said = task(pytorch_lightning, DataDependent()), QuantizationAwareTraining(), []

    class Probe(pytorch_lightning.Callback):
        def on_fit_start(self, trainer, pl_module):
            said.extend(callback.report.notes)

    with pytest.warns(UserWarning, match="DataDependent cannot be traced at .*test_qat.py"):
        fit(pytorch_lightning, tmp_path, model, [callback, Probe()])
    assert "DataDependent" in said[0]
    assert callback.report.notes == tuple(said)
    assert [row.name.startswith("net.fc") for row in callback.report.int8_layers] == [True]


def test_lr_find_leaves_nothing_behind(tmp_path):  # C47
    model, callback = task(pytorch_lightning), QuantizationAwareTraining(convert=False, freeze_observers=None)
    model.lr = 0.01
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=model.lr)
    twin = copy.deepcopy(model.net)
    run = trainer(pytorch_lightning, tmp_path, callback)
    pytorch_lightning.tuner.Tuner(run).lr_find(model, loader(), num_training=5, update_attr=False)
    for name, parameter in twin.named_parameters():
        assert torch.equal(model.net.get_parameter(name), parameter), name
    assert not any(fq.observed for fq in activations(model.net).values())
    run.fit(model, loader())
    assert run.global_step == 8


def test_settings_are_checked_when_the_callback_is_built():
    with pytest.raises((BackendError, ConfigError), match="reference"):
        QuantizationAwareTraining(backend="fbgem")
    for wrong in (
        {"qconfig": 8},
        {"modules": [1]},
        {"modules": []},
        {"exclude": [1]},
        {"freeze_bn": "late"},
        {"fake_quant_start": True},
        {"fake_quant_start": None},
        {"convert": "yes"},
        {"fake_quant_start": 3, "freeze_observers": 2},
    ):
        with pytest.raises(ConfigError):
            QuantizationAwareTraining(**wrong)


@pytest.mark.parametrize(
    "options, limits, message",
    [
        ({"modules": ["nett"]}, {}, "Did you mean 'net'"),
        ({"exclude": ["net.conv11"]}, {}, "Did you mean 'net.conv1'"),
        ({}, {"max_epochs": -1, "max_steps": -1}, "neither max_epochs nor max_steps"),
        ({"fake_quant_start": 2, "freeze_observers": None}, {}, "never start"),
        ({"fake_quant_start": 1, "freeze_observers": 0.25}, {}, "after freeze_observers"),
        ({"qconfig": QConfig(exclude=(nn.Conv2d, nn.Linear))}, {}, "(?i)nothing"),
    ],
)
def test_settings_that_do_not_suit_the_model_or_the_training_stop_it_before_a_batch(tmp_path, options, limits, message):
    model = task(pytorch_lightning)
    model.training_step = lambda *_: pytest.fail("a batch was trained")
    with pytest.raises(ConfigError, match=message):
        fit(pytorch_lightning, tmp_path, model, QuantizationAwareTraining(**options), **limits)
    assert type(model.net) is Net


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
def test_a_precision_without_float32_parameters_stops_before_a_batch(tmp_path, precision):
    model = task(pytorch_lightning)
    with pytest.raises(ConfigError, match=f"{precision}.*bf16-mixed"):
        fit(pytorch_lightning, tmp_path, model, QuantizationAwareTraining(), precision=precision)
    assert type(model.net) is Net


def test_autocast_keeps_ranges_in_float32(tmp_path):
    model, callback = task(pytorch_lightning), QuantizationAwareTraining()
    run = fit(pytorch_lightning, tmp_path, model, callback, precision="bf16-mixed")
    assert all(fq.scale.dtype == torch.float32 for _, fq in fake_quantizers(callback.prepared["net"]))
    run.test(model, loader(), verbose=False)
    assert model(torch.randn(1, 3, 8, 8)).dtype == torch.float32


def test_observers_that_are_frozen_before_they_saw_a_batch_stop_the_training(tmp_path):
    with pytest.raises(CalibrationError, match="freeze_observers"):
        fit(pytorch_lightning, tmp_path, task(pytorch_lightning), QuantizationAwareTraining(freeze_observers=0))


def test_points_beyond_the_training_are_said(tmp_path):
    with pytest.warns(UserWarning, match="freeze_bn at epoch 7 lies beyond"):
        fit(pytorch_lightning, tmp_path, task(pytorch_lightning), QuantizationAwareTraining(freeze_bn=7))


def test_a_training_that_stops_early_converts_and_says_what_it_skipped(tmp_path, caplog):
    model, callback = task(pytorch_lightning), QuantizationAwareTraining()
    stop = pytorch_lightning.callbacks.EarlyStopping("val_loss", patience=0, min_delta=100.0)
    with caplog.at_level("INFO"):
        fit(pytorch_lightning, tmp_path, model, [callback, stop], val=loader(), max_epochs=50)
    assert model.net is callback.int8_model
    assert any("ended before freeze_observers, freeze_bn" in record.getMessage() for record in caplog.records)


def test_several_nets_without_a_forward_are_trained_and_converted(tmp_path):
    class Adversarial(pytorch_lightning.LightningModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.generator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
            self.critic = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                loss = self.critic(self.generator(batch)).mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(net.parameters(), lr=0.01) for net in (self.generator, self.critic)]

    model, callback = Adversarial(), QuantizationAwareTraining()
    fit(pytorch_lightning, tmp_path, model, callback, torch.utils.data.DataLoader(torch.randn(32, 4), batch_size=8))
    assert callback.int8_model == {"generator": model.generator, "critic": model.critic}
    assert [row.name for row in callback.report.int8_layers] == ["generator.0", "generator.2", "critic.0", "critic.2"]


def test_gradient_accumulation_and_manual_optimization_reach_every_point(tmp_path):
    class Manual(type(task(pytorch_lightning))):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(self.net.parameters(), lr=0.01) for _ in range(2)]

    stages = []

    class Probe(pytorch_lightning.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            stages.append(int(trainer.progress_bar_metrics["qat/stage"]))

    expected = [1] * 4 + [2] * 2 + [3] * 2
    callback = QuantizationAwareTraining(freeze_observers=0.5, freeze_bn=0.75)
    fit(pytorch_lightning, tmp_path, Manual(), [callback, Probe()])
    assert stages == expected
    stages.clear()
    fit(pytorch_lightning, tmp_path, task(pytorch_lightning), [callback, Probe()], accumulate_grad_batches=2)
    assert stages == expected


def test_a_copy_of_the_lightning_module_is_one_of_its_own(tmp_path):
    model, callback = task(pytorch_lightning), QuantizationAwareTraining()
    fit(pytorch_lightning, tmp_path, model, callback)
    twin, x = copy.deepcopy(model), torch.randn(2, 3, 8, 8)
    assert torch.equal(twin(x), model(x))
    with prepared_in_place(model):
        assert is_prepared(model.net)
        assert not is_prepared(twin.net)
    assert model.net is callback.int8_model


def test_a_net_that_only_validation_calls_stays_float_and_the_others_are_converted(pl, tmp_path):
    class Target(type(task(pl))):
        def __init__(self):
            super().__init__()
            self.target = copy.deepcopy(self.net)

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", nn.functional.cross_entropy(self.target(batch[0]), batch[1]))

    model, callback = Target(), QuantizationAwareTraining()
    with pytest.warns(UserWarning, match="No training batch went through target"):
        trainer(pl, tmp_path, callback).fit(model, loader(), loader())
    assert model.net is callback.int8_model
    assert type(model.target) is Net
    assert {layer.name.split(".")[0] for layer in callback.report.layers} == {"net"}


@pytest.mark.parametrize("other", [PostTrainingQuantization(), QuantizationAwareTraining(modules=["net"])])
def test_two_callbacks_for_the_same_net_are_refused(tmp_path, other):
    model = task(pytorch_lightning)
    before = state_of(model)
    with pytest.raises(ConfigError, match="Two callbacks quantize the same modules"):
        trainer(pytorch_lightning, tmp_path, [QuantizationAwareTraining(), other]).fit(model, loader())
    assert_same_state(state_of(model), before)


def test_a_frozen_net_is_quantized_with_a_warning(tmp_path):
    model = task(pytorch_lightning)
    model.teacher = Net().requires_grad_(False)
    step = model.training_step
    model.training_step = lambda batch, batch_idx: step(batch, batch_idx) + 0 * model.teacher(batch[0]).mean()
    with pytest.warns(UserWarning, match=r"teacher has no parameter that is trained.*modules=\['net'\]"):
        trainer(pytorch_lightning, tmp_path, QuantizationAwareTraining(), max_epochs=1).fit(model, loader())
