"""Rendezvous of the launchers of all nodes.

Launchers meet before any rank is started, so that a missing node is known by its number. Each launcher claims its node's number,
waits for the others (`assemble`) and prepares the data (`main_first`). After each attempt, launchers tell each other how their
ranks ended, so that either all nodes start again or none does.

They meet in a key-value store on node 0. torchrun's own store later uses the same process and port, so only one
port must be open. torchrun's static rendezvous would report only how many nodes arrived.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from llmtrain.errors import BAD_USAGE, FAILED, RecipeError, TrainingError, first_line
from llmtrain.launch.attempts import NodeExit
from llmtrain.launch.node_info import NodeInfo, check_nodes
from llmtrain.launch.nodes import Nodes
from llmtrain.launch.timeout_store import TimeoutStore
from llmtrain.threads import store_thread
from llmtrain.waiting import announced

POLL_SECONDS = 0.2
PREPARATION_SECONDS = 24 * 3600.0
"""Maximum seconds that nodes wait for a node that tokenizes text."""
ENDING_SECONDS = 24 * 3600.0
"""Maximum seconds that other nodes, once their ranks have ended, wait for node 0 to collect the exits of all nodes."""
BEAT_SECONDS, SILENCE_SECONDS = 2.0, 20.0
"""Seconds between a launcher's heartbeats, and seconds without one after which the launcher counts as lost."""
ATTEMPT_SECONDS = 10.0
"""Maximum seconds for one connection attempt."""
REPORT_SECONDS = 10.0
"""Seconds after which a wait is reported."""
LINGER_SECONDS = 10.0
"""Maximum seconds for which node 0 stays at the end, so that other nodes can read from its store."""


@contextmanager
def connect_nodes(nodes: Nodes, timeout_seconds: float, info: NodeInfo) -> Iterator[NodeLink]:
    """Meet the launchers of the other nodes, which get this node's `info`, and yield the connection to them. The store lives until the
    end of the `with` block.

    Raises RecipeError if node 0's port is taken, if node numbers or counts of nodes contradict each other, and as `check_nodes`
    does. Raises TrainingError if node 0 can't listen for another reason, if it can't be reached or is lost, or if a node does not
    arrive within `timeout_seconds`. A failure on one node ends the waits of the others.
    """
    if nodes.count == 1:
        yield NodeLink(nodes, None, info)
        return
    prefix = f"llmtrain launch {nodes.step}"
    store = TimeoutStore(PrefixStore(prefix, _open_store(nodes, timeout_seconds)), SILENCE_SECONDS)
    link, is_member = NodeLink(nodes, store, info), False
    with ExitStack() as heart:
        try:
            with link.needs_node_0("arrive"):
                link.claim()
                heart.enter_context(store_thread("heartbeat", link.heartbeat))
                link.assemble(timeout_seconds)
            is_member = True
            yield link
        except BaseException as error:
            # A surplus launcher that is started while a run has all of its nodes must not end that run, and neither must a launcher
            # that came back.
            is_outside = isinstance(error, RecipeError | ReturnedError) and link.is_complete()
            if is_member or not is_outside:
                link.announce_failure(str(error))
            raise


def _open_store(nodes: Nodes, timeout_seconds: float) -> Store:
    if nodes.rank != 0:
        _wait_for_listener(nodes, timeout_seconds)
    try:
        return TCPStore(
            nodes.address,
            nodes.port,
            is_master=nodes.rank == 0,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,
            multi_tenant=True,  # torchrun's store on this port becomes another client of the same server
        )
    except DistError as error:
        reason = first_line(error)
        is_taken = nodes.rank == 0 and "EADDRINUSE" in reason
        raise (RecipeError if is_taken else TrainingError)(
            f"node {nodes.rank} can't use MASTER_ADDR={nodes.address} MASTER_PORT={nodes.port} as the meeting point: "
            f"{reason}; give node 0's address and a port that is free there"
        ) from error


