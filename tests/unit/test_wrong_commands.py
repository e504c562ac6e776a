"""Tests of command lines as a new user would mistype them: each ends with exit code 2 and one line that names the mistake."""

from __future__ import annotations

import errno
import re
import shlex
import typing
from pathlib import Path

import pytest
import typer

from llmtrain import files
from llmtrain.cli import app
from llmtrain.errors import UserError
from llmtrain.recipe_commands import recipe_app
from tests.fuzz.draws import problem_of
from tests.fuzz.kinds import write_text
from tests.in_process import message_of, run_here

Q = "recipes/edit_llama_stdlib.yaml"
ROUNDS = "recipes/compare/rounds.yaml"
LONG = "x" * 300
NO_FILE = r"nope\.yaml: there is no such file; recipes are YAML files"
NO_OPTION = r"neither an option of this command .*nor --section\.key=value"
NOT_IN_RANGE = r"Input should be (greater|less) than or equal to"
NO_NUMBER = r"Input should be a valid (integer|number)"
LONG_KEY = "{} is .*, expected a path of at most 3800 bytes, with names of at most 230"
NO_STEP = r"--step is '.*'; expected a number such as 1000, or best"
TOO_LONG = r"is too long for the name of a file; shorten it"
NO_MODEL = r"there is no such folder; give a run .*or a folder that transformers loads"
TEXT = f"{Q} data.source={{tmp}}/text.txt data.cache_dir={{tmp}}/cache"

