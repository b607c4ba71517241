"""Again and again: fit, test, fit; copies at any point; nothing of ours left on a LightningModule."""

import copy

import pytest
import pytorch_lightning
import torch
from torch import nn

from qlightning import PostTrainingQuantization, QConfig, QScheme, QuantizationAwareTraining, convert
from qlightning.errors import ConfigError
from qlightning.graph import is_prepared
from tests.callbacks.nets import Net, assert_same_state, loader, samples, state_of, task, trainer
from tests.callbacks.test_qat import Direct


def test_a_lightning_module_has_no_attributes_of_ours(pl, tmp_path):
    found = []
    for callbacks in ([], [QuantizationAwareTraining()], [PostTrainingQuantization(calibration_data=loader())]):
        model = task(pl)
        run = trainer(pl, tmp_path, callbacks)
        run.fit(model, loader(), loader())
        run.test(model, loader(), verbose=False)
        run.fit_loop.max_epochs = 3
        run.fit(model, loader())
        found.append((set(vars(model)), set(dir(model)), [name for name, _ in model.named_children()]))
    plain = found[0]
    for names, attributes, children in found[1:]:
        assert names == plain[0]
        assert attributes == plain[1]
        assert children == plain[2] == ["net"]


def test_fit_and_test_and_fit(pl, tmp_path):
    """Training twice with a test in between is training twice."""
    start, ends = state_of(task(pl)), []
    for evaluated in (False, True):
        torch.manual_seed(0)
        model, callback = task(pl), QuantizationAwareTraining(freeze_bn=1)
        model.load_state_dict(start)
        for _ in range(2):
            run = trainer(pl, tmp_path, callback)
            run.fit(model, loader(), loader())
            if evaluated:
                run.validate(model, loader(scale=100.0), verbose=False)
                run.test(model, loader(scale=100.0), verbose=False)
        ends.append(state_of(callback.prepared["net"]))
    assert_same_state(*ends)


POINTS = ["before", "in training", "in validation", "after fit", "after test"]


@pytest.mark.parametrize("point", POINTS)
def test_a_copy_at_any_point_lives_on_its_own(pl, tmp_path, point):
    copies = {}

    class Copier(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            copies["in training"] = copy.deepcopy(pl_module)

        def on_validation_batch_end(self, trainer, pl_module, *args, **kwargs):
            copies["in validation"] = copy.deepcopy(pl_module)

    model, callback = task(pl), QuantizationAwareTraining(validate_int8=True)
    copies["before"] = copy.deepcopy(model)
    run = trainer(pl, tmp_path, [callback, Copier()], max_epochs=1)
    run.fit(model, loader(), loader())
    copies["after fit"] = copy.deepcopy(model)
    run.test(model, loader(), verbose=False)
    copies["after test"] = copy.deepcopy(model)
    twin, x = copies[point], samples(8)[0]
    wanted, state = model(x), state_of(callback.prepared["net"])
    if point.startswith("after"):
        assert torch.equal(twin(x), wanted)
    elif point == "in training":
        assert is_prepared(twin.net)
        assert torch.equal(convert(twin.net.eval())(x), wanted)
    elif point == "in validation":
        assert torch.equal(twin(x), wanted)  # the int8 forward that validation was running
    if not point.startswith("after"):
        # Trained, it does nothing to the one that it was copied from.
        other = QuantizationAwareTraining()
        trainer(pl, tmp_path, other, max_epochs=1).fit(twin.train(), loader(seed=1))
        assert twin.net is other.int8_model
        assert twin.net is not model.net
    assert torch.equal(model(x), wanted)
    assert_same_state(state_of(callback.prepared["net"]), state)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Linear(4, 3)

    def forward(self, x):
        return self.second(self.first(x).mean((2, 3)))


def test_two_callbacks_of_one_lightning_module_save_and_resume(pl, tmp_path):
    def build():
        model = task(pl, nn.Identity())
        model.first, model.second = Two().first, Two().second
        model.forward = lambda x: model.second(model.first(x).mean((2, 3)))
        callbacks = [
            QuantizationAwareTraining(modules=["first"], freeze_observers="3 steps"),
            QuantizationAwareTraining(modules=["second"], freeze_observers=None, freeze_bn=None),
        ]
        return model, callbacks

    model, callbacks = build()
    saver = pl.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1)
    run = trainer(pl, tmp_path, [*callbacks, saver], enable_checkpointing=True)
    run.fit(model, loader(), loader())
    x = samples(8)[0]
    again, others = build()
    path = next(tmp_path.glob("epoch=0*.ckpt"))
    trainer(pl, tmp_path, others).fit(again, loader(), loader(), ckpt_path=path)
    for one, two in zip(callbacks, others, strict=True):
        (name,) = one.prepared
        assert_same_state(state_of(two.prepared[name]), state_of(one.prepared[name]))
    assert torch.equal(again(x), model(x))
    last, others = build()
    path = next(tmp_path.glob("epoch=1*.ckpt"))
    trainer(pl, tmp_path, others).test(last, loader(), ckpt_path=path, verbose=False)
    assert torch.equal(last(x), model(x))
    assert last.first is others[0].int8_model
    assert last.second is others[1].int8_model


