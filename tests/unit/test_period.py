"""Steps at which replicas synchronize, and rounds of QSR with the published schedules."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from llmtrain.config import EverySecondsSection, EveryStepSection, LRScheduleSection, QsrSection, StepsSection
from llmtrain.lr import LRSchedule
from llmtrain.parallel.comms import Comms
from llmtrain.sync.period import EveryStep, FixedPeriod, Period, QsrPeriod, build_period
from llmtrain.sync.timed_period import TimedPeriod


def rounds(period: Period, total: int) -> list[int]:
    """Return the lengths of the rounds, from the period's decisions alone."""
    ends = [step for step in range(1, total + 1) if period.ends_round(step)]
    warmup = sum(period.is_synchronous(step) for step in range(1, total + 1))
    return [end - start for start, end in zip([warmup, *ends], ends, strict=False)]


def published(peak: float, total: int, warmup: int, shape: str) -> SimpleNamespace:
    """Return the papers' schedules: from 0 to the peak, then to 1e-6, as a function of the steps already done."""

    def at(step: int) -> float:
        done = step - 1
        if done < warmup:
            return peak * done / warmup
        progress = (done - warmup) / (total - warmup)
        falling = 0.5 * (1 + math.cos(math.pi * progress)) if shape == "cosine" else 1 - progress
        return 1e-6 + (peak - 1e-6) * falling

    return SimpleNamespace(at=at, total_steps=total, warmup_steps=warmup)


VIT = {"peak": 8e-3, "total": 93_600, "warmup": 10_000}
RESNET = {"peak": 0.8, "total": 62_400, "warmup": 1_560}


@pytest.mark.parametrize(
    ("schedule", "shape", "base", "alpha", "expected", "longest"),
    [
        (VIT, "cosine", 4, 0.0175, 9_711, 8_142),
        (VIT, "cosine", 8, 0.0175, 6_461, 6_461),
        (VIT, "linear", 4, 0.0175, 8_741, 2_785),
        (RESNET, "cosine", 2, 0.2, 24_792, 2_051),
        (RESNET, "cosine", 4, 0.25, 12_539, 2_876),
    ],
)
def test_rounds_of_the_published_schedules(schedule, shape, base, alpha, expected, longest):
    lengths = rounds(
        QsrPeriod(QsrSection(base=base, alpha=alpha), 0, published(**schedule, shape=shape)), schedule["total"]
    )
    assert len(lengths) == expected
    assert sum(lengths) == schedule["total"], "the last round is cut at the run's end"
    assert max(lengths) == longest


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0])
def test_rounds_grow_with_a_power_of_the_learning_rate(power):
    """A round that starts at a learning rate of alpha / n has n^power steps."""
    rates = SimpleNamespace(
        at=lambda step: 1.0 if step <= 40 else 0.5 if step <= 100 else 0.25, total_steps=300, warmup_steps=0
    )
    lengths = rounds(build_period(QsrSection(base=1, alpha=1.0, power=power), 0, rates), 300)
    assert lengths[:40] == [1] * 40 and lengths[40] == 2**power
    assert round(4**power) in lengths and set(lengths[:-1]) <= {1, 2**power, 4**power}


def test_rounds_grow_once_the_rate_allows_one_step_more():
    """With base 4 and alpha twice the peak, rounds grow below a rate of 0.89 of the peak, not as soon as it falls."""
    rates = LRSchedule(1.0, 1000, LRScheduleSection(kind="cosine"))
    period = build_period(QsrSection(base=4, alpha=2.0), 0, rates)
    grown = next(step for step in range(1, 1001) if period.round_length(step) > 4)
    assert rates.at(grown) <= 2.0 / 5**0.5 < rates.at(grown - 4) < 0.9


def test_at_a_constant_learning_rate_rounds_have_one_length():
    rates = LRSchedule(3e-3, 100, LRScheduleSection(kind="constant", warmup_steps=10))
    constant = build_period(QsrSection(base=1, alpha=9e-3), 10, rates)
    fixed = build_period(StepsSection(every=9), 10, rates)
    for step in range(1, 101):
        assert constant.is_synchronous(step) == fixed.is_synchronous(step)
        assert constant.ends_round(step) == fixed.ends_round(step)
        assert constant.round_length(step) == fixed.round_length(step)


