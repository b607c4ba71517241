"""A teacher's answers as a second loss, beside training steps that know nothing of it."""

import copy
import functools

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from qlightning import Distillation, QuantizationAwareTraining
from qlightning.errors import ConfigError
from qlightning.graph import is_prepared
from tests.callbacks.nets import Net, assert_same_state, loader, samples, state_of, task, trainer


class Watch(pl.Callback):
    def __init__(self):
        self.logged, self.losses = [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, *args):
        self.logged.append(trainer.callback_metrics["qat/distillation"].clone())
        self.losses.append(outputs["loss"].detach().clone())


def fit(tmp_path, distillation, model=None, ckpt_path=None, settings=None, callbacks=(), **options):
    model = model or task(pl)
    callback = QuantizationAwareTraining(distillation=distillation, **(settings or {}))
    run = trainer(pl, tmp_path, [callback, *callbacks], **{"max_epochs": 1, **options})
    run.fit(model, loader(), ckpt_path=ckpt_path)
    return model, callback, run


def divergence(output, answer, temperature):
    """Hinton et al. 2015 in float64: sum over classes, mean over samples, times the square of the temperature."""
    student, teacher = (torch.softmax(x.detach().double() / temperature, 1) for x in (output, answer))
    return (teacher * (teacher / student).log()).sum(1).mean() * temperature**2


def test_the_loss_is_that_of_the_paper():
    output, answer = torch.randn(5, 4), torch.randn(5, 4)
    loss = Distillation(temperature=4.0, weight=0.5).between(output, answer)
    torch.testing.assert_close(loss.double(), 0.5 * divergence(output, answer, 4.0), rtol=1e-5, atol=0)
    assert Distillation().between(answer, answer) == 0


def test_maps_of_classes_are_averaged_over_places():
    output, answer = torch.randn(2, 4, 3, 5), torch.randn(2, 4, 3, 5)
    rows = [x.permute(0, 2, 3, 1).reshape(-1, 4) for x in (output, answer)]
    loss = Distillation(loss="kl").between(output, answer)
    torch.testing.assert_close(loss.double(), divergence(*rows, 1.0), rtol=1e-5, atol=0)


def test_other_outputs_are_compared_by_squares():
    a, b, c = torch.randn(2, 4, 3), torch.randn(2, 5), torch.arange(2)
    mine = {"features": a, "more": [b, (c, None)]}
    other = {"features": a + 1, "more": [b + 3, (c, None)]}
    assert Distillation().between(mine, other) == pytest.approx((1 + 9) / 2)
    assert Distillation(loss="mse").between(b, b + 2) == pytest.approx(4)


@pytest.mark.parametrize(
    ("loss", "output", "answer", "message"),
    [
        ("kl", {"logits": torch.zeros(1, 2)}, {}, "needs logits .*not a dict"),
        ("kl", torch.zeros(2, 3), torch.zeros(2, 4), r"\(2, 3\), its teacher \(2, 4\)"),
        (None, [torch.zeros(2)], [], "1 float tensors in the output"),
        (None, "text", "text", "0 float tensors"),
    ],
)
def test_outputs_that_do_not_suit_the_loss_are_an_error(loss, output, answer, message):
    with pytest.raises(ConfigError, match=message):
        Distillation(loss=loss).between(output, answer)


@pytest.mark.parametrize(
    "settings",
    [
        {"teacher": "int8"},
        {"teacher": {}},
        {"teacher": {"net": 3}},
        {"weight": 0},
        {"weight": "1"},
        {"temperature": float("inf")},
        {"loss": "l1"},
    ],
)
def test_settings_check_themselves(settings):
    with pytest.raises(ConfigError, match=f"Distillation {next(iter(settings))}="):
        Distillation(**settings)


