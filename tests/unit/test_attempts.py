"""Tests of the attempts to train: when and on which nodes failed ranks are restarted, and the exit code at the end."""

from __future__ import annotations

import pytest

from llmtrain.errors import BAD_USAGE, DONE, FAILED, STOPPED_EARLY, TrainingError
from llmtrain.launch.attempts import Attempt, NodeExit, train_with_restarts
from llmtrain.launch.nodes import Nodes

THREE = Nodes(3, 2, "alpha", 5)
"""The last node of three."""


class Story:
    """A call of `train_with_restarts` on the last node. Each attempt ends with given exit codes, by node."""

    def __init__(self, *attempts: dict[int, NodeExit]):
        self.attempts, self.runs = attempts, []

    def run(self, attempt: Attempt) -> NodeExit:
        self.runs.append(attempt)
        return self.attempts[attempt.number].get(THREE.rank, NodeExit(FAILED))

    def tell(self, number: int, mine: NodeExit, allow_node_loss: bool) -> dict[int, NodeExit]:
        return self.attempts[number]

    def code(self, restarts: int = 2) -> int:
        return train_with_restarts(THREE, restarts, True, self.run, self.tell)


def all_ended(*codes: int) -> dict[int, NodeExit]:
    return dict(enumerate(map(NodeExit, codes)))


def test_ranks_are_started_again_on_all_nodes_until_all_are_done() -> None:
    story = Story(all_ended(DONE, FAILED, DONE), all_ended(FAILED, FAILED, FAILED), all_ended(DONE, DONE, DONE))
    assert story.code() == DONE
    assert story.runs == [Attempt(number, THREE, (0, 1, 2)) for number in range(3)]


def test_the_last_failure_is_the_code_of_every_node() -> None:
    story = Story(all_ended(DONE, FAILED, DONE))
    assert story.code(restarts=0) == FAILED and len(story.runs) == 1


@pytest.mark.parametrize(
    ("endings", "code"),
    [
        (all_ended(STOPPED_EARLY, STOPPED_EARLY, STOPPED_EARLY), STOPPED_EARLY),
        (all_ended(BAD_USAGE, BAD_USAGE, BAD_USAGE), BAD_USAGE),
        (all_ended(FAILED, FAILED, BAD_USAGE), BAD_USAGE),
        ({0: NodeExit(FAILED, by_signal=True), 1: NodeExit(FAILED), 2: NodeExit(FAILED)}, FAILED),
    ],
    ids=["stopped", "bad recipe", "bad recipe on one", "asked to stop"],
)
def test_what_a_restart_would_not_change_is_the_end(endings: dict[int, NodeExit], code: int) -> None:
    story = Story(endings)
    assert story.code() == code and len(story.runs) == 1


def test_a_node_that_is_lost_after_its_ranks_were_done_makes_no_failure() -> None:
    story = Story({0: NodeExit(DONE), 2: NodeExit(DONE)})
    assert story.code(restarts=0) == DONE and len(story.runs) == 1


def test_nodes_that_are_left_are_numbered_anew() -> None:
    story = Story(
        {0: NodeExit(FAILED), 2: NodeExit(FAILED)},
        {0: NodeExit(FAILED), 2: NodeExit(FAILED)},
        {0: NodeExit(0), 2: NodeExit(0)},
    )
    assert story.code() == DONE
    two = Nodes(2, 1, "alpha", 5)
    assert [attempt.nodes for attempt in story.runs] == [THREE, two, two]


def test_a_node_that_was_given_up_says_so() -> None:
    with pytest.raises(TrainingError, match="node 2 was silent for too long: the others continue without it"):
        Story({0: NodeExit(FAILED), 1: NodeExit(FAILED)}).code()
