"""Break llmtrain in one place at a time and check that a test fails: `make mutants`, or `python -m tests.mutation`.

    --area sync         only mutants of llmtrain/sync
    --only 'penalty:'   only mutants whose names contain this text
    --resume            only mutants without a result, and survivors
    --narrow            only the tests named for a mutant, not the rest of its area
    --deep              also tests marked `deep`, for mutants that survive the others
    --workers 1         number of mutants tried in parallel; 2 by default
    --table             write tests/MUTANTS.md from the existing results, and run nothing

Mutants known to be equivalent are not tried. Tests must first pass without a mutant. Every result is appended to a file of JSON
lines immediately. The exit code is 1 if a mutant survives, and 2 if a test named for a mutant fails without the mutant.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from tests.mutants import MUTANTS, Mutant
from tests.mutation_runs import ROOT, Outcome, Run, Slot, preload
from tests.mutation_table import write_table

FOLDER = Path(tempfile.gettempdir()) / "llmtrain-mutants"
AREAS = {
    "sync": ("tests/unit", "tests/distributed"),
    "parallel": ("tests/unit", "tests/distributed"),
    "train": ("tests/unit", "tests/distributed", "tests/end_to_end"),
    "launch": ("tests/unit", "tests/end_to_end", "tests/multi_node"),
}
"""Folders with the tests of an area, which run after the tests named for a mutant."""
ELSEWHERE = ("tests/unit", "tests/end_to_end")
REFUSED = "refused"
"""Verdict on a mutant if a test named for it fails without the mutant."""
NOTHING_RAN = 5
"""pytest's exit code if no test was selected."""
FAR_LONGER, AT_LEAST = 5.0, 60.0
"""A run hangs if it takes longer than FAR_LONGER times its duration without a mutant, plus AT_LEAST seconds."""

Row = dict[str, Any]


class Results:
    """Results in a file of JSON lines. The last line of a key counts. Runs without a mutant that had failures are dropped, so that
    they are repeated."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        rows = {row["key"]: row for row in map(json.loads, lines)}
        self.rows: dict[str, Row] = {key: row for key, row in rows.items() if not row.get("failed")}

    def add(self, row: Row) -> None:
        """Record a row, and append it to the file immediately."""
        self.rows[row["key"]] = row
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


class Trials:
    """Test runs on several copies of the tree in parallel."""

    def __init__(self, workers: int):
        preload()
        FOLDER.mkdir(exist_ok=True)
        for left in FOLDER.glob("copy-*"):  # of a process that was killed
            if not psutil.pid_exists(int(left.name.split("-")[1])):
                shutil.rmtree(left)
        self.slots = [Slot(FOLDER / f"copy-{os.getpid()}-{number}") for number in range(workers)]

    def all(self, tasks: Sequence[Iterator[tuple[Run, Mutant | None]]]) -> None:
        """Run all tasks, at most one per copy at a time. A task yields (run, mutant) and is sent the outcome."""
        waiting, busy, here = list(tasks), {}, os.getpid()
        try:
            while waiting or busy:
                for slot in self.slots:
                    if slot.is_free and waiting:
                        task = waiting.pop(0)
                        self._go_on(busy, slot, task, None)
                    elif not slot.is_free and (outcome := slot.ended()) is not None:
                        self._go_on(busy, slot, busy.pop(slot), outcome)
                time.sleep(0.05)
        finally:
            for slot in self.slots if os.getpid() == here else ():  # forked processes execute this, too
                slot.stop()
                shutil.rmtree(slot.folder)

    @staticmethod
    def _go_on(busy: dict, slot: Slot, task: Any, outcome: Outcome | None) -> None:
        try:
            run, mutant = next(task) if outcome is None else task.send(outcome)
        except StopIteration:
            return
        slot.start(run, None if mutant is None else (mutant.file, mutant.old, mutant.new))
        busy[slot] = task


def main() -> int:
    """Try the mutants that the command line selects, or write the table. Return the exit code."""
    arguments = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an exception, so that running tests are killed, too
    results = Results(arguments.results)
    if arguments.table:
        write_table(MUTANTS, results.rows, ROOT / "tests" / "MUTANTS.md")
        return 0
    chosen = [
        mutant
        for mutant in MUTANTS
        if (not arguments.area or mutant.area in arguments.area.split(","))
        and all(part in mutant.name for part in arguments.only)
        and not mutant.equivalent
        and not (arguments.resume and results.rows.get(key_of(mutant), {}).get("verdict", "survived") != "survived")
    ]
    print(f"{len(chosen)} mutants", flush=True)
    say = report(len(chosen))
    Trials(arguments.workers).all([attempt(mutant, results, arguments, say) for mutant in chosen])
    if all(key_of(mutant) in results.rows for mutant in MUTANTS if not mutant.equivalent):
        write_table(MUTANTS, results.rows, ROOT / "tests" / "MUTANTS.md")
    found = {mutant.name: results.rows.get(key_of(mutant), {}).get("verdict", REFUSED) for mutant in chosen}
    for verdict in ("survived", REFUSED):
        for name in (name for name, what in found.items() if what == verdict):
            print(f"{verdict}: {name}")
    return 2 if REFUSED in found.values() else 1 if "survived" in found.values() else 0


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--area", default="")
    parser.add_argument("--only", action="append", default=[])
    for flag in ("--resume", "--narrow", "--deep", "--table"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", type=Path, default=FOLDER / "results.jsonl")
    arguments = parser.parse_args()
    known = {mutant.area for mutant in MUTANTS}
    if unknown := [area for area in arguments.area.split(",") if area and area not in known]:
        parser.error(f"no mutants in {', '.join(unknown)}; there are some in {', '.join(sorted(known))}")
    return arguments


def key_of(mutant: Mutant) -> str:
    """Return the key of a mutant's result. It contains a digest of the change, so that an edited mutant has no result."""
    change = hashlib.sha256("\0".join((mutant.file, mutant.old, mutant.new)).encode()).hexdigest()[:8]
    return f"{mutant.name} {change}"


