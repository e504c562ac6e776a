"""Times in which the study's methods reach their losses on networks of several speeds. Losses are measured, times predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from statistics import mean

from study_losses import (
    equal_loss_share,
    figures_of,
    finals_of,
    label_with_rounds,
    losses_by_seed,
    mean_loss,
    mean_of,
    share_text,
    synchronous_beside,
)
from study_plan import BATCH, CLOCKS, FINAL_SEEDS, Cell, Records
from study_runs import RECIPE
from study_stages import STAGES, runs_of
from table import ROOT, Row

from llmtrain.config import VirtualClockSection
from llmtrain.parallel.virtual_clock import VirtualClock
from llmtrain.plan.model_size import size_of
from llmtrain.plan.time_estimate import HardwareRates, TimeEstimate, estimate_time
from llmtrain.recipe_loader import load_recipe

MESSAGES = (0.1, 1.0, 10.0, 100.0)
"""Networks of the tables, given by the time of one message of the model in fp32, in steps."""
MEASURED = 21.0
"""Longest message for which predictions were compared with measurements, in steps (docs/network.md)."""
VOCABULARY = 1024
ROUNDED = ("streaming_diloco", "sparseloco")
"""Methods whose messages are not in fp32."""
NO_INT8, OWN_WIRE = "no int8 run", "has its own wire"
"""Table cells where synchronous training was not run with int8 gradients, and where one of ROUNDED would have int8 messages."""
TIMED = ("main", "gradients", "together", "rounds", "auto", "long")
"""Stages whose cells have predicted times."""
WAITING = ("synchronous", "edit", "local_sgd")
"""Methods that are compared with those for uneven replicas: all replicas wait for the slowest, after each step or round."""


def timed_cells(done: Records) -> list[Cell]:
    """Return the complete cells of 4 replicas and the usual batch whose `equal_loss_share` is known."""
    cells = [cell for stage in TIMED for cell in STAGES[stage] if (cell.replicas, cell.batch) == (4, BATCH[4])]
    losses = {cell: mean_loss(cell, done) for cell in cells if cell != synchronous_beside(cell)}
    return [cell for cell, loss in losses.items() if loss is not None and equal_loss_share(loss, cell, done)]


def step_rows(done: Records) -> list[Row]:
    """Return, for each cell, its tokens per second divided by those of synchronous training, by the time of a message."""
    return [
        (label_with_rounds(cell), *(f"{token_speed(cell, done, steps):.2f}" for steps in MESSAGES))
        for cell in timed_cells(done)
    ]


def token_speed(cell: Cell, done: Records, message_steps: float) -> float:
    """Return a cell's tokens per second divided by those of synchronous training, if a message takes `message_steps`."""
    share = mean_of(cell, "tokens", done) / mean_of(synchronous_beside(cell), "tokens", done)
    return share * step_speed(cell, done, message_steps)


def speed_rows(done: Records) -> list[Row]:
    """Return, for each cell, how many times as fast as synchronous training it reaches its loss, by the time of a message, with
    the range over the seeds."""
    rows = []
    for cell in timed_cells(done):
        losses = losses_by_seed(cell, done)
        shares = [equal_loss_share(loss, cell, done) for loss in (mean_loss(cell, done), max(losses), min(losses))]
        texts = []
        for steps in MESSAGES:
            speed = step_speed(cell, done, steps)
            middle, low, high = (f"{share * speed:.2f}" if share else "less" for share in shares)
            texts.append(f"{middle} ({low} to {high})")
        rows.append((label_with_rounds(cell), *texts))
    return rows


def reach_rows(done: Records) -> list[Row]:
    """Return a row for each cell with 4 replicas and their usual batch that reaches, with any seed, the mean final loss of synchronous
    training with AdamW and TOKENS. The row says how many seeds reach it, after how many steps and tokens, and how many times as fast,
    by the time of a message. Losses are interpolated between validations. Speeds are of the mean over the seeds, if all reach it."""
    measure = STAGES["main"][0]
    target, rows = mean_loss(measure, done), []
    for cell in (cell for stage in ("main", "gradients", "together", "long") for cell in STAGES[stage]):
        if target is None or cell == measure or cell.clock or mean_loss(cell, done) is None:
            continue
        finals = finals_of(cell, done)
        steps = [found for record in finals if (found := step_of_loss(record["curve"], target)) is not None]
        if not steps:
            continue
        span = f"{min(steps):,.0f} to {max(steps):,.0f}" if len(steps) > 1 else f"{steps[0]:,.0f}"
        share = mean(steps) / finals[0]["steps"]
        is_known = len(steps) == len(finals)
        times = ((time_of(measure, done, message).run, time_of(cell, done, message).run) for message in MESSAGES)
        speeds = " / ".join(f"{ours / (share * theirs):.2g}" for ours, theirs in times if is_known)
        tokens = f"{share * mean_of(cell, 'tokens', done) / 1e6:.1f} M"
        rows.append((cell.label, f"{len(steps)} of {len(finals)}", span, tokens, speeds))
    return rows


