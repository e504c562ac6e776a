"""Handle of the process that delays and loses a virtual cluster's packets: its start, its counters and its end."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmtrain.compare.cluster import frame_switch
from llmtrain.compare.cluster.frame_switch import Counters
from llmtrain.compare.cluster.limits import HostLimits
from llmtrain.errors import ClusterError

ANSWER_SECONDS = 30.0
"""Maximum seconds to wait for a line from the process, enough for a busy machine."""


@dataclass(frozen=True)
class DelaySwitch:
    """Running process that stands in for a network's bridge."""

    process: subprocess.Popen

    def counters(self) -> Counters:
        """Return the process's counters so far. Raises ClusterError if it has ended or does not answer."""
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except OSError:
            raise ClusterError(f"the process that delays packets has ended (exit code {self.process.poll()})") from None
        return Counters(**json.loads(self._line()))

    def _line(self) -> str:
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_SECONDS)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            ended_with = self.process.poll()  # None if the process has closed its output and is still running
            code = "" if ended_with is None else f" (exit code {ended_with})"
            gone = f"its end{code}" if ready else f"nothing within {ANSWER_SECONDS:.0f} s"
            raise ClusterError(f"the process that delays packets: expected a line, and got {gone}; see its output")
        return line


@contextmanager
def delay_switch(
    namespace: str, ports: Sequence[str], limits: Sequence[HostLimits], seed: int
) -> Iterator[DelaySwitch]:
    """Run a process in the namespace that forwards frames between the hosts' ports until the `with` block ends.
    `limits` has the limits of each port's host. The seed and the port determine which frames are lost.

    Raises ClusterError if the process does not start.
    """
    wanted = [
        {
            "port": port,
            "latency_seconds": (own.latency_ms or 0.0) / 1000,
            "loss": own.loss or 0.0,
            "seed": f"{seed} {port}",
        }
        for port, own in zip(ports, limits, strict=True)
    ]
    # -I keeps this folder off Python's path, so that none of its modules can shadow a module of the standard library.
    program = [sys.executable, "-I", str(Path(frame_switch.__file__)), json.dumps(wanted)]
    process = subprocess.Popen(
        ["ip", "netns", "exec", namespace, *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,  # Ctrl-C must reach only this process, which ends the switch
    )
    try:
        made = DelaySwitch(process)
        made._line()  # printed once the process forwards frames
        yield made
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
