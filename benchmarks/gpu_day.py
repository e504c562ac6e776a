"""Measurements on one GPU in a short time: one row after another, the most valuable first.

    python benchmarks/gpu_day.py preflight,run --out results
    python benchmarks/gpu_day.py throughput --out results --no-machine --deadline 560
    python benchmarks/gpu_day.py sync,rounding --out results --only "1B edit" int    # one row, and those with `int` in the name
    python benchmarks/gpu_day.py throughput --out results --rehearse       # the same rows, small, without a GPU

Each row runs in a process of its own with a time limit, and its result is appended to OUT/rows.jsonl and printed at once, so a
row that fails or hangs costs no other result. The rows' output goes to OUT/rows.log. A row that still runs `--deadline` seconds
after the start is cut off; a row is skipped if less than half of its expected time is left. The first line describes the machine.
`GPU_DAY.md` has the complete plan.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from gpu_rows import PHASES, Day, DayRow, machine
from loops import RowFailed, ask, on_gpu
from table import ROOT, commit, parser

REHEARSAL_PATIENCE = 4.0
"""Factor of the rows' time limits in a rehearsal, because other programs may use the CPUs, too."""
LEAST_PART = 0.5
"""Share of a row's expected seconds that must be left before the deadline when the row starts."""


class Journal:
    """Record of the results as they arrive: per result, one line of JSON in a file and one printed line."""

    def __init__(self, out: Path):
        out.mkdir(parents=True, exist_ok=True)
        self._rows, self._commit = (out / "rows.jsonl").open("a"), commit()
        self.log: IO[str] = (out / "rows.log").open("a+", errors="replace")

    def begin_output(self, title: str) -> None:
        """Write a heading for the next row's output to the log."""
        self.log.write(f"\n==== {title}\n")
        self.log.flush()
        self._begun = self.log.tell()

    def last_output(self) -> str:
        """Return the last line of the row's output. At the end of a traceback, this is the error."""
        self.log.seek(self._begun)
        return next((line for line in reversed(self.log.read().splitlines()) if line.strip()), "")

    def record(self, phase: str, row: str, line: str, **found: Any) -> None:
        """Write one result, and print it as `line`."""
        self._rows.write(json.dumps({"phase": phase, "row": row, "commit": self._commit, **found}) + "\n")
        self._rows.flush()
        print(f"{phase} | {row} | {line}", flush=True)


def measure_row(row: DayRow, phase: str, deadline: float, journal: Journal, longer: float) -> None:
    """Measure one row if there is time before `deadline`, and record the result or the failure. `longer` multiplies the row's
    time limit."""
    left = deadline - time.monotonic()
    if left < LEAST_PART * row.expected:
        journal.record(phase, row.name, f"skipped, {left:.0f} s before the deadline", skipped=left)
        return
    began, patience, found = time.monotonic(), min(longer * row.limit, left), None
    journal.begin_output(f"{phase} | {row.name}")
    if row.empties is not None:
        shutil.rmtree(row.empties, ignore_errors=True)
    try:
        found = ask(str(ROOT / "benchmarks" / row.script), 1, row.task, row.environment, patience, journal.log)
        line, seconds = row.line(found), time.monotonic() - began
        journal.record(phase, row.name, f"{line} ({seconds:.0f} s)", found=found, seconds=seconds)
    except (Exception, RowFailed) as why:
        reason = why.reason if isinstance(why, RowFailed) else f"its result does not read as expected: {why!r}"
        seconds, last = time.monotonic() - began, journal.last_output()
        if seconds >= patience < longer * row.limit:
            journal.record(
                phase, row.name, f"cut off at the deadline, after {seconds:.0f} s", skipped=left, last_output=last
            )
            return
        journal.record(
            phase, row.name, f"FAILED, {reason}: {last}", failed=reason, found=found, last_output=last, seconds=seconds
        )


def arguments() -> ArgumentParser:
    """Return the parser of the command line."""
    made = parser(__doc__)
    made.add_argument("phases", type=_phases, metavar="PHASE[,PHASE]", help=f"of {', '.join(PHASES)}")
    made.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of rows.jsonl and rows.log")
    made.add_argument("--deadline", type=float, default=3600.0, metavar="SECONDS", help="from now")
    made.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="rows with one of these names, or with one of these in their names",
    )
    made.add_argument("--no-machine", action="store_true", help="do not describe the machine again")
    made.add_argument("--rehearse", action="store_true", help="small sizes, one turn")
    return made


def _phases(text: str) -> list[str]:
    if unknown := [phase for phase in text.split(",") if phase not in PHASES]:
        raise SystemExit(f"{', '.join(unknown)}: no such phase; choose of {', '.join(PHASES)}")
    return text.split(",")


def chosen(phases: Sequence[str], day: Day, only: Sequence[str]) -> list[tuple[str, DayRow]]:
    """Return (phase, row) for all rows of the phases that `only` selects. A text selects the rows of that name or, if no row has
    that name, all rows whose names contain it. Raises SystemExit if a text selects no row."""
    rows = [(phase, row) for phase in phases for row in PHASES[phase](day)]
    names = {row.name for _, row in rows}
    selected = {text: {text} if text in names else {name for name in names if text in name} for text in only}
    if unknown := [text for text, some in selected.items() if not some]:
        raise SystemExit(f"--only {', '.join(unknown)}: no row of {', '.join(phases)} has that in its name")
    return [(phase, row) for phase, row in rows if row.name in set().union(*selected.values())]


def main() -> None:
    """Measure the rows of the phases until all are done or the deadline is reached."""
    began = time.monotonic()
    options = arguments().parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that a row's processes end with this one
    patience = REHEARSAL_PATIENCE if options.rehearse else 1.0
    if not (on_gpu() or options.rehearse):
        raise SystemExit("no GPU is found; with --rehearse, the same rows run small on a CPU")
    day, deadline = Day(options.rehearse, on_gpu()), began + options.deadline
    rows = chosen(options.phases, day, options.only)
    journal = Journal(options.out)
    for phase, row in [*([] if options.no_machine else [("provenance", machine(day))]), *rows]:
        measure_row(row, phase, deadline, journal, patience)


if __name__ == "__main__":
    main()
