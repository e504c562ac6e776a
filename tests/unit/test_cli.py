"""The commands that look at recipes and prepare text, as `main` runs them."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from llmtrain.cli import main
from llmtrain.config import Recipe
from llmtrain.eval import command
from llmtrain.plan import time_estimate
from tests.end_to_end.runs import RECIPE, environment, start, write_text

SHORT = ["schedule.warmup_steps=0", "sync.warmup_steps=0", "sync.period.every=2"]
SHORT += [f"train.{key}" for key in ("sequence_length=32", "micro_batch=2", "global_batch=16", "steps=2")]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what a command prints that ends well."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    output = capsys.readouterr()
    assert left.value.code in (0, None), output.err
    return output.out


def test_prepare_says_what_it_made_and_where(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    keys = [f"data.source={write_text(tmp_path)}", "data.tokenizer=train:400", f"data.cache_dir={folder}"]
    keys += [*SHORT, "eval.tokens=64", "data.validation_fraction=0.2"]
    prepare = [sys.executable, "-m", "llmtrain", "prepare", RECIPE, *keys]
    for _ in range(2):  # the second time it is there already
        process = start(prepare, environment())
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        made, _, counts = output.strip().splitlines()[-1].partition(": ")
        assert Path(made).parent == folder and (Path(made) / "index.json").is_file()
        train, validation, vocabulary = re.fullmatch(
            r"([\d,]+) train tokens, ([\d,]+) validation tokens, vocabulary (\d+)", counts
        ).groups()
        assert int(train.replace(",", "")) > 2 * 16 * 32 and int(validation.replace(",", "")) > 64
        assert vocabulary == "400"


def test_check_says_how_much_a_recipe_trains(capsys: pytest.CaptureFixture[str]) -> None:
    expected = f"{RECIPE}: fine (2 steps of 512 tokens)\n"
    assert said(capsys, "recipe", "check", RECIPE, *SHORT, "--processes", "4") == expected
    with pytest.raises(SystemExit) as left:
        main(["recipe", "check", RECIPE, *SHORT, "parallel.replicas=4", "parallel.shards=4", "--processes", "3"])
    assert left.value.code == 2
    assert "3" in capsys.readouterr().err.removeprefix("error: ")


@pytest.mark.parametrize(("options", "rate"), [(["--tflops", "0.25"], "0.25 TFLOP/s"), ([], "0.125 TFLOP/s")])
def test_show_counts_time_at_the_rate_that_is_given_or_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], rate: str
) -> None:
    monkeypatch.setattr(time_estimate, "rate_here", lambda recipe: 0.125e12)
    shown = said(capsys, "recipe", "show", RECIPE, *options, "--mbit", "50", *SHORT)
    assert "steps: 2\n" in shown and f"with {rate} of each rank (--tflops) and 50 Mbit/s" in shown


def test_schema_is_that_of_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(said(capsys, "recipe", "schema")) == Recipe.model_json_schema()


@pytest.mark.parametrize(("is_terminal", "found"), [(True, None), (False, "1")])
def test_an_evaluation_has_bars_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, found: str | None
) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(command, "evaluate", lambda *_, **__: seen.append(os.environ.get("TQDM_DISABLE")))
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    monkeypatch.setenv("TQDM_DISABLE", "")
    monkeypatch.delenv("TQDM_DISABLE")
    with pytest.raises(SystemExit):
        main(["eval", "runs/a", "--suite", "offline"])
    assert seen == [found]


def test_a_spawned_worker_that_imports_the_main_module_runs_no_command() -> None:
    """multiprocessing does that, under this name."""
    assert runpy.run_module("llmtrain.__main__", run_name="__mp_main__")["main"] is main
