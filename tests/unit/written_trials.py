"""Writers of run directories as trials of a comparison leave them, with made-up numbers, for tests of what reads them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

EVERY_STEP = "synchronous"


def write_trial(
    folder: Path,
    condition: str,
    run: str,
    seed: int,
    lines: Sequence[dict[str, Any]],
    method: str | None = None,
    **told: Any,
) -> Path:
    """Write the directory of a trial in a comparison's folder, and return it. trial.json is that of a trial that is done, with
    the changes in `told`."""
    path = folder / condition / run / f"seed-{seed}"
    write_run(path, lines, method or run, seed)
    record = {"condition": condition, "run": run, "seed": seed, "state": "done", "exit_codes": [0, 0], "hosts": []}
    (path / "trial.json").write_text(json.dumps(record | told))
    return path


def write_run(path: Path, lines: Sequence[dict[str, Any]], method: str, seed: int = 1, stopped: str = "done") -> None:
    """Write an ordinary run directory, without trial.json."""
    path.mkdir(parents=True)
    kind = "every_step" if method == EVERY_STEP else "steps"
    recipe = {"run": {"name": path.name, "seed": seed}, "sync": {"method": method, "period": {"kind": kind}}}
    (path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "summary.json").write_text(json.dumps({"stopped": stopped}))


def validation(step: int, seconds: float, loss: float | None) -> dict[str, Any]:
    """Return the line of a validation. A step has 100 tokens."""
    return {"step": step, "tokens": 100 * step, "seconds": seconds, "eval/loss": loss}


def logged(step: int, seconds: float, sent: float, exposed: float = 0.0, waited: float = 0.0) -> dict[str, Any]:
    """Return a line of training. A step has 100 tokens."""
    return {
        "step": step,
        "tokens": 100 * step,
        "seconds": seconds,
        "train/loss": 5.0,
        "comm/bytes_total": sent,
        "comm/exposed_seconds": exposed,
        "comm/wait_seconds": waited,
    }


def straight(end_seconds: float, end_loss: float | None, sent: float = 1000.0) -> list[dict[str, Any]]:
    """Return the lines of ten steps from a loss of 8, validated at the start and at the end only."""
    return [validation(0, 0.0, 8.0), logged(10, end_seconds, sent), validation(10, end_seconds, end_loss)]


METHODS = {
    "synchronous": (1, 1.0, 0.0, 3.93),
    "local_sgd": (20, 1.0, 0.25, 4.20),
    "diloco": (20, 1.0, 0.2, 4.08),
    "edit": (20, 0.45, 0.15, 3.97),
    "palsgd": (20, 1.0, 0.2, 3.99),
    "streaming_diloco": (20, 0.08, 0.02, 4.10),
    "co2": (20, 0.03, 0.02, 4.75),
    "wagma": (10, 0.2, 0.02, 4.3),
}
"""By method: steps per round, the share of a message's time that is exposed, waiting time per round in steps, and the last loss."""
MBIT = {"30mbit": 30, "100mbit": 100, "unlimited": 8000}
STEP, STEPS, HOSTS, MESSAGE = 0.25, 300, 4, 13e6


