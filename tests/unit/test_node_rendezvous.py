"""Launchers of several nodes: their meeting, data prepared one after another, and exits of all nodes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict

import pytest
from torch.distributed import DistNetworkError, HashStore

from llmtrain.errors import BAD_USAGE, DONE, FAILED, DataError, RecipeError, TrainingError
from llmtrain.launch import node_rendezvous
from llmtrain.launch.attempts import NodeExit
from llmtrain.launch.node_info import NodeInfo, check_nodes
from llmtrain.launch.node_rendezvous import NodeLink, connect_nodes
from llmtrain.launch.nodes import Nodes
from llmtrain.launch.timeout_store import TimeoutStore
from llmtrain.parallel.network import unused_port
from tests.end_to_end.runs import wait_until
from tests.unit.test_attempts import all_ended

HERE = socket.gethostname()


class Meeting:
    """Launchers of several nodes, each in a thread of this process."""

    def __init__(self) -> None:
        self.port = unused_port()

    def hold(
        self,
        ranks: list[int],
        count: int,
        do: Callable[[NodeLink], object],
        seconds: float = 20,
        counts=None,
        steps: Sequence[str] = (),
        infos: Sequence[NodeInfo] = (),
    ) -> list[object]:
        """Return, for each of `ranks` in order, the result of `do`, or the error of `do` or of the meeting."""
        outcomes: list[object] = [None] * len(ranks)

        def attend(place: int) -> None:
            nodes = Nodes(
                (counts or {}).get(place, count), ranks[place], "127.0.0.1", self.port, *steps[place : place + 1]
            )
            try:
                with connect_nodes(nodes, seconds, infos[place] if infos else NodeInfo()) as link:
                    outcomes[place] = do(link)
            except Exception as error:
                outcomes[place] = error

        threads = [threading.Thread(target=attend, args=(place,), daemon=True) for place in range(len(ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        assert not any(thread.is_alive() for thread in threads)
        return outcomes


@pytest.fixture
def meeting() -> Meeting:
    return Meeting()


def test_node_0_prepares_before_the_others_and_all_wait_for_all(meeting: Meeting):
    order: list[int] = []

    def attend(link: NodeLink) -> tuple[str, int]:
        rank = link.nodes.rank
        answer = link.main_first(lambda: order.append(rank) or "", lambda: order.append(rank))
        return answer, len(order)

    assert meeting.hold([2, 0, 1], 3, attend) == [("", 3)] * 3
    assert order[0] == 0 and sorted(order) == [0, 1, 2]


def test_two_steps_of_a_slurm_job_with_one_port_do_not_meet(meeting: Meeting):
    outcomes = meeting.hold([0, 1], 2, lambda call: None, seconds=3, steps=["0", "1"])
    assert all(isinstance(outcome, TrainingError) and " to arrive; arrived: " in str(outcome) for outcome in outcomes)


def test_a_run_that_node_0_finds_complete_is_complete_everywhere(meeting: Meeting):
    prepared: list[int] = []
    outcomes = meeting.hold([0, 1], 2, lambda call: call.main_first(lambda: "done", lambda: prepared.append(1)))
    assert outcomes == ["done", "done"] and not prepared


def test_a_node_that_never_comes_is_named_on_every_node_that_came(meeting: Meeting):
    outcomes = meeting.hold([0, 2], 4, lambda call: None, seconds=3)
    assert {type(outcome) for outcome in outcomes} == {TrainingError}
    for outcome in outcomes:
        arrived = f"node 0 on {HERE}, node 2 on {HERE}"
        assert f"waited 3 s for node 1, node 3 to arrive; arrived: {arrived}; start" in str(outcome)


def test_without_node_0_the_others_say_where_they_looked(meeting: Meeting):
    (outcome,) = meeting.hold([1], 2, lambda call: None, seconds=1)
    assert isinstance(outcome, TrainingError)
    assert f"node 1 on {HERE} could not reach node 0 at 127.0.0.1:{meeting.port} in 1 s: Connection ref" in str(outcome)


def test_a_node_that_fails_is_named_on_the_others(meeting: Meeting):
    def attend(link: NodeLink) -> str:
        def fail() -> None:
            raise DataError("data.cache_dir: no space")

        return link.main_first(lambda: "", fail if link.nodes.rank == 1 else lambda: None)

    first, second, third = meeting.hold([0, 1, 2], 3, attend)
    assert isinstance(second, DataError)
    for outcome in (first, third):
        assert isinstance(outcome, TrainingError)
        assert str(outcome) == f"node 1 on {HERE} failed: data.cache_dir: no space"


def test_two_nodes_with_one_number_are_refused(meeting: Meeting, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(node_rendezvous, "BEAT_SECONDS", 0.7)  # a beat must be heard within three times that
    outcomes = meeting.hold([0, 1, 1], 3, lambda call: None)
    assert [type(outcome) for outcome in outcomes].count(RecipeError) == 1
    assert all("NODE_RANK=1" in str(outcome) and "is taken by node 1" in str(outcome) for outcome in outcomes)


def test_a_node_that_waits_for_node_0_reports_once_why(meeting: Meeting, monkeypatch, capsys):
    monkeypatch.setattr(node_rendezvous, "REPORT_SECONDS", 0.1)
    monkeypatch.setattr(node_rendezvous, "POLL_SECONDS", 0.02)
    meeting.hold([1], 2, lambda call: None, seconds=2)
    where = f"node 1 tries to reach node 0 at 127.0.0.1:{meeting.port} (up to 2 s): Connection refused"
    assert capsys.readouterr().out.splitlines() == [where]


def test_nodes_that_count_differently_are_refused(meeting: Meeting):
    first, second = meeting.hold([0, 1], 2, lambda call: None, counts={1: 3})
    assert isinstance(second, RecipeError) and f"NNODES=3 on {HERE}, but 2 on node 0" in str(second)
    assert isinstance(first, TrainingError) and str(second) in str(first)


def test_nodes_that_start_unequal_numbers_of_processes_are_refused(meeting: Meeting):
    outcomes = meeting.hold([0, 1], 2, lambda call: None, infos=[NodeInfo(4), NodeInfo(8)])
    assert RecipeError in map(type, outcomes)
    says = f"node 0 on {HERE} starts 4, node 1 on {HERE} starts 8; set NPROC_PER_NODE=4 on all of them"
    assert all(says in str(outcome) for outcome in outcomes), outcomes


def test_nodes_are_refused_for_other_recipes_and_may_come_again_for_lost_gpus() -> None:
    def error_of(*infos: NodeInfo) -> Exception:
        with pytest.raises((RecipeError, TrainingError)) as error:
            check_nodes([asdict(info) for info in infos], ["node 0 on a", "node 1 on b"])
        return error.value

    other = error_of(NodeInfo(8, 8, {"run.restarts": "2"}), NodeInfo(1, 0, {"run.restarts": "0"}))
    assert type(other) is RecipeError
    assert "versions: run.restarts is 2 for node 0 on a, 0 for node 1 on b; start the same command" in str(other)
    lost = error_of(NodeInfo(8, 8), NodeInfo(1, 0))
    assert type(lost) is TrainingError and str(lost).startswith(
        "node 1 on b has 0 usable GPUs, node 0 on a has 8; see `nv"
    )
    refused = NodeInfo(7, 7, refusal="train.global_batch is 1024, not a multiple of 4 x 14")
    assert "node 1 on b has 7 usable GPUs" in str(error_of(NodeInfo(8, 8), refused))
    assert type(error_of(NodeInfo(1, 1), NodeInfo(1, 0, refusal="the model needs more memory"))) is TrainingError
    told = error_of(NodeInfo(7, 7), refused)
    assert type(told) is RecipeError and str(told) == f"{refused.refusal} (node 1 on b)"
    check_nodes([asdict(NodeInfo(4, gpus)) for gpus in (8, 4)], ["a", "b"])  # 4 processes per node; GPUs may differ


def test_a_launcher_too_many_does_not_end_a_run(meeting: Meeting, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(node_rendezvous, "BEAT_SECONDS", 0.7)  # a beat must be heard within three times that

    def attend(call: NodeLink) -> dict[int, NodeExit]:
        if call.nodes.rank == 0:
            with (
                pytest.raises(RecipeError, match=f"NODE_RANK=1 on {HERE} is taken by node 1"),
                connect_nodes(Nodes(2, 1, "127.0.0.1", meeting.port), 5, NodeInfo()),
            ):
                pass
        return call.exchange_exits(0, NodeExit(DONE), False)

    assert meeting.hold([0, 1], 2, attend) == [{0: NodeExit(DONE), 1: NodeExit(DONE)}] * 2


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("0.0.0.0", 0)) as taken:
        nodes = Nodes(2, 0, "127.0.0.1", taken.getsockname()[1])
        with (
            pytest.raises(RecipeError, match=r"can't use MASTER_ADDR=.* a port that is free there"),
            connect_nodes(nodes, 5, NodeInfo()),
        ):
            pass


@pytest.mark.parametrize("rank", [0, 1])
def test_a_network_that_fails_at_the_start_may_work_later(monkeypatch: pytest.MonkeyPatch, rank: int):
    """Node 0's name may not be known yet. Schedulers start a job again after exit code 1, but not after 2."""

    def refuse(*_: object, **__: object) -> None:
        raise DistNetworkError(
            "The client socket has timed out after 3000ms while trying to connect to (alpha, 1).\nMore"
        )

    monkeypatch.setattr(node_rendezvous, "TCPStore", refuse)
    monkeypatch.setattr(node_rendezvous, "_wait_for_listener", lambda *_: None)
    with (
        pytest.raises(
            TrainingError,
            match=rf"^node {rank} can't use MASTER_ADDR=alpha MASTER_PORT=1 .* timed out .*\(alpha, 1\)\.; ",
        ),
        connect_nodes(Nodes(2, rank, "alpha", 1), 5, NodeInfo()),
    ):
        pass


