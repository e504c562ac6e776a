"""Tests of the command line, mostly of the commands that inspect recipes and prepare text."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
from omegaconf import OmegaConf

from llmtrain import __version__, recipe_keys
from llmtrain.cli import app, main
from llmtrain.config import OuterSection, Recipe
from llmtrain.config.section import Section
from llmtrain.data import extend, tokenizing
from llmtrain.errors import RecipeError
from llmtrain.eval import arguments, command
from llmtrain.launch import torchrun
from llmtrain.plan import hardware
from llmtrain.recipe_commands import recipe_app
from llmtrain.recipe_schema import file_schema
from tests.end_to_end.runs import RECIPE, environment, start, write_text
from tests.in_process import run_here

RECIPES = Path(__file__).parents[2] / "recipes"
SHORT = ["schedule.warmup_steps=0", "sync.warmup_steps=0", "sync.period.every=2"]
SHORT += [f"train.{key}" for key in ("sequence_length=32", "micro_batch=2", "global_batch=16", "steps=2")]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command, which must succeed, and return its output."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    output = capsys.readouterr()
    assert left.value.code in (0, None), output.err
    return output.out


def test_the_help_has_no_line_breaks_of_its_source() -> None:
    """In a narrow terminal, line breaks of the source would be mixed with the terminal's own."""
    commands = [*app.registered_commands, *recipe_app.registered_commands]
    assert len(commands) > 10 and all(re.fullmatch(r".+(\n\n.+)*", command.help) for command in commands)


@pytest.mark.parametrize("command", ["doctor", "runs", "eval", "recipe keys"])
def test_the_usage_has_brackets_and_dots_once(capsys: pytest.CaptureFixture[str], command: str) -> None:
    (usage,) = (line for line in said(capsys, *command.split(), "--help").splitlines() if "Usage: " in line)
    assert f"{command} [OPTIONS] " in usage and "[[" not in usage and "...}" not in usage


def test_prepare_says_what_it_made_and_where(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    keys = [f"data.source={write_text(tmp_path)}", "data.tokenizer=train:400", f"data.cache_dir={folder}"]
    keys += [*SHORT, "eval.tokens=64", "data.validation_fraction=0.2"]
    prepare = [sys.executable, "-m", "llmtrain", "prepare", RECIPE, *keys]
    for _ in range(2):  # the second time, the folder already exists
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


def test_check_says_how_much_a_recipe_trains_elsewhere_and_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    def checked(*options: str) -> list[str]:
        return said(capsys, "recipe", "check", RECIPE, *SHORT, *options).splitlines()

    *_, mesh, memory, fine = checked("parallel.shards=2", "--processes", "4")
    assert fine == f"{RECIPE}: fine (2 steps of 512 tokens)"
    assert mesh == "mesh: 2 replicas x 2 shards on cuda (4 processes, parallel.shards=2)"
    sharded = re.fullmatch(r"memory: about (\d+\.\d\d) GiB on each GPU", memory)
    *_, mesh, memory, _ = checked("--processes", "4")
    assert mesh.startswith("mesh: 4 processes, whose nodes and GPUs decide it (give parallel.replicas or ")
    unsure = r"memory: about (\S+) GiB as 4 replicas x 1 shard or (\S+) GiB as 1 replica x 4 shards on each GPU"
    most, least = (float(number) for number in re.fullmatch(unsure, memory).groups())
    assert most > float(sharded[1]) > least > 0
    *_, mesh, _, _ = checked("--processes", "1")
    assert mesh == "mesh: 1 replica x 1 shard on cuda (one process)"
    with pytest.raises(SystemExit) as left:
        main(["recipe", "check", RECIPE, *SHORT, "parallel.replicas=4", "parallel.shards=4", "--processes", "3"])
    assert left.value.code == 2
    assert "3" in capsys.readouterr().err.removeprefix("error: ")


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        (["--tflops", "0.25"], "0.25 TFLOP/s of each rank (--tflops)"),
        ([], "0.125 TFLOP/s of each rank on this CPU (measured here; --gpu, --tflops)"),
        (["--gpu", "a100", "parallel.precision=bf16"], "125 TFLOP/s of each A100 (40% of the peak in bf16; --tflops)"),
    ],
)
def test_show_counts_time_at_the_rate_that_is_given_or_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], rate: str
) -> None:
    monkeypatch.setattr(hardware, "rate_here", lambda recipe: 0.125e12)
    shown = said(capsys, "recipe", "show", RECIPE, *options, "--mbit", "50", *SHORT)
    assert "steps: 2\n" in shown and f"with {rate} and 50 Mbit/s" in shown


