"""Evaluation without a model: units on several processes, what lm-evaluation-harness gives back, scores that are missing."""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.config import SuiteSection
from llmtrain.errors import DataError, ModelError, UserError
from llmtrain.eval import command, harness, units
from llmtrain.eval.command import evaluate
from llmtrain.eval.evaluated_checkpoint import Checkpoint, find_checkpoints
from llmtrain.eval.harness import check_answers_fit, check_tasks, entry_of, run_task
from llmtrain.eval.scores import Entry, compare, write_json
from llmtrain.eval.table import Evaluated, Row, comparison, lines_of, scores_on_one_line
from llmtrain.eval.tasks import local_jsonl
from llmtrain.eval.units import EvalUnit, LazyModels, Options, units_of
from llmtrain.suites import Suite, TaskSection, check_suite, check_suite_data, local_tasks
from tests.unit.test_export_folder import complete
from tests.unit.test_gaps_files import sample


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that passes for a model, as long as nobody loads it."""
    return write_model(tmp_path / "model")


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer_config.json", "pytorch_model.bin"):
        (folder / name).write_text("{}")
    return folder


# ---- units


def scored(value: float | None) -> Entry:
    return Entry(scores={"quiz": {"acc": value, "acc_stderr": None, "n": 4}}, about={"quiz": {}}, shown=["quiz"])


def test_of_several_processes_only_the_main_one_writes_and_does_what_is_not_shared(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def unit(name: str, by_all: bool) -> EvalUnit:
        return EvalUnit(name, {}, ("acc",), lambda models: ran.append(name) or scored(0.5), by_all)

    monkeypatch.setattr(command, "units_of", lambda options: [unit("shared", True), unit("text", False)])
    for rank, results, done in (("1", 0, ["shared"]), ("0", 1, ["shared", "text"])):
        monkeypatch.setenv("RANK", rank)
        found = evaluate([model], "small", out=tmp_path / "out")
        assert len(found) == results and ran == done
        assert (tmp_path / "out").exists() == (rank == "0")
        ran.clear()
    assert len(list((tmp_path / "out/model/cache").iterdir())) == 2


def test_a_suite_of_prompts_alone_has_neither_table_nor_curves(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = Entry(written=[{"prompt": "Tom", "text": "Tom [sat] down."}])
    monkeypatch.setattr(command, "units_of", lambda options: [EvalUnit("samples", {}, (), lambda models: entry)])
    monkeypatch.setenv("COLUMNS", "120")
    out = tmp_path / "out"
    (result,) = evaluate([model], "small", over_time=True, out=out)
    assert capsys.readouterr().out == ("model: samples (1 of 1)\n\nmodel writes after 'Tom':\nTom [sat] down.\n")
    assert result["written"] == entry.written and result["results"] == {}
    assert json.loads((out / "small-over-time.json").read_text())["checkpoints"] == [result]
    assert not (out / "small-over-time.png").exists()


def test_a_task_of_the_harness_needs_its_index_and_no_data_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(units, "check_tasks", lambda names, *_: asked.append(names))
    monkeypatch.setattr(units, "harness_version", lambda: "0.4")
    monkeypatch.setattr(units, "task_manager", lambda *arguments: arguments)
    monkeypatch.setattr(units, "run_task", lambda section, limit, load, manager: asked.append(manager))
    options = Options(Suite(tasks=(TaskSection(task="piqa"),)), (), None, 5, 1, None)
    (unit,) = units_of(options)
    key = {"kind": "lm_eval", "lm_eval": "0.4", "entry": units.ENTRY, "task": "piqa", "few_shot": None, "limit": 5}
    assert unit.key == key and unit.by_all
    unit.run(LazyModels(Path(), options))
    assert asked == [["piqa"], ((), None, True)]


def test_results_that_can_not_be_written_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file/new/small.json"
    with pytest.raises(UserError) as refused:
        write_json(path, {})
    assert str(refused.value) == f"{path} can't be written (Not a directory); choose another folder with --out"


@pytest.mark.parametrize(
    ("metrics", "tokens"),
    [
        ('{"step": 10, "tokens": 9000}\n', 9000),
        ('{"step": 20, "tokens": 9000}\n{"step": 10}\n', None),
        ('{"step": 10, "tok', None),
        ('{"step": 10, "tokens": 9000}\n{"step": 20, "tok', 9000),
        (None, None),
    ],
    ids=["there", "another step", "torn", "torn afterwards", "no file"],
)
def test_the_tokens_of_an_export_are_those_in_the_metrics(
    tmp_path: Path, metrics: str | None, tokens: int | None
) -> None:
    folder = write_model(tmp_path / "export/step-00000010")
    (tmp_path / "recipe.yaml").write_text("{}")
    complete(folder)
    if metrics is not None:
        (tmp_path / "metrics.jsonl").write_text(metrics)
    (found,) = find_checkpoints(tmp_path, "run", None, False)
    assert (found.folder, found.step, found.tokens) == (folder, 10, tokens)


# ---- what suites need


def test_a_suite_with_its_folder_needs_no_data_before_training() -> None:
    check_suite(SuiteSection(name="offline", data_dir="/nowhere"))
    check_suite(SuiteSection(name="small"))  # reads nothing of ours
    with pytest.raises(DataError, match=r"give the folder that has it with eval\.suite\.data_dir"):
        check_suite(SuiteSection(name="offline"))


def test_a_suite_of_texts_needs_no_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr("llmtrain.suites.harness_version", lambda: pytest.fail("it is not needed"))
    (tmp_path / "texts.yaml").write_text("texts: [{name: words, file: words.txt}]")
    section = SuiteSection(name=str(tmp_path / "texts.yaml"), data_dir=str(tmp_path))
    with pytest.raises(DataError, match=r"has no words\.txt, which text words reads"):
        check_suite_data(section)
    (tmp_path / "words.txt").write_text("words")
    check_suite_data(section)


def test_a_file_that_others_include_is_no_task(tmp_path: Path) -> None:
    (tmp_path / "common.yaml").write_text("dataset_kwargs: {file: words.txt}")
    (tmp_path / "own.yaml").write_text("include: common.yaml\ntask: own")
    assert {name: task.files for name, task in local_tasks([tmp_path]).items()} == {"own": ("words.txt",)}


# ---- lm-evaluation-harness


def test_names_that_the_harness_knows_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    index = SimpleNamespace(all_tasks=["piqa", "offline_piqa"])
    monkeypatch.setattr(harness, "harness_version", lambda: "0.4")
    monkeypatch.setattr(harness, "task_manager", lambda *arguments: asked.append(arguments) or index)
    check_tasks(["offline_piqa"], ["offline_piqa"], (), None)
    assert not asked, "to list its thousands of tasks takes many seconds"
    check_tasks(["piqa", "offline_piqa"], ["offline_piqa"], (), None)
    assert asked == [((), None, True)]


class Task:
    """A task of lm-evaluation-harness with one question, whose answer is `answer`."""

    def __init__(self, answer: str):
        self.instances = [SimpleNamespace(request_type="loglikelihood", args=("Question:", answer))]

    def get_config(self, key: str) -> None:
        return None


def run_one(monkeypatch: pytest.MonkeyPatch, task: Task, evaluated: Callable[..., Any]) -> Entry | None:
    """`run_task` on a model that sees three characters at once."""
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=evaluated))
    manager = SimpleNamespace(load=lambda names: {"tasks": {"quiz": task}, "groups": {}})
    model = SimpleNamespace(tok_encode=list, max_length=3)
    return run_task(TaskSection(task="quiz"), None, lambda: model, manager)


def test_all_processes_but_the_main_one_get_nothing_from_the_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_one(monkeypatch, Task("abc"), lambda **_: None) is None


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ("abc", AssertionError, "^its own$"),
        ("abcd", ModelError, "task quiz: an answer has 4 tokens and the model sees 3 at once"),
    ],
)
def test_an_assertion_of_the_harness_is_explained_if_an_answer_is_too_long(
    monkeypatch: pytest.MonkeyPatch, answer: str, error: type[Exception], message: str
) -> None:
    def fail(**_: Any) -> None:
        raise AssertionError("its own")

    with pytest.raises(error, match=message):
        run_one(monkeypatch, Task(answer), fail)


def test_the_task_that_is_named_is_the_one_with_the_long_answer() -> None:
    model = SimpleNamespace(tok_encode=list, max_length=3)
    with pytest.raises(ModelError, match="task second: an answer has 4 tokens"):
        check_answers_fit({"first": Task("abc"), "second": Task("abcd")}, model)


def test_examples_are_not_taken_from_the_evaluated_documents() -> None:
    def task(**has: bool) -> Any:
        docs = {
            f"has_{split}_docs": (lambda given=given: given) for split, given in ({"training": False} | has).items()
        }
        return SimpleNamespace(get_config=lambda key: None, **docs)

    assert not harness._has_examples(task(validation=False, test=True))
    assert not harness._has_examples(task(validation=True, test=False))
    assert harness._has_examples(task(validation=True, test=True))
    assert harness._has_examples(task(training=True))


def test_losses_that_are_not_finite_are_an_error_whatever_the_target_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for response in (math.nan, -math.inf):
        results = results_of({"acc,none": 0.5}, target="a text", filtered_resps=[(response, False)])
        with pytest.raises(ModelError, match="the model's losses are not finite"):
            run_one(monkeypatch, Task("abc"), lambda results=results, **_: results)


def test_a_standard_error_has_the_name_of_its_metric() -> None:
    found = entry_of(results_of({"exact_match,strict": 0.5, "exact_match_stderr,strict": 0.1})).scores["quiz"]
    assert (found["exact_match,strict"], found["exact_match,strict_stderr"]) == (0.5, 0.1)


def results_of(metrics: dict[str, float], **changes: Any) -> dict[str, Any]:
    """Results of lm-evaluation-harness for a task of one document."""
    return {
        "samples": {"quiz": [sample(**changes)]},
        "group_subtasks": {},
        "results": {"quiz": metrics},
        "versions": {"quiz": 1.0},
        "n-shot": {"quiz": 0},
        "configs": {"quiz": {"output_type": "generate_until"}},
    }


def test_a_number_that_json_does_not_have_is_unknown() -> None:
    scores = entry_of(results_of({"acc,none": 0.5, "acc_stderr,none": math.nan, "perplexity,none": math.inf})).scores
    assert (scores["quiz"]["acc"], scores["quiz"]["acc_stderr"], scores["quiz"]["perplexity"]) == (0.5, None, None)


@pytest.mark.parametrize(
    ("metrics", "changes", "expected"),
    [
        ({"acc,none": 1.0}, {}, 1.5 / math.log(2) / 4),
        ({"acc,none": 1.0, "bits_per_byte,none": 0.25}, {}, 0.25),
        ({"acc,none": 1.0}, {"filtered_resps": ["yes", "no"]}, None),
    ],
    ids=["added", "the task's own", "no likelihoods"],
)
def test_bits_per_byte_are_added_where_they_can_be(
    metrics: dict[str, float], changes: dict[str, Any], expected: float | None
) -> None:
    scores = entry_of(results_of(metrics, **changes)).scores["quiz"]
    assert scores.get("bits_per_byte") == (None if expected is None else pytest.approx(expected))
    assert ("bits_per_byte_stderr" in scores) == (metrics.keys() == {"acc,none"} and not changes)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cut.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 1000)[:-20], "is a damaged gzip file"),
        ("plain.jsonl.gz", b'{"a": 1}\n', "is a damaged gzip file"),
        ("empty.jsonl", b"\n", "has no rows"),
        ("half.jsonl", b'{"a": 1}\n{"a"', "Expecting ':'"),
    ],
    ids=["cut", "not compressed", "empty", "half a row"],
)
def test_damaged_files_of_tasks_are_value_errors(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    """`run_task` makes one line of them."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        local_jsonl.load(data_dir=str(tmp_path), file=name)


