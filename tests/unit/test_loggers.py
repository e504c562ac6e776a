"""Loggers: samples, TensorBoard, Weights & Biases, and the console's lines."""

from __future__ import annotations

import errno
import importlib.util
import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console as RichConsole
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llmtrain.config import Recipe
from llmtrain.errors import RecipeError, TrainingError
from llmtrain.machine_check import check_machine
from llmtrain.recipe_check import check
from llmtrain.recipe_loader import load_recipe
from llmtrain.train import run_log, wandb_logger
from llmtrain.train.loggers import Console, JsonlLogger, SampleLogger, TensorBoardLogger, open_loggers
from llmtrain.train.output import outlive_readers
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.run_log import RunLog
from llmtrain.train.state import TrainState
from llmtrain.train.wandb_logger import WandbLogger

ROOT = Path(__file__).parents[2]
OFFLINE = "log.wandb={project: across, mode: offline}"


def recipe_in(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml", [f"run.out_dir={folder}", "run.name=a", *overrides])


def log_two_lines(recipe: Recipe, resumed_step: int) -> list[Path]:
    """Returns the files of Weights & Biases."""
    directory, notes = RunDirectory(recipe), []
    directory.path.mkdir(exist_ok=True)
    logger = WandbLogger(recipe, directory, resumed_step, notes.append)
    for step in (resumed_step + 1, resumed_step + 2):
        logger.log(step, 100 * step, 0.5, {"train/loss": 4.0})
        logger.log_sample(step, 100 * step, f"text of step {step} <b>")
    logger.close()
    logger.wait()
    assert not notes
    return sorted((directory.path / "wandb").glob("offline-run-*/*.wandb"))


def test_an_offline_run_holds_its_recipe_and_its_lines_and_keeps_its_id(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, OFFLINE)
    [first] = log_two_lines(recipe, 0)
    content = first.read_bytes()
    assert b"train/loss" in content and b"across" in content and b"sequence_length" in content
    texts = [path.read_text() for path in (tmp_path / "a" / "wandb").rglob("*.html")]
    assert any("<pre>text of step 1 &lt;b&gt;</pre>" in text for text in texts), "a text is no HTML"
    assert {path.name for path in log_two_lines(recipe, 2)} == {first.name}, "wandb sync makes one run of both"
    assert len({path.name for path in log_two_lines(recipe, 0)}) == 2, "begun again, it is another run"


def test_loggers_are_those_of_the_recipe(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path)
    directory = RunDirectory(recipe)
    directory.path.mkdir()
    loggers = open_loggers(recipe, directory, 0, 0, 0, pytest.fail)
    assert [type(logger) for logger in loggers] == [JsonlLogger, SampleLogger, TensorBoardLogger]
    for logger in loggers:
        logger.log(1, 10, 0.1, {"train/loss": 1.0})
        logger.close()


@pytest.mark.parametrize(
    ("steps", "unlogged", "lost"),
    [
        ((1, 10, 20), 5, None),
        ((1, 10), 5, "steps 11 to 25"),
        ((), 5, "steps 1 to 25"),
        ((1, 10, 20, 30), 5, None),
        ((1,), 24, None),  # log.every was larger
        ((1, 24), 0, "steps 25 to 25"),  # or smaller
    ],
)
def test_lines_lost_before_the_checkpoint_are_named(
    tmp_path: Path, steps: tuple[int, ...], unlogged: int, lost: str | None
) -> None:
    recipe = recipe_in(tmp_path, "log.tensorboard=false", "log.every=10")
    directory, notes = RunDirectory(recipe), []
    directory.path.mkdir()
    directory.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in steps))
    for logger in open_loggers(recipe, directory, 25, 2500, unlogged, notes.append):
        logger.close()
    assert len(notes) == (lost is not None)
    assert lost is None or f"no line of {lost}, which are before the checkpoint" in notes[0]


def fake_wandb(
    folder: Path, monkeypatch: pytest.MonkeyPatch, run: SimpleNamespace, note: Callable[[str], None]
) -> WandbLogger:
    def teardown() -> None:
        sys.exit(3)  # as wandb does if its own process was killed

    names = {"init": lambda **_: run, "Settings": dict, "Html": str, "teardown": teardown}
    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(Error=OSError, errors=SimpleNamespace(CommError=OSError), **names)
    )
    recipe = recipe_in(folder, "log.wandb={project: p}")
    RunDirectory(recipe).path.mkdir(exist_ok=True)
    return WandbLogger(recipe, RunDirectory(recipe), 0, note)


