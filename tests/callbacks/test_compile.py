import copy
import functools
import shutil

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import qlightning
from qlightning import QScheme, QuantizationAwareTraining
from qlightning.errors import ConfigError, NonFiniteError
from qlightning.fake_quantize import fake_quantizers
from qlightning.observers import MinMaxObserver, MovingAverageObserver
from tests.callbacks.nets import CLASSES, assert_same_state, loader, samples, state_of, task, trainer

POINTS = {"freeze_observers": "3 steps", "freeze_bn": "5 steps"}
NEVER = dict.fromkeys(POINTS)
ADVICE = r"compile=True.*net\.compile\(\) after"


class Tiny(nn.Module):
    """A small net, since what is timed here is the tracing."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.fc(torch.relu(self.bn(self.conv(x))).mean((2, 3)))


class Flat(nn.Sequential):
    """Smaller still."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(192, CLASSES))


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that torch.compile has made, each of a whole forward; they run as they are, bit for bit."""
    made = []

    def backend(graph, _):
        made.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend, fullgraph=True))
    yield made
    torch._dynamo.reset()


class Count(pl.Callback):
    """How many graphs there were after each training batch, and after each validation."""

    def __init__(self, graphs):
        self.graphs = graphs
        self.train, self.validation = [], []

    def on_train_batch_end(self, *_):
        self.train.append(len(self.graphs))

    def on_validation_end(self, *_):
        self.validation.append(len(self.graphs))


def fit(model, train=None, callbacks=(), epochs=1, **options):
    torch.manual_seed(0)
    qat = QuantizationAwareTraining(backend="reference", **{**NEVER, **options})
    fitted = trainer(pl, None, [qat, *callbacks], max_epochs=epochs, num_sanity_val_steps=0)
    fitted.fit(model, train or loader(24), loader(16))
    return qat, fitted.callback_metrics["val_loss"]


def built(net=Tiny):
    torch.manual_seed(0)
    return task(pl, net())


def assert_equals_uncompiled(qat, loss, net=Tiny, **options):
    expected, expected_loss = fit(built(net), **options)
    assert_same_state(state_of(qat.prepared["net"]), state_of(expected.prepared["net"]))
    assert torch.equal(loss, expected_loss)
    x, _ = samples(4, seed=1)
    assert torch.equal(qat.int8_model(x), expected.int8_model(x))


class _NEVER:
    _compiled = None


def is_compiled(module):
    parts = list(module.modules())
    return any(
        m._compiled_call_impl is not None or getattr(m, "_captured", _NEVER)._compiled is not None for m in parts
    )


@pytest.mark.parametrize("value", [1, "yes", None, "inductor"])
def test_compile_is_a_flag(value):
    with pytest.raises(ConfigError, match="compile="):
        QuantizationAwareTraining(compile=value)


def test_one_graph_per_mode_and_one_more_at_each_freeze_point(graphs):
    model, count = built(), Count(graphs)
    net = model.net
    qat, loss = fit(model, loader(), [count], epochs=2, compile=True, **POINTS)
    # The first batch runs as it is. Batch 4 is the first with frozen ranges, batch 6 with frozen BatchNorm.
    assert count.train == [0, 1, 1, 2, 3, 4, 4, 4]
    assert count.validation == [3, 4]
    assert qat.prepared["net"] is net
    assert not is_compiled(net)
    assert not is_compiled(qat.int8_model)
    assert_equals_uncompiled(qat, loss, train=loader(), epochs=2, **POINTS)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="torch.compile needs a C++ compiler for the CPU")
def test_compiled_kernels_train_alike():
    torch._dynamo.reset()
    qat, _ = fit(built(), compile=True)
    expected, _ = fit(built())
    for (name, fq), (_, other) in zip(
        fake_quantizers(qat.prepared["net"]), fake_quantizers(expected.prepared["net"]), strict=True
    ):
        torch.testing.assert_close(fq.scale, other.scale, rtol=0.01, atol=0, msg=name)


def test_own_forward_of_a_lightning_module(graphs):
    class Own(type(built())):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(CLASSES, CLASSES)

        def forward(self, x):
            return self.fc(self.net(x))

    model, count = Own(), Count(graphs)
    fit(model, callbacks=[count], compile=True)
    assert (count.train, count.validation) == ([0, 1, 1], [2])
    assert not is_compiled(model)


def test_int8_validation_runs_int8_and_the_compiled_training_goes_on(graphs):
    model, count = built(), Count(graphs)
    qat, loss = fit(model, callbacks=[count], epochs=2, compile=True, validate_int8=True)
    assert count.train == [0, 1, 1, 1, 1, 1]
    assert_equals_uncompiled(qat, loss, epochs=2, validate_int8=True)


def test_int8_validation_of_a_net_that_the_user_compiled_in_place(graphs):
    model = built()
    model.net.compile()
    qat, loss = fit(model, epochs=2, validate_int8=True)
    assert len(graphs) == 1
    assert_equals_uncompiled(qat, loss, epochs=2, validate_int8=True)


def nan_in_batch(number):
    x, y = samples(32)
    x[8 * number, 0, 0, 0] = torch.nan
    return DataLoader(TensorDataset(x, y), batch_size=8)


class Ranges(pl.Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.before = {name: state_of(fq.observer) for name, fq in fake_quantizers(pl_module)}


@pytest.mark.parametrize("by_user", [False, True])
def test_nan_is_an_error_that_names_the_layer_and_leaves_the_ranges(graphs, by_user):
    model, ranges = built(), Ranges()
    if by_user:
        model.net.compile()
    with pytest.raises(NonFiniteError, match=r"epoch 0, training batch 2: conv_input: .*NaN"):
        fit(model, nan_in_batch(2), [ranges], compile=not by_user)
    assert graphs
    for name, fq in fake_quantizers(model):
        if "weight" not in name:
            assert_same_state(state_of(fq.observer), ranges.before[name])
    assert is_compiled(model.net) is by_user


def test_nan_in_the_first_batch_leaves_a_float_model(graphs):
    model = built()
    before = state_of(model)
    model.net.compile()
    with pytest.raises(NonFiniteError, match=r"epoch 0, training batch 0: conv_input"):
        fit(model, nan_in_batch(0))
    assert graphs
    assert state_of(model).keys() == before.keys()


def test_nan_in_a_loop_of_ones_own_is_an_error_at_conversion(graphs):
    net = qlightning.prepare(Tiny(), backend="reference").train()
    net.compile()
    x, _ = samples(4)
    net(x)
    x[0, 0, 0, 0] = torch.inf
    net(x)
    with pytest.raises(NonFiniteError, match="conv_input"):
        qlightning.convert(net)
    assert not is_compiled(qlightning.convert(net))


class TestCompiledBefore:
    @pytest.mark.parametrize("in_callback", [False, True])
    def test_a_net_compiled_in_place_before_fit(self, graphs, in_callback):
        model, count = built(Flat), Count(graphs)
        model.net.compile()
        qat, loss = fit(model, callbacks=[count], compile=in_callback)
        assert (count.train, count.validation) == ([1, 1, 1], [2])
        assert not is_compiled(qat.int8_model)
        assert_equals_uncompiled(qat, loss, Flat)

    def test_a_net_that_ran_compiled_before_it_was_prepared(self, graphs):
        model = built(Flat)
        model.net.compile()
        model.net.eval()(samples(8)[0])
        model.net.train()
        qat, loss = fit(model)
        assert len(graphs) == 3
        assert_equals_uncompiled(qat, loss, Flat)

    def test_a_prepared_net_compiled_in_place(self, graphs):
        model, count = built(Flat), Count(graphs)
        qlightning.prepare(model.net, backend="reference").compile()
        qat, loss = fit(model, callbacks=[count])
        assert (count.train, count.validation) == ([1, 1, 1], [2])
        assert_equals_uncompiled(qat, loss, Flat)

    def test_a_lightning_module_compiled_in_place(self, graphs):
        model = built(Flat)
        model.compile()
        qat, loss = fit(model)
        assert len(graphs) == 2
        x, _ = samples(4, seed=1)
        assert torch.equal(model(x), qat.int8_model(x))
        assert_equals_uncompiled(qat, loss, Flat)

    @pytest.mark.parametrize(
        "wrapped",
        [
            lambda: task(pl, torch.compile(Flat())),
            lambda: task(pl, torch.compile(qlightning.prepare(Flat(), backend="reference"))),
            lambda: torch.compile(built(Flat)),
        ],
        ids=["net", "prepared net", "LightningModule"],
    )
    def test_a_wrapper_of_torch_compile_is_an_error_before_training(self, wrapped):
        with pytest.raises(ConfigError, match=ADVICE):
            fit(wrapped())

    def test_a_prepared_net_in_a_wrapper_trains_without_the_callback(self, graphs):
        net = qlightning.prepare(Flat(), backend="reference")
        trainer(pl, None, [], max_epochs=1, num_sanity_val_steps=0).fit(
            task(pl, torch.compile(net)), loader(), loader(16)
        )
        assert len(graphs) == 2
        assert not is_compiled(qlightning.convert(net))


class TestConversion:
    def test_convert_and_quantize_model_of_a_compiled_model(self, graphs):
        x, _ = samples(8)
        net, other = Tiny(), None
        other = copy.deepcopy(net)
        net.compile()
        for quantize in (
            lambda m: qlightning.quantize_model(m, [x], backend="reference"),
            lambda m: qlightning.convert(_run(qlightning.prepare(m, backend="reference").train(), x)),
        ):
            int8 = quantize(net)
            assert not is_compiled(int8)
            assert torch.equal(int8(x), quantize(other)(x))

    def test_calibrate_a_compiled_model(self, graphs):
        x, _ = samples(8)
        net = qlightning.prepare(Tiny(), backend="reference", mode="qat")
        other = copy.deepcopy(net)
        net.compile()
        qlightning.calibrate(net, [x, x])
        assert_same_state(state_of(net), state_of(qlightning.calibrate(other, [x, x])))
        with pytest.raises(NonFiniteError, match="conv_input"):
            qlightning.calibrate(net, [x / 0])

    @pytest.mark.parametrize("backend", ["reference", "onednn"])
    def test_a_compiled_function_that_calls_an_int8_model(self, backend):
        x, _ = samples(8)
        int8 = qlightning.quantize_model(Tiny(), [x], backend=backend)
        assert torch.equal(torch.compile(lambda v: int8(v) + 1, backend="eager")(x), int8(x) + 1)


def _run(net, x):
    net(x)
    return net


@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("kind", [MinMaxObserver, MovingAverageObserver])
def test_observers_see_the_same_in_a_graph(graphs, kind, nonfinite, axis):
    observer = kind(QScheme(axis=axis), nonfinite=nonfinite)
    if axis is not None:
        observer.allocate(3)  # a state that takes its shape in a graph breaks it
    other = copy.deepcopy(observer)
    batches = list(torch.randn(4, 6, 3) * torch.tensor([1.0, 100.0, 0.0]))
    if nonfinite == "skip":
        batches[0][:, 1] = torch.nan
        batches[2][:2, 0] = -torch.inf
        batches[3].fill_(torch.inf)
    seen = torch.compile(observer)
    for batch in batches:
        seen(batch)
        other(batch)
        for actual, expected in zip(observer.range(), other.range(), strict=True):
            assert torch.equal(actual, expected)
    assert len(graphs) == 1