def baseline_key(test: str, marks: str | None = None) -> str:
    """Return the key of a run without a mutant. It contains a digest of the test files, so that changed tests run again."""
    path = ROOT / test.partition("::")[0]
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]
    return f"unbroken {test} {marks or 'fast'} {digest}"


def baseline(test: str, results: Results, marks: str | None = None) -> Iterator[tuple[Run, None]]:
    """Run tests without a mutant, and record their durations and failures."""
    outcome = yield Run((test,), marks, stops_at_first=False), None
    failed = outcome.failed
    if outcome.code not in (0, NOTHING_RAN) and not failed:
        failed = [f"{test} (timed out)" if outcome.timed_out else f"{test} (exit code {outcome.code})"]
    results.add({"key": baseline_key(test, marks), **asdict(outcome), "failed": failed})
    print(f"unbroken: {test} {marks or ''} {outcome.count} tests, {len(failed)} fail, {outcome.seconds} s", flush=True)


def attempt(
    mutant: Mutant, results: Results, arguments: argparse.Namespace, say: Callable[[Row], None]
) -> Iterator[tuple[Run, Mutant | None]]:
    """Run tests on a mutant until one fails: each of the tests named for it, then the rest of its area, then deep tests."""
    area = AREAS.get(mutant.area, ELSEWHERE)
    stages: list[tuple[tuple[str, ...], str | None]] = [((test,), None) for test in mutant.tests]
    stages += [] if arguments.narrow else [(area, None)]
    stages += [(mutant.tests, "deep"), (area, "deep")] if arguments.deep else []
    row: Row = {"key": key_of(mutant), "verdict": "survived", "by": "", "message": "", "seconds": 0.0}
    for tests, marks in stages:
        for test in tests:
            if baseline_key(test, marks) not in results.rows:
                yield from baseline(test, results, marks)
        known = [results.rows[baseline_key(test, marks)] for test in tests]
        red = [test for before in known for test in before["failed"]]
        if red and tests is not area:
            say(row | {"verdict": REFUSED, "by": f"{red[0]} fails without it"})
            return
        if all(before["code"] == NOTHING_RAN for before in known):
            continue
        run = Run(
            tests,
            marks,
            left_out=(*red, *mutant.tests) if tests is area else (),
            limit=AT_LEAST + FAR_LONGER * sum(before["seconds"] for before in known),
            limit_of_test=AT_LEAST + FAR_LONGER * max(before["longest"] for before in known),
        )
        outcome = yield run, mutant
        row["seconds"] = round(row["seconds"] + outcome.seconds, 1)
        if outcome.code == NOTHING_RAN or (outcome.code in (0, 1) and not outcome.failed):
            continue
        row["verdict"] = "deep" if marks else "timeout" if outcome.timed_out else "caught"
        row["by"] = outcome.failed[0] if outcome.failed else ", ".join(tests)
        row["message"] = outcome.message
        break
    results.add(row | {"commit": commit()})
    say(row)


def report(total: int) -> Callable[[Row], None]:
    """Return a function that prints the result of a mutant, and how many of `total` are done."""
    done = 0

    def say(row: Row) -> None:
        nonlocal done
        done += 1
        name = row["key"].rpartition(" ")[0]
        print(f"[{done}/{total}] {row['verdict']:8} {row['seconds']:6.1f} s  {name}  <- {row['by']}", flush=True)

    return say


def commit() -> str:
    """Return the name of the current commit, with a `+` if the tree has uncommitted changes."""
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"], cwd=ROOT, capture_output=True, text=True
    )
    return told.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
