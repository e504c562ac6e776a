"""Tests of encodings: files are UTF-8 in every locale, and no command fails because its output's encoding lacks a character."""

from __future__ import annotations

import ast
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.errors import exit_with_status
from llmtrain.train.loggers import Console

PACKAGE = Path(__file__).parents[2] / "llmtrain"
OPEN = {"TextIOWrapper", "NamedTemporaryFile", "fdopen"}
"""Functions, besides `open`, that open text unless a mode says otherwise."""


def without_encoding(source: str) -> Iterator[int]:
    """Yield the line numbers of calls that read or write text in the encoding of the locale."""
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        method = getattr(call.func, "attr", None)
        name = method or getattr(call.func, "id", "")
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        modes = [one.value for one in (*call.args, given.get("mode")) if isinstance(one, ast.Constant)]
        modes = [mode for mode in modes if isinstance(mode, str)]
        opens = name in OPEN or (name == "open" and (modes or not method))
        is_text = method in ("read_text", "write_text") or (opens and not any("b" in mode for mode in modes))
        if "encoding" not in given and (is_text or {"text", "universal_newlines"} & given.keys()):
            yield call.lineno


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("path.read_text()", True),
        ("path.write_text('b')", True),
        ("path.open('a')", True),
        ("open(path)", True),
        ("run(command, text=True)", True),
        ("path.read_text(encoding='utf-8')", False),
        ("path.open('rb')", False),
        ("write_text(model)", False),
        ("os.open(path, os.O_RDONLY)", False),
        ("run_log.open(state)", False),
    ],
)
def test_text_without_an_encoding_is_found(source: str, is_found: bool) -> None:
    assert list(without_encoding(source)) == [1] * is_found


def test_every_text_file_has_an_encoding() -> None:
    """A recipe.yaml with an umlaut that was written as Latin-1 can't be read as UTF-8."""
    files = sorted(PACKAGE.rglob("*.py"))
    found = [f"{file}:{line}" for file in files for line in without_encoding(file.read_text(encoding="utf-8"))]
    assert len(files) > 200 and not found, "give encoding='utf-8'"


def test_a_character_that_the_terminal_lacks_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's sample may have any character. A run that a character ends would end again after every restart."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)

    def sample() -> None:
        console = Console(enabled=True)
        console.start(0, 10, None)
        console.log_sample(1, "ü → 語" + 100 * "a")
        print("…")

    exit_with_status(sample)
    out.flush()
    step, dots = out.buffer.getvalue().decode("latin-1").splitlines()
    assert step.startswith("step 1/10 | writes: ü \\u2192 \\u8a9ea") and step.endswith("a\\u2026") and dots == "\\u2026"