def write_comparison(
    folder: Path, conditions: Sequence[str] = tuple(MBIT), seeds: Sequence[int] = (1, 2, 3)
) -> list[tuple[str, str, int]]:
    """Write trials of eight methods with plausible numbers. One trial has failed, and the last one is missing. Return all planned
    trials."""
    planned = [(condition, run, seed) for seed in seeds for condition in conditions for run in METHODS]
    for condition, run, seed in planned[:-1]:
        told: dict[str, Any] = {
            "condition_in_words": f"{MBIT[condition]} Mbit/s between 4 hosts",
            "recipe": "recipes/diloco_gpt_neo_8m.yaml",
            "overrides": [f"sync.method={run}", "train.steps=300", "optim.lr=2e-3", f"run.seed={seed}"],
            "commit": "0123abc",
            "wall_seconds": 90.0,
        }
        lines, sent = _plausible(condition, run, seed)
        told["hosts"] = [
            {"name": f"host{i}", "sent": round(sent * 0.262), "received": round(sent * 0.262)} for i in range(4)
        ]
        if (condition, run, seed) == (conditions[0], "wagma", seeds[0]):
            lines = lines[: len(lines) // 3]
            said = [f"line {number} of what host 2 printed | with a bar" for number in range(5)]
            said.append("error: rank 2 lost a peer in step 96: Connection reset by peer; start the same command again")
            told |= {"state": "failed", "exit_codes": [1, 1, -9, 1], "last_lines": said}
        path = write_trial(folder, condition, run, seed, lines, **told)
        if (condition, seed) == (conditions[0], seeds[0]):
            write_trace(path, condition, run)
    return planned


def _plausible(condition: str, run: str, seed: int) -> tuple[list[dict[str, Any]], float]:
    every, share, waits, last = METHODS[run]
    draw = random.Random(f"{condition} {run} {seed}")
    last += draw.gauss(0, 0.012)
    message = MESSAGE * 8 / (MBIT[condition] * 1e6)
    exposed = share * message / every
    waiting = STEP * (waits + 0.02)
    lines, seconds, sent = [validation(0, 0.0, 8.34)], 0.0, 0.0
    for step in range(10, STEPS + 1, 10):
        seconds += 10 * (STEP * draw.uniform(0.97, 1.03) + exposed + waiting / every)
        sent += 10 * HOSTS * MESSAGE / every
        lines.append(logged(step, seconds, sent, step * (exposed + waiting / every), step * waiting / every))
        if step % 20 == 0:
            lines.append(validation(step, seconds, last + (8.34 - last) * math.exp(-step / 55) + draw.gauss(0, 0.006)))
    return lines, sent


def write_trace(path: Path, condition: str, run: str, first: int = 100, steps: int = 60) -> None:
    """Write spans of four ranks, of which the last one is slower. Some methods have messages in the background."""
    every, share, _, _ = METHODS[run]
    message = MESSAGE * 8 / (MBIT[condition] * 1e6)
    clocks = [1.8e9] * HOSTS
    ranks: list[list[dict[str, Any]]] = [[] for _ in range(HOSTS)]
    for step in range(first, first + steps):
        is_round = step % every == 0
        starts = list(clocks)
        for rank in range(HOSTS):
            lag = 0.12 if rank == 3 and step % 3 == 0 else 0.0
            end = clocks[rank] + STEP + lag
            ranks[rank].append(_span("data", step, clocks[rank], clocks[rank] + 0.01))
            ranks[rank].append(_span("gradient", step, clocks[rank] + 0.01, end))
            if lag:
                ranks[rank].append(_span("delay", step, clocks[rank] + 0.05, clocks[rank] + 0.05 + lag))
            clocks[rank] = end
        if every == 1 or (is_round and share > 0.1):
            together = max(clocks)
            for rank in range(HOSTS):
                ranks[rank].append(_span("exposed", step, clocks[rank], together + share * message))
                ranks[rank].append(_span("wait", step, clocks[rank], together))
            clocks = [together + share * message] * HOSTS
        elif is_round:
            for rank in range(HOSTS):
                ranks[rank].append(_span("message", step, clocks[rank], clocks[rank] + message) | {"bytes": MESSAGE})
                ranks[rank].append(_span("exposed", step, clocks[rank], clocks[rank] + share * message))
                clocks[rank] += share * message
        for rank in range(HOSTS):
            ranks[rank].append(_span("step", step, starts[rank], clocks[rank]))
    (path / "trace").mkdir()
    for rank, spans in enumerate(ranks):
        text = "".join(json.dumps(span) + "\n" for span in spans)
        (path / "trace" / f"rank-{rank:05d}.jsonl").write_text(text)


def _span(kind: str, step: int, start: float, end: float) -> dict[str, Any]:
    return {"kind": kind, "name": "", "step": step, "start": start, "end": end}
