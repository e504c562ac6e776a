"""Tests of files as a disk, an editor or another program may leave them: each is named in one line, with exit code 2."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.compare.comparison import load_comparison
from llmtrain.errors import RecipeError, SuiteError
from llmtrain.recipe_loader import load_recipe
from llmtrain.suites import load_suite
from llmtrain.task_files import local_tasks
from llmtrain.train.checkpoint_files import FORMAT
from tests.fuzz.draws import problem_of
from tests.fuzz.kinds import QUICKSTART, SHORT_KEYS, write_text
from tests.in_process import message_of, run_here
from tests.unit.test_checkpoint_files import write

FOLDER, LINK, REMOVED = "a folder", "a link to nothing", "removed"
"""States of a file that are not content."""
Content = str | bytes
LENGTH = "train.steps and train.tokens: neither is given"
CODEC = "can't be read as a recipe: 'utf-8' codec can't decode byte"


BINARY = b"\xff\xfe\x00 not text"

RECIPES: list[tuple[Content, str]] = [
    ("", LENGTH),
    ("null", LENGTH),
    ("train:\n", LENGTH),
    ("3", "can't be read as a recipe"),
    ("a text", "a text is not a section"),
    ("[1, 2]", "holds a list, expected sections"),
    (
        "a story of many words " * 20,
        "recipe.yaml is a text, not a recipe; give a YAML file with lines such as `key: value`",
    ),
    (FOLDER, "is a folder; give one of the recipes in it"),
    (LINK, "there is no such file"),
    (REMOVED, "there is no such file; recipes are YAML files"),
    (bytes(range(256)) * 4, CODEC),
    ("run: {name: é}".encode("latin1"), CODEC),
    ("run: {name: a}".encode("utf-16"), CODEC),
    (b"train: {steps: 3}\0", "can't be read as a recipe"),
    (b"\0" * 10_000_000, "can't be read as a recipe"),
    (b"\xef\xbb\xbftrain: {steps: x}", 'train.steps is "x", expected a whole number'),
    ("run:\n\tname: a\n", "recipe.yaml:2: not YAML"),
    ("train: {steps: 3\r\n", "recipe.yaml:2: not YAML"),
    ("run: {name: a}\n---\nrun: {name: b}\n", "recipe.yaml:2: not YAML"),
    ("train: {steps: 3}\ntrain: {steps: 4}\n", "recipe.yaml:2: not YAML: found duplicate key train"),
    ("? [a]\n: 1\n", "recipe.yaml:1: not YAML"),
    ("<<: 3\n", "recipe.yaml:1: not YAML"),
    ("? ", "can't be read as a recipe: a key is not a word or a number"),
    ("a: &a [*a]\n", "not YAML: YAML recursive aliases are not supported"),
    ("run: !!python/object/apply:os.system [true]\n", "not YAML: could not determine a constructor"),
    ("[" * 5000, "not YAML"),
    ("run: {name: 'a", "not YAML"),
    ("train: {steps: 0o10}", 'train.steps is "0o10", expected a whole number'),
    ("train: {steps: 1_0.5}", "train.steps is 10.5, expected a whole number"),
    ("train: {steps: yes}", "train.steps is true, expected a whole number"),
    ("train: {steps: 5, sequence_length: 1e400}", "train.sequence_length is Infinity, expected"),
    ("train: [steps, 3]", r'train is \["steps", 3\], expected a mapping of keys'),
    ("optim: {lr: .nan}", "optim.lr is NaN, expected a finite number"),
    ("run: {name: ..}", r'run.name is "\.\.", expected letters'),
    ("run: {name: ''}", 'run.name is "", expected letters'),
    ("run: {seed: '${oc.env:HOME}'}", "no interpolation"),
    ("base: recipe.yaml", "base files form a circle"),
    ("base: nowhere.yaml", r"nowhere.yaml: there is no such file \(named by `base:` in recipe.yaml\)"),
    ("base: " + "x" * 300 + ".yaml", "can't be read as a recipe: File name too long"),
    ("base: [3]", r"base is \[3\], expected a file name or a list"),
    ("base: {a: b}", "base is .*, expected a file name or a list"),
]

RUN_FILES: list[tuple[str, Content, str, str]] = [
    *(
        ("summary.json", content, "recipe check {run}/recipe.yaml", "summary.json is damaged; delete it, and the run")
        for content in (
            "",
            "{",
            "[]",
            "null",
            "{}",
            b"\xff\xfe",
            '{"stopped": 3}',
            FOLDER,
            '{"stopped": "done", "steps": "2"}',
        )
    ),
    (
        "summary.json",
        '{"stopped": "done", "steps": 2, "final_eval_loss": "x"}',
        "recipe check {run}/recipe.yaml",
        "is damaged",
    ),
    *(
        ("summary.json", content, "compare {run} {other} --report", "summary.json (is damaged|holds no mapping)")
        for content in ("{", "[1]", b"\xff\xfe", FOLDER)
    ),
    (
        "summary.json",
        '{"final_eval_loss": "x"}',
        "compare {run} {other} --report",
        "summary.json has final_eval_loss='x'",
    ),
    ("recipe.yaml", "sync: 3", "compare {run} {other} --report", "is not a valid trial"),
    ("recipe.yaml", "run: {seed: x}", "compare {run} {other} --report", "is not a valid trial"),
    ("recipe.yaml", "[", "compare {run} {other} --report", "recipe.yaml is damaged"),
    ("recipe.yaml", REMOVED, "compare {run} {other} --report", "contains no finished run"),
    ("metrics.jsonl", REMOVED, "compare {run} {other} --report", "contains no finished run"),
    ("trial.json", "{", "compare {run} {other} --report", "trial.json is damaged"),
    ("trial.json", '{"state": "odd"}', "compare {run} {other} --report", "is not a valid trial"),
    ("recipe.yaml", "[", "export {run}", "recipe.yaml:2: not YAML"),
    ("recipe.yaml", REMOVED, "export {run}", "has no recipe.yaml"),
    ("recipe.yaml", REMOVED, "generate {run}", "has no config.json"),
    ("recipe.yaml", "[", "generate {run}", "recipe.yaml:2: not YAML"),
    ("recipe.yaml", "trian: {}", "export {run}", "trian is not a section"),
]
"""Cases: a file of a run, its content, a command, and a pattern of the command's message."""