@pytest.mark.parametrize(
    ("failing", "error"), [("log", ConnectionResetError("Connection lost")), ("finish", Exception("Connection lost"))]
)
def test_where_wandbs_process_is_gone_a_line_says_so_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, error: Exception
) -> None:
    calls, notes = [], []

    def call(name: str) -> None:
        calls.append(name)
        if name == failing:
            raise error

    run = SimpleNamespace(
        define_metric=lambda *_, **__: None,
        log=lambda line, step: call("log"),
        finish=lambda exit_code: call("finish"),
    )
    logger = fake_wandb(tmp_path, monkeypatch, run, notes.append)
    for step in (1, 2):
        logger.log(step, 100, 0.5, {})
    logger.log_sample(2, 100, "text")
    logger.close()
    logger.wait()
    assert not logger._thread.is_alive()
    assert calls == (["log"] if failing == "log" else ["log", "log", "log", "finish"])
    assert notes == [f"warning: log.wandb: Connection lost; nothing more is sent, {tmp_path}/a/metrics.jsonl goes on"]


@pytest.mark.parametrize("failed", [False, True])
def test_the_wait_for_weights_and_biases_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    """Its process is then killed, for which wandb would wait when this one exits."""
    notes, killed, is_killed = [], [], threading.Event()

    def finish(exit_code: int) -> None:
        is_killed.wait()
        raise ConnectionResetError("Connection lost")

    def child(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=lambda: name, kill=lambda: (killed.append(name), is_killed.set()))

    run = SimpleNamespace(define_metric=lambda *_, **__: None, finish=finish)
    logger = fake_wandb(tmp_path, monkeypatch, run, notes.append)
    process = SimpleNamespace(children=lambda: [child("tokenizer"), child("wandb-core")])
    monkeypatch.setattr(wandb_logger.psutil, "Process", lambda: process)
    monkeypatch.setattr(wandb_logger, "WANDB_SECONDS_FAILED" if failed else "WANDB_SECONDS", 0.01)
    logger.close(failed)
    logger.wait()
    logger._thread.join()
    assert killed == ["wandb-core"]
    assert notes == [
        f"warning: log.wandb: not everything was sent within 0.01 s; `wandb sync {tmp_path}/a/wandb/latest-run` sends the rest"
    ]


def test_weights_and_biases_draws_losses_over_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defined: dict[str, str | None] = {}
    run = SimpleNamespace(define_metric=lambda name, step_metric=None: defined.update({name: step_metric}))
    fake_wandb(tmp_path, monkeypatch, run, pytest.fail)
    assert defined == {"tokens": None, "train/*": "tokens", "eval/*": "tokens"}


def test_samples_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "samples.txt"
    logger = SampleLogger(path, 0)
    for step in (50, 100, 150):
        logger.log_sample(step, 10 * step, f"text\n\nof {step}")
    SampleLogger(path, 100).log_sample(150, 1500, "again")
    parts = "==== step 50 ====\ntext\n\nof 50\n\n==== step 100 ====\ntext\n\nof 100\n\n==== step 150 ====\nagain\n\n"
    assert path.read_text() == parts
    SampleLogger(path, 0)
    assert path.read_text() == "", "a run that begins again"


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()


