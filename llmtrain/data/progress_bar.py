"""Progress display of data preparation: a bar on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

PLAIN_SECONDS = 10.0


class ProgressBar:
    """Counter of one split's text bytes and tokens, with a display of its progress toward the tokens needed."""

    def __init__(self, label: str, needed: int, show: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self.label, self.text_bytes, self.tokens = label, 0, 0
        self._console = Console(stderr=True, quiet=not show)
        # rich's bar shows nothing unless the console is a terminal; lines are printed instead
        columns = (BarColumn(bar_width=20), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task = self._bar.add_task(label, total=needed)
        self._start = self._shown = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def advance(self, text_bytes: int, tokens: int) -> None:
        self.text_bytes += text_bytes
        self.tokens += tokens
        self._bar.update(self._task, completed=self.tokens, description=self.line())
        if not self._console.is_terminal and time.monotonic() - self._shown >= PLAIN_SECONDS:
            self._shown = time.monotonic()
            self._print()

    def line(self) -> str:
        rate = self.tokens / max(time.monotonic() - self._start, 1e-9)
        counts = f"{self.text_bytes / 1e6:,.1f} MB, {self.tokens / 1e6:,.2f} M tokens"
        return f"{self.label}: {counts}, {rate / 1e6:.2f} M tokens/s"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if kind is None:
            self._print()

    def _print(self) -> None:
        self._console.print(self.line(), highlight=False, soft_wrap=True)