def test_calibration_then_training_then_calibration(pl, tmp_path):
    model, x = task(pl), samples(8)[0]
    names = {name for name, _ in model.named_parameters()}
    float_net = model.net
    for i in range(2):
        ptq = PostTrainingQuantization(calibration_data=loader(seed=i))
        trainer(pl, tmp_path, ptq).validate(model, loader(), verbose=False)
        assert model.net is ptq.int8_model
        calibrated = model(x)
        qat = QuantizationAwareTraining()
        trainer(pl, tmp_path, qat, max_epochs=1).fit(model.train(), loader())
        assert qat.prepared["net"] is float_net
        assert {f"net.{name}" for name, _ in float_net.named_parameters()} == names
        assert model.net is qat.int8_model
        assert not torch.equal(model(x), calibrated)
    assert isinstance(float_net, Net)


def test_another_callback_calibrates_anew_with_its_own_settings(pl, tmp_path):
    model, x = task(pl).eval(), samples(8)[0]
    outputs = {}
    for bits in (8, 4, 8):
        qconfig = QConfig(activation=QScheme(bits=bits, signed=False))
        callback = PostTrainingQuantization(qconfig, calibration_data=loader())
        trainer(pl, tmp_path, callback).test(model, loader(), verbose=False)
        assert callback.report.layers
        outputs.setdefault(bits, []).append(model(x))
    assert torch.equal(*outputs[8])
    assert not torch.equal(outputs[4][0], outputs[8][0])


@pytest.mark.parametrize("own_forward", [False, True])
def test_a_fit_with_nothing_left_to_train_leaves_the_int8_model(tmp_path, own_forward):
    pl = pytorch_lightning
    model = Direct() if own_forward else task(pl)
    callback = QuantizationAwareTraining()
    run = trainer(pl, tmp_path, callback)
    run.fit(model, loader(64))
    x = torch.randn(4, 3, 8, 8)
    before = model(x)
    run.fit(model, loader(64))
    assert torch.equal(model(x), before)
    if not own_forward:
        assert model.net is callback.int8_model
    run.save_checkpoint(tmp_path / "again.ckpt")
    fresh = Direct() if own_forward else task(pl)
    trainer(pl, tmp_path, QuantizationAwareTraining()).test(fresh, loader(), ckpt_path=tmp_path / "again.ckpt")
    assert torch.equal(fresh(x), before)
    other, finished = Direct() if own_forward else task(pl), QuantizationAwareTraining()
    trainer(pl, tmp_path, finished).fit(other, loader(64), ckpt_path=tmp_path / "again.ckpt")
    assert torch.equal(other(x), before)
    assert torch.equal(finished.int8_model(x), before)
    assert finished.report.layers == callback.report.layers
    run.fit_loop.max_epochs = 3
    run.fit(model, loader(64))
    assert not torch.equal(model(x), before)


@pytest.mark.parametrize("own_forward", [False, True])
def test_a_copy_of_an_int8_model_is_trained_saved_and_loaded_like_the_original(pl, tmp_path, own_forward):
    def build():
        return Direct() if own_forward else task(pl)

    pl = pytorch_lightning if own_forward else pl
    model, callback = build(), QuantizationAwareTraining()
    run = trainer(pl, tmp_path, callback, max_epochs=1)
    run.fit(model, loader())
    run.save_checkpoint(tmp_path / "first.ckpt")
    x = samples(8)[0]
    wanted, state = model(x), state_of(model)
    copied = copy.deepcopy(model)
    assert_same_state(state_of(copied), state)
    trainer(pl, tmp_path, QuantizationAwareTraining(), max_epochs=2).fit(copied, loader(seed=1))
    assert not torch.equal(copied(x), wanted)
    assert torch.equal(model(x), wanted)
    assert_same_state(state_of(model), state)
    trainer(pl, tmp_path, []).test(copied, loader(), ckpt_path=tmp_path / "first.ckpt", verbose=False)
    assert torch.equal(copied(x), wanted)
    tester = trainer(pl, tmp_path, [])
    tester.test(copy.deepcopy(copied), loader(), verbose=False)
    tester.save_checkpoint(tmp_path / "again.ckpt", weights_only=True)
    fresh = build()
    trainer(pl, tmp_path, []).test(fresh, loader(), ckpt_path=tmp_path / "again.ckpt", verbose=False)
    assert torch.equal(fresh(x), wanted)