def test_node_0_ends_its_ranks_when_those_of_another_node_refuse_or_are_stopped_early() -> None:
    """Otherwise, ranks of node 0 would wait for the other ranks in the roll call until the timeout."""

    def watched(do: Callable[[NodeLink], object]) -> Exception | bool:
        stopped = threading.Event()

        def attend(call: NodeLink) -> bool | None:
            if call.nodes.rank == 1:
                stopped.wait(20)
                return do(call)
            before = call.has_failed(0)
            stopped.set()
            wait_until(lambda: call.has_failed(0), "node 0 has not heard of the failure")
            call.exchange_exits(0, NodeExit(FAILED), False)
            return before

        return Meeting().hold([0, 1], 2, attend)[0]

    def stop(call: NodeLink) -> None:
        raise DataError("stopped by SIGTERM before training began")

    assert watched(lambda call: call.exchange_exits(0, NodeExit(BAD_USAGE), False)) is False
    assert str(watched(stop)) == f"node 1 on {HERE} failed: stopped by SIGTERM before training began"


def test_a_launcher_that_is_stopped_once_its_ranks_have_ended_does_not_end_those_of_others() -> None:
    """Rank 0, on another node, may still wait for the last evaluation."""
    link = NodeLink(Nodes(2, 1, "alpha", 1), TimeoutStore(HashStore(), 10.0), NodeInfo())
    link.announce_failure("stopped")
    assert link.has_failed(0)
    link = NodeLink(Nodes(2, 1, "alpha", 1), TimeoutStore(store := HashStore(), 10.0), NodeInfo())
    store.set("outcome0 0", "{}")
    assert link.exchange_exits(0, NodeExit(DONE), False) == {}
    link.announce_failure("stopped")
    assert not link.has_failed(0)