def test_tensorboard_has_losses_over_tokens_the_recipe_and_samples(tmp_path: Path) -> None:
    """Resumed after step 2, the third step is logged again, in both folders."""
    recipe = recipe_in(tmp_path)
    for resumed, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        logger = TensorBoardLogger(recipe, tmp_path, resumed, 100 * resumed)
        for step in steps:
            logger.log(step, 100 * step, 0.5, {"train/loss": 4.0 + resumed, "eval/loss": 5.0, "sync/count": 0.0})
        logger.log_sample(steps[-1], 100, "a *text*\n# of two lines")
        logger.close()
    by_step, by_tokens = events(tmp_path), events(tmp_path / "over_tokens")
    assert [(one.step, one.value) for one in by_step.Scalars("train/loss")] == [(1, 4.0), (2, 4.0), (3, 6.0), (4, 6.0)]
    tags = by_tokens.Tags()["scalars"]
    assert sorted(tags) == ["loss_over_tokens/eval", "loss_over_tokens/train"]
    points = [(one.step, one.value) for one in by_tokens.Scalars("loss_over_tokens/train")]
    assert points == [(100, 4.0), (200, 4.0), (300, 6.0), (400, 6.0)]
    texts = {tag: by_step.Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0] for tag in ("recipe", "sample")}
    assert texts["sample"] == b"    a *text*\n    # of two lines", "shown as it is, not as Markdown"
    assert b"    sync:\n" in texts["recipe"]


TAGS = {
    **{"train/loss": 4.0, "train/lr": 1e-3, "train/grad_norm": 1.0, "perf/tokens_per_second": 41_200.0},
    **{"sync/count": 0.0, "sync/round": 0.0, "sync/divergence": 0.0, "comm/bytes_total": 8e8},
    **{"perf/peak_memory_gib": 10.0},
}


@pytest.mark.parametrize(
    ("rounds", "number", "phase"),
    [
        *((0, 0, "synchronous"), (13, 0, "synchronous warm-up"), (None, 0, "synchronous warm-up")),
        *((13, 2, "round 2/13"), (None, 2, "round 2")),
    ],
)
def test_a_line_names_the_phase(capsys, rounds: int | None, number: int, phase: str) -> None:
    console = Console(enabled=True)
    console.start(0, 100, rounds)
    console.log_step(1, TAGS | {"sync/round": number})
    assert capsys.readouterr().out.split(" | ")[5] == phase


def test_divergence_and_memory_are_shown_when_they_are_new(capsys) -> None:
    console = Console(enabled=True)
    console.start(0, 100, 5)
    changes = [{}, {"sync/count": 1.0, "sync/divergence": 0.25}, {"sync/count": 1.0, "sync/divergence": 0.25}]
    changes += [{"sync/count": 2.0, "perf/peak_memory_gib": 10.2}, {"sync/count": 2.0, "perf/peak_memory_gib": 10.25}]
    for step, changed in enumerate(changes, 1):
        console.log_step(step, TAGS | changed)
    shown = [line.split(" | ")[6:-1] for line in capsys.readouterr().out.splitlines()]
    sent = "800MB between replicas"
    assert shown == [
        [sent, "memory 10.00 GiB"],
        [f"{sent}, divergence 0.25"],
        [sent],
        [sent, "memory 10.20 GiB"],
        [sent],
    ]


def test_lines_of_a_long_run_fit_a_wide_terminal(capsys) -> None:
    console = Console(enabled=True)
    console.start(0, 100_000, 5000)
    console.log_step(99_000, TAGS | {"sync/round": 4950, "perf/mfu": 0.412, "comm/bytes_total": 80.4e12})
    console.log_step(99_010, TAGS | {"sync/round": 4950, "perf/mfu": 0.412, "comm/bytes_total": 80.4e12})
    console.log_step(
        300, TAGS | {"sync/round": 13, "sync/count": 13, "sync/divergence": 0.123, "comm/bytes_total": 8e8}
    )
    _, *lines = capsys.readouterr().out.splitlines()  # the first one also has the memory
    assert [len(line) <= 140 for line in lines] == [True, True]


def test_one_replica_sends_nothing(capsys) -> None:
    console = Console(enabled=True)
    console.start(0, 100, 5)
    console.log_step(1, TAGS | {"comm/bytes_total": 0.0})
    assert "between replicas" not in capsys.readouterr().out


def test_a_sample_is_one_short_line(capsys) -> None:
    console = Console(enabled=True)
    console.start(0, 100, 5)
    console.log_sample(10, "def\n\n  f():" + 200 * " x")
    line = capsys.readouterr().out
    assert line.startswith("step 10/100 | writes: def f(): x x") and line.endswith(" …\n") and len(line) < 125


def test_lines_for_a_reader_that_is_gone_go_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write to a pipe without a reader, such as `tee` after Ctrl-C or the end of an ssh session."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        outlive_readers()
        console = Console(enabled=True)
        for _ in range(2):
            console.print("a line")
            print("another", flush=True)
        assert os.fstat(writer).st_rdev == os.stat(os.devnull).st_rdev and not console.out.quiet
        sys.stdout.flush()


