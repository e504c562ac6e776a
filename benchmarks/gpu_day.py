"""All that is worth measuring on one GPU, in a short time: row after row, each on its own, the most valuable first.

    python benchmarks/gpu_day.py preflight --out results
    python benchmarks/gpu_day.py throughput --out results --deadline 560
    python benchmarks/gpu_day.py parts,sync,run,checkpoint,loss,rounding --out results --deadline 570
    python benchmarks/gpu_day.py throughput --out results --rehearse       # the same rows, small, without a GPU

A row is a process of its own with a time limit. Its result is appended to OUT/rows.jsonl and printed at once, so a row that
fails, hangs or comes too late costs no other one. Output of the rows goes to OUT/rows.log. A row that has not ended
`--deadline` seconds after the start is cut off. The first line describes the machine. `GPU_DAY.md` has the whole plan.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import IO, Any

from gpu_rows import PHASES, Day, DayRow
from loops import RowFailed, ask, on_gpu
from table import ROOT, commit, parser

MACHINE_SECONDS = 90.0
REHEARSAL_PATIENCE = 4.0
"""Factor by which the rows' time limits are longer in a rehearsal, for CPUs that other programs use, too."""
LEAST_SECONDS = 30.0
"""Minimum seconds before the deadline to start a row. Less time is not enough for most rows."""


class Journal:
    """Record of the results as they arrive: one line of JSON per result in a file, and one printed line for the reader."""

    def __init__(self, out: Path):
        out.mkdir(parents=True, exist_ok=True)
        self._rows, self._commit = (out / "rows.jsonl").open("a"), commit()
        self.log: IO[str] = (out / "rows.log").open("a+")

    def begin_output(self, title: str) -> None:
        """Write a heading for the output of the next row."""
        self.log.write(f"\n==== {title}\n")
        self.log.flush()
        self._begun = self.log.tell()

    def last_output(self) -> str:
        """Return the last line that the row has written. If that is the end of a traceback, it is the error."""
        self.log.seek(self._begun)
        return next((line for line in reversed(self.log.read().splitlines()) if line.strip()), "")

    def record(self, phase: str, row: str, line: str, **found: Any) -> None:
        """Write one result, and print it as `line`."""
        self._rows.write(json.dumps({"phase": phase, "row": row, "commit": self._commit, **found}) + "\n")
        self._rows.flush()
        print(f"{phase} | {row} | {line}", flush=True)


def measure_row(row: DayRow, phase: str, deadline: float, journal: Journal, longer: float) -> None:
    """Measure one row, if there is time, and record the result or the failure. The row's time limit is multiplied by
    `longer`."""
    left = deadline - time.monotonic()
    if left < LEAST_SECONDS:
        journal.record(phase, row.name, f"skipped, {left:.0f} s before the deadline", skipped=left)
        return
    began, patience, found = time.monotonic(), min(longer * row.limit, left), None
    journal.begin_output(f"{phase} | {row.name}")
    try:
        found = ask(str(ROOT / "benchmarks" / row.script), 1, row.task, row.environment, patience, journal.log)
        journal.record(phase, row.name, row.line(found), found=found, seconds=time.monotonic() - began)
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


def main() -> None:
    """Measure the phases' rows until they are done or the deadline comes."""
    began = time.monotonic()
    arguments = parser(__doc__)
    arguments.add_argument("phases", metavar="PHASE[,PHASE]", help=f"of {', '.join(PHASES)}")
    arguments.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of rows.jsonl and rows.log")
    arguments.add_argument("--deadline", type=float, default=3600.0, metavar="SECONDS", help="from now")
    arguments.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="rows whose names have one of these in them"
    )
    arguments.add_argument("--rehearse", action="store_true", help="small sizes, one turn")
    options = arguments.parse_args()
    phases = options.phases.split(",")
    if unknown := [phase for phase in phases if phase not in PHASES]:
        raise SystemExit(f"{', '.join(unknown)}: no such phase; choose of {', '.join(PHASES)}")
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that a row's processes end with this one
    patience = REHEARSAL_PATIENCE if options.rehearse else 1.0
    if not (on_gpu() or options.rehearse):
        raise SystemExit("no GPU is found; with --rehearse, the same rows run small on a CPU")
    day, deadline, journal = Day(options.rehearse, on_gpu()), began + options.deadline, Journal(options.out)
    machine = {"what": "machine", "quick": day.rehearse}
    measure_row(
        DayRow("machine", "preflight.py", machine, str, MACHINE_SECONDS), "provenance", deadline, journal, patience
    )
    for phase in phases:
        for row in (row for row in PHASES[phase](day) if any(text in row.name for text in options.only)):
            measure_row(row, phase, deadline, journal, patience)


if __name__ == "__main__":
    main()
