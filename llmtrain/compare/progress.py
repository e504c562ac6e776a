"""What a person sees of a comparison: a bar for all trials and one for the present one; plain lines elsewhere."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from llmtrain.compare.comparison import TrialSpec
from llmtrain.compare.trial import TrialRecord


class ComparisonProgress:
    """Of `total` trials."""

    def __init__(self, total: int):
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.total = total
        self._bars: Bars | None = None
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bars = Bars(*columns, console=self.console)
            self._all = self._bars.add_task("trials", total=total)
            self._one = self._bars.add_task("steps", total=None)
            self._bars.start()

    def skip(self, planned: TrialSpec) -> None:
        """It is there already."""
        if self._bars is not None:
            self._bars.advance(self._all)

    def begin(self, number: int, planned: TrialSpec, steps: int) -> None:
        """The `number`-th trial (from 0) begins."""
        self._name = f"{planned.condition} · {planned.run} · seed {planned.seed}"
        if self._bars is None:
            self.note(f"trial {number + 1} of {self.total}: {self._name}")
        else:
            self._bars.reset(self._one, description=self._name, total=steps)

    def advance(self, step: int) -> None:
        """The present trial has come to this step."""
        if self._bars is not None:
            self._bars.update(self._one, completed=step)

    def end(self, record: TrialRecord, seconds_left: float) -> None:
        """It is over; an estimate of what the others will take."""
        if self._bars is not None:
            self._bars.advance(self._all)
        left = f"; about {_duration(seconds_left)} left" if seconds_left else ""
        self.note(f"{self._name}: {record.state} in {_duration(record.wall_seconds)}{left}")
        for line in record.last_lines[-3:]:
            self.note(f"    {line}")

    def note(self, text: str) -> None:
        """Any other line."""
        self.console.print(text, markup=False)

    def close(self) -> None:
        """No more bars."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