def test_an_error_before_the_first_step_closes_what_was_opened() -> None:
    """Raise what other ranks have already found, between the opening of the loggers and the first step."""

    def refuse() -> None:
        raise TrainingError("a damaged shard")

    closed = []
    logger = SimpleNamespace(close=lambda failed=False: closed.append(failed))
    console = SimpleNamespace(print=print, stop=lambda: None)
    io_errors = SimpleNamespace(check=refuse, write=lambda path, make: [logger])
    log = RunLog(None, SimpleNamespace(metrics=None), console, io_errors, is_main=True)
    with pytest.raises(TrainingError), log.open(TrainState(2), 0, 0, None):
        raise AssertionError("nothing is trained")
    assert closed == [True]


def test_lines_for_a_full_disk_are_lost_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "train.log"
    with open("/dev/full", "w") as full, log.open("w") as disk:
        monkeypatch.setattr(sys, "stdout", full)
        outlive_readers()
        Console(enabled=True).print("lost")
        assert os.fstat(full.fileno()).st_rdev == os.stat("/dev/full").st_rdev
        os.dup2(disk.fileno(), full.fileno())
        Console(enabled=True).print("a line")
    assert log.read_text().endswith("a line\n")


def test_weights_and_biases_are_told_that_a_run_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    run = SimpleNamespace(define_metric=lambda *_, **__: None, finish=lambda exit_code: codes.append(exit_code))
    for failed in (True, False):
        logger = fake_wandb(tmp_path, monkeypatch, run, pytest.fail)
        logger.close(failed)
        logger.wait()
    assert codes == [1, 0]


@pytest.mark.parametrize(("is_server", "expected"), [(False, RecipeError), (True, TrainingError)])
def test_a_server_that_refuses_is_an_error_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_server: bool, expected: type[Exception]
) -> None:
    """And of the run if the server may answer the next time."""

    class Refused(Exception):
        pass

    class NotThere(Refused):
        pass

    def init(**given: object) -> None:
        raise (NotThere if is_server else Refused)("No API key configured.\nUse `wandb login`")

    errors = SimpleNamespace(CommError=NotThere)
    fake = SimpleNamespace(Error=Refused, errors=errors, init=init, Settings=lambda **given: given)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(
        expected, match=r"^log.wandb: No API key configured. Use `wandb login`; .* log.wandb.mode=offline$"
    ):
        log_two_lines(recipe_in(tmp_path, "log.wandb={project: p}"), 0)


def test_without_the_package_a_recipe_that_wants_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find_spec(name))
    with pytest.raises(
        RecipeError, match=r"^log.wandb is given, but wandb is not installed; pip install wandb, or log"
    ):
        check_machine(recipe_in(tmp_path, OFFLINE))
    check(recipe_in(tmp_path, OFFLINE), None)  # elsewhere
    check_machine(recipe_in(tmp_path))


@pytest.mark.parametrize("problem", [None, OSError(errno.ENOSPC, "No space left on device"), ValueError("closed")])
def test_a_run_that_fails_on_a_terminal_closes_its_files_and_shows_the_cursor_again(
    monkeypatch: pytest.MonkeyPatch, problem: Exception | None
) -> None:
    def close(failed: bool = False) -> None:
        closed.append(failed)
        if problem is not None:
            raise problem

    console, screen, closed = Console(enabled=True), io.StringIO(), []
    console.out = RichConsole(file=screen, force_terminal=True)
    monkeypatch.setattr(run_log, "open_loggers", lambda *_: [SimpleNamespace(close=close)] * 2)
    io_errors = SimpleNamespace(check=lambda: None, write=lambda path, work: work())
    log = RunLog(None, SimpleNamespace(metrics=None), console, io_errors, is_main=True)
    with pytest.raises(TrainingError, match=r"^a rank is gone$"), log.open(TrainState(2), 0, 0, rounds=1):
        raise TrainingError("a rank is gone")
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert 0 <= screen.getvalue().rfind(hidden) < screen.getvalue().rfind(shown)
    assert closed == [True, True]
