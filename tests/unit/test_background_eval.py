"""Tests of evaluations in the background of training, with fake evaluation processes."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from llmtrain.errors import UserError
from llmtrain.recipe_loader import load_recipe
from llmtrain.suites import check_suite, check_suite_data
from llmtrain.train import background_eval
from llmtrain.train.background_eval import BackgroundEval, last_log_line, start_in_background
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.signals import StopRequest

ROOT = Path(__file__).resolve().parents[2]
SCORES = "piqa acc_norm 0.500 ± 0.100 near chance"


class Child:
    """A fake evaluation process, which ends when the test calls `end`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path):
        self.command, self.environment, self.log = command, environment, log
        self.step = int(command[command.index("--step") + 1])
        self.pid, self.returncode = -self.step, None
        self._ended = threading.Event()
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("Traceback\nerror: no room\nsome library's farewell\n")

    def end(self, code: int, result: str | None = json.dumps({"headline": SCORES})) -> None:
        if result is not None:
            (self.log.parents[1] / f"offline-step-{self.step:08d}.json").write_text(result)
        self.returncode = code
        self._ended.set()

    def wait(self) -> int:
        assert self._ended.wait(100)
        return self.returncode

    def poll(self) -> int | None:
        return self.returncode


class Beside:
    """Background evaluations of a run of 50 steps, with the fake processes that were started and the lines on the console."""

    def __init__(self, folder: Path, *overrides: str):
        keys = [f"run.out_dir={folder}", "run.name=a", "train.steps=50", "checkpoint.every=10"]
        suite = ["eval.suite.name=offline", "eval.suite.data_dir=data", "eval.suite.limit=5"]
        self.recipe = load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml", [*keys, *suite, *overrides])
        self.lines: list[str] = []
        self.children: list[Child] = []
        self.stop = StopRequest()
        self.background_eval = BackgroundEval(
            self.recipe.eval.suite, self.recipe, RunDirectory(self.recipe), self, self.stop
        )
        self.background_eval.start = self.start

    def print(self, text: str) -> None:
        self.lines.append(text)

    def start(self, *arguments: object) -> Child:
        self.children.append(Child(*arguments))
        return self.children[-1]

    def child(self, number: int) -> Child:
        eventually(lambda: len(self.children) > number)
        return self.children[number]

    def says(self, text: str) -> None:
        eventually(lambda: text in self.lines)

    def idle(self) -> None:
        eventually(lambda: not self.background_eval.worker.pending_steps())


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def beside(tmp_path: Path) -> Beside:
    return Beside(tmp_path)