def test_rounds_do_not_depend_on_where_a_run_was_resumed():
    """Decisions depend on the step alone: a new object that is asked in the reverse order decides the same."""
    rates = LRSchedule(1e-3, 500, LRScheduleSection(kind="cosine", warmup_steps=20, final_ratio=0.01))
    first, again = (QsrPeriod(QsrSection(base=2, alpha=3e-3), 30, rates) for _ in range(2))
    assert [first.ends_round(s) for s in range(1, 501)] == [again.ends_round(s) for s in range(500, 0, -1)][::-1]
    lengths = rounds(first, 500)
    assert sum(lengths) == 470
    assert [first.round_length(s) for s in range(1, 501)] == [0] * 30 + [
        length for length in lengths for _ in range(length)
    ]


def test_a_learning_rate_that_ends_at_zero_is_no_division_by_zero():
    rates = LRSchedule(1e-3, 50, LRScheduleSection(kind="linear", final_ratio=0.0))
    assert sum(rounds(QsrPeriod(QsrSection(base=1, alpha=1e-3), 0, rates), 50)) == 50


def test_every_step_has_no_rounds():
    period = build_period(EveryStepSection(), 0, LRSchedule(1.0, 10, LRScheduleSection()))
    assert all(
        period.is_synchronous(s) and not period.ends_round(s) and period.round_length(s) == 0 for s in range(1, 11)
    )


def test_a_step_has_a_place_in_its_round_and_none_in_a_synchronous_phase():
    rates = LRSchedule(1e-3, 12, LRScheduleSection(kind="constant"))
    places = {
        "always": (build_period(EveryStepSection(), 3, rates), [0] * 12),
        "fixed": (build_period(StepsSection(every=4), 3, rates), [0] * 3 + [1, 2, 3, 4, 1, 2, 3, 4, 1]),
        "qsr": (build_period(QsrSection(base=4, alpha=1e-9), 3, rates), [0] * 3 + [1, 2, 3, 4, 1, 2, 3, 4, 1]),
    }
    for name, (period, expected) in places.items():
        assert [period.step_in_round(step) for step in range(1, 13)] == expected, name


class Hands(list):
    """Clock that shows the time that the test has set."""

    def __call__(self) -> float:
        return self[0]


def timed(clock: Hands) -> TimedPeriod:
    return TimedPeriod(EverySecondsSection(every=10.0, min_steps=0), 2, 100, Comms(None), Comms(None), clock)


def test_rounds_of_seconds_begin_after_the_warm_up_and_go_on_where_a_run_was_left():
    clock = Hands([5.0])
    period = timed(clock)
    for step in (1, 2):
        assert period.is_synchronous(step) and not period.ends_round(step) and period.step_in_round(step) == 0
    assert period.resharded([period.state_dict()] * 3) == period.state_dict(), "no clock has started yet"
    clock[0] = -5.0
    assert not period.is_synchronous(3), "asking does not start the clock"
    clock[0] = 5.0
    period.begin_local_step(3)
    assert period.step_in_round(3) == 1
    ends = []
    for step, now in ((3, 6.0), (4, 15.5)):
        clock[0] = now
        ends.append(period.ends_round(step))
    assert ends == [False, True], "10.5 seconds after step 2"
    assert (period.round_length(4), period.step_in_round(4), period.agreed_step(4)) == (2, 0, 4)
    clock[0] = 20.0
    state = period.state_dict()
    clock[0] = 900.0
    again = timed(clock)
    again.load_state_dict(state)
    assert again.state_dict() == state
    clock[0] = 1000.0
    assert not again.is_synchronous(5) and again.step_in_round(5) == 1 and again.agreed_step(5) is None
    again.begin_local_step(5)
    clock[0] = 1005.4
    assert not again.ends_round(5), "9.9 seconds: 4.5 before the run was left, and 5.4 since its next step began"
    clock[0] = 1005.6
    assert again.ends_round(6) and again.round_length(6) == 2


def test_a_validation_takes_no_seconds_of_a_round():
    clock = Hands([0.0])
    period = timed(clock)
    period.begin_local_step(3)
    clock[0] = 10.0
    assert period.ends_round(3)
    clock[0] = 11.0
    with period.paused():
        clock[0] = 30.0
        assert period.state_dict()["elapsed"] == 1.0, "a checkpoint after the validation does not count its seconds"
    clock[0] = 38.9
    assert not period.ends_round(4), "9.9 seconds, without the 19 of the validation"
    clock[0] = 39.1
    assert period.ends_round(5) and period.round_length(5) == 2


