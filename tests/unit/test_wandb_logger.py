"""Tests of Weights & Biases: what a run sends, and that the run goes on if sending fails."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain.config import Recipe
from llmtrain.errors import RecipeError, TrainingError
from llmtrain.machine_check import check_machine
from llmtrain.recipe_check import check
from llmtrain.train import wandb_logger
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.wandb_logger import WandbLogger, _id_of
from tests.unit.test_loggers import recipe_in

OFFLINE = "log.wandb={project: across, mode: offline}"


def log_two_lines(recipe: Recipe, resumed_step: int) -> list[Path]:
    """Log two steps after `resumed_step`, and return all files of Weights & Biases."""
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
    assert any("<pre>text of step 1 &lt;b&gt;</pre>" in text for text in texts), "the text is escaped"
    assert {path.name for path in log_two_lines(recipe, 2)} == {first.name}, "wandb sync makes one run of both"
    assert len({path.name for path in log_two_lines(recipe, 0)}) == 2, "a run that begins again is another one"


def test_a_copy_of_a_run_under_another_name_has_its_own_id(tmp_path: Path) -> None:
    file = tmp_path / "wandb_id.txt"
    kept = _id_of(file, "a", is_new=True)
    assert _id_of(file, "a", is_new=False) == kept
    other = _id_of(file, "b", is_new=False)
    assert other != kept and _id_of(file, "b", is_new=False) == other
    file.write_text(f"{kept}\n")  # as an earlier version wrote it
    assert _id_of(file, "c", is_new=False) == kept


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
    assert notes == [
        f"warning: log.wandb: Connection lost; nothing more is sent, but lines are still written to {tmp_path}/a/metrics.jsonl"
    ]


@pytest.mark.parametrize("failed", [False, True])
def test_the_wait_for_weights_and_biases_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    """After the limit, the process of wandb is killed, because wandb would wait for it when this process exits."""
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
    """It is a TrainingError if the server may answer the next time."""

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
    check(recipe_in(tmp_path, OFFLINE), None)  # another machine may have wandb
    check_machine(recipe_in(tmp_path))
