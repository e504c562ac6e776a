"""Console output of the main rank: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from llmtrain.startup import seconds_since_command


def format_si(number: float) -> str:
    """Format a number with three digits and a unit: 41200 -> 41.2k."""
    for unit in ("", "k", "M", "G"):
        if abs(number) < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}T"


class Console:
    """Progress display of one run; silent if not `enabled`, as on every rank except the main rank."""

    def __init__(self, enabled: bool):
        self.out = RichConsole(file=sys.stdout, quiet=not enabled, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._enabled = enabled
        self._has_begun = False

    def start(self, step: int, total: int) -> None:
        """Start the display of a run that starts or continues after `step`."""
        self._total, self._first, self._started = total, step, time.monotonic()
        if self._enabled and self.out.is_terminal:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self.out)
            self._task = self._bar.add_task("training", total=total, completed=step)
            self._bar.start()

    def advance(self, step: int) -> None:
        """Move the progress bar to `step`. The first call prints the seconds since the command was started."""
        if not self._has_begun:
            self._has_begun = True
            self.print(f"first step {seconds_since_command():.1f} s after the command was started")
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def log_step(self, step: int, tokens: int, tags: dict[str, float]) -> None:
        parts = [
            f"step {step}/{self._total}",
            f"loss {tags['train/loss']:.3f}",
            f"lr {tags['train/lr']:.2e}",
            f"gn {tags['train/grad_norm']:.2f}",
            f"{format_si(tags['perf/tokens_per_second'])} tok/s",
        ]
        if "perf/mfu" in tags:
            parts.append(f"mfu {100 * tags['perf/mfu']:.1f}%")
        parts.append(f"sync {tags['sync/count']:.0f} rounds {format_si(tags['comm/bytes_total'])}B")
        parts.append(f"mem {tags['perf/peak_memory_gib']:.2f} GiB")
        if self._bar is None:
            parts.append(f"eta {self._time_left(step)}")
        self.print(" | ".join(parts))

    def log_validation(self, step: int, name: str, tags: dict[str, float]) -> None:
        """Print a validation result. `name` is empty for the run's own text."""
        loss, perplexity, bits_per_byte = tags.values()
        text = f"validation loss {loss:.4f} | ppl {perplexity:.2f} | {bits_per_byte:.3f} bits per byte"
        self.print(f"step {step}/{self._total} | {name + ': ' if name else ''}{text}")

    def print(self, text: str) -> None:
        """Print a line verbatim."""
        self.out.print(text, markup=False)

    def stop(self) -> None:
        """Stop the progress bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _time_left(self, step: int) -> str:
        left = max(0, self._total - step)
        seconds = (time.monotonic() - self._started) / max(1, step - self._first) * left
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"
