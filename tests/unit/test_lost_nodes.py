"""Launchers of lost nodes: those that are silent, that come back, or that were only paused."""

from __future__ import annotations

import threading

import pytest

from llmtrain.errors import DONE, FAILED, TrainingError
from llmtrain.launch import node_rendezvous
from llmtrain.launch.attempts import NodeExit
from llmtrain.launch.node_rendezvous import NodeLink, ReturnedError
from tests.end_to_end.runs import wait_until
from tests.unit.test_node_rendezvous import HERE, Meeting


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make launchers send heartbeats often, and wait for silent ones only as long as a busy machine may need."""
    monkeypatch.setattr(node_rendezvous, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(node_rendezvous, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(node_rendezvous, "SILENCE_SECONDS", 2.5)
    monkeypatch.setattr(node_rendezvous, "LINGER_SECONDS", 10.0)


def leave(call: NodeLink) -> None:
    """Acknowledge the ends of later waits, so that node 0 does not stay LINGER_SECONDS for this node, which is gone."""
    for wait in ("outcome0", "failure"):
        call._store.set(f"heard {wait} {call.nodes.rank}", "yes")


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("allow_node_loss", [True, False])
def test_a_launcher_that_is_gone_is_left_out_or_ends_the_run(allow_node_loss: bool) -> None:
    def attend(call: NodeLink) -> tuple[dict[int, NodeExit], ...] | None:
        if call.nodes.rank == 1:
            return leave(call)
        if call.nodes.rank == 2:  # trains for longer than a launcher may be silent
            threading.Event().wait(1.5 * node_rendezvous.SILENCE_SECONDS)
        told = call.exchange_exits(0, NodeExit(FAILED), allow_node_loss)
        return told, call.exchange_exits(1, NodeExit(DONE), allow_node_loss)

    first, _, third = Meeting().hold([0, 1, 2], 3, attend)
    if allow_node_loss:
        assert first == third == ({0: NodeExit(FAILED), 2: NodeExit(FAILED)}, {0: NodeExit(DONE), 2: NodeExit(DONE)})
    else:
        assert type(first) is type(third) is TrainingError
        assert f"node 1 on {HERE}: no heartbeat from its launcher for 2.5 s" in str(third)
        assert str(third).startswith(f"node 0 on {HERE} failed: ")


@pytest.mark.usefixtures("soon")
def test_nobody_waits_again_for_a_launcher_that_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(call: NodeLink) -> list[dict[int, NodeExit]] | None:
        if call.nodes.rank == 1:
            return leave(call)
        told = [call.exchange_exits(0, NodeExit(FAILED), True)]
        monkeypatch.setattr(node_rendezvous, "SILENCE_SECONDS", 600.0)
        return [*told, call.exchange_exits(1, NodeExit(DONE), True)]

    first, _ = Meeting().hold([0, 1], 2, attend)
    assert first == [{0: NodeExit(FAILED)}, {0: NodeExit(DONE)}]


@pytest.mark.usefixtures("soon")
def test_a_launcher_that_is_gone_while_data_is_prepared_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_rendezvous, "LINGER_SECONDS", 2.0)  # node 1 is gone and does not acknowledge the failure

    def attend(call: NodeLink) -> str | None:
        return None if call.nodes.rank == 1 else call.main_first(lambda: "", lambda: None)

    first, _, third = Meeting().hold([0, 1, 2], 3, attend)
    for outcome in (first, third):
        assert isinstance(outcome, TrainingError)
        assert f"node 1 on {HERE}: no heartbeat from its launcher for 2.5 s" in str(outcome)


@pytest.mark.usefixtures("soon")
def test_a_node_that_comes_back_too_early_is_told_to_wait() -> None:
    """A scheduler that replaces a lost node must not take the error for one of the recipe."""
    meeting, outcomes = Meeting(), []

    def heartbeats() -> int:
        return [thread.name for thread in threading.enumerate()].count("heartbeat")

    def attend(call: NodeLink) -> None:
        if call.nodes.rank == 1:
            return leave(call)
        wait_until(lambda: heartbeats() == 1, "node 0 is not alone")
        outcomes.extend(meeting.hold([1], 2, lambda call: None))
        outcomes.append(call.exchange_exits(0, NodeExit(DONE), True))

    wait_until(lambda: heartbeats() == 0, "launchers of an earlier test are still there")
    meeting.hold([0, 1], 2, attend)
    assert type(outcomes[0]) is ReturnedError
    assert str(outcomes[0]).startswith("node 1 was lost, and the others have not noticed this yet")
    assert outcomes[1:] == [{0: NodeExit(DONE)}], "node 0 continues without node 1"


@pytest.mark.usefixtures("soon")
def test_a_node_that_comes_back_after_it_was_given_up_does_not_end_the_run() -> None:
    meeting, outcomes = Meeting(), []

    def attend(call: NodeLink) -> tuple[dict[int, NodeExit], ...] | None:
        if call.nodes.rank == 1:
            return leave(call)
        first = call.exchange_exits(0, NodeExit(FAILED), True)
        if call.nodes.rank == 0:
            outcomes.extend(meeting.hold([1], 3, lambda call: None))
        return first, call.exchange_exits(1, NodeExit(DONE), True)

    first, _, third = meeting.hold([0, 1, 2], 3, attend)
    assert type(outcomes[0]) is ReturnedError
    assert str(outcomes[0]).startswith("node 1 was lost, and the others continue without it")
    assert first == third == ({0: NodeExit(FAILED), 2: NodeExit(FAILED)}, {0: NodeExit(DONE), 2: NodeExit(DONE)})


@pytest.mark.usefixtures("soon")
def test_a_node_that_was_only_paused_does_not_end_the_run_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher, whose machine was suspended, learns that it was given up while the others train on."""
    heartbeat, meeting, returned = NodeLink.heartbeat, Meeting(), []
    monkeypatch.setattr(
        NodeLink, "heartbeat", lambda link, over: None if link.nodes.rank == 1 else heartbeat(link, over)
    )

    def resume(call: NodeLink) -> None:
        wait_until(lambda: call._has("given up 1"), "node 1 is not given up")
        assert call.exchange_exits(0, NodeExit(FAILED), True) == {0: NodeExit(FAILED), 2: NodeExit(FAILED)}
        raise TrainingError("node 1 was silent for too long")

    def attend(call: NodeLink) -> tuple[bool, dict[int, NodeExit]]:
        call.exchange_exits(0, NodeExit(FAILED), True)
        wait_until(lambda: returned, "node 1 has not returned")
        return call.has_failed(1), call.exchange_exits(1, NodeExit(DONE), True)

    paused = threading.Thread(target=lambda: returned.extend(meeting.hold([1], 3, resume)), daemon=True)
    paused.start()
    assert meeting.hold([0, 2], 3, attend) == [(False, {0: NodeExit(DONE), 2: NodeExit(DONE)})] * 2
    assert isinstance(returned[0], TrainingError) and str(returned[0]) == "node 1 was silent for too long"
