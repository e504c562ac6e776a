"""Tests of resuming: a run that was saved and resumed, or only saved, has the bits of an uninterrupted run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from llmtrain.config import LRScheduleSection
from tests.distributed.fake_engine import Scenario, choices, edit, replay
from tests.distributed.test_offload import late
from tests.distributed.threads import simulate
from tests.distributed.trace import assert_same_bits, assert_same_run

FALLING = LRScheduleSection(kind="cosine", warmup_steps=2, final_ratio=0.1)
STEPS, WARMUP = 18, 2
QSR = {"kind": "qsr", "base": 2, "alpha": 1.5}
PULL = {"probability": 0.4, "strength": 0.3}
SECONDS = {"kind": "seconds", "every": 3.0, "min_steps": 0}
PENALTY = {"z": 1.0, "temperature": 0.3, "clip": 0.5, "step_weight": 0.3}
BY_SUM = {"kind": "nesterov", "lr": 0.5, "momentum": 0.7, "normalize": "lr_sum"}
SOON = {"first": 1, "second": 2}
WEIGHED = ("token_weighted", "radial")


def of(method: str, every: int | None = 4, **changes: Any) -> Any:
    return choices(method, every, **{"warmup_steps": WARMUP, **changes})


def streaming(steps: int = 2, wire: Any = "fp32", **schedule: Any) -> Any:
    others = {key: schedule.pop(key) for key in ("outer", "penalty", "moments", "reduction") if key in schedule}
    schedule = {"kind": "overlapped", "steps": steps, "fragments": 3, **schedule}
    return of("streaming_diloco", schedule=schedule, wire=wire, **others)


def feedback(kind: str) -> dict:
    return {"kind": kind, "error_feedback": True}


STEPPED = {
    "diloco": of("diloco", 3),
    "local_sgd-layerwise": of("local_sgd", 3, schedule="layerwise"),
    "edit": edit(every=3, penalty=PENALTY, warmup_steps=WARMUP),
    "edit-blocking": edit(every=3, penalty=PENALTY, warmup_steps=WARMUP, schedule="blocking"),
    "des_loc": of("des_loc", 2),
    "des_loc-layerwise": of("des_loc", 2, schedule="layerwise", moments=SOON),
    "streaming-moments": streaming(moments=SOON),
    "slowmo": of("slowmo"),
    "diloco-accumulated-qsr": of("diloco", None, period=QSR, outer=BY_SUM),
    "post_local_sgd": of("post_local_sgd", warmup_until_lr=0.9),
    "edit-qsr": edit(every=None, period=QSR, warmup_steps=WARMUP, penalty=PENALTY, outer=BY_SUM),
    "diloco-rising": of("diloco", outer={"kind": "nesterov", "rounds": {"momentum_warmup": 4, "lr_decay": 5}}),
    "sparseloco": of("sparseloco", wire={"kind": "topk", "keep": 900, "error_feedback": True, "feedback_decay": 0.9}),
    "gpa": of("gpa", 2, outer={"kind": "gpa", "decay": 0.7}),
    "palsgd": of("palsgd", pull=PULL),
    "palsgd-layerwise": of("palsgd", pull=PULL, schedule="layerwise"),
    "co2": of("co2"),
    "co2-clipped-lr": of(
        "co2", outer={"kind": "momentum", "lr": 0.8, "momentum": 0.6, "clip": 0.05, "normalize": "lr"}
    ),
    "co2-qsr": of("co2", None, period=QSR),
    "co2-weighed": of("co2", penalty={**PENALTY, "z": 0.5, "min_rounds": 2}, outer=BY_SUM),
    "co2-fragments": of("co2", schedule={"kind": "delayed", "fragments": 3}),
    "co2-fragments-qsr": of("co2", None, period=QSR, schedule={"kind": "delayed", "fragments": 3}),
    "co2-fragments-weighed": of("co2", 3, penalty=PENALTY, schedule={"kind": "delayed", "fragments": 2}),
    "streaming": streaming(),
    "streaming-accumulated": streaming(outer=BY_SUM),
    "streaming-at-once": streaming(steps=0),
    "streaming-whole-model-at-once": streaming(steps=0, fragments=1),
    "streaming-whole-round": streaming(steps=4, alpha=0.3, fragment_layout="sequential"),
    "streaming-unmixed": streaming(steps=3, alpha=0.0),
    "streaming-weighed": streaming(steps=3, penalty={**PENALTY, "z": 0.5, "min_rounds": 2}),
    "streaming-weighed-soon": streaming(penalty={**PENALTY, "z": 0.5, "min_rounds": 2}, alpha=1.0),
    "streaming-pull": of("streaming_diloco", pull=PULL, wire="fp32", schedule={"kind": "overlapped", "steps": 2}),
    **{f"diloco-{kind}": of("diloco", 3, reduction=kind) for kind in WEIGHED},
    **{f"co2-{kind}": of("co2", 3, reduction=kind, schedule={"kind": "delayed", "fragments": 2}) for kind in WEIGHED},
    **{f"streaming-{kind}": streaming(steps=3, alpha=0.4, reduction=kind) for kind in WEIGHED},
}
ROUNDED = {
    "diloco-bf16": of("diloco", wire="bf16"),
    "diloco-int4-feedback": of("diloco", wire=feedback("int4")),
    "edit-int8-feedback": edit(every=4, warmup_steps=WARMUP, penalty=PENALTY, wire=feedback("int8")),
    "palsgd-int8-feedback": of("palsgd", pull=PULL, schedule="layerwise", wire=feedback("int8")),
    "co2-int8": of("co2", wire="int8"),
    "co2-weighed-int4-feedback": of("co2", penalty=PENALTY, wire=feedback("int4")),
    "co2-int4-feedback": of("co2", wire=feedback("int4")),
    "streaming-int4": streaming(wire="int4"),
    "streaming-int4-feedback": streaming(wire=feedback("int4")),
    "streaming-weighed-int4-feedback": streaming(steps=3, wire=feedback("int4"), penalty=PENALTY),
    "streaming-whole-round-int8-feedback": streaming(steps=4, wire=feedback("int8")),
}
FAST = ("diloco-int4-feedback", "edit-int8-feedback", "palsgd-int8-feedback", "streaming-weighed-int4-feedback")
"""Cases above that run outside `deep`. They have the most state: a method's own, and rounding errors."""
MOMENTS = {
    "in-warm-up": 1,
    "after-warm-up": 2,
    "in-first-round": 3,
    "first-round-done": 6,
    "in-second-round": 7,
    "under-way": 11,
    "turn-or-armed": 14,
    "offload-switched": (11, 14),
    "in-last-round": 17,
    "last-step": 18,
    "every-step": range(1, STEPS + 1),
    "every-third": range(2, STEPS + 1, 3),
}
OFTEN = ("in-first-round", "offload-switched", "every-step")
RARELY = tuple(moment for moment in MOMENTS if moment not in OFTEN)
moments = pytest.mark.parametrize(
    "moments", [OFTEN, pytest.param(RARELY, marks=pytest.mark.deep)], ids=["often", "rarely"]
)


