"""What launchers do when ranks have failed: they tell one another, and start all ranks again, on the nodes that are left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmtrain.errors import BAD_USAGE, FAILED, TrainingError
from llmtrain.launch.nodes import Nodes


@dataclass(frozen=True)
class NodeExit:
    """How the ranks of one node ended."""

    code: int
    """Their exit code; the highest, where they differ."""
    by_signal: bool = False
    """Somebody asked this node for a stop."""


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks."""

    number: int
    """From 0."""
    nodes: Nodes
    """Those that take part; ranks of nodes are numbered without gaps."""


ExchangeExits = Callable[[int, NodeExit, bool], Mapping[int, NodeExit]]
"""(attempt, how this node's ended, whether to go on without nodes that are gone) -> how all nodes' ended, by number."""


def train_with_restarts(
    nodes: Nodes,
    restarts: int,
    allow_node_loss: bool,
    run: Callable[[Attempt], NodeExit],
    exchange_exits: ExchangeExits,
) -> int:
    """The exit code of this node's ranks in the last of up to 1 + `restarts` attempts.

    Raises TrainingError if a node is gone and the others may not go on (`allow_node_loss`), or this is the node that the
    others have given up.
    """
    members = list(range(nodes.count))
    number = 0
    while True:
        mine = run(Attempt(number, Nodes(len(members), members.index(nodes.rank), nodes.address, nodes.port)))
        endings = exchange_exits(number, mine, allow_node_loss)
        if nodes.rank not in endings:
            raise TrainingError(f"node {nodes.rank} was silent for too long: the others go on without it")
        lost = [member for member in members if member not in endings]
        codes = [ended.code for ended in endings.values()]
        if not lost and FAILED not in codes:
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
