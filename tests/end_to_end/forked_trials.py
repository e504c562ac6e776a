"""`llmtrain compare` on loopback, with torchruns forked from the session's mother, and ranks forked from a rank server.

Run as a program, this file is one rank: FAULTS RECIPE KEY=VALUE...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from llmtrain.compare import faults
from llmtrain.compare.cluster.hosts import Host
from llmtrain.errors import exit_with_status
from llmtrain.launch.forked_rank import become_a_program
from llmtrain.launch.rank_server import rank_server
from tests.mother import Process, run_llmtrain, session


def compare(*arguments: str) -> None:
    """Run `llmtrain compare ARGUMENTS` in this process, a fork of the mother."""
    Host.popen = _popen
    run_llmtrain("compare", *arguments)


def _popen(host: Host, command: Sequence[str], env: Mapping[str, str], stdout: IO[str], stderr: int) -> Process:
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    process = session().fork(torchrun, command[3:], environment=env, descriptors=[stdout.fileno()])
    host._started.append(process)
    return process


def torchrun(output: int, words: Sequence[str]) -> None:
    """Run torchrun with forked ranks, and write its output to the descriptor `output`."""
    from torch.distributed.run import main

    for stream in (1, 2):
        os.dup2(output, stream)
    at = words.index("-m")
    assert words[at + 1] == "llmtrain.compare.faults"
    with rank_server():
        main([*words[:at], "--start-method", "forkserver", "--run-path", __file__, *words[at + 2 :]])


if __name__ == "__main__":
    become_a_program()
    exit_with_status(lambda: sys.exit(faults.main(*sys.argv[1:])))