def test_a_request_to_stop_ends_a_round_of_seconds():
    clock, asked = Hands([0.0]), [False]
    section = EverySecondsSection(every=10.0, min_steps=0)
    period = TimedPeriod(section, 0, 100, Comms(None), Comms(None), clock, lambda: asked[0])
    period.begin_local_step(1)
    assert not period.ends_round(1) and not period.stop_agreed
    asked[0] = True
    assert period.ends_round(2) and period.stop_agreed and period.agreed_step(2) == 2


def test_a_longer_run_begins_with_a_round_of_full_length():
    """Few remaining steps make the last rounds of a run short. A longer run that continues it must not inherit that."""
    clock = Hands([0.0])
    section = EverySecondsSection(every=10.0, min_steps=5)
    period, longer = (TimedPeriod(section, 0, total, Comms(None), Comms(None), clock) for total in (4, 20))
    for step in (1, 2, 3, 4):
        period.begin_local_step(step)
        clock[0] = 9.0 * step
        period.ends_round(step)
    assert period.agreed_step(4) == 4
    clock[0] += 60.0  # the last validation and checkpoint
    longer.load_state_dict(period.state_dict())
    longer.total_steps_changed(is_synchronized=True)
    longer.begin_local_step(5)
    clock[0] += 5.0
    assert not longer.ends_round(5), "10 seconds have not passed"
    clock[0] += 6.0
    assert not longer.ends_round(6) and longer.agreed_step(6) == 6, "2 steps since the run's end are too few"
    shorter = TimedPeriod(section, 0, 7, Comms(None), Comms(None), clock)
    shorter.load_state_dict(longer.state_dict())
    shorter.total_steps_changed(is_synchronized=False)
    shorter.begin_local_step(7)
    assert not shorter.ends_round(7) and shorter.agreed_step(7) == 7, "the run's last step, although no time has passed"


def test_rounds_begin_after_the_warm_up_that_a_run_had():
    rates = LRSchedule(3e-3, 40, LRScheduleSection(kind="cosine"))
    for section in (StepsSection(every=4), QsrSection(base=4, alpha=1e-3)):
        changed, expected = build_period(section, 20, rates), build_period(section, 6, rates)
        changed.set_warmup(6)
        for step in range(1, 41):
            assert changed.is_synchronous(step) == (step <= 6)
            assert changed.step_in_round(step) == expected.step_in_round(step)
            assert changed.ends_round(step) == expected.ends_round(step)


def test_rounds_are_numbered_and_the_last_number_is_how_many_there_are():
    fixed = FixedPeriod(StepsSection(every=3), 2)
    assert [fixed.round_number(step) for step in range(1, 10)] == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert [EveryStep(EveryStepSection()).round_number(step) for step in (1, 100)] == [0, 0]
    qsr = QsrPeriod(QsrSection(base=4, alpha=0.0175), 500, published(**VIT, shape="cosine"))
    ends = [step for step in range(1, VIT["total"] + 1) if qsr.ends_round(step)]
    assert [qsr.round_number(step) for step in (500, 501, ends[0], ends[0] + 1)] == [0, 1, 1, 2]
    assert qsr.round_number(VIT["total"]) == len(ends)
    assert [timed(Hands([0.0])).round_number(step) for step in (1, 2, 3)] == [0, 0, None], "counted when they end"


@pytest.mark.parametrize("rule", [{"alpha": 1e200}, {"alpha": 1e308, "power": 1}])
def test_a_round_of_the_quadratic_rule_that_is_too_long_for_a_number_lasts_to_the_end(rule: dict[str, float]) -> None:
    rates = LRSchedule(1e-3, 10, LRScheduleSection(kind="constant"))
    period = QsrPeriod(QsrSection(base=3, **rule), 1, rates)
    assert [step for step in range(1, 11) if period.ends_round(step)] == [10]


def test_rounds_of_the_quadratic_rule_beyond_the_end_have_the_shortest_length() -> None:
    """A training loop of one's own may go on beyond the end, to its last average."""
    rates = LRSchedule(1.0, 10, LRScheduleSection(kind="constant"))
    period = QsrPeriod(QsrSection(base=3, alpha=3**0.5), 1, rates)
    ends = [step for step in range(1, 20) if period.ends_round(step)]
    assert ends == [4, 7, 10, 13, 16, 19]
    assert [period.round_length(step) for step in (10, 11, 13, 14)] == [3] * 4
    assert [period.step_in_round(step) for step in (10, 11, 13, 14)] == [3, 1, 3, 1]
    assert [period.round_number(step) for step in (10, 11, 13, 14)] == [3, 4, 4, 5]
