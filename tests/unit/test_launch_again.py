"""What launchers do when ranks have failed: who is asked, who starts them again, and which ranks are ended for it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException

from llmtrain.errors import BAD_USAGE, DONE, FAILED, STOPPED_EARLY, DataError, RecipeError, TrainingError
from llmtrain.launch import node_rendezvous, torchrun, watchdog
from llmtrain.launch.attempts import Attempt, NodeExit, train_with_restarts
from llmtrain.launch.node_rendezvous import NodeRendezvous, ReturnedError, TimeoutStore
from llmtrain.launch.nodes import Nodes
from llmtrain.launch.preflight import Preflight
from llmtrain.recipe_loader import load_recipe
from llmtrain.train.run_dir import RunDirectory
from tests.end_to_end.runs import RECIPE, ROOT
from tests.mother import session
from tests.unit import processes
from tests.unit.test_launch import HERE, Meeting

THREE = Nodes(3, 2, "alpha", 5)
"""The last of three."""


class Story:
    """What `train_with_restarts` does on one node when attempts end as told, by node."""

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


EIGHT = Nodes(8, 0, "alpha", 5)
"""Eight nodes of eight ranks."""


def test_a_loss_that_the_batch_does_not_allow_is_a_failure_and_announced(capsys: pytest.CaptureFixture[str]) -> None:
    """Launchers start a failed run again on all nodes, but not one with a wrong recipe."""

    def fewer(left: int, *keys: str) -> list[str]:
        start = Preflight(processes=64, replicas=8, shards=8, reason="", memory=0)
        attempt = Attempt(1, Nodes(left, 0, "alpha", 5), range(left))
        return torchrun._fewer_replicas(ROOT / "recipes/edit_1b.yaml", keys, start, EIGHT, attempt)

    assert fewer(8) == [] and fewer(4) == ["parallel.replicas=auto"]
    line = (
        "the run can't continue on 7 of 8 nodes: train.global_batch is 1024, not a multiple of micro_batch x replicas x shards = "
        "4 x 56 = 224; start it again on all 8"
    )
    with pytest.raises(TrainingError, match=f"^{re.escape(line)}$"):
        fewer(7)
    with pytest.raises(RecipeError, match="not a multiple of micro_batch x replicas x shards = 4 x 64"):
        fewer(8, "train.global_batch=1000")
    torchrun._warn_of_lost_node(EIGHT, lambda attempt: fewer(attempt.nodes.count, "train.global_batch=1792"))
    torchrun._warn_of_lost_node(Nodes(), pytest.fail)
    assert capsys.readouterr().out == ""
    torchrun._warn_of_lost_node(EIGHT, lambda attempt: fewer(attempt.nodes.count))
    assert capsys.readouterr().out == f"warning: after the loss of a node, {line}\n"


def test_all_nodes_learn_how_all_ended() -> None:
    def attend(call: NodeRendezvous) -> list:
        rank = call.nodes.rank
        before = call.has_failed(0)
        told = [call.exchange_exits(0, NodeExit(FAILED if rank == 1 else DONE, by_signal=rank == 2), False)]
        return [before, call.has_failed(0), call.has_failed(1), *told, call.exchange_exits(1, NodeExit(DONE), False)]

    first = {0: NodeExit(DONE), 1: NodeExit(FAILED), 2: NodeExit(DONE, by_signal=True)}
    outcomes = Meeting().hold([0, 1, 2], 3, attend)
    assert [outcome[1:] for outcome in outcomes] == [[True, False, first, all_ended(DONE, DONE, DONE)]] * 3


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make launchers say often that they are there, and wait for silent ones a second."""
    monkeypatch.setattr(node_rendezvous, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(node_rendezvous, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(node_rendezvous, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(node_rendezvous, "PATIENCE_SECONDS", 1.0)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("allow_node_loss", [True, False])
def test_a_launcher_that_is_gone_is_left_out_or_ends_the_run(allow_node_loss: bool) -> None:
    def attend(call: NodeRendezvous) -> tuple[dict[int, NodeExit], ...] | None:
        if call.nodes.rank == 1:
            return None  # leaves: nothing more is heard of it
        if call.nodes.rank == 2:  # trains, for longer than a launcher may be silent
            threading.Event().wait(2 * node_rendezvous.SILENCE_SECONDS)
        told = call.exchange_exits(0, NodeExit(FAILED), allow_node_loss)
        return told, call.exchange_exits(1, NodeExit(DONE), allow_node_loss)

    first, _, third = Meeting().hold([0, 1, 2], 3, attend)
    if allow_node_loss:
        assert first == third == ({0: NodeExit(FAILED), 2: NodeExit(FAILED)}, {0: NodeExit(DONE), 2: NodeExit(DONE)})
    else:
        assert type(first) is type(third) is TrainingError
        assert f"node 1 on {HERE}: nothing was heard of its launcher for 1 s" in str(third)
        assert str(third).startswith(f"node 0 on {HERE} failed: ")


@pytest.mark.usefixtures("soon")
def test_a_launcher_that_is_gone_while_data_is_prepared_ends_the_wait() -> None:
    def attend(call: NodeRendezvous) -> str | None:
        return None if call.nodes.rank == 1 else call.main_first(lambda: "", lambda: None)

    first, _, third = Meeting().hold([0, 1, 2], 3, attend)
    for outcome in (first, third):
        assert isinstance(outcome, TrainingError)
        assert f"node 1 on {HERE}: nothing was heard of its launcher for 1 s" in str(outcome)


@pytest.mark.usefixtures("soon")
def test_a_node_that_comes_back_too_early_is_told_to_wait() -> None:
    """A scheduler that replaces a lost node must not read it as a wrong recipe."""
    meeting, outcomes = Meeting(), []

    def attend(call: NodeRendezvous) -> None:
        if call.nodes.rank == 1:
            return  # leaves
        eventually(lambda: [thread.name for thread in threading.enumerate()].count("says that it is there") == 1)
        outcomes.extend(meeting.hold([1], 2, lambda call: None))
        outcomes.append(call.exchange_exits(0, NodeExit(DONE), True))

    eventually(lambda: "says that it is there" not in [thread.name for thread in threading.enumerate()])
    meeting.hold([0, 1], 2, attend)
    assert type(outcomes[0]) is ReturnedError
    assert str(outcomes[0]).startswith("node 1 was there before, is gone, and the others have not given it up yet")
    assert outcomes[1:] == [{0: NodeExit(DONE)}], "node 0 continues without it"


@pytest.mark.usefixtures("soon")
def test_a_node_that_comes_back_after_it_was_given_up_does_not_end_the_run() -> None:
    meeting, outcomes = Meeting(), []

    def attend(call: NodeRendezvous) -> tuple[dict[int, NodeExit], ...] | None:
        if call.nodes.rank == 1:
            return None  # leaves
        first = call.exchange_exits(0, NodeExit(FAILED), True)
        if call.nodes.rank == 0:
            outcomes.extend(meeting.hold([1], 3, lambda call: None))
        return first, call.exchange_exits(1, NodeExit(DONE), True)

    first, _, third = meeting.hold([0, 1, 2], 3, attend)
    assert type(outcomes[0]) is ReturnedError
    assert str(outcomes[0]).startswith("node 1 was lost, and the others continue without it")
    assert first == third == ({0: NodeExit(FAILED), 2: NodeExit(FAILED)}, {0: NodeExit(DONE), 2: NodeExit(DONE)})


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Launcher:
    """A launcher in a process of its own, whose ranks end when they are let go."""

    def __init__(self, folder: Path, ranks: int):
        self.folder = folder
        commands = [
            f"for _ in {{1..1200}}; do [ -e {folder}/{rank} ] && exit; sleep 0.05; done" for rank in range(ranks)
        ]
        self._looks, self._failed = folder / "looks", folder / "failed"
        self._looks.touch()
        files = str(self._looks), str(self._failed)
        self._process = session().fork(processes.launch, *files, *commands, capture=True)
        self.ranks = [psutil.Process(int(pid)) for pid in self._process.stdout.readline().split()]

    def let_go(self, rank: int) -> None:
        """Let a rank end."""
        (self.folder / str(rank)).touch()

    def fail_elsewhere(self) -> None:
        """Let ranks of another node have failed."""
        self._failed.touch()

    def has_looked(self, times: int) -> None:
        """Wait until the launcher has looked at its ranks so many times more."""
        before = self._looks.stat().st_size
        eventually(lambda: self._looks.stat().st_size >= before + times)

    def ended(self) -> list[str]:
        """Return how the ranks ended, once all have."""
        output, _ = self._process.communicate(timeout=60)
        return output.split()


def test_a_frozen_rank_is_ended_once_another_has_ended(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, 3)
    frozen, _, alive = launcher.ranks
    frozen.suspend()
    launcher.let_go(1)
    eventually(lambda: not frozen.is_running())
    assert alive.is_running() and alive.status() != psutil.STATUS_ZOMBIE
    launcher.let_go(2)
    assert launcher.ended() == ["-9", "0", "0"]


def test_all_ranks_are_ended_when_those_of_another_node_have_failed(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, 2)
    launcher.fail_elsewhere()
    assert launcher.ended() == ["-9", "-9"]


def test_a_frozen_rank_among_ranks_that_train_is_left_alone(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, 2)
    frozen = launcher.ranks[0]
    frozen.suspend()
    launcher.has_looked(20)  # in which time it would have lost patience three times
    assert frozen.status() == psutil.STATUS_STOPPED
    frozen.resume()
    launcher.let_go(0)
    launcher.let_go(1)
    assert launcher.ended() == ["0", "0"]


def test_ctrl_c_is_passed_on_although_it_has_ended_who_reads_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(descriptor: int, text: bytes) -> int:
        raise BrokenPipeError

    asked: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    try:
        with monkeypatch.context() as patched, watchdog.stop_on_interrupt():
            patched.setattr(os, "write", write)
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert asked == [signal.SIGTERM]


def test_processes_that_end_while_they_are_looked_at_have_no_children() -> None:
    ended = subprocess.Popen(["true"])
    process = psutil.Process(ended.pid)
    ended.wait()
    assert watchdog._children(process) == set()


def test_node_0_hears_why_another_launcher_gave_up_and_waits_no_longer() -> None:
    def attend(call: NodeRendezvous) -> dict[int, NodeExit]:
        if call.nodes.rank == 1:
            raise DataError("data.cache_dir: no space")
        return call.exchange_exits(0, NodeExit(DONE), True)

    first, second = Meeting().hold([0, 1], 2, attend)
    assert isinstance(second, DataError)
    assert isinstance(first, TrainingError) and str(first) == f"node 1 on {HERE} failed: data.cache_dir: no space"


def test_a_stores_own_error_is_raised_to_who_asked() -> None:
    class Lost:
        def check(self, keys: list[str]) -> bool:
            raise DistError(f"{keys[0]}: connection reset")

    with pytest.raises(DistError, match=r"^ended: connection reset$"):
        TimeoutStore(Lost(), 10.0).check(["ended"])


@pytest.mark.parametrize(("recipe_was_written", "code"), [(False, None), (True, STOPPED_EARLY)])
def test_a_signal_before_the_ranks_have_met_ends_like_one_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe_was_written: bool, code: int | None
) -> None:
    """Ranks that have met listen for signals, and say by the summary how they ended; it may come late from another node."""
    directory = RunDirectory(load_recipe(ROOT / RECIPE, [f"run.out_dir={tmp_path}", "run.name=a"]))

    def run(command: object) -> None:
        if recipe_was_written:
            directory.path.mkdir()
            (directory.path / "recipe.yaml").touch()
        raise SignalException("asked to stop", signal.SIGUSR1)

    def sleep(seconds: float) -> None:
        directory.write_summary({"stopped": "signal"})

    monkeypatch.setattr("torch.distributed.run.run", run)
    monkeypatch.setattr(torchrun, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    arguments = torchrun.torchrun_arguments(directory.recipe, Attempt(0, THREE), 2)
    if code is None:
        with pytest.raises(torchrun.StopRequested, match=r"^stopped by SIGUSR1 before training began; start"):
            torchrun._run([*arguments, "train.py"], directory, THREE)
    else:
        assert torchrun._run([*arguments, "train.py"], directory, THREE) == NodeExit(code, by_signal=True)


def test_ranks_share_the_cores_that_the_launcher_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(load_recipe(ROOT / RECIPE, [f"run.out_dir={tmp_path}", "run.name=a"]))
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")
    monkeypatch.setattr(torchrun, "usable_cores", lambda: 12)
    found: list[str] = []
    monkeypatch.setattr("torch.distributed.run.run", lambda command: found.append(os.environ["OMP_NUM_THREADS"]))
    for ranks in (4, 24):
        monkeypatch.setenv("OMP_NUM_THREADS", "")  # so that what is set here is undone
        monkeypatch.delenv("OMP_NUM_THREADS")
        arguments = torchrun.torchrun_arguments(directory.recipe, Attempt(0, THREE), ranks)
        assert torchrun._run([*arguments, "train.py"], directory, THREE) == NodeExit(DONE)
    assert found == ["3", "1"]


def test_ranks_on_gpus_are_started_with_segments_that_expand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(load_recipe(ROOT / RECIPE, [f"run.out_dir={tmp_path}", "run.name=a"]))
    for name in ("OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "1")  # so that what is set here is undone
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found: list[str | None] = []
    monkeypatch.setattr("torch.distributed.run.run", lambda command: found.append(os.environ.get("PYTORCH_ALLOC_CONF")))
    arguments = torchrun.torchrun_arguments(directory.recipe, Attempt(0, THREE), 2)
    assert torchrun._run([*arguments, "train.py"], directory, THREE) == NodeExit(DONE)
    assert found == ["expandable_segments:True"]