CHECKPOINT = "checkpoints/step-00000020"
DAMAGED = "step-00000020 is damaged: "
CHECKPOINT_FILES: list[tuple[str, Content, str]] = [
    *(
        ("state.json", content, DAMAGED + "state.json can't be read")
        for content in ("", "{", "[]", "3", b"\xff", FOLDER)
    ),
    ("state.json", "{}", "has format None, this version reads"),
    ("state.json", '{"format": 999}', "has format 999, this version reads .*; use the version that wrote it"),
    ("state.json", f'{{"format": {FORMAT}}}', DAMAGED + "state.json is not what was written"),
    ("state.json", "swapped", DAMAGED + ".metadata is not what was written"),
    *((name, REMOVED, f"{DAMAGED}{name} is gone") for name in (".metadata", "__0_0.distcp")),
    *((name, LINK, f"{DAMAGED}{name} is gone") for name in (".metadata", "__0_0.distcp")),
    *((name, FOLDER, f"{DAMAGED}{name} has .* bytes, .* were written") for name in (".metadata", "__0_0.distcp")),
    *((name, "", f"{DAMAGED}{name} has 0 bytes, .* were written") for name in (".metadata", "__0_0.distcp")),
    *(
        (name, "flipped", f"{DAMAGED}{name} is not what was written: its digest")
        for name in (".metadata", "__0_0.distcp")
    ),
    *((name, "cut", f"{DAMAGED}{name} has .* bytes, .* were written") for name in (".metadata", "__0_0.distcp")),
    ("__0_0.distcp", "swapped", DAMAGED + "__0_0.distcp is not what was written: its digest"),
]

