"""Roll calls through a store: which ranks are present, and the answer of each.

Every wait ends within the timeout plus GRACE_SECONDS, and every present rank reports the same missing ranks.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from llmtrain.errors import TrainingError, first_line
from llmtrain.parallel.world import World, master_endpoint
from llmtrain.waiting import announced

GRACE_SECONDS = 3.0
"""Seconds that all ranks but rank 0 wait beyond the timeout, until rank 0 names the missing ranks. Rank 0 then stays for up to
the same time, so that they can read its answer."""
QUIET_SECONDS = 10.0
"""Seconds that rank 0 waits silently, because ranks that a launcher starts together do not take equally long to import."""
POLL_SECONDS = 0.2
"""Maximum seconds between two checks for the answers or for a newer start."""
AT_START = "at the start"
START = "llmtrain/start"
"""Store key of the name that rank 0 has given to the current start."""

Answers = dict[int, tuple[str, Any]]
"""Host and answer of each present rank, by rank."""


def gather_over_store(store: dist.Store, world: World, when: str, mine: Any, timeout_seconds: float) -> list[Any]:
    """Return every rank's `mine`, a JSON value, by rank. A collective of all ranks, through the store of this start.

    `when` names this roll call in the store and in messages. If ranks are missing, raises a TrainingError that names
    them, on every present rank. If this rank loses the store, raises a TrainingError on this rank alone.
    """
    began = time.monotonic()
    with _naming_the_store(world, when):
        _answer(store, world, when, mine)
        if world.rank == 0:
            answers = _collect_answers(store, world, when, timeout_seconds)
        else:
            _wait(store, [_key(when, "told")], timeout_seconds + GRACE_SECONDS)
            answers = _read_answers(store, world, when)
            _acknowledge(store, world, when)
    return _in_rank_order(answers, world, when, began)


def open_roll_call(store: dist.Store, world: World, mine: Any, timeout_seconds: float) -> tuple[dist.Store, list[Any]]:
    """Return the part of `store` that belongs to this start of the ranks, and every rank's `mine`, a JSON value, by rank. A
    collective of all ranks, through the store. Raises as `gather_over_store` does.

    A launcher that restarts ranks may keep the store with the keys of earlier starts. Nodes do not agree on a number of
    restarts: each of torchrun's agents counts its own, and one that joins later begins at 0. Rank 0 therefore draws a
    name for the start, with which all further keys begin. A rank that is faster than rank 0 reads the name of an
    earlier start. It notices that its own answer is not among the answers under this name, and looks for a newer name.
    """
    began, own = time.monotonic(), uuid4().hex
    with _naming_the_store(world, AT_START):
        if world.rank == 0:
            store.set(START, own)
            part = dist.PrefixStore(own, store)
            _answer(part, world, AT_START, [own, mine])
            answers = _collect_answers(part, world, AT_START, timeout_seconds)
        else:
            part, answers = _join(store, world, [own, mine], began + timeout_seconds + GRACE_SECONDS)
    return part, [answer for _, answer in _in_rank_order(answers, world, AT_START, began)]


def _join(store: dist.Store, world: World, mine: list[Any], deadline: float) -> tuple[dist.Store, Answers]:
    """Find the roll call that has `mine` as this rank's answer. Return its part of the store, and all its answers. After the
    deadline, return the known answers: those of the last roll call, or of the ranks that wait for rank 0 to open one."""
    waiting, answers = f"{START}/{world.rank}", {}
    _set(store, waiting, None)
    _wait(store, [START], deadline - time.monotonic())
    while store.check([START]) and time.monotonic() < deadline:
        name = store.get(START)
        part = dist.PrefixStore(name.decode(), store)
        _answer(part, world, AT_START, mine)
        pause = POLL_SECONDS / 32
        while store.get(START) == name and not part.check([_key(AT_START, "told")]) and time.monotonic() < deadline:
            time.sleep(pause)  # not a short wait of the store, after each of which torch prints a warning
            pause = min(2 * pause, POLL_SECONDS)
        answers = _read_answers(part, world, AT_START)
        has_mine = world.rank in answers and answers[world.rank][1] == mine
        if has_mine and store.get(START) == name:
            store.delete_key(waiting)
            _acknowledge(part, world, AT_START)
            return part, answers
        time.sleep(POLL_SECONDS)
    is_of_this_start = bool(answers) and world.rank not in answers
    return store, answers if is_of_this_start else _present(store, START, world)


def _answer(store: dist.Store, world: World, when: str, mine: Any) -> None:
    _set(store, _key(when, world.rank), mine)


def _collect_answers(store: dist.Store, world: World, when: str, timeout_seconds: float) -> Answers:
    """Wait as rank 0 for the answers of the other ranks, tell them which ranks are present, and return all answers."""
    others = "the other rank" if world.size == 2 else f"the other {world.size - 1} ranks"
    with announced(f"{others} {when}", timeout_seconds, QUIET_SECONDS):
        _wait(store, [_key(when, rank) for rank in range(world.size)], timeout_seconds)
    answers = _present(store, _key(when), world)
    store.set(_key(when, "told"), json.dumps(answers))
    _wait(store, [_key(when, "heard", rank) for rank in answers if rank != 0], GRACE_SECONDS)
    return answers


def _read_answers(store: dist.Store, world: World, when: str) -> Answers:
    """Return the answers that rank 0 has published. If it has published none, return those of the ranks that are present."""
    if not store.check([_key(when, "told")]):
        return _present(store, _key(when), world)
    told = json.loads(store.get(_key(when, "told")))
    return {int(rank): (host, answer) for rank, (host, answer) in told.items()}


def _acknowledge(store: dist.Store, world: World, when: str) -> None:
    """Tell rank 0 that this rank has read the answers. Rank 0 may then end, and the store with it, so nothing is read
    afterwards."""
    store.set(_key(when, "heard", world.rank), "")


def _in_rank_order(answers: Answers, world: World, when: str, began: float) -> list[Any]:
    """Return the ranks' answers in order. Raises TrainingError if one is missing."""
    if missing := sorted(set(range(world.size)) - answers.keys()):
        hosts = {rank: host for rank, (host, _) in answers.items()}
        raise TrainingError(missing_ranks_message(missing, hosts, world, when, time.monotonic() - began))
    return [answers[rank][1] for rank in range(world.size)]