def test_schema_is_that_of_every_recipe_and_its_base_files(capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.loads(said(capsys, "recipe", "schema"))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert {"base", *Recipe.model_fields} == schema["properties"].keys()
    files = [path for folder in (".", "base") for path in sorted((RECIPES / folder).glob("*.yaml"))]
    assert len(files) > 40
    assert validator.is_valid(dict.fromkeys(schema["properties"]))  # as in a file in which everything is commented out
    for path in files:
        # YAML 1.2, which editors read, has no numbers with underscores.
        assert not re.search(r"^[^#]*: \d[\d_]*_\d", path.read_text(), re.MULTILINE), path
        problems = validator.iter_errors(OmegaConf.to_container(OmegaConf.load(path)))
        assert not [f"{problem.json_path}: {problem.message}" for problem in problems], path
        (line,) = (line for line in path.read_text().splitlines() if "yaml-language-server" in line)
        named = line.removeprefix("# yaml-language-server: $schema=")
        assert (path.parent / named).resolve() == RECIPES / "schema.json"


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"optim": {"lrr": 1}}, "$.optim"),
        ({"train": {"steps": "ten"}}, "$.train.steps"),
        ({"sync": {"schedule": "layer"}}, "$.sync.schedule"),
        ({"sync": {"period": 0}}, "$.sync.period"),
        ({"trian": {}}, "$"),
    ],
    ids=str,
)
def test_an_editor_is_shown_mistakes(wrong: dict[str, Any], where: str) -> None:
    (problem,) = jsonschema.Draft202012Validator(file_schema()).iter_errors(wrong)
    assert problem.json_path == where


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--version") == f"llmtrain {__version__}\n"


def test_the_shell_completes_commands_and_sections(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def completed(beginning: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", beginning)
        monkeypatch.setenv("COMP_CWORD", str(beginning.count(" ")))
        monkeypatch.setenv("_LLMTRAIN_COMPLETE", "complete_bash")
        with pytest.raises(SystemExit):
            app(prog_name="llmtrain")
        return capsys.readouterr().out.split()

    assert {"train", "runs", "recipe"} <= set(completed("llmtrain "))
    assert completed("llmtrain recipe keys o") == ["optim"]


class UndocumentedSection(OuterSection):
    """Outer optimizer with an undocumented key."""

    kind: Literal["new"] = "new"


class OtherSection(OuterSection):
    kind: Literal["other"] = "other"
    """`other`."""


@pytest.mark.parametrize(
    ("added", "name"), [(UndocumentedSection, "UndocumentedSection.kind"), (OtherSection, "OtherSection")]
)
def test_a_key_without_a_docstring_is_named(
    monkeypatch: pytest.MonkeyPatch, added: type[OuterSection], name: str
) -> None:
    class Changed(Section):
        """Recipe with an added section."""

        sync: added

    monkeypatch.setattr(recipe_keys, "Recipe", Changed)
    with pytest.raises(RecipeError, match=f"^{re.escape(name)} of llmtrain/config has no docstring; write one"):
        recipe_keys.key_groups.__wrapped__("sync")


def test_keys_are_listed_with_type_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    def keys(*section: str) -> dict[str, list[str]]:
        rows = [re.split(r"\s{2,}", line.strip()) for line in said(capsys, "recipe", "keys", *section).splitlines()]
        return {row[0]: row[1:] for row in rows if len(row) > 1}

    optim = keys("optim")
    assert optim["lr"] == ["number > 0", "0.0003", "Peak learning rate."]
    assert optim["weight_decay"] == ["number ≥ 0", "0.1", "Decoupled weight decay of matrices."]
    assert keys("optim.lr") == {name: optim[name] for name in ("key", "lr")}
    assert {"probability", "fragments", "gap_penalty"} <= keys("sync").keys()
    assert keys("sync.period").keys() == {"key", "kind", "every", "base", "alpha", "power", "min_steps"}
    everything = keys()
    assert {key for section in Recipe.model_fields.values() for key in section.annotation.model_fields} <= set(
        everything
    )


def test_two_recipes_or_runs_are_compared_key_by_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "run: {name: mine}\noptim: {lr: 0.5}\nsync: {method: diloco, outer: average}\n"
    )
    (tmp_path / "other.yaml").write_text("run: {name: mine}\nsync: {method: diloco}\n")
    lines = said(capsys, "recipe", "diff", str(tmp_path), str(tmp_path / "other.yaml")).splitlines()
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines]
    assert rows[0] == ["key", str(tmp_path), str(tmp_path / "other.yaml")]
    assert rows[1:3] == [["optim.lr", "0.5", "0.0003"], ["sync.outer.kind", '"average"', '"nesterov"']]
    assert ["sync.outer.momentum", "not given", "0.9"] in rows  # from the method's preset
    assert not any(row[0].startswith(("run.", "model.")) for row in rows)
    assert said(capsys, "recipe", "diff", "quickstart", "quickstart") == "The recipes do not differ.\n"


