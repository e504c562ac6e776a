"""Break llmtrain in one place after another and see whether the tests notice: `make mutants`, or `python -m tests.mutation`.

    --area sync         only mutants of llmtrain/sync
    --only 'penalty:'   only those with this in their names
    --resume            only those without a result yet, and survivors
    --narrow            the tests that are named for a mutant, not the rest of its area
    --deep              for survivors also tests marked `deep`
    --workers 1         at once; 2 by default
    --table             write tests/MUTANTS.md from the results that are there, and run nothing

Tests must pass without a mutant first. Results are appended to a file of JSON lines at once. Exit code 1 if a mutant survives
that is not known to be equivalent, 2 if tests fail without any.
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
"""Where the rest of an area's tests is."""
ELSEWHERE = ("tests/unit", "tests/end_to_end")
REFUSED = "refused"
"""The verdict on a mutant of which a test fails without it."""
NOTHING_RAN = 5
"""pytest's exit code where no test is left to run."""
FAR_LONGER, AT_LEAST = 5.0, 60.0
"""A run that takes so many times what it takes unbroken, and so many seconds, hangs."""

Row = dict[str, Any]


class Results:
    """A file of JSON lines: of what was run, the last line counts. What failed without a mutant is to be run again."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        rows = {row["key"]: row for row in map(json.loads, lines)}
        self.rows: dict[str, Row] = {key: row for key, row in rows.items() if not row.get("failed")}

    def add(self, row: Row) -> None:
        """Append a row at once."""
        self.rows[row["key"]] = row
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


class Trials:
    """Runs of tests on several copies of the tree at once."""

    def __init__(self, workers: int):
        preload()
        FOLDER.mkdir(exist_ok=True)
        for left in FOLDER.glob("copy-*"):  # by one that was killed
            if not psutil.pid_exists(int(left.name.split("-")[1])):
                shutil.rmtree(left)
        self.slots = [Slot(FOLDER / f"copy-{os.getpid()}-{number}") for number in range(workers)]

    def all(self, tasks: Sequence[Iterator[tuple[Run, Mutant | None]]]) -> None:
        """Do tasks, as many at once as there are copies. A task yields runs and is sent what became of them."""
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
            for slot in self.slots if os.getpid() == here else ():  # forks pass here, too, when they end
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
    """Do what the command line says."""
    arguments = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended, too
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
    """Name a mutant so that a result does not outlive a change of it."""
    change = hashlib.sha256("\0".join((mutant.file, mutant.old, mutant.new)).encode()).hexdigest()[:8]
    return f"{mutant.name} {change}"


def baseline_key(test: str, marks: str | None = None) -> str:
    """Name a run without a mutant; it is made again when the tests in that file change."""
    path = ROOT / test.partition("::")[0]
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]
    return f"unbroken {test} {marks or 'fast'} {digest}"


def baseline(test: str, results: Results, marks: str | None = None) -> Iterator[tuple[Run, None]]:
    """Run tests without a mutant, and keep how long they take and which fail."""
    outcome = yield Run((test,), marks, stops_at_first=False), None
    failed = outcome.failed
    if outcome.code not in (0, NOTHING_RAN) and not failed:
        failed = [f"{test} (timed out)" if outcome.timed_out else f"{test} (exit code {outcome.code})"]
    results.add({"key": baseline_key(test, marks), **asdict(outcome), "failed": failed})
    print(f"unbroken: {test} {marks or ''} {outcome.count} tests, {len(failed)} fail, {outcome.seconds} s", flush=True)


def attempt(
    mutant: Mutant, results: Results, arguments: argparse.Namespace, say: Callable[[Row], None]
) -> Iterator[tuple[Run, Mutant | None]]:
    """Try tests on a mutant until some see it: those named for it one after another, the rest of its area, deep ones."""
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
    """Print a line for each of `total` mutants as it is done."""
    done = 0

    def say(row: Row) -> None:
        nonlocal done
        done += 1
        name = row["key"].rpartition(" ")[0]
        print(f"[{done}/{total}] {row['verdict']:8} {row['seconds']:6.1f} s  {name}  <- {row['by']}", flush=True)

    return say


def commit() -> str:
    """Name the commit that is tried; with a `+` if the tree has changes beside it."""
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"], cwd=ROOT, capture_output=True, text=True
    )
    return told.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