def test_the_float_twin_teaches(tmp_path):
    model, watch = task(pl), Watch()
    twin = copy.deepcopy(model.net).eval()
    before = state_of(twin)
    plain = type(model).training_step
    seen = []
    first = []

    class Keep(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 0:
                first.append(copy.deepcopy(pl_module.net))
            seen.append("training_step" in vars(pl_module))

    distillation = Distillation(temperature=2.0, weight=3.0)
    model, callback, _ = fit(tmp_path, distillation, model, callbacks=[watch, Keep()])
    x, y = (t[:8] for t in samples(32))
    logits = first[0](x)  # in training mode, with the ranges of the first batch
    expected = 3 * divergence(logits, twin(x), 2.0)
    torch.testing.assert_close(watch.logged[0].double(), expected, rtol=1e-4, atol=1e-7)
    total = nn.functional.cross_entropy(logits, y).double() + expected
    torch.testing.assert_close(watch.losses[0].double(), total, rtol=1e-4, atol=1e-7)
    (teacher,) = callback._distiller._teachers.values()
    assert not teacher.training
    assert not is_prepared(teacher)
    assert_same_state(state_of(teacher), before)
    assert seen == [True] * 4
    assert "training_step" not in vars(model)
    assert type(model).training_step is plain
    assert not any(module._forward_hooks for module in model.modules())
    assert not any("teacher" in key for key in model.state_dict())


def test_the_given_teacher_teaches(tmp_path):
    teacher = Net()
    before = state_of(teacher)
    model, *_ = fit(tmp_path, teacher, settings={"freeze_bn": None}, max_epochs=10)
    x, _ = samples(64, seed=3)
    far = nn.functional.mse_loss(Net().eval()(x), teacher(x))
    assert nn.functional.mse_loss(model(x), teacher(x)) < 10 * far
    assert_same_state(state_of(teacher), before)
    assert all(p.requires_grad for p in teacher.parameters())


def test_steps_may_return_dicts_or_nothing(tmp_path):
    class Dicts(type(task(pl))):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else {"loss": loss, "more": batch_idx}

    seen = []

    class Outputs(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append((outputs or {}).get("more"))

    fit(tmp_path, "float", Dicts(), callbacks=[Outputs()])
    assert seen == [0, None, 2, 3]


def test_a_dict_without_a_loss_is_left_to_lightning(tmp_path):
    class Empty(type(task(pl))):
        def training_step(self, batch, batch_idx):
            return {"los": super().training_step(batch, batch_idx)}

    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="'loss' key"):
        fit(tmp_path, "float", Empty())


class WithoutBatchNorm(type(task(pl))):
    """Whose net changes nothing in a forward that gradient checkpointing repeats."""

    def __init__(self, around=lambda net, x: net(x)):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3))
        self.around = around

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.around(self.net, batch[0]), batch[1])


@pytest.mark.parametrize("loss", ["kl", "mse"])
def test_gradient_checkpointing_around_the_net_changes_nothing(tmp_path, loss):
    around = functools.partial(checkpoint, use_reentrant=False)
    plain, watched = Watch(), Watch()
    one, _, _ = fit(tmp_path, Distillation("float", loss=loss), WithoutBatchNorm(), callbacks=[plain])
    two, _, _ = fit(tmp_path, Distillation("float", loss=loss), WithoutBatchNorm(around), callbacks=[watched])
    assert plain.logged == watched.logged
    assert plain.logged[0] > 0
    x = samples(8)[0]
    assert torch.equal(one(x), two(x))


def test_a_step_in_which_nothing_is_taught_is_said(tmp_path):
    def around(net, x):
        return checkpoint(net, x.requires_grad_(), use_reentrant=True)

    with pytest.warns(UserWarning, match="called none of the nets with gradients.* use_reentrant=False"):
        fit(tmp_path, "float", WithoutBatchNorm(around))


def test_a_function_may_compare(tmp_path):
    calls = []

    def compare(output, answer):
        calls.append((output.requires_grad, answer.requires_grad))
        return (output - answer).abs().mean()

    fit(tmp_path, Distillation(loss=compare), accumulate_grad_batches=2)
    assert calls == [(True, False)] * 4


def test_manual_optimization_is_refused(tmp_path):
    model = task(pl)
    model.automatic_optimization = False
    with pytest.raises(ConfigError, match="automatic_optimization=False"):
        fit(tmp_path, "float", model)
    assert not is_prepared(model)


class TwoNets(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(4, 3))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_several_nets_need_a_loss_that_suits_all(tmp_path):
    with pytest.raises(ConfigError, match="body, head"):
        fit(tmp_path, "float", TwoNets())
    fit(tmp_path, Distillation(loss="mse"), TwoNets())
    model = TwoNets()
    teachers = {"body": copy.deepcopy(model.body), "head": copy.deepcopy(model.head)}
    fit(tmp_path, Distillation(teachers, loss="mse"), model)
    with pytest.raises(ConfigError, match=r"'body'.* the nets are 'body', 'head'"):
        fit(tmp_path, Distillation({"body": teachers["body"]}, loss="mse"), TwoNets())


def the_net(model):
    return model.net


