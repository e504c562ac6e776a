"""Tests of shell completion of recipes, sections, keys and values, also with typer's script in bash on a
pseudo-terminal."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from llmtrain.cli import app
from llmtrain.completion import complete_override, complete_recipe
from llmtrain.recipe_files import recipe_names
from tests.mother import ROOT

SECONDS = 60.0


def completed(incomplete: str, *before: str) -> list[str]:
    """Return the completions of the word `incomplete` after the words `before` of a command."""
    context = typer.Context(get_command(app))
    context.params["overrides"] = list(before)
    return complete_override(context, incomplete)


def test_recipes_are_completed_by_name_and_files_by_the_shell() -> None:
    assert complete_recipe("quick") == ["quickstart"] and complete_recipe("") == recipe_names()
    assert complete_recipe("recipes/quick") == []


def test_keys_are_completed() -> None:
    assert {"optim.lr=", "optim.betas=", "sync.outer.lr="} <= set(completed(""))
    assert completed("optim.l") == ["optim.lr=", "optim.lr=0.0003"], "two candidates, so that no space follows ="
    assert completed("nothing") == []
    assert not [key for key in completed("data.") if key.startswith(("data.sources.", "data.per_replica."))]


def test_values_are_completed_where_words_are_expected() -> None:
    assert completed("sync.method=stream") == ["sync.method=streaming_diloco"]
    assert completed("optim.ki") == [f"optim.kind={kind}" for kind in ("adamw", "muon", "sgd")]
    assert completed("train.deterministic") == ["train.deterministic=true", "train.deterministic=false"]
    assert completed("=", "sync.method") == completed("", "sync.method", "="), "bash splits words at ="
    assert completed("di", "sync.method", "=") == ["diloco"]
    assert completed("=") == []


@pytest.mark.fresh
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_on_a_terminal(tmp_path: Path) -> None:
    command = tmp_path / "llmtrain"
    command.write_text(f"#!{sys.executable}\nfrom llmtrain.cli import main\nmain()\n")
    command.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TERM": "dumb",
        "HOME": str(tmp_path),
    }
    below_bash = ["bash", "-c", "llmtrain --show-completion; exit $?"]  # typer looks for the shell that started it
    script = subprocess.run(below_bash, env=variables, capture_output=True, text=True, check=True).stdout
    (tmp_path / "script").write_text(f"bind 'set enable-bracketed-paste off'\nPS1='ready '\n{script}")
    terminal, its_end = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--noprofile", "--rcfile", str(tmp_path / "script"), "-i"],
        stdin=its_end, stdout=its_end, stderr=its_end, env=variables, cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    os.close(its_end)
    try:
        read_until(terminal, "ready ")
        for typed, inserted in (("launch quick", "start "), ("launch quickstart sync.method=dil", "oco ")):
            os.write(terminal, f"llmtrain {typed}\t".encode())
            read_until(terminal, typed + inserted)
            os.write(terminal, b"\x15")  # Ctrl-U: the line is not run
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)


def read_until(terminal: int, expected: str) -> None:
    """Read what a terminal shows, without its bells, until `expected` is part of it."""
    shown, deadline = "", time.monotonic() + SECONDS
    while expected not in shown:
        assert select.select([terminal], [], [], deadline - time.monotonic())[0], f"not {expected!r} but {shown!r}"
        shown += os.read(terminal, 1 << 16).decode().replace("\a", "")
