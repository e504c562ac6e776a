"""Comparison of runs that were made by hand, in one table and one picture: `llmtrain compare RUN RUN`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from llmtrain.console_table import console_for_output, output_table
from llmtrain.errors import ResultsError
from llmtrain.files import read_lines
from llmtrain.quantities import format_duration
from llmtrain.run_files import METRICS
from llmtrain.run_list import RunRow, loss_in_words, name_below, read_run, run_directories
from llmtrain.run_plots import draw_runs
from llmtrain.validated_text import LossUnit, common_unit, read_validated_text

PICTURE = "losses.png"
REPORT = Path("runs/report")
"""Default folder of the report or picture on given runs."""
NOTHING = "-"


@dataclass(frozen=True)
class ComparedRun:
    """A run directory, whether the run has ended or not."""

    path: Path
    row: RunRow
    lines: Sequence[dict[str, Any]]

    def last(self, tag: str) -> float | None:
        """Return the last finite value of a tag, or None."""
        return next((line[tag] for line in reversed(self.lines) if line.get(tag) is not None), None)


def are_runs(arguments: Sequence[str]) -> bool:
    """Return whether the arguments of `llmtrain compare` are run directories, and not a comparison file."""
    return not Path(arguments[0]).is_file() and any(Path(one).is_dir() for one in arguments)


def compare_runs(folders: Sequence[Path], out: Path) -> None:
    """Print a table of the runs in or below `folders`, the lowest validation loss first, and draw their losses in a
    picture in `out`. Raises ResultsError if a folder holds no run."""
    console = console_for_output()
    runs = find_compared_runs(folders)
    unit = common_unit([(run.row.name, read_validated_text(run.path, run.lines)) for run in runs])
    if unit.is_ranked:
        runs = sorted(runs, key=lambda run: (run.last(unit.tag) is None, run.last(unit.tag)))
    console.print(table_of_runs(runs, unit, console))
    if unit.note:
        console.print(f"warning: {unit.note}", markup=False, soft_wrap=True)
    try:
        out.mkdir(parents=True, exist_ok=True)
        note = "" if unit.is_ranked else f"validated on different {unit.differs}: not comparable"
        draw_runs({run.row.name: run.lines for run in runs}, out / PICTURE, unit.tag, unit.name, note)
    except OSError as error:
        raise ResultsError(f"{out / PICTURE} can't be written ({error.strerror}); choose another --out") from None
    console.print(f"picture: {out / PICTURE}", markup=False, soft_wrap=True)


def find_compared_runs(folders: Sequence[Path]) -> list[ComparedRun]:
    """Return the runs in or below `folders`, in this order. Raises ResultsError if a folder holds none."""
    found: dict[Path, str] = {}
    for folder in folders:
        paths = list(run_directories(folder)) if folder.is_dir() else []
        if not paths:
            what = "holds no run" if folder.is_dir() else "is not a folder" if folder.exists() else "does not exist"
            raise ResultsError(
                f"{folder} {what}; give run directories, with recipe.yaml and metrics.jsonl, as in runs/"
            )
        found |= {path: name_below(folder, path) for path in paths}
    names = list(found.values())
    return [
        ComparedRun(path, read_run(path, str(path) if names.count(name) > 1 else name), read_lines(path / METRICS))
        for path, name in found.items()
    ]


def table_of_runs(runs: Sequence[ComparedRun], unit: LossUnit, console: Console) -> Table:
    """Return a table with a row per run. Bits per byte are shown only if the runs are compared by them."""
    table = output_table(console)
    in_bits = unit.tag == "eval/bpb"
    for head in ("name", "method", "state"):
        table.add_column(head, overflow="fold", no_wrap=head != "name")
    losses = ("train loss", "val. loss", *(["bits/byte"] if in_bits else []))
    for head in ("steps", "tokens", *losses, "training time", "between replicas"):
        table.add_column(head, justify="right", no_wrap=True)
    for run in runs:
        last, sent = run.lines[-1] if run.lines else {}, run.last("comm/bytes_total")
        validated = ("eval/loss", *(["eval/bpb"] if in_bits else []))
        table.add_row(
            run.row.name,
            run.row.method or "?",
            run.row.state,
            f"{run.row.steps:,}",
            f"{last.get('tokens', 0):,}",
            loss_in_words(run.last("train/loss")),
            *(loss_in_words(run.last(tag), run.row.validated_before_end) for tag in validated),
            format_duration(last.get("seconds", 0.0)),
            NOTHING if sent is None else decimal(round(sent)),
        )
    return table
