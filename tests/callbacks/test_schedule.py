import math
from types import SimpleNamespace

import pytest
from pytorch_lightning.callbacks import GradientAccumulationScheduler

from qlightning.callbacks.progress import check_finite, lengths_of, progress_of
from qlightning.callbacks.schedule import Phase, Progress, Schedule, SchedulePoint
from qlightning.errors import ConfigError


def schedule(start=0, observers=0.75, bn=0.85):
    return Schedule(*(SchedulePoint.parse(value) for value in (start, observers, bn)))


@pytest.mark.parametrize(
    "value, unit, count",
    [
        (0, "epoch", 0),
        (3, "epoch", 3),
        (0.5, "fraction", 0.5),
        ("1000 steps", "step", 1000),
        ("1step", "step", 1),
        ("2 epochs", "epoch", 2),
        (SchedulePoint("step", 5), "step", 5),
    ],
)
def test_a_point_is_an_epoch_a_fraction_or_a_count_with_its_unit(value, unit, count):
    assert SchedulePoint.parse(value) == SchedulePoint(unit, count)


def test_none_is_never():
    assert SchedulePoint.parse(None) is None
    assert schedule(bn=None).at(Progress(10**6, 10**9, 1.0)) == Phase(True, True, False)


@pytest.mark.parametrize(
    "value", [True, -1, 1.0, 1.5, -0.1, math.nan, math.inf, "soon", "10", "1.5 steps", [1], object()]
)
def test_what_is_no_point_is_an_error_that_names_the_setting(value):
    with pytest.raises(ConfigError, match="freeze_bn"):
        SchedulePoint.parse(value, "freeze_bn")


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.7, 0.75, 0.85])
@pytest.mark.parametrize("total", [10, 20, 100, 1000])
def test_a_fraction_is_reached_at_the_exact_batch(fraction, total):
    point = SchedulePoint.parse(fraction)
    reached = [point.reached(Progress(0, done, done / total)) for done in range(total + 1)]
    first = math.ceil(round(fraction * total, 9))
    assert reached == [done >= first for done in range(total + 1)]


def test_zero_is_the_start_in_every_unit():
    for value in (0, 0.0, "0 steps"):
        assert SchedulePoint.parse(value).reached(Progress(0, 0, None))


def test_phases_follow_from_epoch_and_step_alone():
    plan = schedule(start="2 steps", observers=1, bn=0.5)
    steps = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6), (1, 7)]
    phases = [plan.at(Progress(epoch, step, step / 8)) for epoch, step in steps]
    assert [phase.fake_quant for phase in phases] == [False] * 2 + [True] * 6
    assert [phase.observers_frozen for phase in phases] == [False] * 4 + [True] * 4
    assert [phase.bn_frozen for phase in phases] == [False] * 4 + [True] * 4
    assert [phase.stage for phase in phases] == [0, 0, 1, 1, 3, 3, 3, 3]
    assert plan.at(Progress(1, 4, 0.5)) == plan.at(Progress(1, 4, 0.5))


@pytest.mark.parametrize("start, freeze", [(2, 1), (0.5, 0.4), ("10 steps", "9 steps"), (1, 0), (0.1, 0)])
def test_observers_that_freeze_before_fake_quantization_starts_are_an_error(start, freeze):
    with pytest.raises(ConfigError, match="fake_quant_start"):
        schedule(start, freeze)


def test_points_of_different_units_are_compared_once_the_length_is_known():
    plan = schedule(start=2, observers=0.4, bn=None)
    plan.check_order({"fraction": 1.0})
    plan.check_order({"fraction": 1.0, "epoch": 5})
    with pytest.raises(ConfigError, match="after freeze_observers"):
        plan.check_order({"fraction": 1.0, "epoch": 4})


def test_fake_quantization_that_never_starts_is_an_error():
    with pytest.raises(ConfigError, match="never start"):
        schedule(start=None)


def trainer(*, epochs, steps=-1, batches=8, done=0, global_step=0, accumulate=1, callbacks=()):
    loop = SimpleNamespace(
        epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(total=SimpleNamespace(completed=done)))
    )
    return SimpleNamespace(
        max_epochs=epochs,
        max_steps=steps,
        num_training_batches=batches,
        fit_loop=loop,
        global_step=global_step,
        current_epoch=done // batches if batches != math.inf else 1,
        accumulate_grad_batches=accumulate,
        callbacks=callbacks,
        lightning_module=SimpleNamespace(automatic_optimization=True),
    )


def test_the_fraction_is_that_of_the_limit_which_ends_the_training():
    assert progress_of(trainer(epochs=2, done=4)).fraction == 0.25
    assert progress_of(trainer(epochs=2, steps=8, done=4, global_step=4)).fraction == 0.5
    assert progress_of(trainer(epochs=-1, steps=8, done=4, global_step=4)).fraction == 0.5
    assert progress_of(trainer(epochs=4, batches=math.inf)).fraction == 0.25
    assert progress_of(trainer(epochs=-1)).fraction is None


def test_lengths_count_optimizer_steps():
    assert lengths_of(trainer(epochs=2, accumulate=3)) == {"fraction": 1.0, "epoch": 2, "step": 6}
    assert lengths_of(trainer(epochs=-1, steps=16)) == {"fraction": 1.0, "epoch": 2, "step": 16}
    assert lengths_of(trainer(epochs=-1)) == {"fraction": 1.0}
    schedulers = [GradientAccumulationScheduler({0: 4, 2: 1})]
    assert lengths_of(trainer(epochs=3, callbacks=schedulers)) == {"fraction": 1.0, "epoch": 3, "step": 2 + 2 + 8}
    assert lengths_of(trainer(epochs=3, steps=8, callbacks=schedulers)) == {"fraction": 1.0, "epoch": 2.5, "step": 8}
    assert lengths_of(trainer(epochs=-1, steps=8, callbacks=schedulers)) == {"fraction": 1.0, "epoch": 2.5, "step": 8}
    assert lengths_of(trainer(epochs=-1, callbacks=schedulers)) == {"fraction": 1.0}


def test_a_fraction_of_an_endless_training_is_an_error():
    with pytest.raises(ConfigError, match="freeze_observers"):
        check_finite(schedule(), trainer(epochs=-1))
    check_finite(schedule(), trainer(epochs=-1, steps=10))
    check_finite(schedule(observers="10 steps", bn=3), trainer(epochs=-1))