WRONG_COMMANDS: dict[str, list[tuple[str, str]]] = {
    "train and launch": [
        ("trian", "^No such command 'trian'. Did you mean 'train'\\? .* --help shows what can be given$"),
        ("--verison", "No such option: --verison"),
        ("train", "Missing argument 'RECIPE'"),
        ("train {tmp}/nope.yaml", NO_FILE),
        (f"train {Q} optim.lrr=1", r"optim\.lrr is not a key; did you mean optim\.lr\?"),
        (f"train {Q} --local-rank x", NO_NUMBER),
        (f"train {Q} optim.lr=x", r'optim\.lr is "x", expected a number'),
        (f"train {Q} --nproc 2", NO_OPTION),
        ("launch", "Missing argument 'RECIPE'"),
        ("launch {tmp}/nope.yaml", NO_FILE),
        ("launch {tmp}", r"is a folder; give one of the recipes in it"),
        (f"launch {Q} optim.lr=-1", r"optim\.lr is -1, expected a number greater than 0"),
        (f"launch {Q} --nproc 2", NO_OPTION),
        (f"launch {Q} sync.period=0", r"sync\.period\.every is 0"),
        (f"launch {LONG}.yaml", TOO_LONG),
    ],
    "recipe check": [
        ("recipe", "Usage: "),
        ("recipe chek", "No such command 'chek'"),
        ("recipe check", "Missing argument 'RECIPE'"),
        (f"recipe check {LONG}.yaml", TOO_LONG),
        ("recipe check ''", r"is a folder; give one of the recipes in it"),
        ("recipe check /dev/null", r"train\.steps and train\.tokens: neither is given"),
        ("recipe check /dev/zero", r"/dev/zero: can't be read as a recipe"),
        ("recipe check 'a\0b'", "null byte"),
        (f"recipe check {Q} --processes 0", NOT_IN_RANGE),
        (f"recipe check {Q} --processes two", NO_NUMBER),
        (f"recipe check {Q} --processes", "requires an argument"),
        (f"recipe check {Q} --processes 3", r"train\.global_batch is 32, not a multiple of .* = 24; use"),
        (f"recipe check {Q} --processes 1000000000000", r"train\.global_batch is 32, not a multiple of"),
        (f"recipe check {Q} {Q}", r"is not an override; write section\.key=value"),
        (f"recipe check {Q} data.source=/nowhere", "data.source: /nowhere: no such file or folder"),
        (
            f"recipe check {Q} run.out_dir={{tmp}}/text.txt",
            r"run\.out_dir: .*text\.txt is a file; choose another folder",
        ),
        (f"recipe check {Q} data.cache_dir={{tmp}}/text.txt", r"data\.cache_dir: .*text\.txt is a file"),
    ],
    "recipe show and keys": [
        (f"recipe show {Q} --gpu h1000", "--gpu h1000 is not a known card; did you mean h100"),
        (f"recipe show {Q} --gpu ''", "--gpu  is not a known card"),
        (f"recipe show {Q} --tflops 0", NOT_IN_RANGE),
        (f"recipe show {Q} --tflops nan", NOT_IN_RANGE),
        (f"recipe show {Q} --tflops inf", "--tflops is inf; expected a finite number"),
        (f"recipe show {Q} --tflops fast", NO_NUMBER),
        (f"recipe show {Q} --mbit -1", NOT_IN_RANGE),
        (f"recipe show {Q} --mbit nan", NOT_IN_RANGE),
        (f"recipe show {Q} --latency-ms -1", NOT_IN_RANGE),
        (f"recipe show {Q} --mbit inf", "--mbit is inf; expected a finite number"),
        ("recipe show {tmp}/nope.yaml", NO_FILE),
        ("recipe keys optimm", r"optimm is neither a section .*; did you mean optim\?"),
        ("recipe keys ''", "is neither a section nor a key of a recipe; sections are run, model"),
        ("recipe keys optim.lrr", r"did you mean optim\.lr\?"),
        ("recipe keys optim.lr.x", r"did you mean optim\.lr\?"),
        ("recipe keys .", "sections are run, model"),
        ("recipe keys a b", "unexpected extra argument"),
        ("recipe schema x", "unexpected extra argument"),
    ],
    "prepare": [
        ("prepare", "Missing argument 'RECIPE'"),
        ("prepare {tmp}/nope.yaml", NO_FILE),
        (
            f"prepare {Q} data.source=/nowhere",
            "data.source: /nowhere: no such file or folder; expected stories, stdlib, python, a path",
        ),
        (f"prepare {Q} data.source={{tmp}}/empty", "no text in this folder; expected files that end in .txt"),
        (f"prepare {Q} data.source={{tmp}}/a.bin", "a.bin is tokens already; name the tokenizer that made them"),
        (f"prepare {Q} data.source={{tmp}}/a.pdf", "unknown kind of file; expected .txt"),
        (f"prepare {Q} data.source=null", r"data\.source is null, expected one of data.source"),
        (f"prepare {Q} data.source=hf:", r'data\.source is .*"hf": null.*, expected text'),
        (f"prepare {Q} data.source=hf:a/b", "needs the Hugging Face hub, which can't be used from here"),
        (f"prepare {Q} data.source={LONG}", "no such file or folder"),
        (f"prepare {TEXT} data.cache_dir={{tmp}}/text.txt", "File exists; expected a folder to write in"),
        (f"prepare {TEXT} data.cache_dir=/proc/x", "data.cache_dir: /proc/x: .*expected a folder to write in"),
        (f"prepare {TEXT} data.cache_dir={{tmp}}/{LONG}", LONG_KEY.format("data.cache_dir")),
        (f"prepare {TEXT} data.tokenizer=train:5", r"train:5: this source has more characters .* at least train:\d+"),
        (f"prepare {TEXT} data.tokenizer=train:99999", r"too little text for so many pieces; give at most train:\d+"),
        (f"prepare {TEXT} data.tokenizer=train:", r'data\.tokenizer is .*"train": null.*, expected text'),
        (f"prepare {TEXT} data.tokenizer=train:1e3", "train:1e3: expected train:SIZE with a whole number"),
        (f"prepare {TEXT} data.tokenizer={{tmp}}/empty", r"a folder without a tokenizer\.json"),
        (
            f"prepare {TEXT} data.tokenizer={{tmp}}/a.bin",
            r"not a tokenizer .*; expected a tokenizer\.json or its folder",
        ),
        (f"prepare {TEXT} data.tokenizer=gpt2", "'gpt2' needs the Hugging Face hub"),
        (f"prepare {TEXT} data.tokenizer=null", r"data\.tokenizer is null, expected text"),
        (f"prepare {TEXT} data.validation=~nobody", "data.validation: ~nobody: no such file or folder"),
        (f"prepare {TEXT} data.validation=/nowhere", "data.validation: /nowhere: no such file or folder"),
        (
            f"prepare {TEXT} data.validation_fraction=0",
            "data.validation_fraction is 0, expected a number greater than 0",
        ),
        (f"prepare {TEXT} data.validation_fraction=1", "data.validation_fraction is 1, expected a number less than 1"),
    ],
    "runs": [
        ("runs {tmp}/nope", "nope does not exist; give the folder of the run directories"),
        ("runs {tmp}/text.txt", "text.txt is not a folder; give the folder of the run directories"),
        (f"runs {LONG}", TOO_LONG),
        ("runs {tmp}/loop", "does not exist; give the folder of the run directories"),
        ("runs 'a\0b'", "null byte"),
        ("runs a b", r"unexpected extra argument.* \(b\); .* runs --help shows what can be given$"),
        ("runs --jsn", "No such option: --jsn"),
    ],
    "export": [
        ("export", "Missing argument 'RUN'"),
        ("export {tmp}/nope", "nope does not exist; give one that training made"),
        ("export {tmp}/text.txt", r"is not a run directory \(it has no recipe\.yaml\)"),
        ("export {tmp}/empty", r"is not a run directory \(it has no recipe\.yaml\)"),
        ("export {tmp}/model", r"is not a run directory \(it has no recipe\.yaml\)"),
        ("export {tmp}/new", "has no complete checkpoint; train it until it writes one"),
        ("export ''", "is not a run directory"),
        (f"export {LONG}", TOO_LONG),
        ("export {tmp}/run --step 7", "has no checkpoint of step 7; there are: 10, 20"),
        ("export {tmp}/run --step -1", NO_STEP),
        ("export {tmp}/run --step x", NO_STEP),
        ("export {tmp}/run --step 1.5", NO_STEP),
        ("export {tmp}/run", "step-00000020 has format None, this version reads"),
        ("export {tmp}/run --weights best", "--weights is 'best'; expected mean, anchor, or replica:K"),
        ("export {tmp}/run --weights replica:x", "--weights is 'replica:x'; expected mean, anchor"),
        ("export {tmp}/run --weights ''", "--weights is ''; expected mean, anchor"),
        ("export {tmp}/run --dtype fp16", "--dtype is 'fp16'; expected fp32 or bf16"),
        ("export {tmp}/run --max-shard-size many", "--max-shard-size is 'many'; expected a size such as 500MB"),
        ("export {tmp}/run --max-shard-size 0GB", "--max-shard-size is '0GB'; expected a size such as 500MB"),
        ("export {tmp}/run --max-shard-size '5 parsec'", "--max-shard-size is '5 parsec'; expected a size"),
        ("export {tmp}/run --out {tmp}/text.txt", "text.txt exists and is not an exported model"),
        ("export {tmp}/run --out {tmp}/text.txt/a", r"can't be written \(File exists\); make room, or choose another"),
        ("export {tmp}/run --out /proc/x", "/proc/x can't be written"),
        (f"export {{tmp}}/run --out {{tmp}}/{LONG}", TOO_LONG),
        ("export {tmp}/run --out", "requires an argument"),
        ("export {tmp}/run x", "unexpected extra argument"),
    ],
    "generate": [
        ("generate", r"Missing argument 'RUN\|FOLDER'"),
        ("generate {tmp}/nope", NO_MODEL),
        ("generate {tmp}/text.txt", NO_MODEL),
        ("generate {tmp}/empty", r"has no config\.json, so it is not a folder with a model"),
        ("generate {tmp}/new", "has no complete checkpoint"),
        ("generate {tmp}/model", "can't be loaded by transformers"),
        (f"generate {LONG}", TOO_LONG),
        ("generate {tmp}/run --step 7", "has no checkpoint of step 7; there are: 10, 20"),
        ("generate {tmp}/model --step 7", "is one model, not a run with checkpoints; leave --step out"),
        ("generate {tmp}/run --tokens 0", NOT_IN_RANGE),
        ("generate {tmp}/run --tokens 1e3", NO_NUMBER),
        ("generate {tmp}/run --temperature -1", NOT_IN_RANGE),
        ("generate {tmp}/run --temperature nan", NOT_IN_RANGE),
        ("generate {tmp}/run --temperature inf", NOT_IN_RANGE),
        ("generate {tmp}/run --top-k -1", NOT_IN_RANGE),
        ("generate {tmp}/run --seed x", NO_NUMBER),
        ("generate {tmp}/run --seed -1", NOT_IN_RANGE),
        ("generate {tmp}/run --seed 99999999999999999999", NOT_IN_RANGE),
        ("generate {tmp}/run --prompt", "requires an argument"),
    ],
    "eval": [
        ("eval", "Missing argument 'RUN'"),
        ("eval {tmp}/nope", NO_MODEL),
        ("eval {tmp}/text.txt", NO_MODEL),
        ("eval {tmp}/empty", r"has no config\.json"),
        (f"eval {LONG}", TOO_LONG),
        ("eval {tmp}/model {tmp}/model", "is given twice; leave one out"),
        ("eval {tmp}/model --suite smal", r"--suite smal: there is no such suite; did you mean small\?"),
        ("eval {tmp}/model --suite ''", "there is no such suite; suites are edit_paper"),
        ("eval {tmp}/model --suite none.yaml", "--suite none.yaml: there is no such file"),
        (f"eval {{tmp}}/model --suite {LONG}.yaml", TOO_LONG),
        ("eval {tmp}/model --suite tinystories", "give the folder that has it with --data-dir"),
        ("eval {tmp}/model --suite offline", "give the folder that has it with --data-dir"),
        ("eval {tmp}/model --suite tinystories --data-dir {tmp}/nope", "is not a folder, so it has no tinystories"),
        ("eval {tmp}/model --suite tinystories --data-dir {tmp}/empty", r"has no tinystories/valid\.txt"),
        (f"eval {{tmp}}/model --suite tinystories --data-dir {LONG}", TOO_LONG),
        ("eval {tmp}/model --device cud", "--device cud: there is no such device; give cpu, cuda"),
        ("eval {tmp}/model --device cuda:-1", "--device cuda:-1: there is no such device"),
        ("eval {tmp}/model --device ''", "there is no such device"),
        ("eval {tmp}/model --limit 0", NOT_IN_RANGE),
        ("eval {tmp}/model --limit x", NO_NUMBER),
        ("eval {tmp}/model --batch-size 0", NOT_IN_RANGE),
        ("eval {tmp}/model --batch-size auto", NO_NUMBER),
        ("eval {tmp}/model --step 3", "is one model, not a run with checkpoints"),
        ("eval {tmp}/model --baseline {tmp}/nope", NO_MODEL),
        (f"eval {{tmp}}/model --baseline {LONG}", TOO_LONG),
        ("eval {tmp}/model --out {tmp}/text.txt", "text.txt is a file; choose another folder with --out"),
        ("eval {tmp}/model --out {tmp}/text.txt/a", "text.txt is a file; choose another folder with --out"),
        (f"eval {{tmp}}/model --out {{tmp}}/{LONG}", TOO_LONG),
        ("eval {tmp}/model --over-time --step 3", "--over-time is for all checkpoints and --step for one"),
    ],
    "compare": [
        ("compare", r"Missing argument 'FILE"),
        ("compare {tmp}/nope.yaml", "there is no such file; comparisons are YAML files"),
        ("compare {tmp}/empty", "holds no run; give run directories"),
        (f"compare {LONG}", TOO_LONG),
        (f"compare {{tmp}}/run {LONG}", TOO_LONG),
        (f"compare {{tmp}}/run {{tmp}}/run --out {LONG}", TOO_LONG),
        (f"compare --report {LONG}", TOO_LONG),
        (f"compare {Q}", r"is a recipe, not a comparison; name it as `recipe:` of one"),
        (f"compare {ROUNDS} nope=1", "nope is not a section"),
        (f"compare {ROUNDS} x", "'x' is not an override"),
        (f"compare {ROUNDS} hosts.count=0", "hosts is not a section"),
        ("compare --report", "Missing argument"),
        ("compare --report {tmp}/nope", "are for given runs, and these are none"),
        ("compare --report {tmp}/empty", "contains no finished run"),
        ("compare --report {tmp}/text.txt", "are for given runs, and these are none"),
        ("compare --report {tmp}/run", "contains no finished run"),
    ],
    "paths that are too long": [
        ("compare {tmp}/long.yaml", "out_dir is .*; input should be a path of at most 3800 bytes"),
        (f"recipe copy quickstart --to {LONG}", TOO_LONG),
        (f"recipe check {Q} run.name={LONG}", "run.name is .*, expected at most 230 characters"),
        (f"recipe check {Q} run.out_dir={{tmp}}/{LONG}", LONG_KEY.format("run.out_dir")),
        (f"recipe check {Q} run.out_dir={'x/' * 2000}", LONG_KEY.format("run.out_dir")),
        (f"recipe check {Q} checkpoint.mirror={{tmp}}/{LONG}", LONG_KEY.format("checkpoint.mirror")),
        (f"recipe check {Q} data.source={LONG}", "no such file or folder"),
        (f"recipe check {Q} data.validation={LONG}", "no such file or folder"),
        (f"recipe check {Q} data.tokenizer={LONG}.json", "neither a file or folder here nor a model name"),
        (f"recipe check {Q} model.from_config={LONG}", "can't be read .*; give a folder"),
        (f"recipe check {Q} model.from_weights={LONG}", "neither a file or folder here nor a model name"),
        (f"recipe check {Q} eval.suite={LONG}.yaml", "there is no such file"),
        (f"recipe check {Q} eval.sets.{LONG}=a.txt", "expected at most 230 characters"),
        (f"recipe check {Q} eval.sets.a={LONG}", "no such file or folder"),
    ],
    "doctor and completion": [
        ("doctor --timeout 0", NOT_IN_RANGE),
        ("doctor --timeout -5", NOT_IN_RANGE),
        ("doctor --timeout nan", NOT_IN_RANGE),
        ("doctor --timeout inf", NOT_IN_RANGE),
        ("doctor --timeout x", NO_NUMBER),
        ("doctor {tmp}/nope.yaml", NO_FILE),
        (f"doctor {Q} optim.lrr=1", r"did you mean optim\.lr\?"),
        (f"doctor {LONG}", TOO_LONG),
        ("doctor optim.lr=1", "optim.lr=1: there is no such file"),
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a folder with the files and folders that the command lines name."""
    folder = tmp_path_factory.mktemp("wrong")
    write_text(folder)
    for step in (10, 20):
        (folder / f"run/checkpoints/step-{step:08d}").mkdir(parents=True)
        (folder / f"run/checkpoints/step-{step:08d}/state.json").write_text("{}")
    for name in ("empty", "new", "model"):
        (folder / name).mkdir()
    for name in ("run", "new"):
        (folder / name / "recipe.yaml").write_text("train: {steps: 3000}\n")
    for name in ("config.json", "tokenizer_config.json", "pytorch_model.bin"):
        (folder / "model" / name).write_text("{}")
    for name in ("a.bin", "a.pdf"):
        (folder / name).write_bytes(bytes(range(256)))
    (folder / "long.yaml").write_text(f"out_dir: {LONG}\nrecipe: {Q}\nruns: {{a: {{}}}}\n")
    (folder / "loop").symlink_to(folder / "loop")
    return folder


@pytest.mark.parametrize(
    ("command", "pattern"), [pytest.param(*row, id=row[0][:60]) for rows in WRONG_COMMANDS.values() for row in rows]
)
def test_a_mistyped_command_ends_with_2_and_one_line(folder: Path, command: str, pattern: str) -> None:
    words = [word.format(tmp=folder) for word in shlex.split(command)]
    code, output = run_here(words)
    assert code == 2 and problem_of(code, output) is None, output
    assert re.search(pattern, message_of(output) or output), output


@pytest.mark.parametrize("command", [*app.registered_commands, *recipe_app.registered_commands])
def test_every_path_of_the_command_line_is_looked_up_first(
    command: typer.models.CommandInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str | Path, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(files.os, "stat", refuse)
    for name, hint in typing.get_type_hints(command.callback, include_extras=True).items():
        kind, *rest = typing.get_args(hint) or (hint,)
        if "Path" not in str(kind) and name not in ("arguments", "suite"):
            continue
        for given, message in ((LONG, TOO_LONG), ("locked/a", r"locked/a can't be looked up \(Permission denied\)")):
            with pytest.raises(UserError, match=message):
                rest[0].callback([given] if "list" in str(kind) else Path(given))
