"""Restarts after a failure: launchers tell each other how their ranks ended, and start all ranks again on the remaining
nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llmtrain.errors import BAD_USAGE, DONE, FAILED, TrainingError
from llmtrain.launch.nodes import Nodes


@dataclass(frozen=True)
class NodeExit:
    """Result of the ranks of one node."""

    code: int
    """Exit code of the ranks; the highest if they differ."""
    by_signal: bool = False
    """True if a signal asked this node to stop."""


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks."""

    number: int
    """Counted from 0."""
    nodes: Nodes
    """Nodes that take part, numbered without gaps."""
    members: Sequence[int] = ()
    """Number of each of these nodes in the first attempt."""


ExchangeExits = Callable[[int, NodeExit, bool], Mapping[int, NodeExit]]
"""Function from (number of the attempt, exit of this node, whether to continue without lost nodes) to the exits of all
remaining nodes, by their numbers in the first attempt."""


def train_with_restarts(
    nodes: Nodes,
    restarts: int,
    allow_node_loss: bool,
    run: Callable[[Attempt], NodeExit],
    exchange_exits: ExchangeExits,
) -> int:
    """Run up to 1 + `restarts` attempts and return the exit code of this node's ranks in the last one.

    If only other nodes failed in the last attempt, returns FAILED. An attempt that ended by a signal or with BAD_USAGE
    is not retried. Raises TrainingError if a node is lost and `allow_node_loss` is false, or if the other nodes have
    given up on this one.
    """
    members = list(range(nodes.count))
    number = 0
    while True:
        left = Nodes(len(members), members.index(nodes.rank), nodes.address, nodes.port, nodes.step)
        mine = run(Attempt(number, left, tuple(members)))
        endings = exchange_exits(number, mine, allow_node_loss)
        if nodes.rank not in endings:
            raise TrainingError(f"node {nodes.rank} was silent for too long: the others continue without it")
        lost = [member for member in members if member not in endings]
        codes = [ended.code for ended in endings.values()]
        if FAILED not in codes and (not lost or set(codes) == {DONE}):
            return mine.code
        final = any(ended.by_signal for ended in endings.values()) or BAD_USAGE in codes
        if final or number == restarts:
            return mine.code or FAILED
        members = [member for member in members if member in endings]
        if nodes.rank == members[0]:
            where = f" on {len(members)} of {nodes.count} nodes" if len(members) < nodes.count else ""
            print(
                f"the run failed; its ranks are started again{where} ({restarts - number - 1} of {restarts} restarts left)",
                flush=True,
            )
        number += 1