def test_a_copy_of_an_int8_net_alone_is_a_plain_int8_net(pl, tmp_path):
    model = task(pl)
    trainer(pl, tmp_path, QuantizationAwareTraining(), max_epochs=1).fit(model, loader())
    net, x = copy.deepcopy(model.net), samples(8)[0]
    other = task(pl, net)
    assert torch.equal(other(x), model(x))
    assert any("codes" in key for key in net.state_dict())
    with pytest.raises(ConfigError, match="holds int8 nets"):
        trainer(pl, tmp_path, QuantizationAwareTraining()).fit(other, loader())


@pytest.mark.parametrize("own_forward", [False, True])
@pytest.mark.parametrize("first", [QuantizationAwareTraining, PostTrainingQuantization])
def test_a_fit_of_an_int8_model_without_a_callback_says_what_to_do(pl, tmp_path, own_forward, first):
    pl = pytorch_lightning if own_forward else pl
    model = Direct() if own_forward else task(pl)
    model.head = nn.Linear(2, 2)  # what is float would be trained alone, without a word
    modules = None if own_forward else ["net"]
    trainer(pl, tmp_path, first(modules=modules), max_epochs=1).fit(model, loader())
    x = samples(8)[0]
    wanted, state = model(x), state_of(model)
    with pytest.raises(ConfigError, match="is in int8 and cannot be trained"):
        trainer(pl, tmp_path, [], max_epochs=1).fit(model, loader())
    assert torch.equal(model(x), wanted)
    assert_same_state(state_of(model), state)
    model.to("cpu")
    trainer(pl, tmp_path, []).test(model, loader(), verbose=False)
    trainer(pl, tmp_path, first(modules=modules), max_epochs=1).fit(model.train(), loader())
    assert not torch.equal(model(x), wanted) or first is PostTrainingQuantization


def test_an_int8_net_may_stand_by_while_another_is_trained(pl, tmp_path):
    model = task(pl, nn.Identity())
    model.first, model.second = Two().first, Two().second
    model.forward = lambda x: model.second(model.first(x).mean((2, 3)))
    first = PostTrainingQuantization(modules=["first"], calibration_data=loader())
    trainer(pl, tmp_path, first, max_epochs=1).fit(model, loader())
    second = QuantizationAwareTraining(modules=["second"])
    trainer(pl, tmp_path, second, max_epochs=1).fit(model, loader())
    assert model.first is first.int8_model
    assert model.second is second.int8_model


def modes(module):
    return {name: m.training for name, m in module.named_modules()}


@pytest.mark.parametrize("late", [False, True])
def test_an_evaluation_leaves_the_modes_that_a_further_fit_trains_in(pl, tmp_path, late):
    """Lightning puts all in eval mode for an evaluation, and back what it finds afterwards: not what int8 replaced."""

    class Late(type(task(pl))):
        def __init__(self):
            super().__init__()
            self.net = None

        def configure_model(self):
            self.net = self.net or Net()

    def build():
        if late:
            return Late()
        model = task(pl)
        model.net.bn1.eval()  # as the user wants it
        return model

    wanted = modes(task(pl).net) if late else modes(build().net)
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append({name: mode for name, mode in modes(pl_module.net).items() if name in wanted})

    model = build()
    calibrating = PostTrainingQuantization(calibration_data=loader(), calibration_batches=1)
    trainer(pl, tmp_path, calibrating).test(model, loader(), verbose=False)
    trainer(pl, tmp_path, []).test(model, loader(), verbose=False)
    run = trainer(pl, tmp_path, [QuantizationAwareTraining(freeze_bn=None), Watch()], max_epochs=1)
    run.fit(model, loader())
    run.save_checkpoint(tmp_path / "qat.ckpt")
    other = build()
    tester = QuantizationAwareTraining(freeze_bn=None)
    trainer(pl, tmp_path, tester).test(other, loader(), ckpt_path=tmp_path / "qat.ckpt", verbose=False)
    trainer(pl, tmp_path, [PostTrainingQuantization(), Watch()], max_epochs=1).fit(other, loader())
    assert seen[0] == seen[-1] == wanted


def test_a_fit_from_a_checkpoint_without_the_callback_says_what_is_missing(pl, tmp_path):
    run = trainer(pl, tmp_path, QuantizationAwareTraining(), max_epochs=1)
    run.fit(task(pl), loader())
    run.save_checkpoint(tmp_path / "qat.ckpt")
    with pytest.warns(UserWarning, match="this Trainer has no QuantizationAwareTraining"):
        trainer(pl, tmp_path, []).fit(task(pl), loader(), ckpt_path=tmp_path / "qat.ckpt")