TASKS = "tasks: [{task: mine}]\ntask_folders: [tasks]\n"
SUITES: list[tuple[Content, Content, str]] = [
    *((content, "", "is not a mapping; a suite has about, batch_size") for content in ("", "3", "[a]", "text")),
    *(
        (content, "", "can't be read as a suite")
        for content in (bytes(range(256)), "a: [", "!!python/object:os.system {}", "\tx: 1")
    ),
    ("[" * 5000, "", "can't be read as a suite: it is nested too deeply"),
    (FOLDER, "", "there is no such file"),
    (LINK, "", "there is no such file"),
    ("taks: []", "", r"taks is not a key; did you mean tasks\?"),
    ("tasks: [{tsk: a}]", "", r"tsk is not a key; did you mean task\?"),
    ("tasks: 3", "", "tasks is 3"),
    ("tasks: [{task: a}]\nbatch_size: -1", "", "batch_size"),
    ("samples: {prompts: []}", "", "samples.prompts"),
    ("samples: {prompts: [a], temperature: 0}", "", "samples.temperature is 0"),
    ("tasks: [{task: a}]\ntask_folders: [nowhere]", "", "nowhere, which is not a folder"),
    ("tasks: [{task: a}]\ntask_folders: [" + "x" * 300 + "]", "", "x, which is not a folder"),
    ("texts: [{name: t, file: nowhere.txt}]", "", "has no nowhere.txt, which text t reads"),
    ("texts: [{name: t, file: " + "x" * 300 + "}]", "", "which text t reads"),
    ("texts: [{name: t, file: text.txt, separator: ''}]", "", "texts.0.separator"),
    (TASKS, "", "mine.yaml: holds no mapping, expected a task"),
    (TASKS, "[", "mine.yaml: can't be read as a task file"),
    (TASKS, bytes(range(256)), "mine.yaml: can't be read as a task file"),
    (TASKS, "task: 3", "mine.yaml: task is 3, expected a name"),
    (TASKS, "group: []", "mine.yaml: group is .*, expected a name"),
    (TASKS, "task: mine\ninclude: 3", "mine.yaml: include is 3, expected the name of a file"),
    (TASKS, "task: mine\ninclude: nowhere.yaml", r"needs .*nowhere.yaml \(include\), which is missing"),
    (TASKS, "task: mine\ninclude: mine.yaml", "mine.yaml: includes itself"),
    (TASKS, "task: mine\ninclude: " + "x" * 300, r"\(include\), which is missing"),
    (TASKS, "task: mine\ndataset_kwargs: text", 'mine.yaml: dataset_kwargs is "text", expected a mapping'),
    (
        TASKS,
        "task: mine\ndataset_kwargs: {file: 3}",
        "mine.yaml: dataset_kwargs.file is 3, expected the name of a file",
    ),
    (TASKS, "task: mine\ndataset_kwargs: {file: no.jsonl}", "has no no.jsonl, which task mine reads"),
    (TASKS, "task: mine\ndoc_to_text: !function code.f", r"needs .*code.py \(!function code.f\), which is missing"),
]
"""Cases: a suite, a task file below it, and a pattern of the message."""

LINE = json.dumps({"text": "a few words"}) + "\n"
TEXTS: list[tuple[str, Content, str]] = [
    ("a.txt", "", "no (train|validation) documents|the source has no text"),
    ("a.txt", b"\xff\xfe\x00", r"a.txt: not UTF-8 .*iconv"),
    ("a.txt", "one", "a.txt is one document"),
    ("a.jsonl", "", "no (train|validation) documents|the source has no text"),
    ("a.jsonl", "{", r"a.jsonl:1: not JSON"),
    ("a.jsonl", LINE + "3\n", r"a.jsonl:2: expected a JSON object per line, found a number"),
    ("a.jsonl", LINE + "null\n", r"a.jsonl:2: expected a JSON object per line, found null"),
    ("a.jsonl", LINE + '{"txt": "a"}\n', r"a.jsonl:2: .*text"),
    ("a.jsonl", LINE + '{"text": 3}\n', r"a.jsonl:2: .*text"),
    ("a.jsonl", '{"text": null}\n', "no (train|validation) documents|the source has no text"),
    ("a.jsonl", b"\xff\n", r"a.jsonl:1: not JSON"),
    ("a.jsonl.gz", LINE, "damaged gzip file"),
    ("a.jsonl.gz", gzip.compress(LINE.encode() * 99, mtime=0)[:-9], "damaged gzip file"),
    ("a.jsonl.gz", "", "no (train|validation) documents|the source has no text"),
    ("a.parquet", "", "can't be read as parquet"),
    ("a.parquet", "PAR1", "can't be read as parquet"),
    ("a.csv", "a,b", "unknown kind of file"),
    ("a.txt", LINK, "no such file or folder"),
    ("a.txt", FOLDER, "no text in this folder"),
]

SHARD = "train-00000.npy"
TOKEN_FILES: list[tuple[str, Content, str]] = [
    ("index.json", "", "index.json: the file: .*; delete .* and prepare again"),
    ("index.json", "{}", "index.json: format: .*; delete .* and prepare again"),
    ("index.json", "[]", "index.json: .*; delete .* and prepare again"),
    ("index.json", FOLDER, "index.json: can't be read .*; delete .* and prepare again"),
    ("index.json", REMOVED, "index.json: no such file; .*; delete .* and prepare again"),
    ("index.json", "no train", "index.json: splits.train: missing; delete .* and prepare again"),
    ("index.json", '{"format": 2}', "index.json: .*; delete .* and prepare again"),
    (SHARD, REMOVED, f"{SHARD}: no such file; expected .* bytes; delete .* and prepare again"),
    (SHARD, LINK, f"{SHARD}: no such file"),
    (SHARD, FOLDER, f"{SHARD}: no such file"),
    (SHARD, "", f"{SHARD}: 0 bytes found, .* expected; delete .* and prepare again"),
    (SHARD, "cut", f"{SHARD}: .* bytes found, .* expected"),
    (SHARD, "no header", f"{SHARD}: another file's content"),
    ("tokenizer/tokenizer_config.json", REMOVED, "tokenizer_config.json: no such file; the tokens can't be read"),
]

