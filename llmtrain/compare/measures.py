"""What one trial reached and what it cost, from its metrics.jsonl and its hosts' counters."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from llmtrain.compare.results import Trial


@dataclass(frozen=True)
class Cost:
    """What had been spent at some moment of a run: training seconds, tokens of all replicas, bytes between replicas."""

    seconds: float
    tokens: float
    bytes: float | None


@dataclass(frozen=True)
class ValidationPoint:
    """A validation during training. `loss` in nats per token, None where it was not finite."""

    loss: float | None
    cost: Cost


@dataclass(frozen=True)
class TimeSplit:
    """Where the training seconds went, mean over ranks: they add up to the whole."""

    computing: float
    exposed: float
    waiting: float


@dataclass(frozen=True)
class OnTheWire:
    """Bytes over all hosts: what the run counted, and what left and reached the hosts' interfaces."""

    counted: float
    """For the method."""
    others: float
    """For validation, metrics and agreements."""
    sent: float
    received: float | None

    @property
    def ratio(self) -> float | None:
        """Sent by the interfaces / all that was counted; None where nothing was."""
        counted = self.counted + self.others
        return self.sent / counted if counted else None


def validations(trial: Trial) -> list[ValidationPoint]:
    """All validations, in order. Bytes are interpolated over steps between log lines."""
    sent = [(0.0, 0.0), *((line["step"], line["comm/bytes_total"]) for line in _with(trial, "comm/bytes_total"))]
    known = len(sent) > 1
    return [
        ValidationPoint(
            loss=line["eval/loss"],
            cost=Cost(line["seconds"], line["tokens"], _interpolate(sent, line["step"]) if known else None),
        )
        for line in trial.lines
        if "eval/loss" in line
    ]


def cost_to_reach(trial: Trial, target: float) -> Cost | None:
    """What it took until the validation loss was first at or below `target` (nats per token); None if it never was.

    Linear between the two validations around that moment. After a validation that was not finite there is nothing to
    interpolate from, so the next one counts as it is.
    """
    before: ValidationPoint | None = None
    for now in validations(trial):
        if now.loss is not None and now.loss <= target:
            if before is None or before.loss is None:
                return now.cost
            share = (before.loss - target) / (before.loss - now.loss)
            return _between(before.cost, now.cost, share)
        before = now
    return None


def final_loss(trial: Trial) -> float | None:
    """Validation loss at the end; None where there was none or it was not finite."""
    losses = [validation.loss for validation in validations(trial)]
    return losses[-1] if losses else (trial.summary or {}).get("final_eval_loss")


def training_seconds(trial: Trial) -> float | None:
    """Until the last line; validation, checkpoints and start-up are not in it."""
    return trial.lines[-1]["seconds"] if trial.lines else None


def tokens_per_second(trial: Trial) -> float | None:
    """Of all ranks together, over the whole training time."""
    seconds = training_seconds(trial)
    return trial.lines[-1]["tokens"] / seconds if seconds else None


def bytes_sent(trial: Trial) -> float | None:
    """Between replicas in the whole run, summed over ranks, as the run counted them."""
    lines = _with(trial, "comm/bytes_total")
    return lines[-1]["comm/bytes_total"] if lines else None


def time_split(trial: Trial) -> TimeSplit | None:
    """From the last line that has the times of synchronization; None without one."""
    lines = [line for line in _with(trial, "comm/exposed_seconds") if line.get("comm/wait_seconds") is not None]
    if not lines:
        return None
    last = lines[-1]
    waiting = min(last["comm/wait_seconds"], last["comm/exposed_seconds"])
    exposed = last["comm/exposed_seconds"] - waiting
    return TimeSplit(max(0.0, last["seconds"] - exposed - waiting), exposed, waiting)


def on_the_wire(trial: Trial) -> OnTheWire | None:
    """The interfaces' counters beside the run's own; None on loopback."""
    counted = bytes_sent(trial)
    if counted is None or not trial.hosts or any(host.sent is None for host in trial.hosts):
        return None
    received = [host.received for host in trial.hosts if host.received is not None]
    whole = len(received) == len(trial.hosts)
    lines = _with(trial, "comm/other_bytes_total")
    others = lines[-1]["comm/other_bytes_total"] if lines else 0.0
    return OnTheWire(counted, others, sum(host.sent or 0 for host in trial.hosts), sum(received) if whole else None)


def _with(trial: Trial, tag: str) -> list[dict[str, Any]]:
    return [line for line in trial.lines if line.get(tag) is not None]


def _between(start: Cost, end: Cost, share: float) -> Cost:
    return Cost(
        start.seconds + share * (end.seconds - start.seconds),
        start.tokens + share * (end.tokens - start.tokens),
        None if start.bytes is None or end.bytes is None else start.bytes + share * (end.bytes - start.bytes),
    )


def _interpolate(points: list[tuple[float, float]], at: float) -> float:
    """Value at `at`, linear between points in increasing order, and the last one's beyond it."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= at < x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return points[-1][1]
