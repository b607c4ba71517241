"""Two ranks on the CPU: the same ranges, flags and int8 model on both, for one collective a step."""

import importlib
import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning
import torch
from torch import nn

from qlightning import PostTrainingQuantization, QConfig, QScheme, QuantizationAwareTraining, convert, prepare
from qlightning.callbacks.ranks import RangeSync, _Numbers, check_strategy
from qlightning.errors import ConfigError
from qlightning.fake_quantize import FakeQuantize, refresh_all
from qlightning.nn.qat import QATLayer
from qlightning.observers import HistogramObserver, MinMaxObserver, MovingAverageObserver, Observer
from tests.callbacks.nets import Net, loader, samples, task, trainer
from tests.callbacks.two_ranks import BATCH, COUNT, buffers

INPUT = "graph_fake_quant.conv1_input.observer"
FITS = ("moving_average", "minmax", "histogram", "other")
CALIBRATIONS = ("ptq_minmax", "ptq_histogram")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of both ranks, by scenario; they take most of the time to import Lightning."""
    tmp_path = tmp_path_factory.mktemp("ranks")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    for name in ("LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        environment.pop(name, None)
    script = Path(__file__).with_name("two_ranks.py")
    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("scenario", ["moving_average", "minmax"])
def test_ranges_are_the_same_after_every_batch(results, scenario):
    first, second = (rank[scenario]["grids"] for rank in results)
    assert len(first) == COUNT // 2 // BATCH
    for ours, theirs in zip(first, second, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("scenario", FITS)
def test_ranges_flags_and_int8_are_the_same_in_the_end(results, scenario):
    first, second = (rank[scenario] for rank in results)
    assert_same(first["end"], second["end"])
    assert first["flags"] == second["flags"]
    assert torch.equal(first["int8"], second["int8"])
    assert first["attributes"] == second["attributes"] == set()


def test_learned_scales_are_the_same_on_all_ranks(results):
    first, second = (rank["learned"] for rank in results)
    for ours, theirs in zip(first["grids"], second["grids"], strict=True):
        assert_same(ours, theirs)
    scales = [{n: g for n, g in grids.items() if n.endswith(".scale")} for grids in first["grids"]]
    moved = [any(not torch.equal(a[n], b[n]) for n in a) for a, b in itertools.pairwise(scales)]
    assert moved == [True, True, False]  # the fourth batch finds them frozen
    assert torch.equal(first["int8"], second["int8"])


def test_moving_averages_combine_by_their_mean(results):
    average = None
    own, other = (rank["moving_average"]["batches"] for rank in results)
    assert max(x.max() for x in other) > 5 * max(x.max() for x in own)
    for pair in list(zip(own, other, strict=True))[:3]:  # then they freeze
        extremes = torch.stack([torch.stack([x.min(), x.max()]) for x in pair]).double().mean(0)
        average = extremes if average is None else average + 0.01 * (extremes - average)
    end = results[0]["moving_average"]["end"]
    found = torch.stack([end[f"{INPUT}.{name}"] for name in ("min_val", "max_val")])
    torch.testing.assert_close(found.double(), average, rtol=1e-6, atol=0)


def test_min_max_is_that_of_all_ranks(results):
    x = torch.cat([batch for rank in results for batch in rank["minmax"]["batches"]])
    end = results[1]["minmax"]["end"]
    assert end[f"{INPUT}.min_val"] == x.min()
    assert end[f"{INPUT}.max_val"] == x.max()


def test_a_histogram_counts_every_batch_once(results):
    alone = HistogramObserver(QScheme())
    for rank in results:
        for batch in rank["histogram"]["batches"][:3]:
            alone(batch)
    end = results[1]["histogram"]["end"]
    for name in alone.reductions:
        assert torch.equal(end[f"{INPUT}.{name}"], alone.get_buffer(name)), name


@pytest.mark.parametrize("scenario", ["moving_average", "minmax"])
def test_a_step_has_one_collective(results, scenario):
    follows = 3 if scenario == "moving_average" else 4
    for rank in results:
        # Where they freeze at the fourth, the ranks come together for good before it.
        assert rank[scenario]["collectives"] == [1, 2, 3, 4]
        assert rank[scenario]["late"] == {"all_gather": follows, "all_gather_object": 1}


def test_histograms_need_no_collective_while_they_follow(results):
    for rank in results:
        assert rank["histogram"]["collectives"] == [0, 0, 0, 1]


def test_an_observer_that_cannot_merge_is_rank_zeros(results):
    (warning,) = results[0]["other"]["warnings"]
    assert "TorchAO" in warning
    assert results[1]["other"]["warnings"] == []
    assert results[1]["other"]["end"][f"{INPUT}.bound"] == torch.cat(results[0]["other"]["batches"]).abs().max()


def test_a_forward_of_the_lightning_module_itself_runs_in_int8(results):
    for rank in results:
        assert torch.equal(rank["own_forward"]["called"], rank["own_forward"]["int8"])
        assert torch.equal(rank["own_forward"]["called"], results[0]["own_forward"]["called"])


@pytest.mark.parametrize("scenario", CALIBRATIONS)
def test_calibration_on_shares_is_calibration_on_all(results, scenario, tmp_path):
    model = task(pytorch_lightning)
    callback = PostTrainingQuantization(
        QConfig(activation_observer=MinMaxObserver if scenario == "ptq_minmax" else HistogramObserver),
        calibration_data=loader(COUNT, BATCH),
        calibration_batches=5,
    )
    trainer(pytorch_lightning, tmp_path, callback).test(model, loader(COUNT, BATCH), verbose=False)
    for rank in results:
        assert_same(rank[scenario]["end"], buffers(callback.prepared["net"]))
        assert torch.equal(rank[scenario]["int8"], model(samples(8, seed=2)[0]))


# In one process


class AbsMax(Observer):
    def __init__(self, scheme):
        super().__init__(scheme)
        self.add_state("bound", torch.tensor(0.0), reduction="max")

    def update(self, x):
        self.set_state("bound", torch.maximum(self.bound, x.abs().max()))

    def range(self):
        return -self.bound, self.bound


@pytest.mark.parametrize("seed", range(5))
def test_a_row_combines_as_merge_does(seed):
    generator = torch.Generator().manual_seed(seed)
    ranks = [
        [FakeQuantize(QScheme(), kind(QScheme())) for kind in (MinMaxObserver, MovingAverageObserver, AbsMax) * 2]
        for _ in range(3)
    ]
    for fqs in ranks:
        for fq in fqs[:-1]:  # the last has seen nothing on any rank
            if torch.rand((), generator=generator) < 0.6:
                fq.observer(torch.randn(20, generator=generator))
    numbers = _Numbers(ranks[0])
    rows = torch.stack([torch.stack([b for fq in fqs for b in fq.observer.buffers()]) for fqs in ranks])
    combined, seen = numbers.combine(rows)
    states = iter(combined)
    for i in range(len(ranks[0])):
        merged = type(ranks[0][i].observer)(QScheme())
        merged.merge([fqs[i].observer.state_dict() for fqs in ranks])
        assert bool(seen[i]) == merged.observed
        for name in merged.reductions:
            value = next(states)
            assert not merged.observed or torch.equal(value, merged.get_buffer(name)), (i, name)


def test_refreshing_together_is_refreshing_each():
    schemes = [QScheme(), QScheme(bits=4), QScheme(signed=True, symmetric=True), QScheme()]
    fqs = [FakeQuantize(scheme, AbsMax(scheme)) for scheme in schemes]
    fqs.append(FakeQuantize(QScheme(axis=0), MinMaxObserver(QScheme(axis=0))))
    for fq in fqs:
        fq.observer(torch.randn(3, 4))
    refresh_all(fqs)
    found = [(fq.scale.clone(), fq.zero_point.clone(), fq.observed) for fq in fqs]
    for fq, (scale, zero_point, observed) in zip(fqs, found, strict=True):
        fq.refresh()
        assert torch.equal(scale, fq.scale)
        assert torch.equal(zero_point, fq.zero_point)
        assert observed


def strategy(pl, name):
    kind = getattr(importlib.import_module(f"{pl.__name__}.strategies"), name)
    return object.__new__(type("Mine", (kind,), {}))  # none of them is built without its hardware


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"])
@pytest.mark.parametrize("callback", [QuantizationAwareTraining, PostTrainingQuantization])
def test_sharded_parameters_are_refused(pl, callback, name):
    run = SimpleNamespace(strategy=strategy(pl, name), precision="32-true", world_size=2, callbacks=[])
    with pytest.raises(ConfigError, match=r"Mine parts the parameters.*strategy='ddp'"):
        callback().setup(run, task(pl), "fit")


def test_ranks_that_cannot_talk_are_refused():
    with pytest.raises(ConfigError, match=r"2 ranks without torch\.distributed"):
        check_strategy(SimpleNamespace(strategy=object(), world_size=2))


def sync_plugin(pl):
    return importlib.import_module(f"{pl.__name__}.plugins.layer_sync").TorchSyncBatchNorm()


def syncing(pl):
    """What DDPStrategy does to BatchNorm, on one CPU: SyncBatchNorm itself runs on several ranks with GPUs only."""

    class Syncing(importlib.import_module(f"{pl.__name__}.strategies").SingleDeviceStrategy):
        def setup(self, trainer):
            if trainer.state.fn == "fit":
                self.model = sync_plugin(pl).apply(self.model)
            super().setup(trainer)

        def teardown(self):
            if self.lightning_module.trainer.state.fn == "fit":
                self.model = sync_plugin(pl).revert(self.model)
            super().teardown()

    return Syncing(torch.device("cpu"))


PLAIN = QConfig(weight=QScheme(bits=8, symmetric=False))  # its grid has to know the BatchNorm behind the layer


@pytest.mark.parametrize("qconfig", [QConfig(), PLAIN], ids=["scales_along", "knows_bn"])
def test_batchnorm_may_be_synchronized(pl, tmp_path, qconfig):
    seen = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            seen.append({name: (type(m), m.training) for name, m in pl_module.named_modules() if name.endswith("bn1")})
            layer = pl_module.net.conv1
            assert isinstance(layer, QATLayer)
            assert layer.following_bn in (None, pl_module.net.bn1)

    model = task(pl)
    callback = QuantizationAwareTraining(qconfig, backend="reference", freeze_bn="2 steps")
    run = trainer(pl, tmp_path, [callback, Look()], strategy=syncing(pl), max_epochs=1)
    run.fit(model, loader())
    assert seen[0]["net.bn1"] == (nn.SyncBatchNorm, True)
    assert seen[-1]["net.bn1"] == (nn.SyncBatchNorm, False)
    prepared = callback.prepared["net"]
    assert type(prepared.bn1).__name__ == "_BatchNormXd"
    assert prepared.conv1.following_bn in (None, prepared.bn1)
    assert callback.report.float_layers == []
    x = samples(8, seed=1)[0]
    expected = prepared.eval()(x)
    assert (model(x) - expected).abs().max() / expected.abs().max() < 0.05
    # What Lightning leaves is a net like any other.
    again = QuantizationAwareTraining(qconfig, backend="reference")
    trainer(pl, tmp_path, again, max_epochs=1).fit(model, loader())
    assert again.report.float_layers == []


def test_lightnings_batchnorm_is_one_to_quantize(pl):
    net = Net()
    net = sync_plugin(pl).revert(sync_plugin(pl).apply(net))
    net = prepare(net)
    net.train()(samples(8)[0])
    assert isinstance(convert(net).bn1, nn.Identity)


def test_convert_takes_the_module_out_of_ddp(tmp_path):
    net = prepare(Net())
    net.train()(samples(8)[0])
    expected = convert(net)
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        int8 = convert(nn.parallel.DistributedDataParallel(net))
    finally:
        torch.distributed.destroy_process_group()
    assert isinstance(int8, Net)
    x = samples(8, seed=1)[0]
    assert torch.equal(int8(x), expected(x))


def test_what_all_ranks_share_counts_once_when_training_goes_on():
    net = prepare(Net(), QConfig(activation_observer=HistogramObserver), mode="qat")
    net.train()(samples(8)[0])
    (observer, *_) = (m for m in net.modules() if isinstance(m, HistogramObserver))
    before = {name: tensor.clone() for name, tensor in observer.state_dict().items()}
    sync = RangeSync(SimpleNamespace(world_size=2), nn.ModuleDict({"net": net}), {"net": net})
    sync.follow(True)  # on either rank
    observer.merge([observer.state_dict(), observer.state_dict()])
    assert_same(observer.state_dict(), before)


def test_ddp_is_told_what_to_leave_alone_and_no_more():
    model = nn.ModuleDict({"net": prepare(Net())})
    mine = ["net.fc.bias"]
    model._ddp_params_and_buffers_to_ignore = mine
    sync = RangeSync(SimpleNamespace(world_size=2), model, {"net": model["net"]})
    grids = {name for name, _ in model.named_buffers() if "bn" not in name}
    assert set(model._ddp_params_and_buffers_to_ignore) == {*mine, *grids}
    for _ in range(2):
        sync.release()
        assert model._ddp_params_and_buffers_to_ignore is mine