TOKENIZERS: list[tuple[str, Content, str]] = [
    ("tokenizer.json", "", r"not a tokenizer .*; expected a tokenizer.json or its folder"),
    ("tokenizer.json", "{", "not a tokenizer"),
    ("tokenizer.json", "[]", "not a tokenizer"),
    ("tokenizer.json", b"\xff\xfe", "not a tokenizer"),
    ("tokenizer.json", FOLDER, r"tokenizer.json: can't be read \(Is a directory\); copy it again"),
    ("tokenizer.json", LINK, r"tokenizer.json: can't be read \(No such file"),
    ("tokenizer_config.json", FOLDER, r"tokenizer_config.json: can't be read \(Is a directory\)"),
    ("tokenizer_config.json", LINK, r"tokenizer_config.json: can't be read \(No such file"),
    ("tokenizer_config.json", "[3]", "not a tokenizer|no eos token"),
    ("tokenizer_config.json", '{"unk_token": {}}', "not a tokenizer"),
]


def put(path: Path, content: Content) -> None:
    """Put a file into a state, or give it content: `flipped`, `cut` and the like change its content."""
    if path.is_file():
        old = path.read_bytes()
        half = len(old) // 2
        changes = {
            "flipped": old[:half] + bytes([old[half] ^ 1]) + old[half + 1 :],
            "cut": old[:half],
            "no header": bytes(len(old)),
            "swapped": Path(str(path).replace("00020/", "00010/")).read_bytes() if content == "swapped" else b"",
            "no train": json.dumps({**json.loads(old), "splits": {}}).encode() if content == "no train" else b"",
        }
        content = changes.get(content, content) if isinstance(content, str) else content
    path.unlink(missing_ok=True)
    if content == FOLDER:
        path.mkdir()
    elif content == LINK:
        path.symlink_to(path.parent / "nowhere")
    elif content != REMOVED:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def assert_refused(command: list[str], pattern: str) -> None:
    code, output = run_here(command)
    assert code == 2 and problem_of(code, output) is None, output
    assert re.search(pattern, message_of(output)), output


def identity(value: object) -> str:
    return str(value)[:40].replace("\0", "0")


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a folder with a text, its prepared tokens, and two runs with two checkpoints each."""
    folder = tmp_path_factory.mktemp("clean")
    assert run_here(prepare(folder, write_text(folder)))[0] == 0
    for name in ("a", "b"):
        for step in (10, 20):
            write(folder / "runs" / name / "checkpoints", step)
        lines = [{"step": step, "tokens": 9, "seconds": 1.0, "train/loss": 5.0} for step in (10, 20)]
        (folder / "runs" / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        text = (
            f"base: {QUICKSTART}\nrun: {{name: {name}, out_dir: {folder}/runs}}\ndata: {{source: {folder}/text.txt}}\n"
        )
        (folder / "runs" / name / "recipe.yaml").write_text(text)
    return folder


@pytest.fixture
def copy(clean: Path, tmp_path: Path) -> Path:
    """Provide a copy of the clean folder's runs and tokens."""
    for name in ("runs", "data"):
        shutil.copytree(clean / name, tmp_path / name)
    recipe = tmp_path / "runs/a/recipe.yaml"
    recipe.write_text(recipe.read_text().replace(f"out_dir: {clean}", f"out_dir: {tmp_path}"))
    return tmp_path


def prepare(folder: Path, source: Path, *keys: str) -> list[str]:
    """Return a command that prepares a text into a folder's data."""
    given = [f"data.source={source}", f"data.cache_dir={folder / 'data'}", *SHORT_KEYS, "train.steps=60", *keys]
    return ["prepare", str(QUICKSTART), *given]


@pytest.mark.parametrize(("content", "pattern"), RECIPES, ids=identity)
def test_a_wrong_recipe_file_is_refused(tmp_path: Path, content: Content, pattern: str) -> None:
    put(tmp_path / "recipe.yaml", content)
    assert_refused(["recipe", "check", str(tmp_path / "recipe.yaml")], pattern)