def with_a_layer_of_the_net(model):
    teacher = copy.deepcopy(model.net)
    teacher.fc = model.net.fc
    return teacher


def beside_the_net(model):
    model.teacher = copy.deepcopy(model.net).requires_grad_(False)
    return model.teacher


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (the_net, r"the teacher is 'net', which is quantized itself.* copy.deepcopy\(\)"),
        (with_a_layer_of_the_net, "shares parameters with 'net'"),
        (beside_the_net, r"the teacher is 'teacher'.* modules=\['net'\]"),
    ],
)
@pytest.mark.parametrize("loss", [None, "mse"])
def test_a_teacher_that_is_taught_is_refused(tmp_path, teacher, message, loss):
    model = task(pl)
    given = Distillation(teacher(model), loss=loss)
    before, modes = state_of(model), [module.training for module in model.modules()]
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, given, model)
    assert_same_state(state_of(model), before)
    assert [module.training for module in model.modules()] == modes


def test_a_frozen_teacher_may_stand_beside_the_net(tmp_path):
    model = task(pl)
    before = state_of(beside_the_net(model))
    fit(tmp_path, model.teacher, model, settings={"modules": ["net"]})
    assert_same_state(state_of(model.teacher), before)


def test_the_forward_of_the_lightning_module_is_taught(tmp_path):
    from tests.callbacks.test_qat import Direct

    _, _, run = fit(tmp_path, "float", Direct())
    assert run.callback_metrics["qat/distillation"] >= 0


def test_a_float_phase_needs_another_teacher():
    with pytest.raises(ConfigError, match="Fit twice"):
        QuantizationAwareTraining(distillation="float", fake_quant_start=1)
    QuantizationAwareTraining(distillation=Net(), fake_quant_start=1)


def test_a_resumed_run_has_the_same_teacher(tmp_path):
    start = state_of(task(pl))

    def run(name, max_epochs, ckpt_path=None, begin=start):
        model = task(pl)
        model.load_state_dict(begin)
        saver = pl.callbacks.ModelCheckpoint(tmp_path / name, save_top_k=-1)
        options = {"enable_checkpointing": True, "max_epochs": max_epochs}
        points = {"freeze_observers": "6 steps", "freeze_bn": "7 steps", "convert": False}
        fit(tmp_path, "float", model, ckpt_path, points, [saver], **options)
        return state_of(model)

    whole = run("whole", 2)
    part = next((tmp_path / "whole").glob("epoch=0*.ckpt"))
    assert_same_state(run("resumed", 2, part), whole)
    with pytest.raises(ConfigError, match="Load the same float weights"):
        run("other", 2, part, state_of(Other()))


class Other(type(task(pl))):
    def __init__(self):
        super().__init__()
        self.net = Net()


def test_a_float_checkpoint_teaches_what_it_holds(tmp_path):
    saver = pl.callbacks.ModelCheckpoint(tmp_path)
    model = task(pl)
    trainer(pl, tmp_path, [saver], max_epochs=1, enable_checkpointing=True).fit(model, loader())
    _, callback, _ = fit(tmp_path, "float", ckpt_path=saver.best_model_path, max_epochs=3)
    (teacher,) = callback._distiller._teachers.values()
    assert_same_state(state_of(teacher), state_of(model.net))


def test_a_further_fit_has_the_first_teacher(tmp_path):
    callback, model = QuantizationAwareTraining(distillation="float"), task(pl)
    before = state_of(model.net)
    for _ in range(2):
        trainer(pl, tmp_path, callback, max_epochs=1).fit(model, loader())
    (teacher,) = callback._distiller._teachers.values()
    assert_same_state(state_of(teacher), before)


def test_a_failed_training_leaves_the_step_as_it_was(tmp_path):
    class Failing(type(task(pl))):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                raise ValueError("a fault of the step")
            return super().training_step(batch, batch_idx)

    model = Failing()
    with pytest.raises(ValueError, match="a fault of the step"):
        fit(tmp_path, "float", model)
    assert "training_step" not in vars(model)
    assert not any(module._forward_hooks for module in model.modules())


def test_validation_asks_no_teacher(tmp_path):
    asked = []
    teacher = Net()
    teacher.register_forward_hook(lambda *_: asked.append(True))
    model = task(pl)
    callback = QuantizationAwareTraining(distillation=teacher, validate_int8=True)
    trainer(pl, tmp_path, callback, max_epochs=1).fit(model, loader(), loader())
    assert len(asked) == 4
    assert model.net is callback.int8_model