def _wait_for_listener(nodes: Nodes, timeout_seconds: float) -> None:
    """Wait until node 0 accepts connections on its port. torch's own attempts report less about why it cannot be
    reached."""
    started = time.monotonic()
    reason = ""
    is_reported = False
    with announced(f"node 0 to listen at {nodes.address}:{nodes.port}", timeout_seconds):
        while (left := started + timeout_seconds - time.monotonic()) > 0:
            try:
                socket.create_connection((nodes.address, nodes.port), timeout=min(left, ATTEMPT_SECONDS)).close()
                return
            except OSError as error:
                reason = error.strerror or str(error)
                if not is_reported and time.monotonic() - started >= REPORT_SECONDS:
                    is_reported = True
                    tried = f"node {nodes.rank} tries to reach node 0 at {nodes.address}:{nodes.port}"
                    print(f"{tried} (up to {timeout_seconds:g} s): {reason}", flush=True)
                time.sleep(POLL_SECONDS)
    raise TrainingError(
        f"node {nodes.rank} on {socket.gethostname()} could not reach node 0 at {nodes.address}:{nodes.port} in "
        f"{timeout_seconds:g} s: {reason}; check that it is started, that MASTER_ADDR is its address, and that the port is open"
    )


class ReturnedError(TrainingError):
    """Error of a launcher that was started for a node that was lost. It does not concern the launchers of the remaining nodes."""


