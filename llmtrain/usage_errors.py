"""Command lines that the parser refuses: each ends with one line, as llmtrain's own errors do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import typer

from llmtrain.errors import BAD_USAGE, UserError

PARSER_ERROR: Any = typer.BadParameter.__base__
"""Base class of the parser's errors. typer does not export it, and its module depends on typer's version."""


def run_app(app: typer.Typer, arguments: Sequence[str] | None) -> NoReturn:
    """Run the command that `arguments` name (by default the process's) and exit with its code. Raises UserError, with what to do, if
    the parser refuses them."""
    try:
        code = app(arguments, standalone_mode=False)
    except PARSER_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help is printed already
            sys.exit(BAD_USAGE)
        command = error.ctx.command_path if error.ctx is not None else "llmtrain"
        what = " ".join(error.format_message().split()).removesuffix(".")
        raise UserError(f"{what}{'' if what.endswith('?') else ';'} {command} --help shows what can be given") from None
    sys.exit(code or 0)