# ---- scores


def at(step: int, tokens: int | None, entry: Entry) -> Evaluated:
    return Evaluated(Checkpoint("run", Path("run"), Path("run"), step, tokens), {"quiz": entry})


def test_curves_leave_out_what_is_not_known() -> None:
    points = [at(10, 1000, scored(0.5)), at(20, None, scored(0.6)), at(30, 3000, scored(None)), at(40, 4000, Entry())]
    row = Row("quiz", "quiz", "acc")
    assert lines_of(points, row, over_tokens=True) == {"run": [(1000, 0.5, 0.0)]}
    assert lines_of(points, row, over_tokens=False) == {"run": [(10, 0.5, 0.0), (20, 0.6, 0.0)]}


def test_a_score_that_is_none_is_not_in_the_line() -> None:
    both = Evaluated(at(10, 1000, Entry()).checkpoint, {"quiz": scored(0.5), "other": scored(None)})
    assert scores_on_one_line(both, {"other": ["acc"], "quiz": ["acc"]}) == "quiz acc 0.500"


def test_a_task_that_only_one_of_two_was_given_is_not_compared() -> None:
    entry = scored(0.5).model_copy(
        update={"about": {"quiz": {"members": ["quiz"]}}, "answers": {"quiz": {"doc": [0, 1], "acc": [1.0, 0.0]}}}
    )
    ours, theirs, row = at(10, 1000, entry), at(10, 1000, Entry()), Row("quiz", "quiz", "acc")
    assert comparison(ours, ours, row) is not None
    assert comparison(ours, theirs, row) is None and comparison(theirs, ours, row) is None


@pytest.mark.parametrize("changes", [{"bytes": [4, 5]}, {"nll": None}], ids=["other bytes", "no likelihoods"])
def test_bits_per_byte_are_compared_over_the_same_bytes(changes: dict[str, Sequence[int] | None]) -> None:
    ours = {"doc": ["0:x", "1:y"], "nll": [1.0, 2.0], "bytes": [4, 4]}
    theirs = {key: value for key, value in (ours | changes).items() if value is not None}
    assert compare([ours], [ours], "bits_per_byte") is not None
    assert compare([ours], [theirs], "bits_per_byte") is None and compare([theirs], [ours], "bits_per_byte") is None