def is_the_run_left_alone(sync: Any, replicas: int, shard: int, moments: Sequence[str], **run: Any) -> None:
    """Check that a run has the bits of an uninterrupted one if it is resumed at each of `moments`, or only saved.

    At `offload-switched`, the first resume switches the offload of anchors, and the second switches it back.
    """
    run = {"steps": STEPS, "schedule": FALLING, "copies": late, "adapts": sync.moments is not None, **run}
    alone = Scenario(sync, replicas, shard, **run)
    resumed = [replace(alone, resume_after=MOMENTS[moment]) for moment in moments]
    resumed = [replace(one, switches_offload=one.resume_after == MOMENTS["offload-switched"]) for one in resumed]
    saved = replace(alone, save_after=range(1, 100))
    expected, only_saved, *runs = map(simulate, [alone, saved, *resumed])
    assert_same_run(expected, replay(alone))
    for moment, got in [("saved", only_saved), *zip(moments, runs, strict=True)]:
        try:
            assert_same_bits(got, expected)
            assert got.agreed == expected.agreed
        except AssertionError as error:
            error.add_note(f"resumed: {moment}")
            raise


@moments
@pytest.mark.parametrize("sync", STEPPED.values(), ids=STEPPED.keys())
def test_rounds_of_steps(sync: Any, moments: Sequence[str]) -> None:
    is_the_run_left_alone(sync, 2, 2, moments)


@moments
@pytest.mark.parametrize(
    "sync",
    [pytest.param(sync, id=name, marks=[] if name in FAST else pytest.mark.deep) for name, sync in ROUNDED.items()],
)
def test_rounded_messages(sync: Any, moments: Sequence[str]) -> None:
    """Rounding errors are state, whether a replica keeps them or they belong to a message in flight."""
    is_the_run_left_alone(sync, 4, 1, moments)


TIMED = {
    "layerwise": edit(every=None, period=SECONDS, penalty=PENALTY, warmup_steps=WARMUP),
    "blocking": edit(every=None, period=SECONDS, penalty=PENALTY, warmup_steps=WARMUP, schedule="blocking"),
    "min-steps": edit(every=None, period={**SECONDS, "min_steps": 12}, penalty=PENALTY, outer=BY_SUM),
    "delayed": edit(every=None, period=SECONDS, penalty=PENALTY, outer=BY_SUM, schedule="delayed"),
    "co2": of("co2", None, period={**SECONDS, "every": 2.0}, outer=BY_SUM),
    "pull": of("palsgd", None, period=SECONDS, pull=PULL, schedule="layerwise"),
    "int8-feedback": of("diloco", None, period=SECONDS, wire=feedback("int8")),
    "moments": of("diloco", None, period=SECONDS, moments=SOON),
    **{f"delayed-{kind}": of("co2", None, period=SECONDS, outer=BY_SUM, reduction=kind) for kind in WEIGHED},
}


@moments
@pytest.mark.parametrize("sync", TIMED.values(), ids=TIMED.keys())
def test_rounds_of_seconds(sync: Any, moments: Sequence[str]) -> None:
    """Replicas resume at their own steps, at an exchange or within a round. Their clocks continue."""
    is_the_run_left_alone(sync, 2, 2, moments, step_seconds=(0.5, 1.25), delays={(7, 1): 2.0})


@moments
def test_rounded_messages_of_seconds_that_are_under_way(moments: Sequence[str]) -> None:
    """Ranks save at agreed steps only, because saving starts the second exchange of a message in flight."""
    sync = of("co2", None, period={**SECONDS, "every": 2.0}, wire=feedback("int8"), outer=BY_SUM)
    is_the_run_left_alone(sync, 2, 2, moments, step_seconds=(0.5, 1.25), delays={(7, 1): 2.0}, saves_when_agreed=True)
