"""Progress bars on a terminal that appear only if a task takes longer than a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

DELAY_SECONDS = 2.0
"""Seconds after which the bar of a delayed task appears."""


class CountColumn(ProgressColumn):
    """Column with the completed part of a task, such as `12/300`, or with its elapsed seconds if its length is unknown."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.elapsed or 0:.0f} s" if task.total is None else f"{task.completed:.0f}/{task.total:.0f}")


class DelayedProgress(Progress):
    """Bars of several tasks, one below the other. Bars added by `delayed` appear after `DELAY_SECONDS`."""

    def __init__(self, console: RichConsole):
        columns = (TextColumn("{task.description}"), BarColumn(), CountColumn(), TimeRemainingColumn())
        # Long enough for slow steps: an estimate needs more than one step in this period.
        super().__init__(*columns, console=console, transient=True, speed_estimate_period=1800)

    def get_renderables(self) -> Iterable[RenderableType]:
        shown = [
            task for task in self.tasks if not task.fields.get("is_delayed") or (task.elapsed or 0) > DELAY_SECONDS
        ]
        yield self.make_tasks_table(shown)

    @contextmanager
    def delayed(self, label: str, total: int | None) -> Iterator[Callable[[], None]]:
        """Show a bar for the enclosed code, if it takes long. Yields a function that advances it by one of `total`."""
        task = self.add_task(label, total=total, is_delayed=True)
        try:
            yield lambda: self.advance(task)
        finally:
            self.remove_task(task)
