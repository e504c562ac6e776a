"""Tests of loggers: lines of metrics, samples, TensorBoard, and what the console shows."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llmtrain.config import Recipe
from llmtrain.recipe_loader import load_recipe
from llmtrain.train import loggers
from llmtrain.train.loggers import Console, JsonlLogger, SampleLogger, TensorBoardLogger, open_loggers
from llmtrain.train.output import outlive_readers
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.validation import Validation, ValidationSet

ROOT = Path(__file__).parents[2]


def recipe_in(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml", [f"run.out_dir={folder}", "run.name=a", *overrides])


def test_loggers_are_those_of_the_recipe(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path)
    directory = RunDirectory(recipe)
    directory.path.mkdir()
    loggers = open_loggers(recipe, directory, 0, 0, pytest.fail)
    assert [type(logger) for logger in loggers] == [JsonlLogger, SampleLogger, TensorBoardLogger]
    for logger in loggers:
        logger.log(1, 10, 0.1, {"train/loss": 1.0})
        logger.close()


@pytest.mark.parametrize(
    ("steps", "lost"),
    [((1, 10, 20, 25), None), ((1, 10, 24, 30), "steps 25 to 25"), ((), "steps 1 to 25")],
)
def test_lines_lost_before_the_checkpoint_are_named(tmp_path: Path, steps: tuple[int, ...], lost: str | None) -> None:
    recipe = recipe_in(tmp_path, "log.tensorboard=false", "log.every=10")
    directory, notes = RunDirectory(recipe), []
    directory.path.mkdir()
    directory.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in steps))
    for logger in open_loggers(recipe, directory, 25, 2500, notes.append):
        logger.close()
    assert len(notes) == (lost is not None)
    assert lost is None or f"no lines of {lost}, which precede the checkpoint" in notes[0]


def test_what_was_made_of_steps_that_are_trained_again_is_not_of_this_run(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path, "log.tensorboard=false", "log.every=25")
    directory, notes = RunDirectory(recipe), []
    for name in ("step-00000025", "step-00000050-bf16", "step-00000050", "step-00000050.old"):
        (directory.path / "export" / name).mkdir(parents=True)
    (directory.path / "eval").mkdir()
    for name, content in (("small", {"checkpoint_step": 50}), ("first", {"checkpoint_step": 25}), ("odd", [])):
        (directory.path / f"eval/{name}.json").write_text(json.dumps(content))
    directory.metrics.write_text('{"step": 25}\n')
    for _ in range(2):
        for logger in open_loggers(recipe, directory, 25, 2500, notes.append):
            logger.close()
    moved = ["eval/small.json.old", "export/step-00000050.old1", "export/step-00000050-bf16.old"]
    assert notes == [
        f"steps after 25 are trained again, so their earlier exports and evaluation results were renamed: {', '.join(moved)}"
    ]
    found = {str(path.relative_to(directory.path)) for path in directory.path.glob("e*/*")}
    kept = {"eval/first.json", "eval/odd.json", "export/step-00000025", "export/step-00000050.old"}
    assert found == {*moved, *kept}


def test_metrics_continue_without_lines_after_the_checkpoint(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlLogger(path, resumed_step=0)
    for step in (1, 10, 20):
        writer.log(step, step, 0.5, {"train/loss": math.nan if step == 20 else 1.0})
    writer.close()
    with path.open("a") as file:
        file.write('{"step": 30, "tok')  # cut off by a crash
    writer = JsonlLogger(path, resumed_step=10)
    writer.log(20, 20, 0.6, {"train/loss": 2.0})
    writer.close()
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == [1, 10, 20]


def test_a_run_that_begins_again_leaves_no_line_of_the_first_time(tmp_path: Path):
    """The run was killed after the validation before its first step, without a checkpoint."""
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        writer = JsonlLogger(path, resumed_step=0)
        writer.log(0, 0, 0.0, {"eval/loss": 7.0})
        writer.close()
    assert len(path.read_text().splitlines()) == 1


def test_metrics_write_null_for_what_is_not_finite(tmp_path: Path):
    writer = JsonlLogger(tmp_path / "metrics.jsonl", resumed_step=0)
    writer.log(1, 1, 0.1, {"train/loss": math.nan})
    writer.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["train/loss"] is None


def test_lines_that_are_no_lines_of_metrics_are_left_out(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n3\n["step"]\n{"tokens": 7}\n{"step": 2}\n{"step": 3, "tra')
    JsonlLogger(path, 2).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_samples_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "samples.txt"
    logger = SampleLogger(path, 0)
    for step in (50, 100, 150):
        logger.log_sample(step, 10 * step, f"text\n\nof {step}")
    SampleLogger(path, 100).log_sample(150, 1500, "again")
    parts = "==== step 50 ====\ntext\n\nof 50\n\n==== step 100 ====\ntext\n\nof 100\n\n==== step 150 ====\nagain\n\n"
    assert path.read_text() == parts
    SampleLogger(path, 0)
    assert path.read_text() == "", "a run that begins again has no earlier samples"


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()


def test_tensorboard_has_losses_over_tokens_the_recipe_and_samples(tmp_path: Path) -> None:
    """A run that resumes after step 2 logs the third step again, in both folders."""
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
    assert texts["sample"] == b"    a *text*\n    # of two lines", "the sample is shown as it is, not as Markdown"
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


def test_the_time_left_follows_from_the_steps_since_this_start(monkeypatch, capsys) -> None:
    now = [50.0]
    monkeypatch.setattr(loggers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tags = ("train/loss", "train/lr", "train/grad_norm", "perf/tokens_per_second", "sync/count", "sync/round")
    tags += ("comm/bytes_total", "sync/divergence", "perf/peak_memory_gib")
    shown = loggers.Console(enabled=True)
    shown.start(step=900, total=1000, rounds=9)
    now[0] = 150.0
    shown.log_step(950, dict.fromkeys(tags, 1.0))
    assert capsys.readouterr().out.rstrip().endswith("eta 1 min 40 s")


def test_a_replica_alone_reports_its_step_now_and_then(monkeypatch, capsys) -> None:
    now = [0.0]
    monkeypatch.setattr(loggers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    shown = loggers.Console(enabled=True)
    shown.start(step=0, total=100, rounds=None)
    for step, seconds in enumerate(range(0, 50, 5), start=1):
        now[0] = seconds
        shown.advance(step, is_alone=step > 1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" on")[0] for line in lines[1:]] == ["step 5/100", "step 9/100"]


def test_training_has_a_bar_on_a_terminal(terminal: None, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(enabled=True)
    console.start(3, 8, 4)
    console.advance(4)
    tags = {"train/loss": 4.0, "train/lr": 1e-3, "train/grad_norm": 1.0, "perf/tokens_per_second": 41_200.0}
    tags |= {"perf/mfu": 0.41, "sync/count": 2.0, "sync/round": 3, "sync/divergence": 0.25}
    tags |= {"comm/bytes_total": 2e6, "perf/peak_memory_gib": 1.5}
    console.log_step(4, tags)
    console.stop()
    shown = capsys.readouterr().out
    assert (
        "training" in shown
        and "4/8" in shown
        and "41.2k tok/s | mfu 41% | round 3/4 | 2MB between replicas, divergence 0.25 | memory 1.50 GiB" in shown
    )
    assert "eta" not in shown, "the bar shows it"


def test_lines_for_a_reader_that_is_gone_go_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is a pipe without a reader, such as `tee` after Ctrl-C or the end of an ssh session."""
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


TAG = re.compile(r"(train|eval|data|perf|comm|sync|health)/(<name>/)?[a-z_]+")


def test_tags_that_are_written_are_those_in_the_documentation() -> None:
    """They include tags of methods, data and machines that no run of these tests has."""
    page = (ROOT / "docs/metrics.md").read_text()
    rows = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    documented = {tag for tag in re.findall(r"`([^`]+)`", rows) if TAG.fullmatch(tag)}
    found = Validation(1.0, 1)
    written = {tag for name in ("", "<name>") for tag in ValidationSet(name, list, 1.0).tags(found)}
    trees = [ast.parse(path.read_text()) for path in (ROOT / "llmtrain/train").rglob("*.py")]
    for node in (node for tree in trees for node in ast.walk(tree)):
        keys = node.keys if isinstance(node, ast.Dict) else []
        keys = [node.slice] if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) else keys
        constants = [key.value for key in keys if isinstance(key, ast.Constant)]
        written |= {key for key in constants if isinstance(key, str) and TAG.fullmatch(key)}
    assert written == documented