def test_a_node_that_loses_node_0_between_two_waits_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(HashStore):
        def set(self, key: str, value: str) -> None:
            raise DistNetworkError("connection reset")

        add = set

    store = Lost()
    HashStore.set(store, "answer 0", "")
    link = NodeLink(Nodes(2, 1, "alpha", 1), TimeoutStore(store, 10.0), NodeInfo())
    with pytest.raises(
        TrainingError, match=r"^node 1 on .* lost node 0 \(alpha:1\) while it waited for nodes to prepare"
    ):
        link.main_first(lambda: "", lambda: None)
    monkeypatch.setattr(node_rendezvous, "_open_store", lambda *_: Lost())
    # torch's PrefixStore would not call methods that are written in Python.
    monkeypatch.setattr(node_rendezvous, "PrefixStore", lambda prefix, store: store)
    with (
        pytest.raises(TrainingError, match=r"lost node 0 \(alpha:1\) while it waited for nodes to arrive"),
        connect_nodes(Nodes(2, 1, "alpha", 1), 5, NodeInfo()),
    ):
        pass


def test_all_nodes_learn_how_all_ended() -> None:
    def attend(call: NodeLink) -> list:
        rank = call.nodes.rank
        before = call.has_failed(0)
        told = [call.exchange_exits(0, NodeExit(FAILED if rank == 1 else DONE, by_signal=rank == 2), False)]
        return [before, call.has_failed(0), call.has_failed(1), *told, call.exchange_exits(1, NodeExit(DONE), False)]

    first = {0: NodeExit(DONE), 1: NodeExit(FAILED), 2: NodeExit(DONE, by_signal=True)}
    outcomes = Meeting().hold([0, 1, 2], 3, attend)
    assert [outcome[1:] for outcome in outcomes] == [[True, False, first, all_ended(DONE, DONE, DONE)]] * 3


def test_node_0_hears_why_another_launcher_gave_up_and_waits_no_longer() -> None:
    def attend(call: NodeLink) -> dict[int, NodeExit]:
        if call.nodes.rank == 1:
            raise DataError("data.cache_dir: no space")
        return call.exchange_exits(0, NodeExit(DONE), True)

    first, second = Meeting().hold([0, 1], 2, attend)
    assert isinstance(second, DataError)
    assert isinstance(first, TrainingError) and str(first) == f"node 1 on {HERE} failed: data.cache_dir: no space"