def test_links_that_form_a_circle_are_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").symlink_to(tmp_path / "a.yaml")
    assert_refused(["recipe", "check", str(tmp_path / "a.yaml")], "Too many levels of symbolic links")


@pytest.mark.parametrize(("name", "content", "command", "pattern"), RUN_FILES, ids=identity)
def test_a_damaged_file_of_a_run_is_named(copy: Path, name: str, content: Content, command: str, pattern: str) -> None:
    put(copy / "runs/a" / name, content)
    words = command.format(run=copy / "runs/a", other=copy / "runs/b").split()
    assert_refused(words, pattern)


@pytest.mark.parametrize(("name", "content", "pattern"), CHECKPOINT_FILES, ids=identity)
def test_a_damaged_checkpoint_is_not_exported(copy: Path, name: str, content: Content, pattern: str) -> None:
    shutil.copytree(next((copy / "data").glob("*/tokenizer")), copy / "runs/a/tokenizer")
    put(copy / "runs/a" / CHECKPOINT / name, content)
    assert_refused(["export", str(copy / "runs/a"), "--out", str(copy / "out")], pattern)
    assert not (copy / "out").exists()


def test_a_tokenizer_that_encodes_nothing_is_not_exported(copy: Path) -> None:
    settings = copy / "runs/a/tokenizer/tokenizer_config.json"
    shutil.copytree(next((copy / "data").glob("*/tokenizer")), settings.parent)
    put(settings, json.dumps({**json.loads(settings.read_text()), "model_max_length": "x"}))
    wrong = "the tokenizer in .*/tokenizer can't be read .its values are not of the expected kinds"
    assert_refused(["export", str(copy / "runs/a"), "--out", str(copy / "out")], wrong)
    assert not (copy / "out").exists()


@pytest.mark.parametrize(("suite", "task", "pattern"), SUITES, ids=identity)
def test_a_wrong_suite_is_refused(tmp_path: Path, suite: Content, task: Content, pattern: str) -> None:
    for name in ("config.json", "tokenizer_config.json", "pytorch_model.bin"):
        put(tmp_path / "model" / name, "{}")
    put(tmp_path / "suite.yaml", suite)
    put(tmp_path / "tasks/mine.yaml", task)
    command = ["eval", str(tmp_path / "model"), "--suite", str(tmp_path / "suite.yaml"), "--data-dir", str(tmp_path)]
    assert_refused(command, pattern)


@pytest.mark.parametrize(("name", "content", "pattern"), TEXTS, ids=identity)
def test_a_wrong_text_is_refused(tmp_path: Path, name: str, content: Content, pattern: str) -> None:
    put(tmp_path / name, content)
    assert_refused(prepare(tmp_path, tmp_path / name), pattern)


@pytest.mark.parametrize(("name", "content", "pattern"), TOKEN_FILES, ids=identity)
def test_damaged_tokens_are_refused(clean: Path, copy: Path, name: str, content: Content, pattern: str) -> None:
    put(next((copy / "data").glob("*/index.json")).parent / name, content)
    assert_refused(prepare(copy, clean / "text.txt"), pattern)


@pytest.mark.parametrize(("name", "content", "pattern"), TOKENIZERS, ids=identity)
def test_a_damaged_tokenizer_is_refused(clean: Path, copy: Path, name: str, content: Content, pattern: str) -> None:
    shutil.copytree(next((copy / "data").glob("*/tokenizer")), copy / "given")
    put(copy / "given" / name, content)
    assert_refused(prepare(copy, clean / "text.txt", f"data.tokenizer={copy / 'given'}"), pattern)


@pytest.mark.parametrize(
    ("load", "content", "error", "message"),
    [
        (load_recipe, BINARY, RecipeError, "can't be read as a recipe"),
        (load_comparison, BINARY, RecipeError, "can't be read as a comparison"),
        (load_comparison, b"[1, 2]", RecipeError, "expected keys such as `runs:`"),
        (lambda path: load_suite(str(path)), BINARY, SuiteError, "can't be read as a suite"),
        (lambda path: local_tasks([path.parent]), BINARY, SuiteError, "can't be read as a task file"),
        (lambda path: local_tasks([path.parent]), b"[1, 2]", SuiteError, "holds no mapping, expected a task"),
    ],
    ids=["recipe", "comparison", "a list for a comparison", "suite", "task", "a list for a task"],
)
def test_a_file_that_is_something_else(
    tmp_path: Path, load: Callable[[Path], object], content: bytes, error: type[Exception], message: str
) -> None:
    path = tmp_path / "given.yaml"
    path.write_bytes(content)
    with pytest.raises(error, match=message) as refused:
        load(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)