@pytest.fixture
def killed(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that receives (step, signal) for each signal sent to a fake process, which then ends."""
    sent = []

    def kill(group: int, number: int) -> None:
        sent.append((-group, number))
        next(child for child in beside.children if child.pid == group).end(-number, None)

    monkeypatch.setattr(os, "killpg", kill)
    return sent


def test_a_checkpoint_is_evaluated_by_a_process_that_is_no_rank(
    beside: Beside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launchers = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "SLURM_PROCID",
    )
    for name in launchers:
        monkeypatch.setenv(name, "3")
    beside.background_eval.after_checkpoint(10)
    child = beside.child(0)
    options = ["--suite", "offline", "--limit", "5", "--data-dir", "data", "--step", "10", "--device", "cpu"]
    assert child.command[1:] == ["-m", "llmtrain", "eval", str(tmp_path / "a"), *options]
    assert not set(launchers) & set(child.environment) and child.environment["PATH"] == os.environ["PATH"]
    assert (child.environment["OMP_NUM_THREADS"], child.environment["CUDA_VISIBLE_DEVICES"]) == ("4", "")
    assert beside.background_eval.worker.pending_steps() == {10}
    beside.says(f"step 10/50 | offline: evaluating in the background ({tmp_path}/a/eval/log/offline-step-00000010.log)")
    child.end(0)
    beside.idle()
    assert beside.lines[1:] == [f"step 10/50 | offline: {SCORES}"]


def test_training_does_not_wait_and_the_newest_checkpoint_is_next(beside: Beside) -> None:
    for step in (10, 20, 30):
        beside.background_eval.after_checkpoint(step)
    assert beside.background_eval.worker.pending_steps() == {10, 30}
    beside.child(0).end(0)
    beside.child(1).end(0)
    beside.idle()
    assert [child.step for child in beside.children] == [10, 30]
    assert [line for line in beside.lines if "waits" in line] == [
        "step 20/50 | offline: waits for the evaluation of step 10",
        "step 30/50 | offline: waits for the evaluation of step 10, instead of step 20",
    ]
    beside.background_eval.after_checkpoint(40)
    beside.child(2).end(0)
    beside.idle()


@pytest.mark.parametrize(
    ("overrides", "steps", "evaluated"),
    [
        (["eval.suite.every=2"], [10, 20, 30, 40, 50], [20, 40, 50]),
        (["eval.suite.every=2"], [13, 31, 44, 50], [31, 44, 50]),  # checkpoints at the ends of timed rounds
        (["checkpoint.every=null"], [7, 50], [50]),
        (["eval.suite.every=9"], [10, 50], [50]),
        ([], [10, 14, 20], [10, 20]),  # the checkpoint of step 14 was written by a stop
        (["eval.suite=null"], [10, 50], []),
    ],
)
def test_whose_turn_it_is(tmp_path: Path, overrides: list[str], steps: list[int], evaluated: list[int]) -> None:
    beside, ended = Beside(tmp_path, *overrides), 0
    for step in steps:
        beside.background_eval.after_checkpoint(step)
        if step in beside.background_eval.worker.pending_steps():
            beside.child(ended).end(0)
            beside.idle()
            ended += 1
    assert [child.step for child in beside.children] == evaluated


def test_a_run_that_continues_does_not_begin_with_a_stops_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a/checkpoints/step-00000015").mkdir(parents=True)
    (tmp_path / "a/checkpoints/step-00000015/state.json").write_text("{}")
    beside = Beside(tmp_path)
    beside.background_eval.after_checkpoint(17)
    assert not beside.background_eval.worker.pending_steps() and beside.background_eval.newest == 17


@pytest.mark.parametrize(
    ("code", "result", "line"),
    [
        (2, None, "the evaluation failed (exit code 2): no room; see {log}"),
        (-9, None, "the evaluation failed (SIGKILL): no room; see {log}"),
        (0, "{", "the evaluation left no result (Expecting property name"),
        (0, None, "the evaluation left no result ([Errno 2] No such file"),
        (0, '{"headline": ""}', "evaluated ({result})"),
    ],
)
def test_what_went_wrong_is_one_line_and_the_next_is_evaluated(
    beside: Beside, code: int, result: str | None, line: str
) -> None:
    beside.background_eval.after_checkpoint(10)
    child = beside.child(0)
    child.end(code, result)
    beside.idle()
    file = child.log.parents[1] / "offline-step-00000010.json"
    assert beside.lines[-1].startswith(f"step 10/50 | offline: {line.format(log=child.log, result=file)}")
    assert len(beside.lines) == 2 and "\n" not in beside.lines[-1]
    beside.background_eval.after_checkpoint(20)
    beside.child(1).end(0)
    beside.idle()
    assert beside.lines[-1].endswith(SCORES)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Traceback\nAssertionError\nRequests:   0%|    | 0/4\rRequests: 100%|####| 4/4\n", "AssertionError"),
        ("error: no room\nfarewell\n", "no room"),
        ("", "the log has no message"),
    ],
)
def test_last_words_are_no_progress_bar(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "log").write_text(text)
    assert last_log_line(tmp_path / "log") == words
    assert last_log_line(tmp_path / "no log") == "the log has no message"


def test_a_process_that_can_not_be_started_is_one_line(beside: Beside) -> None:
    def start(*_: object) -> None:
        raise OSError(28, "No space left on device")

    beside.background_eval.start = start
    beside.background_eval.after_checkpoint(10)
    beside.idle()
    assert beside.lines == [
        "step 10/50 | offline: the evaluation can't be started ([Errno 28] No space left on device)"
    ]


def test_the_end_of_the_run_waits_for_the_last_one(beside: Beside, tmp_path: Path) -> None:
    def end_both() -> None:
        beside.child(0).end(0)
        beside.says("waiting for the evaluation of step 50 on offline, at most 1800 s (eval.suite.wait_seconds)")
        beside.child(1).end(0)

    with beside.background_eval:
        beside.background_eval.after_checkpoint(40)
        beside.background_eval.after_checkpoint(50)
        ending = threading.Thread(target=end_both)
        ending.start()
    ending.join()
    assert beside.lines[-2:] == [
        f"step 50/50 | offline: {SCORES}",
        f"all checkpoints: llmtrain eval {tmp_path}/a --suite offline --limit 5 --data-dir data --over-time",
    ]
    assert len([line for line in beside.lines if line.startswith("waiting for")]) == 1


def test_the_end_of_the_run_does_not_wait_for_one_that_is_done(beside: Beside) -> None:
    with beside.background_eval:
        beside.background_eval.after_checkpoint(50)
        beside.child(0).end(0)
        beside.idle()
        beside.background_eval.worker.join(60)
    assert not any("waiting for" in line for line in beside.lines)
    assert beside.lines[-1].startswith("all checkpoints: llmtrain eval ")


@pytest.mark.parametrize(("device", "devices"), [("cpu", ""), ("cuda:1", "0,1")])
def test_an_evaluation_on_the_cpu_sees_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, devices: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    beside = Beside(tmp_path, f"eval.suite.device={device}")
    beside.background_eval.after_checkpoint(50)
    child = beside.child(0)
    assert child.environment["CUDA_VISIBLE_DEVICES"] == devices
    child.end(0)
    beside.idle()


def after_too_long(beside: Beside) -> None:
    beside.background_eval.section = beside.background_eval.section.model_copy(update={"wait_seconds": 0.01})


def after_a_signal(beside: Beside) -> None:
    beside.stop.requested = True


@pytest.mark.parametrize("why", [after_too_long, after_a_signal])
def test_the_wait_has_an_end(beside: Beside, killed: list[tuple[int, int]], tmp_path: Path, why: Callable) -> None:
    with beside.background_eval:
        beside.background_eval.after_checkpoint(50)
        beside.child(0)
        why(beside)
    assert killed == [(50, signal.SIGTERM)]
    assert beside.lines[-1] == (
        "step 50/50 | offline: the evaluation was terminated; to finish it, run llmtrain eval "
        f"{tmp_path}/a --suite offline --limit 5 --data-dir data --over-time"
    )
    assert not any("failed" in line for line in beside.lines)


def test_a_run_that_stops_early_ends_its_evaluation_and_starts_no_other(
    beside: Beside, killed: list[tuple[int, int]]
) -> None:
    with beside.background_eval:
        beside.background_eval.after_checkpoint(20)
        beside.background_eval.after_checkpoint(30)
        beside.child(0)
    assert (
        killed == [(20, signal.SIGTERM)]
        and len(beside.children) == 1
        and not beside.background_eval.worker.pending_steps()
    )


def test_a_signal_that_also_reaches_the_evaluation_is_no_failure_of_it(beside: Beside) -> None:
    """Slurm sends it to all processes of a job."""
    beside.background_eval.after_checkpoint(20)
    beside.background_eval.after_checkpoint(30)
    beside.stop.requested = True
    beside.child(0).end(-signal.SIGUSR1, None)
    beside.idle()
    assert beside.lines[-1].startswith(
        "step 20/50 | offline: the evaluation was terminated; to finish it, run llmtrain eval "
    )
    assert len(beside.children) == 1


def test_an_error_of_the_run_ends_its_evaluation(beside: Beside, killed: list[tuple[int, int]]) -> None:
    with pytest.raises(RuntimeError, match="broke"), beside.background_eval:
        beside.background_eval.after_checkpoint(50)
        beside.child(0)
        raise RuntimeError("broke")
    assert killed == [(50, signal.SIGTERM)]


def test_one_that_does_not_heed_a_request_is_killed(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []

    def kill(group: int, number: int) -> None:
        sent.append(number)
        if number == signal.SIGKILL:
            beside.children[0].end(-9, None)

    monkeypatch.setattr(os, "killpg", kill)
    monkeypatch.setattr(background_eval, "GRACE_SECONDS", 0.05)
    with beside.background_eval:
        beside.background_eval.after_checkpoint(10)
        beside.child(0)
    assert sent == [signal.SIGTERM, signal.SIGKILL]


def test_the_process_yields_to_all_others_and_hears_no_ctrl_c(tmp_path: Path) -> None:
    yields = "import os, time\nwhile os.nice(0) < 19: time.sleep(0.01)\n"
    code = yields + "print(os.nice(0), os.getsid(0) == os.getpid(), sorted(os.environ)[:1])"
    # -I and -S shorten the start, because all other processes come first.
    command = [sys.executable, "-I", "-S", "-c", code]
    process = start_in_background(command, {"A": "b", **path()}, tmp_path / "x/log")
    assert process.wait(250) == 0
    assert (tmp_path / "x/log").read_text() == "19 True ['A']\n"


def path() -> dict[str, str]:
    return {"PATH": os.environ["PATH"]}


def test_a_suite_that_can_not_be_evaluated_is_refused_before_training(tmp_path: Path) -> None:
    section = Beside(tmp_path, f"eval.suite.data_dir={tmp_path}").recipe.eval.suite
    check_suite(section)  # accepts a suite without its data, which a laptop may lack
    with pytest.raises(UserError) as error:
        check_suite_data(section)
    assert str(error.value) == (
        f"eval.suite.data_dir {tmp_path} has no lambada_openai/test.jsonl, which task offline_lambada_openai reads; "
        "see eval/README.md"
    )
    check_suite(None)
    check_suite_data(None)
