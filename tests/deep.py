"""Runner of the deep tests whose guarded files have changed.

    python -m tests.deep [--seconds N] [--all] [--only TESTS...] [--write]

`tests/DEEP.md` says for each group of deep tests which paths it guards and at which commit it last passed. A group is due when
one of these paths has changed since then. A group that has never passed runs only with `--all`. Groups run one after another,
the shortest first, until the time is up; the groups that are left stay due. `--write` updates the file, which is then to be
committed.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "DEEP.md"
SHORTEST_SECONDS = 60
"""Remaining seconds that are needed to begin a group."""
MODULES = "llmtrain/*.py"
"""Modules directly in llmtrain, without those in its folders."""
COMMON = ("tests/conftest.py", "tests/mother.py", "tests/distributed/pool.py", "constraints.txt", "llmtrain/config")
"""Paths that every group guards."""
HEAD = """# Deep tests

`make test-deep` runs all of them. `python -m tests.deep --write` runs those of what has changed since the commit in the
table, and writes it; CI runs them as far as its time allows.

| tests | guard | passed at | on | minutes |
|---|---|---|---|---:|
"""
ROW = re.compile(r"\| `(?P<tests>[^`]+)` \| .* \| (?P<commit>\w+|never) \| (?P<day>[-\d]+|) \| (?P<minutes>[.\d]+|) \|")


@dataclass(frozen=True)
class Group:
    """Deep tests that are run together, and the paths that they guard."""

    tests: str
    guards: tuple[str, ...]


GROUPS = (
    Group(
        "tests/unit",
        (
            "llmtrain/loss.py",
            "llmtrain/parallel/wire_format.py",
            "llmtrain/train/mirror.py",
            "llmtrain/parallel/wrapping.py",
            "llmtrain/data",
            "llmtrain/plan",
            "benchmarks",
        ),
    ),
    Group("tests/multi_node/test_cluster.py", ("llmtrain/compare/cluster", "llmtrain/doctor")),
    Group("tests/multi_node/test_slurm.py", ("llmtrain/launch", "launch")),
    Group("tests/multi_node/test_deepspeed_ssh.py", ("launch", "llmtrain/parallel/zero.py")),
    Group("tests/multi_node/test_hosts.py", ("llmtrain/launch", "llmtrain/parallel", "launch")),
    Group("tests/multi_node/test_restarts.py", ("llmtrain/launch", "llmtrain/train", "llmtrain/parallel")),
    Group("tests/multi_node/test_two_sites.py", ("llmtrain/launch", "llmtrain/parallel", "launch")),
    Group("tests/multi_node/test_tunnel.py", ("llmtrain/parallel", "launch")),
    Group("tests/multi_node/test_mounted_folder.py", ("llmtrain/train", "launch")),
    Group("tests/chaos", ("llmtrain/launch", "llmtrain/train", "llmtrain/parallel")),
    Group(
        "tests/end_to_end",
        (
            MODULES,
            "llmtrain/train",
            "llmtrain/launch",
            "llmtrain/eval",
            "llmtrain/compare",
            "llmtrain/doctor",
            "llmtrain/data",
            "llmtrain/sync",
            "llmtrain/parallel",
        ),
    ),
    Group(
        "tests/distributed",
        (
            MODULES,
            "llmtrain/parallel",
            "llmtrain/sync",
            "llmtrain/train",
            "llmtrain/data",
            "llmtrain/export",
        ),
    ),
    Group("tests/emulated_gpu", ("llmtrain/parallel", "llmtrain/sync", "llmtrain/train", "llmtrain/loss.py")),
)


@dataclass
class Record:
    """Commit, day and duration of a group's last pass."""

    commit: str = "never"
    day: str = ""
    minutes: str = ""


def recorded() -> dict[str, Record]:
    """Return the records of the table by group. A group that is not in the table has never passed."""
    lines = FILE.read_text().splitlines() if FILE.exists() else []
    rows = [match.groupdict() for line in lines if (match := ROW.match(line))]
    found = {row.pop("tests"): Record(**row) for row in rows}
    return {group.tests: found.get(group.tests, Record()) for group in GROUPS}


def table(records: dict[str, Record]) -> str:
    """Return the text of DEEP.md."""
    rows = []
    for group in GROUPS:
        guards, one = ", ".join(f"`{path}`" for path in group.guards), records[group.tests]
        rows.append(f"| `{group.tests}` | {guards} | {one.commit} | {one.day} | {one.minutes} |")
    return HEAD + "\n".join(rows) + "\n"


def is_due(group: Group, record: Record) -> bool:
    """Return whether the group's tests or the paths that it guards have changed since it passed."""
    if record.commit == Record().commit:
        return False
    paths = [f":(glob){path}" if "*" in path else path for path in (group.tests, *group.guards, *COMMON)]
    compared = _git("diff", "--quiet", record.commit, "HEAD", "--", *paths)
    return compared.returncode != 0  # also for a commit that this clone does not have


def run(group: Group, seconds: float) -> tuple[int | None, float]:
    """Run a group's deep tests for at most `seconds`. Return the exit code (None if the time was up) and the minutes it took.

    The first failure ends the group. If the group continued after it until the time was up, the failure would be lost.
    """
    started = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-m", "deep", "-x", group.tests]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        code = None
    return code, (time.monotonic() - started) / 60


def main(arguments: list[str] | None = None) -> int:
    """Run the groups that are due. Return 1 if one of them fails, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.deep", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0, help="seconds for all groups; 3600 by default")
    parser.add_argument("--all", action="store_true", help="run every group, whatever has changed")
    groups = [group.tests for group in GROUPS]
    parser.add_argument("--only", nargs="+", choices=groups, metavar="TESTS", help=f"some of {', '.join(groups)}")
    parser.add_argument("--write", action="store_true", help="record in tests/DEEP.md which groups passed")
    asked = parser.parse_args(arguments)
    end, records, failed = time.monotonic() + asked.seconds, recorded(), []
    due = [group for group in GROUPS if asked.all or is_due(group, records[group.tests])]
    due = [group for group in due if not asked.only or group.tests in asked.only]
    print(f"deep tests due: {', '.join(group.tests for group in due) or 'none'}", flush=True)
    for group in sorted(due, key=lambda group: float(records[group.tests].minutes or "inf")):
        left = end - time.monotonic()
        if left < SHORTEST_SECONDS:
            print(f"{group.tests}: no time left; still due", flush=True)
            continue
        code, minutes = run(group, left)
        if code is None:
            print(f"{group.tests}: the time was up after {minutes:.1f} minutes; still due", flush=True)
        elif code in (0, 5):  # 5: the group has no deep tests
            commit = _git("rev-parse", "--short=9", "HEAD").stdout.strip()
            records[group.tests] = Record(commit, datetime.date.today().isoformat(), f"{minutes:.1f}")
        else:
            failed.append(group.tests)
        if asked.write:
            FILE.write_text(table(records))
    if failed:
        print(f"deep tests failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main())