class NodeLink:
    """Connection of this launcher to the launchers of the other nodes. Without a store, there is only one node, which never
    waits."""

    def __init__(self, nodes: Nodes, store: TimeoutStore | None, info: NodeInfo):
        self.nodes, self._info = nodes, info
        self._store = store
        self._attempt = 0  # the attempt whose exit is not published yet
        self._host = socket.gethostname()
        self._members = list(range(nodes.count))

    def claim(self) -> None:
        """Claim this node's number. Raises RecipeError if a running launcher has claimed it, and ReturnedError if a lost
        launcher did."""
        rank = self.nodes.rank
        if self._store.add(f"claims {rank}", 1) == 1:
            return
        if self._has(f"given up {rank}"):
            raise ReturnedError(
                f"node {rank} was lost, and the others continue without it; to take it in again, stop node 0 with Ctrl-C (it writes a "
                "checkpoint), then start the same command on all nodes"
            )
        beats = self._store.add(f"beat {rank}", 0)
        with announced(f"a heartbeat of another launcher that is node {rank}", 3 * BEAT_SECONDS):
            time.sleep(3 * BEAT_SECONDS)
        if self._store.add(f"beat {rank}", 0) == beats:
            raise ReturnedError(
                f"node {rank} was lost, and the others have not noticed this yet; start it again in "
                f"{SILENCE_SECONDS:g} s, when they have ended"
            )
        raise RecipeError(
            f"NODE_RANK={rank} on {self._host} is taken by {self._name(rank)}; number the nodes 0 to {self.nodes.count - 1}"
        )

    def assemble(self, timeout_seconds: float) -> None:
        """Wait until the launchers of all nodes have arrived. Raises RecipeError and TrainingError as
        `connect_nodes` does."""
        rank, count = self.nodes.rank, self.nodes.count
        if rank == 0:
            self._store.set("count 0", str(count))
        self._wait("count", [0], "arrive", timeout_seconds)
        counted = int(self._store.get("count 0"))
        if counted != count:
            raise RecipeError(f"NNODES={count} on {self._host}, but {counted} on node 0; set the same on all nodes")
        self._store.set(f"info {rank}", json.dumps(asdict(self._info)))
        self._store.set(f"host {rank}", self._host)
        self._wait("host", range(count), "arrive", timeout_seconds)
        told = [json.loads(self._store.get(f"info {node}")) for node in range(count)]
        check_nodes(told, [self._name(node) for node in range(count)])
        self._store.set("complete 0", "yes")

    def is_complete(self) -> bool:
        """Return whether all nodes of this launch have met; False if node 0 is gone."""
        try:
            return self._has("complete 0")
        except DistError:
            return False

    def main_first(self, first: Callable[[], str], others: Callable[[], object]) -> str:
        """Run `first()` on node 0 and, if it returns "", `others()` on all other nodes at the same time. Return the result
        of `first()` when all nodes are done.

        An error is raised on the node where it occurs. The other nodes raise a TrainingError that names it.
        """
        if self._store is None:
            return first()
        with self.needs_node_0("prepare the data"):
            if self.nodes.rank == 0:
                answer = first()
                self._store.set("answer 0", answer)
            else:
                self._wait("answer", [0], "prepare the data", PREPARATION_SECONDS)
                answer = self._store.get("answer 0").decode()
                if not answer:
                    others()
            self._store.set(f"ready {self.nodes.rank}", "yes")
            self._wait("ready", range(self.nodes.count), "prepare the data", PREPARATION_SECONDS)
            self._linger_until_acked("ready")
        return answer

    def exchange_exits(self, attempt: int, mine: NodeExit, allow_node_loss: bool) -> dict[int, NodeExit]:
        """Publish how this node's ranks ended in an attempt, and return the exits of all nodes, by number, once all
        have ended.

        If `allow_node_loss`, nodes whose launchers are lost are left out. Otherwise a lost node causes a
        TrainingError on all nodes.
        """
        if self._store is None:
            return {0: mine}
        with self.needs_node_0("report how their ranks ended"):
            return self._exits_of_all_nodes(attempt, mine, allow_node_loss)

    def _exits_of_all_nodes(self, attempt: int, mine: NodeExit, allow_node_loss: bool) -> dict[int, NodeExit]:
        if mine.code in (FAILED, BAD_USAGE):
            self._store.set(f"failed {attempt}", "yes")
        self._store.set(f"ended{attempt} {self.nodes.rank}", json.dumps(asdict(mine)))
        self._attempt = attempt + 1
        outcome = f"outcome{attempt}"
        if self.nodes.rank == 0:
            gone = self._wait_for_lost(f"ended{attempt}")
            if gone and not allow_node_loss:
                raise TrainingError(
                    f"{', '.join(map(self._name, gone))}: no heartbeat from its launcher for {SILENCE_SECONDS:g} s; when it is "
                    "back, start the same command again on all nodes to continue from the last checkpoint, or give "
                    "run.on_replica_loss=continue to continue without it"
                )
            for node in gone:
                self._store.set(f"given up {node}", "yes")
            ended = {
                node: json.loads(self._store.get(f"ended{attempt} {node}"))
                for node in self._members
                if node not in gone
            }
            self._store.set(f"{outcome} 0", json.dumps(ended))
        else:
            self._wait(outcome, [0], "collect the results of all nodes", ENDING_SECONDS)
        told = json.loads(self._store.get(f"{outcome} 0"))
        exits = {int(node): NodeExit(**ended) for node, ended in told.items()}
        self._members = list(exits)  # a lost node acknowledges nothing
        self._linger_until_acked(outcome)
        return exits

    def has_failed(self, attempt: int) -> bool:
        """Return whether any node has reported that its ranks or its launcher failed in this attempt; False if the store does not
        answer."""
        try:
            return self._store is not None and self._has(f"failed {attempt}")
        except DistError:
            return False

    def announce_failure(self, message: str) -> None:
        """Publish the reason for a failure, unless another reason is published already. This ends the other nodes' current or next
        wait, and also their ranks, unless this node's ranks have ended. Do nothing if node 0 is gone, or if the others continue
        without this node."""
        try:
            if self._has(f"given up {self.nodes.rank}"):
                return
            self._store.set(f"failed {self._attempt}", "yes")
            if not self._has("failure"):
                self._store.set("failure", f"node {self.nodes.rank} on {self._host} failed: {message}")
            self._linger_until_acked("failure")
        except DistError:  # node 0 is gone, so no node can read the message
            return

    # -- heartbeats and waits ------------------------------------------------------------------------------------

    def heartbeat(self, over: threading.Event) -> None:
        """Send this launcher's heartbeats until `over` is set."""
        while not over.wait(BEAT_SECONDS):
            with suppress(DistError):  # node 0 may be gone, or unreachable for a while
                self._store.add(f"beat {self.nodes.rank}", 1)

    def _silent(self, nodes: Sequence[int], heard: dict[int, tuple[int, float]]) -> list[int]:
        """Return the `nodes` whose heartbeats have stopped for SILENCE_SECONDS. `heard`, which is updated, has each node's number of
        heartbeats and the time at which the number last rose."""
        for node in nodes:
            beats = self._store.add(f"beat {node}", 0)
            if node not in heard or beats != heard[node][0]:
                heard[node] = beats, time.monotonic()
        return [node for node in nodes if time.monotonic() - heard[node][1] > SILENCE_SECONDS]

    def _wait_for_lost(self, key: str) -> list[int]:
        """Wait until every node has set its `key` or is lost, and return the lost nodes."""
        heard: dict[int, tuple[int, float]] = {}
        while missing := [node for node in self._members if not self._has(f"{key} {node}")]:
            if self._has("failure"):
                raise TrainingError(self._store.get("failure").decode())
            if self._silent(missing, heard) == missing:
                return missing
            time.sleep(POLL_SECONDS)
        return []

    def _wait(self, key: str, nodes: Sequence[int], purpose: str, seconds: float) -> None:
        """Wait until all of `nodes` have set their `key`. Raises TrainingError after `seconds`, when any node has
        failed, when the heartbeats of a node that had arrived stop, or when node 0 is lost."""
        started = time.monotonic()
        is_reported = False
        heard: dict[int, tuple[int, float]] = {}
        with self.needs_node_0(purpose):
            while missing := [node for node in nodes if not self._has(f"{key} {node}")]:
                if self._has("failure"):
                    raise TrainingError(self._store.get("failure").decode())
                if gone := self._silent([node for node in missing if self._has(f"host {node}")], heard):
                    raise TrainingError(
                        f"{', '.join(map(self._name, gone))}: no heartbeat from its launcher for {SILENCE_SECONDS:g} s; start "
                        "the same command again on all nodes"
                    )
                waited = time.monotonic() - started
                names = ", ".join(map(self._name, missing))
                if waited > seconds:
                    raise TrainingError(self._timed_out(names, purpose, seconds))
                if not is_reported and waited > REPORT_SECONDS:
                    is_reported = True
                    print(f"node {self.nodes.rank} waits for {names} to {purpose} (up to {seconds:g} s)", flush=True)
                time.sleep(POLL_SECONDS)

    def _timed_out(self, names: str, purpose: str, seconds: float) -> str:
        arrived = ", ".join(self._name(node) for node in range(self.nodes.count) if self._has(f"host {node}"))
        return (
            f"waited {seconds:g} s for {names} to {purpose}; arrived: {arrived}; start llmtrain launch on each of "
            f"{self.nodes.count} nodes with MASTER_ADDR={self.nodes.address} MASTER_PORT={self.nodes.port}, "
            "or raise run.timeout_seconds"
        )

    def _linger_until_acked(self, what: str) -> None:
        """Acknowledge that a wait is over on this node. Node 0 then waits for a limited time until all nodes that arrived have
        acknowledged the same, because the store may end when node 0 ends."""
        self._store.set(f"heard {what} {self.nodes.rank}", "yes")
        deadline = time.monotonic() + (LINGER_SECONDS if self.nodes.rank == 0 else 0)
        while time.monotonic() < deadline and any(
            self._has(f"host {node}") and not self._has(f"heard {what} {node}") for node in self._members
        ):
            time.sleep(POLL_SECONDS)

    @contextmanager
    def needs_node_0(self, purpose: str) -> Iterator[None]:
        """Turn errors of the store within the `with` block into a TrainingError that says that node 0 is lost."""
        try:
            yield
        except DistError as error:
            raise TrainingError(
                f"node {self.nodes.rank} on {self._host} lost node 0 ({self.nodes.address}:{self.nodes.port}) "
                f"while it waited for nodes to {purpose}; see the output of node 0"
            ) from error

    def _name(self, node: int) -> str:
        return f"node {node}" + (f" on {self._store.get(f'host {node}').decode()}" if self._has(f"host {node}") else "")

    def _has(self, key: str) -> bool:
        return self._store.check([key])
