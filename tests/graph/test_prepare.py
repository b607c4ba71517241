"""What prepare changes of a model, and what it must not."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qlightning import QConfig, QScheme, calibrate, convert, prepare, report, unprepare
from qlightning.affine import sqnr
from qlightning.errors import CalibrationError, ConfigError
from qlightning.fake_quantize import WeightFakeQuantize, fake_quantizers, set_fake_quant, set_observers
from qlightning.nn.qat import QATLayer
from qlightning.observers import MinMaxObserver
from tests.graph.nets import CASES, Case

# A sum into the input of a convolution is one that float torch cannot train either.
TRAINED = [case for case in CASES[::9] if case.name != "x += conv"]


class Net(nn.Module):
    """conv-bn-relu, a residual block, dropout, linear; with hyper-parameters of its own, an attribute and a method."""

    def __init__(self) -> None:
        super().__init__()
        self.num_classes = 5
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8, eps=1e-2, momentum=0.3)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.bn2 = nn.BatchNorm2d(8, eps=3e-4, momentum=None)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.dropout = nn.Dropout(0.1)
        self.fc = nn.Linear(8, self.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(x + self.bn2(self.conv2(x)))
        return self.fc(self.dropout(self.up(x).mean((2, 3))))

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target)


def batch(size: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 8, 8), torch.randint(5, (size,))


def train(net: nn.Module, steps: int = 2, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    net.train()
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        x, y = batch()
        loss = net.loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net


def snapshot(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def hyper_parameters(net: nn.Module) -> list[tuple]:
    names = ("eps", "momentum", "p", "stride", "padding", "groups", "inplace", "num_classes", "affine")
    return [tuple(getattr(m, n, None) for n in names) for m in net.modules() if type(m).__module__ != "qlightning"]


@pytest.fixture
def net() -> Net:
    return Net()


class TestTraining:
    @pytest.mark.parametrize("case", TRAINED, ids=str)
    def test_gradients_reach_every_parameter_as_in_float(self, case: Case) -> None:
        float_net = case.build().train()
        prepared = prepare(copy.deepcopy(float_net)).train()
        x = case.input()
        for net in (float_net, prepared):
            torch.manual_seed(1)
            net(x).square().sum().backward()
        for (name, ours), (other, theirs) in zip(
            prepared.named_parameters(), float_net.named_parameters(), strict=True
        ):
            assert name == other
            assert (ours.grad is None) == (theirs.grad is None), name
            if ours.grad is not None and theirs.grad.abs().max() > 1e-3:
                assert ours.grad.isfinite().all(), name
                assert F.cosine_similarity(ours.grad.flatten(), theirs.grad.flatten(), dim=0) > 0.8, name

    def test_batch_norm_moves_as_in_float(self, net: Net) -> None:
        other = prepare(copy.deepcopy(net))
        set_fake_quant(other, False)
        for model in (net, other):
            torch.manual_seed(1)
            train(model, steps=3)
        ours, theirs = other.state_dict(), net.state_dict()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6, msg=name)
        assert not torch.equal(net.bn1.running_mean, torch.zeros(8))

    def test_bn_parameters_are_trained_and_frozen_by_eval_mode(self, net: Net) -> None:
        prepare(net)
        before = snapshot(net)
        train(net)
        after = snapshot(net)
        assert not torch.equal(before["bn1.weight"], after["bn1.weight"])
        net.train()
        net.bn1.eval()
        mean = net.bn1.running_mean.clone()
        net(batch()[0])
        assert torch.equal(net.bn1.running_mean, mean)
        assert not torch.equal(net.bn2.running_mean, after["bn2.running_mean"])

    def test_the_loss_falls(self, net: Net) -> None:
        prepare(net)
        x, y = batch(8)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
        net.train()
        losses = []
        for _ in range(40):
            loss = net.loss(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0]

    def test_optimizers_from_before_and_after_see_the_same_parameters(self, net: Net) -> None:
        before = [id(p) for p in net.parameters()]
        prepare(net)
        assert [id(p) for p in net.parameters()] == before

    def test_a_layer_in_eval_mode_throughout_becomes_int8(self, net: Net) -> None:
        prepare(net)
        for _ in range(2):
            net.train()
            net.conv1.eval()
            net.bn1.eval()
            net(batch()[0])
        int8 = convert(net.eval())
        assert [row.name for row in report(int8).int8_layers] == ["conv1", "conv2", "up", "fc"]
        x = batch()[0]
        assert sqnr(net(x), int8(x)) > 25  # the weight of conv1 was not rounded in training

    def test_frozen_parameters_stay_frozen(self, net: Net) -> None:
        net.conv1.requires_grad_(False)
        prepare(net)
        train(net)
        assert net.conv1.weight.grad is None
        assert not net.conv1.weight.requires_grad

    def test_observers_move_in_training_alone(self, net: Net) -> None:
        train(prepare(net))
        state = snapshot(net)
        net.eval()
        for scale in (1, 100):
            net(batch()[0] * scale)
        assert same(snapshot(net), state)
        net.train()
        net(batch()[0] * 100)
        assert not same(snapshot(net), state)

    def test_the_observer_of_activations_can_be_given_alone(self, net: Net) -> None:
        prepare(net, QConfig(exclude=("fc",)), mode="ptq", observer=MinMaxObserver)
        found = [type(fq.observer) for _, fq in fake_quantizers(net) if not isinstance(fq, WeightFakeQuantize)]
        assert set(found) == {MinMaxObserver}

    def test_in_ptq_mode_calibrate_alone_moves_observers(self, net: Net) -> None:
        calibrate(prepare(net, mode="ptq"), [batch()])
        grids = {name: (fq.scale.clone(), fq.observer.state_dict()) for name, fq in fake_quantizers(net)}
        net.train()
        net(batch()[0] * 100)
        for name, fq in fake_quantizers(net):
            assert torch.equal(fq.scale, grids[name][0])
            assert same(fq.observer.state_dict(), grids[name][1])

    def test_observers_do_not_move_when_frozen(self, net: Net) -> None:
        train(prepare(net))
        set_observers(net, False)
        state = {name: fq.scale.clone() for name, fq in fake_quantizers(net)}
        net.train()
        net(batch()[0] * 100)
        assert all(torch.equal(fq.scale, state[name]) for name, fq in fake_quantizers(net))

    def test_the_weight_grid_follows_the_weight(self, net: Net) -> None:
        train(prepare(net))
        with torch.no_grad():
            net.conv1.weight.mul_(10)
        net.train()
        net(batch()[0])
        grid = net.conv1.weight_fake_quant
        torch.testing.assert_close(
            grid.scale, net.conv1.weight.detach().abs().amax((1, 2, 3)) / grid.scheme.quant_max, rtol=1e-6, atol=0
        )


class TestStateDict:
    def test_holds_the_float_keys_and_more_under_their_names(self, net: Net) -> None:
        keys = list(net.state_dict())
        prepare(net)
        kept = [key for key in net.state_dict() if key in set(keys)]
        assert kept == keys
        added = set(net.state_dict()) - set(keys)
        assert all("fake_quant" in key for key in added)

    def test_a_float_checkpoint_loads_and_leaves_no_range_of_other_weights(self, net: Net) -> None:
        state = snapshot(Net())
        train(prepare(net))
        net.load_state_dict(state)
        assert all(torch.equal(net.state_dict()[key], value) for key, value in state.items())
        assert not any(fq.observed or fq.observer.observed for _, fq in fake_quantizers(net))
        with pytest.raises(CalibrationError):
            convert(net)

    def test_one_missing_range_is_an_error(self, net: Net) -> None:
        train(prepare(net))
        state = snapshot(net)
        state.pop(next(key for key in state if key.endswith("observer.min_val")))
        with pytest.raises(RuntimeError, match="Missing key"):
            net.load_state_dict(state)

    def test_a_qat_checkpoint_loads_into_a_float_net(self, net: Net) -> None:
        train(prepare(net))
        other = Net()
        result = other.load_state_dict(net.state_dict(), strict=False)
        assert result.missing_keys == []
        assert all("fake_quant" in key for key in result.unexpected_keys)

    @pytest.mark.parametrize("mode", ["qat", "ptq"])
    @pytest.mark.parametrize(
        "qconfig", [None, QConfig(weight=QScheme(symmetric=True))], ids=["per channel", "per tensor"]
    )
    def test_loads_into_a_fresh_net_to_the_bit(self, net: Net, mode: str, qconfig: QConfig | None) -> None:
        prepare(net, qconfig, mode=mode)
        train(net) if mode == "qat" else calibrate(net, [batch(), batch()])
        other = prepare(Net(), qconfig, mode=mode)
        other.load_state_dict(net.state_dict(), strict=True)
        x = batch()[0]
        assert torch.equal(other.eval()(x), net.eval()(x))
        assert torch.equal(convert(other)(x), convert(net)(x))
        if mode == "qat":  # and they go on alike
            for model in (net, other):
                torch.manual_seed(2)
                train(model)
            assert same(snapshot(net), snapshot(other))


class TestHyperParameters:
    def test_stay(self, net: Net) -> None:
        before = hyper_parameters(net)
        prepare(net)
        train(net)
        net.eval()
        net.train()
        after = hyper_parameters(net)
        assert [entry for entry in after if entry in before][: len(before)]
        assert (net.bn1.eps, net.bn1.momentum, net.bn2.eps, net.bn2.momentum) == (1e-2, 0.3, 3e-4, None)
        assert net.dropout.p == 0.1

    @pytest.mark.parametrize("case", CASES[::9], ids=str)
    def test_without_rounding_it_is_the_float_net_to_the_bit(self, case: Case) -> None:
        x = case.input()
        net = case.build().eval()
        expected = net(x).detach()
        prepare(net)
        set_fake_quant(net, False)
        set_observers(net, False)
        for _, grid in fake_quantizers(net):
            grid.scale.fill_(0.5)
            grid.observed = True
        assert torch.equal(net.eval()(x), expected)

    def test_before_any_data_it_is_the_float_net(self, net: Net) -> None:
        x = batch()[0]
        expected = net.eval()(x)
        assert torch.equal(prepare(net)(x), expected)

    def test_mode_and_device_stay(self, net: Net) -> None:
        net.eval()
        prepare(net)
        assert not any(module.training for module in net.modules())
        other = prepare(Net())
        assert all(module.training for module in other.modules())


class TestIdentity:
    def test_the_module_is_the_same_object_of_its_class(self, net: Net) -> None:
        layers = dict(net.named_modules())
        assert prepare(net) is net
        assert isinstance(net, Net)
        assert type(net).__name__ == "Net"
        assert all(net.get_submodule(name) is layer for name, layer in layers.items())
        assert isinstance(net.conv1, nn.Conv2d)
        assert net.num_classes == 5
        assert net.loss(torch.randn(2, 5), torch.tensor([0, 1])).ndim == 0

    def test_twice_is_once(self, net: Net) -> None:
        train(prepare(net))
        state, cls = snapshot(net), type(net)
        assert prepare(net) is net
        assert same(snapshot(net), state)
        assert type(net) is cls

    def test_other_settings_need_unprepare_first(self, net: Net) -> None:
        prepare(net)
        with pytest.raises(ConfigError, match="unprepare"):
            prepare(net, mode="ptq")
        with pytest.raises(ConfigError, match="unprepare"):
            prepare(nn.Sequential(net))

    @pytest.mark.parametrize("case", CASES[::11], ids=str)
    def test_unprepare_brings_the_float_net_back(self, case: Case) -> None:
        net = case.build()
        x = case.input()
        expected = copy.deepcopy(net).eval()(x)
        keys, classes = list(net.state_dict()), [(n, type(m)) for n, m in net.named_modules()]
        attributes = {n: set(vars(m)) for n, m in net.named_modules()}
        prepare(net)
        net.eval()(x)
        assert unprepare(net) is net
        assert list(net.state_dict()) == keys
        assert [(n, type(m)) for n, m in net.named_modules()] == classes
        assert {n: set(vars(m)) for n, m in net.named_modules()} == attributes
        assert torch.equal(net.eval()(x), expected)
        with pytest.raises(ConfigError, match="not prepared"):
            unprepare(net)

    def test_prepares_again_after_unprepare(self, net: Net) -> None:
        train(prepare(net))
        unprepare(net)
        prepare(net, mode="ptq")
        calibrate(net, [batch()])
        assert convert(net)(batch()[0]).shape == (4, 5)


class TestCopies:
    def test_a_copy_is_the_same_and_its_own(self, net: Net) -> None:
        train(prepare(net))
        other = copy.deepcopy(net)
        x = batch()[0]
        assert torch.equal(other.eval()(x), net.eval()(x))
        state = snapshot(net)
        train(other)
        assert same(snapshot(net), state)
        assert not same(snapshot(other), state)
        assert isinstance(other.conv1, QATLayer)
        assert not torch.equal(convert(other)(x), convert(net)(x))

    def test_a_copy_traces_new_calls_of_its_own(self) -> None:
        class Scaled(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc = nn.Linear(3, 3)

            def forward(self, x: Tensor, *more: Tensor) -> Tensor:
                return self.fc(sum(more, x))

        net = prepare(Scaled())
        other = copy.deepcopy(net)
        x = torch.randn(2, 3)
        other(x, x)
        other(x, x, x)
        assert torch.equal(net.eval()(x), Scaled.forward(unprepare(net), x))

    @pytest.mark.parametrize("mode", ["qat", "ptq"])
    def test_unprepare_of_a_copy_leaves_the_first_prepared(self, net: Net, mode: str) -> None:
        prepare(net, mode=mode)
        other = unprepare(copy.deepcopy(net))
        assert type(other) is Net
        assert isinstance(net.conv1, QATLayer)


class TestSettings:
    def test_one_weight_grid_a_layer_and_one_activation_grid_a_value(self, net: Net) -> None:
        prepare(net)
        weights = [name for name, fq in fake_quantizers(net) if isinstance(fq, WeightFakeQuantize)]
        assert weights == [f"{name}.weight_fake_quant" for name in ("conv1", "conv2", "up", "fc")]
        activations = [fq.name for _, fq in fake_quantizers(net) if not isinstance(fq, WeightFakeQuantize)]
        assert len(activations) == 5  # input, conv1 block, add block, up, mean
        assert len(set(activations)) == 5

    @pytest.mark.parametrize("pattern", ["conv1", "conv?", nn.Conv2d, "torch.nn.Conv2d"])
    def test_excluded_layers_stay_float(self, net: Net, pattern: str | type) -> None:
        expected = dict(net.named_modules())
        classes = {name: type(module) for name, module in expected.items()}
        prepare(net, exclude=(pattern,))
        assert type(net.conv1) is classes["conv1"]
        assert isinstance(net.fc, QATLayer)

    def test_an_excluded_block_is_float_to_the_bit(self) -> None:
        head = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
        net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), head)
        original = copy.deepcopy(head)
        prepare(net, exclude=("1",), mode="ptq")
        calibrate(net, [batch()[0]])
        int8 = convert(net)
        x = batch()[0]
        seen: list[Tensor] = []
        int8[1][0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        out = int8(x)
        assert torch.equal(out, original(seen[0]))
        assert [type(m) for m in int8[1]] == [type(m) for m in original]

    def test_overrides_give_a_layer_its_own_scheme(self, net: Net) -> None:
        few = QConfig(weight=QScheme(bits=4, symmetric=True, axis=0, narrow_range=True))
        prepare(net, QConfig(overrides={"fc": few, "up": None}), backend="reference")
        assert net.fc.weight_fake_quant.scheme.bits == 4
        assert net.conv1.weight_fake_quant.scheme.bits == 8
        assert type(net.up) is nn.ConvTranspose2d
        train(net)
        int8 = convert(net)
        assert int8.fc.weight().int_repr().abs().max() <= 7


def test_an_override_of_a_block_that_is_called_twice_holds_for_each_call() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = nn.AvgPool2d(3, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.pool(x)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.last = Block(), nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.block(self.block(x)))

    coarse = QConfig(activation=QScheme(bits=4, signed=False))
    prepared = prepare(Two(), QConfig(overrides={"block": coarse}), backend="reference")
    bits = [fq.scheme.bits for _, fq in fake_quantizers(prepared) if fq.name in ("block.add", "block.add_1")]
    assert bits == [4, 4]


@torch.no_grad()
def test_identities_change_neither_grids_nor_blocks() -> None:
    class Residual(nn.Module):
        def __init__(self, between: nn.Module) -> None:
            super().__init__()
            self.conv, self.bn, self.last = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)
            self.between = between

        def forward(self, x: Tensor) -> Tensor:
            y = self.between(self.bn(self.between(self.conv(self.between(x)))))
            return self.last(self.between(self.between(self.between(y) + x).relu()))

    x = torch.randn(2, 3, 4, 4)
    found = {}
    for between in (nn.Identity(), nn.Sequential()):
        torch.manual_seed(0)
        prepared = calibrate(prepare(Residual(between).eval(), mode="ptq"), [x])
        grids = {name: fq.scale.tolist() for name, fq in fake_quantizers(prepared)}
        found[type(between)] = grids, convert(prepared)(x)
    (grids, result), (plain_grids, plain_result) = found[nn.Identity], found[nn.Sequential]
    assert grids == plain_grids
    assert torch.equal(result, plain_result)


@torch.no_grad()
def test_an_identity_with_a_hook_is_called() -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Identity(), nn.ReLU(), nn.Conv2d(3, 3, 1)).eval()
    net[1].register_forward_hook(lambda module, args, output: output - 1)
    x = torch.randn(2, 3, 4, 4)
    expected = net(x)
    prepared = calibrate(prepare(net, mode="ptq"), [x])
    assert sqnr(expected, prepared(x)) > 20
    assert sqnr(expected, convert(prepared)(x)) > 20
