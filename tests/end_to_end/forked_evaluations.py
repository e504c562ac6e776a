"""`llmtrain train` with background evaluations that are forked from the session's mother."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import IO, Any

from llmtrain.train import background_eval
from tests.mother import Process, run_llmtrain, session


def train(*arguments: str) -> None:
    """Run `llmtrain train ARGUMENTS` in this process, a fork of the mother."""
    background_eval.subprocess = SimpleNamespace(Popen=_popen, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT)
    run_llmtrain("train", *arguments)


def _popen(command: Sequence[str], env: Mapping[str, str], stdout: IO[str], **others: Any) -> Process:
    assert command[:3] == [sys.executable, "-m", "llmtrain"] and others["start_new_session"]
    return session().fork(evaluate, *command[3:], environment=env, descriptors=[stdout.fileno()])


def evaluate(output: int, *words: str) -> None:
    """Run `llmtrain WORDS` in this process, a fork of the mother, and write its output to the descriptor `output`."""
    for stream in (1, 2):
        os.dup2(output, stream)
    run_llmtrain(*words)