@pytest.mark.parametrize(
    ("section", "hint"),
    [("optm", "did you mean optim?"), ("optim.lrr", "did you mean optim.lr?"), ("xyz", "sections are run, model")],
)
def test_keys_of_an_unknown_section_are_refused(capsys: pytest.CaptureFixture[str], section: str, hint: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(["recipe", "keys", section])
    assert left.value.code == 2
    assert f"error: {section} is neither a section nor a key of a recipe; {hint}" in capsys.readouterr().err


@pytest.mark.parametrize(("is_terminal", "found"), [(True, None), (False, "1")])
def test_an_evaluation_has_bars_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, found: str | None
) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(arguments, "check_arguments", lambda *_, **__: None)
    monkeypatch.setattr(command, "evaluate", lambda *_, **__: seen.append(os.environ.get("TQDM_DISABLE")))
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    monkeypatch.setenv("TQDM_DISABLE", "")
    monkeypatch.delenv("TQDM_DISABLE")
    with pytest.raises(SystemExit):
        main(["eval", "runs/a", "--suite", "offline"])
    assert seen == [found]


def test_a_file_that_exists_is_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", str(RECIPES / "edit_llama_stdlib.yaml")])
    assert "is not a run directory" in capsys.readouterr().err


def test_a_spawned_worker_that_imports_the_main_module_runs_no_command() -> None:
    """Workers of multiprocessing import the main module under this name."""
    assert runpy.run_module("llmtrain.__main__", run_name="__mp_main__")["main"] is main


def test_an_interrupted_preparation_says_what_it_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, tokenize, calls = tmp_path / "data", tokenizing.tokenize, []
    keys = [f"data.source={write_text(tmp_path)}", "data.tokenizer=train:400", f"data.cache_dir={folder}", *SHORT]

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return tokenize(*arguments)

    monkeypatch.setattr(extend, "BATCH_CHARACTERS", 2000)
    monkeypatch.setattr(tokenizing, "tokenize", interrupted)
    code, output = run_here(["prepare", RECIPE, *keys, "eval.tokens=64", "data.validation_fraction=0.2"])
    kept = re.search(
        r"^stopped: \S+ keeps ([\d,]+) train and [\d,]+ validation tokens; run the same command to continue$",
        output,
        re.M,
    )
    assert code == 3 and kept is not None, output
    monkeypatch.undo()
    code, output = run_here(["prepare", RECIPE, *keys, "eval.tokens=64", "data.validation_fraction=0.2"])
    found = re.search(r"([\d,]+) train tokens", output)
    assert code == 0 and 0 < int(kept[1].replace(",", "")) < int(found[1].replace(",", "")), output


@pytest.mark.parametrize("code", [0, 3])
def test_launch_leaves_with_the_code_of_its_ranks(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(torchrun, "launch_torchrun", lambda recipe, overrides: code)
    with pytest.raises(SystemExit) as left:
        main(["launch", "recipe.yaml"])
    assert left.value.code == code
