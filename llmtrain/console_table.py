"""Tables on standard output: lines and colors on a terminal, plain columns in a file or pipe."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

WIDTH = 1000
"""Width without a terminal, so that nothing is cut or wrapped."""


def console_for_output() -> Console:
    """Return a console for standard output that cuts nothing if there is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH)


def output_table(console: Console) -> Table:
    """Return an empty table for this console."""
    plain = not console.is_terminal
    return Table(box=None if plain else SIMPLE_HEAD, pad_edge=False, padding=(0, 2) if plain else (0, 1))
