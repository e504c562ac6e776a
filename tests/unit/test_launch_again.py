"""What launchers do when ranks have failed: who is asked, who starts them again, and which ranks are ended for it."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from llmtrain.errors import BAD_USAGE, DONE, FAILED, STOPPED_EARLY, TrainingError
from llmtrain.launch import roll_call as roll_calls
from llmtrain.launch.attempts import Attempt, Ended, train_with_restarts
from llmtrain.launch.nodes import Nodes
from llmtrain.launch.roll_call import RollCall
from tests.unit.test_launch import HERE, Meeting

THREE = Nodes(3, 2, "alpha", 5)
"""The last of three."""


class Story:
    """What `train_with_restarts` does on one node when attempts end as told, by node."""

    def __init__(self, *attempts: dict[int, Ended]):
        self.attempts, self.runs = attempts, []

    def run(self, attempt: Attempt) -> Ended:
        self.runs.append(attempt)
        return self.attempts[attempt.number].get(THREE.rank, Ended(FAILED))

    def tell(self, number: int, mine: Ended, goes_on_without: bool) -> dict[int, Ended]:
        return self.attempts[number]

    def code(self, restarts: int = 2) -> int:
        return train_with_restarts(THREE, restarts, True, self.run, self.tell)


def all_ended(*codes: int) -> dict[int, Ended]:
    return dict(enumerate(map(Ended, codes)))


def test_ranks_are_started_again_on_all_nodes_until_all_are_done() -> None:
    story = Story(all_ended(DONE, FAILED, DONE), all_ended(FAILED, FAILED, FAILED), all_ended(DONE, DONE, DONE))
    assert story.code() == DONE
    assert story.runs == [Attempt(number, THREE) for number in range(3)]


def test_the_last_failure_is_the_code_of_every_node() -> None:
    story = Story(all_ended(DONE, FAILED, DONE))
    assert story.code(restarts=0) == FAILED and len(story.runs) == 1


@pytest.mark.parametrize(
    ("endings", "code"),
    [
        (all_ended(STOPPED_EARLY, STOPPED_EARLY, STOPPED_EARLY), STOPPED_EARLY),
        (all_ended(BAD_USAGE, BAD_USAGE, BAD_USAGE), BAD_USAGE),
        (all_ended(FAILED, FAILED, BAD_USAGE), BAD_USAGE),
        ({0: Ended(FAILED, by_signal=True), 1: Ended(FAILED), 2: Ended(FAILED)}, FAILED),
    ],
    ids=["stopped", "bad recipe", "bad recipe on one", "asked to stop"],
)
def test_what_a_restart_would_not_change_is_the_end(endings: dict[int, Ended], code: int) -> None:
    story = Story(endings)
    assert story.code() == code and len(story.runs) == 1


def test_nodes_that_are_left_are_numbered_anew() -> None:
    story = Story(
        {0: Ended(FAILED), 2: Ended(FAILED)}, {0: Ended(FAILED), 2: Ended(FAILED)}, {0: Ended(0), 2: Ended(0)}
    )
    assert story.code() == DONE
    two = Nodes(2, 1, "alpha", 5)
    assert [attempt.nodes for attempt in story.runs] == [THREE, two, two]


def test_a_node_that_was_given_up_says_so() -> None:
    with pytest.raises(TrainingError, match="node 2 was silent for too long: the others go on without it"):
        Story({0: Ended(FAILED), 1: Ended(FAILED)}).code()


def test_all_nodes_learn_how_all_ended() -> None:
    def attend(call: RollCall) -> list:
        rank = call.nodes.rank
        before = call.has_failed(0)
        told = [call.tell(0, Ended(FAILED if rank == 1 else DONE, by_signal=rank == 2), False)]
        return [before, call.has_failed(0), call.has_failed(1), *told, call.tell(1, Ended(DONE), False)]

    first = {0: Ended(DONE), 1: Ended(FAILED), 2: Ended(DONE, by_signal=True)}
    outcomes = Meeting().hold([0, 1, 2], 3, attend)
    assert [outcome[1:] for outcome in outcomes] == [[True, False, first, all_ended(DONE, DONE, DONE)]] * 3


@pytest.mark.parametrize("goes_on_without", [True, False])
def test_a_launcher_that_is_gone_is_left_out_or_ends_the_run(monkeypatch, goes_on_without: bool) -> None:
    monkeypatch.setattr(roll_calls, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(roll_calls, "SILENCE_SECONDS", 1.5)

    def attend(call: RollCall) -> dict[int, Ended] | None:
        if call.nodes.rank == 1:
            return None  # leaves: nothing more is heard of it
        if call.nodes.rank == 2:
            time.sleep(3)  # trains, for longer than a launcher may be silent
        told = call.tell(0, Ended(FAILED), goes_on_without)
        return told, call.tell(1, Ended(DONE), goes_on_without)

    first, _, third = Meeting().hold([0, 1, 2], 3, attend)
    if goes_on_without:
        assert first == third == ({0: Ended(FAILED), 2: Ended(FAILED)}, {0: Ended(DONE), 2: Ended(DONE)})
    else:
        assert type(first) is type(third) is TrainingError
        assert f"node 1 on {HERE}: nothing was heard of its launcher for 1.5 s" in str(third)
        assert str(third).startswith(f"node 0 on {HERE} failed: ")


def test_a_node_that_comes_back_too_early_is_told_to_wait(monkeypatch) -> None:
    """A scheduler that replaces a lost node must not read it as a wrong recipe."""
    monkeypatch.setattr(roll_calls, "BEAT_SECONDS", 0.1)
    meeting, outcomes = Meeting(), []

    def attend(call: RollCall) -> None:
        if call.nodes.rank == 1:
            return  # leaves
        time.sleep(1)
        outcomes.extend(meeting.hold([1], 2, lambda call: None))

    meeting.hold([0, 1], 2, attend)
    assert type(outcomes[0]) is TrainingError
    assert str(outcomes[0]).startswith("node 1 was there before, is gone, and the others have not given it up yet")


LAUNCHER = """
import subprocess, sys, time
from llmtrain.launch.watch import hung_ranks_are_ended
elsewhere = sys.argv[1] == "elsewhere"
with hung_ranks_are_ended(lambda: elsewhere):
    ranks = [subprocess.Popen(["sleep", seconds], start_new_session=True) for seconds in sys.argv[2:]]
    print(*(rank.pid for rank in ranks), flush=True)
    print(*(rank.wait() for rank in ranks))
"""


def launcher(where: str, *seconds: str) -> tuple[subprocess.Popen, list[psutil.Process]]:
    """A launcher with ranks that sleep so long."""
    command = [sys.executable, "-c", LAUNCHER, where, *seconds]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return process, [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]


def test_a_frozen_rank_is_ended_once_another_has_ended() -> None:
    process, (frozen, _, alive) = launcher("here", "60", "1", "9")
    frozen.suspend()
    output, _ = process.communicate(timeout=30)
    assert output.split() == ["-9", "0", "0"] and not alive.is_running()


def test_all_ranks_are_ended_when_those_of_another_node_have_failed() -> None:
    process, _ = launcher("elsewhere", "60", "60")
    output, _ = process.communicate(timeout=30)
    assert output.split() == ["-9", "-9"]


def test_a_frozen_rank_among_ranks_that_train_is_left_alone() -> None:
    process, (frozen, _) = launcher("here", "6", "5")
    frozen.suspend()
    time.sleep(4)
    assert frozen.status() == psutil.STATUS_STOPPED
    frozen.resume()
    output, _ = process.communicate(timeout=30)
    assert output.split() == ["0", "0"]