def missing_ranks_message(missing: Sequence[int], hosts: dict[int, str], world: World, when: str, waited: float) -> str:
    """Return one line that says which ranks were `missing` after `waited` seconds and, by host, which ranks (those in
    `hosts`) were present."""
    present: dict[str, list[int]] = {}
    for rank, host in sorted(hosts.items()):
        present.setdefault(host, []).append(rank)
    there = ", ".join(f"{format_ranks(ranks)} on {host}" for host, ranks in present.items())
    where = ":".join(master_endpoint())
    return (
        f"{format_ranks(missing)} of {world.size} did not answer the roll call {when} at {where} within {waited:.0f} s "
        f"(run.timeout_seconds), only {there} did; see the output of the missing ranks, which were not started, have ended, or cannot "
        f"reach {where}"
    )


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text, such as `rank 3` or `ranks 1, 4-7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(runs) > 1 or len(runs[0]) > 1 else ''} {', '.join(parts)}"


@contextmanager
def _naming_the_store(world: World, when: str) -> Iterator[None]:
    """Turn an error of the store into a TrainingError that says where the store was."""
    try:
        yield
    except dist.DistError as error:
        where = ":".join(master_endpoint())
        raise TrainingError(
            f"rank {world.rank} on {socket.gethostname()} lost the store at {where} in the roll call {when}: "
            f"{first_line(error)}; rank 0, or the launcher on its host, has ended"
        ) from error


def _key(when: str, *parts: Any) -> str:
    return "/".join(["llmtrain", when, *map(str, parts)])


def _set(store: dist.Store, key: str, mine: Any) -> None:
    store.set(key, json.dumps([socket.gethostname(), mine]))


def _wait(store: dist.Store, keys: list[str], seconds: float) -> None:
    """Wait until the keys exist or `seconds` have passed. The caller checks which of them exist."""
    try:
        store.wait(keys, timedelta(seconds=max(seconds, 1e-3)))
    except dist.DistStoreError:
        return


def _present(store: dist.Store, prefix: str, world: World) -> Answers:
    """Return the answers in the store, by rank."""
    keys = {rank: f"{prefix}/{rank}" for rank in range(world.size)}
    return {rank: tuple(json.loads(store.get(key))) for rank, key in keys.items() if store.check([key])}
