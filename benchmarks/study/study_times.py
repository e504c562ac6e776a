"""Times in which the study's methods reach their losses on networks of several speeds: measured losses, predicted times."""

from __future__ import annotations

from functools import cache

from study_losses import equal_loss_share, losses_by_seed, mean_loss, mean_of, synchronous_beside
from study_plan import STAGES, Cell, Records, runs_of
from study_runs import RECIPE
from table import ROOT, Row

from llmtrain.plan.model_size import size_of
from llmtrain.plan.time_estimate import HardwareRates, TimeEstimate, estimate_time
from llmtrain.recipe_loader import load_recipe

MESSAGES = (0.1, 1.0, 10.0, 100.0)
"""Time of one message of the model in fp32, in steps: the networks of the tables."""
MEASURED = 21.0
"""Longest message for which predictions were compared with measurements, in steps (docs/network.md)."""
VOCABULARY = 1024


def timed_cells(done: Records) -> list[Cell]:
    """Return the complete cells of several replicas and full batch whose `equal_loss_share` is known."""
    cells = [*STAGES["main"], *STAGES["gradients"], *STAGES["together"]]
    losses = {cell: mean_loss(cell, done) for cell in cells if cell != synchronous_beside(cell)}
    return [cell for cell, loss in losses.items() if loss is not None and equal_loss_share(loss, cell, done)]


def step_rows(done: Records) -> list[Row]:
    """Return, for each cell, its tokens per second divided by those of synchronous training, by the time of a message."""
    return [
        (cell.label, *(f"{token_speed(cell, done, steps):.2f}" for steps in MESSAGES)) for cell in timed_cells(done)
    ]


def token_speed(cell: Cell, done: Records, message_steps: float) -> float:
    """Return a cell's tokens per second divided by those of synchronous training."""
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
        rows.append((cell.label, *texts))
    return rows


def step_speed(cell: Cell, done: Records, message_steps: float) -> float:
    """Return the duration of synchronous training divided by that of a cell's run, if a message of the model in fp32 takes
    `message_steps` synchronous steps without communication."""
    beside = time_of(synchronous_beside(cell), done, message_steps).run
    return beside / time_of(cell, done, message_steps).run


def time_of(cell: Cell, done: Records, message_steps: float) -> TimeEstimate:
    """Return the estimated times of a cell's final run, in units of an AdamW step without communication, if a message of the model
    in fp32 takes `message_steps` of them, with a process per replica."""
    final = next(run for run in runs_of(cell, done) if run.kind == "final")
    return _time_of(tuple(final.overrides()), message_steps)


@cache
def _time_of(overrides: tuple[str, ...], message_steps: float) -> TimeEstimate:
    processes = ("parallel.in_process=false", "parallel.virtual_clock=null", "parallel.shards=1")
    recipe = load_recipe(ROOT / RECIPE, [*overrides, *processes])
    size, replicas = size_of(recipe, VOCABULARY), recipe.parallel.replicas
    sent = 8 * 2 * (replicas - 1) / replicas * 4 * size.parameters
    flops = recipe.train.tokens_per_step * size.flops_per_token / replicas
    return estimate_time(recipe, size, replicas, 1, HardwareRates(flops, mbit=sent / message_steps / 1e6))