def step_of_loss(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """Return the step at which a `curve` of (step, loss, bytes) first reaches `loss`, interpolated between its points, or None."""
    for (before, higher, *_), (after, lower, *_) in pairwise(curve):
        if lower <= loss:
            return before + (after - before) * (higher - loss) / (higher - lower)
    return None


def break_even_rows(done: Records) -> list[Row]:
    """Return, for each cell that is local from the first step, the times of a message at which it reaches its loss as fast as
    synchronous training: with gradients in fp32, with gradients in int8, and with gradients and the cell's own messages in int8. If
    there is no such time, the reason takes its place. Synchronous training with int8 gradients was run with TOKENS only; for longer
    runs, the rows assume that these gradients cost as little."""
    rounded = {synchronous_beside(cell): cell for cell in STAGES["gradients"] if mean_loss(cell, done) is not None}
    rows = []
    for cell in timed_cells(done):
        if cell.method in ("synchronous", "post_local_sgd") or cell.together:
            continue
        beside = synchronous_beside(cell)
        int8 = rounded.get(replace(beside, length=1))
        against = [break_even_text(cell, other, done) for other in (beside, int8)]
        both = OWN_WIRE if cell.method in ROUNDED else break_even_text(cell, int8, done, "sync.wire=int8")
        rows.append((label_with_rounds(cell), *against, both))
    return rows


def break_even_text(cell: Cell, other: Cell | None, done: Records, *changed: str) -> str:
    """Return `break_even` as text. `other` is None if its runs are missing."""
    if other is None:
        return NO_INT8
    steps = break_even(cell, other, done, *changed)
    if steps == 0:
        return f"below {MESSAGES[0]:g}"
    return f"{steps:.2g}" if math.isfinite(steps) else f"above {MESSAGES[-1]:g}"


def break_even(cell: Cell, other: Cell, done: Records, *changed: str) -> float:
    """Return the time of a message, in steps, at which a cell and synchronous training reach the cell's loss at the same time: 0 if
    the cell is faster even with the shortest message of the tables, infinity if it is not faster even with the longest. `other` is the
    synchronous cell, which needs the tokens of `equal_loss_share`. `changed` keys change the cell's times, not its loss."""
    share = equal_loss_share(mean_loss(cell, done), cell, done) * cell.length / other.length

    def is_faster(steps: float) -> bool:
        return share * time_of(other, done, steps).run > time_of(cell, done, steps, *changed).run

    low, high = MESSAGES[0], MESSAGES[-1]
    if is_faster(low):
        return 0.0
    if not is_faster(high):
        return math.inf
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_faster(middle) else (middle, high)
    return (low * high) ** 0.5


def step_speed(cell: Cell, done: Records, message_steps: float) -> float:
    """Return the duration of synchronous training divided by that of a cell's run, if a message of the model in fp32 takes
    `message_steps` synchronous steps without communication."""
    beside = time_of(synchronous_beside(cell), done, message_steps).run
    return beside / time_of(cell, done, message_steps).run


def time_of(cell: Cell, done: Records, message_steps: float, *changed: str) -> TimeEstimate:
    """Return the estimated times of a cell's final run, in units of an AdamW step without communication, if a message of the model
    in fp32 takes `message_steps` of them, with a process per replica, and with `changed` keys."""
    final = next(run for run in runs_of(cell, done) if run.kind == "final")
    return _time_of((*final.overrides(), *changed), message_steps)


@cache
def _time_of(overrides: tuple[str, ...], message_steps: float) -> TimeEstimate:
    processes = ("parallel.in_process=false", "parallel.virtual_clock=null", "parallel.shards=1")
    recipe = load_recipe(ROOT / RECIPE, [*overrides, *processes])
    size, replicas = size_of(recipe, VOCABULARY), recipe.parallel.replicas
    sent = 8 * 2 * (replicas - 1) / replicas * 4 * size.parameters
    flops = recipe.train.tokens_per_step * size.flops_per_token / replicas
    return estimate_time(recipe, size, replicas, 1, HardwareRates(flops, mbit=sent / message_steps / 1e6))


def uneven_rows(done: Records) -> list[Row]:
    """Return, for each uneven virtual clock, the loss and the virtual time of methods that wait for slow replicas and of those that
    do not, if any of the latter is complete."""
    rows = []
    for clock in dict.fromkeys(cell.clock for cell in STAGES["uneven"]):
        complete = [cell for stage in ("main", "uneven") for cell in STAGES[stage] if mean_loss(cell, done) is not None]
        cells = [cell for cell in complete if cell.clock == clock]
        waiting = [cell for cell in complete if cell.label in WAITING] if cells else []
        for cell in (*waiting, *cells):
            ratio = virtual_seconds(cell, clock, done) / virtual_seconds(synchronous_beside(cell), clock, done)
            share = 1.0 if cell == synchronous_beside(cell) else equal_loss_share(mean_loss(cell, done), cell, done)
            loss, spread, gap, *_ = figures_of(cell, done)
            speed = f"{share / ratio:.2f}" if share else ""
            rows.append((clock, cell.method, f"{loss} ± {spread}", gap, share_text(cell, done), f"{ratio:.2f}", speed))
    return rows


def virtual_seconds(cell: Cell, clock: str, done: Records) -> float:
    """Return the mean virtual time of a cell's final runs: as recorded or, for a method whose replicas wait for each other, as
    computed from the clock."""
    finals = finals_of(cell, done)
    if cell.clock == clock:
        return mean(record["virtual_seconds"] for record in finals)
    every = 1 if cell.method == "synchronous" else cell.every
    return mean(
        waiting_seconds(record["steps"], every, clock, seed) for record, seed in zip(finals, FINAL_SEEDS, strict=True)
    )


def waiting_seconds(steps: int, every: int, clock: str, seed: int) -> float:
    """Return the virtual time of `steps` steps, if the replicas wait for each other after every `every` steps."""
    seconds, delay = CLOCKS[clock]
    times = VirtualClock(VirtualClockSection(step_seconds=seconds, random_delay=delay), seed, 0)
    total = 0.0
    for first in range(1, steps + 1, every):
        of_round = range(first, min(first + every, steps + 1))
        total += max(sum(times.seconds_of(replica, step) for step in of_round) for replica in range(len(seconds)))
    return total
