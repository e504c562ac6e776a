"""Tests of tasks and results of lm-evaluation-harness: the part that is kept, and errors in one line."""

from __future__ import annotations

import gzip
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.errors import DataError, ModelError, SuiteError
from llmtrain.eval import fetch as fetching
from llmtrain.eval import harness
from llmtrain.eval.harness import check_answers_fit, check_tasks, entry_of, per_document, run_task
from llmtrain.eval.scores import Entry
from llmtrain.eval.tasks import local_jsonl
from llmtrain.suites import TaskSection


def sample(**changes: Any) -> dict[str, Any]:
    """Return a document as lm-evaluation-harness logs it, with `changes`."""
    two = [["question", " yes"], ["question", " no"]]
    likelihoods = [(-1.5, True), (-2.0, False)]
    usual = {
        "doc_id": 0,
        "doc_hash": "abcdef012345",
        "filter": "none",
        "metrics": ["acc", "said"],
        "acc": 1.0,
        "said": "yes",
    }
    return {**usual, "arguments": two, "filtered_resps": likelihoods, "target": 0, **changes}


def test_only_numbers_are_kept_of_a_document() -> None:
    assert per_document([sample()]) == {"doc": ["0:abcdef01"], "acc": [1.0], "nll": [1.5], "bytes": [4]}
    assert per_document([sample(), sample(filter="strict", doc_id=1)]).keys() == {"doc"}, (
        "two filters, so two answers per question"
    )


def test_answers_are_kept_in_the_order_of_documents() -> None:
    usual = {
        "doc_hash": "0123456789",
        "metrics": ["acc"],
        "arguments": [("Question", " ä"), ("Question", " bc")],
        "filtered_resps": [(-1.5, False), (-2.5, True)],
    }
    kept = per_document([sample(**usual, doc_id=1, target=1), sample(**usual, doc_id=0, target=0)])
    assert kept == {"doc": ["0:01234567", "1:01234567"], "acc": [1.0, 1.0], "nll": [1.5, 2.5], "bytes": [3, 3]}


@pytest.mark.parametrize(
    "changes",
    [
        {"arguments": [["question", {"until": ["."]}]], "filtered_resps": ["yes"]},
        {"target": 7},
        {"target": "yes"},
        {"filtered_resps": ["yes", "no"]},
    ],
    ids=["generated", "no such choice", "a text", "no likelihood"],
)
def test_a_document_without_the_likelihood_of_a_right_answer(changes: dict[str, Any]) -> None:
    assert per_document([sample(**changes)]).keys() == {"doc", "acc"}


def test_names_that_the_harness_knows_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    index = SimpleNamespace(all_tasks=["piqa", "offline_piqa"])
    monkeypatch.setattr(harness, "harness_version", lambda: "0.4")
    monkeypatch.setattr(harness, "task_manager", lambda *arguments: asked.append(arguments) or index)
    check_tasks(["offline_piqa"], ["offline_piqa"], (), None)
    assert not asked, "listing the harness's thousands of tasks takes many seconds"
    check_tasks(["piqa", "offline_piqa"], ["offline_piqa"], (), None)
    assert asked == [((), None, True)]


class Task:
    """Task of lm-evaluation-harness with one question, whose answer is `answer`."""

    def __init__(self, answer: str):
        self.instances = [SimpleNamespace(request_type="loglikelihood", args=("Question:", answer))]

    def get_config(self, key: str) -> None:
        return None


def run_one(monkeypatch: pytest.MonkeyPatch, task: Task, evaluated: Callable[..., Any]) -> Entry | None:
    """Call `run_task` with a model that sees three characters at once. `evaluated` replaces lm-eval's `simple_evaluate`."""
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=evaluated))
    manager = SimpleNamespace(load=lambda names: {"tasks": {"quiz": task}, "groups": {}})
    model = SimpleNamespace(tok_encode=list, max_length=3)
    return run_task(TaskSection(task="quiz"), None, lambda: model, manager)


def test_only_a_task_with_a_local_file_has_a_file_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without internet, the library datasets raises ValueError if its cache has another configuration of a dataset."""

    def load(names: list[str]) -> None:
        raise ValueError("Couldn't find cache for ai2_arc\nAvailable: ARC-Easy")

    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=None))
    for is_local, message in (
        (True, "data can't be read (Couldn't find cache for ai2_arc); fix the file"),
        (
            False,
            "data is not available (Couldn't find cache for ai2_arc Available: ARC-Easy); without internet, use --suite",
        ),
    ):
        with pytest.raises(DataError, match=re.escape(message)):
            run_task(TaskSection(task="quiz"), None, lambda: None, SimpleNamespace(load=load), is_local)


def test_a_suites_tasks_are_loaded_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[str, bool]] = []

    def index(folders: tuple[Path, ...], data_dir: Path | None, with_defaults: bool) -> SimpleNamespace:
        def load(names: list[str]) -> None:
            loaded.append((*names, with_defaults))
            if names == ["siqa"]:
                raise OSError("no internet")

        return SimpleNamespace(load=load, all_tasks=["offline_piqa", "piqa", "siqa"])

    monkeypatch.setattr(harness, "harness_version", lambda: "0.4")
    monkeypatch.setattr(harness, "task_manager", index)
    monkeypatch.setattr(fetching, "task_manager", index)
    suite = tmp_path / "mine.yaml"
    suite.write_text("tasks: [{task: offline_piqa}, {task: piqa}]\n")
    fetching.fetch(str(suite), tmp_path)
    assert loaded == [("offline_piqa", False), ("piqa", True)]
    suite.write_text("tasks: [{task: siqa}]\n")
    with pytest.raises(DataError, match=r"task siqa: its data is not available \(no internet\)"):
        fetching.fetch(str(suite))
    suite.write_text("tasks: [{task: piqq}]\n")
    with pytest.raises(SuiteError, match=r"did you mean piqa"):
        fetching.fetch(str(suite))


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


def test_a_task_whose_generated_answers_leave_no_room_for_questions_is_named() -> None:
    model = SimpleNamespace(tok_encode=list, max_length=256, max_gen_toks=256)

    def task(**keys: int) -> Any:
        return SimpleNamespace(instances=[SimpleNamespace(request_type="generate_until", args=("Question", keys))])

    for fitting, filling in (
        (task(max_gen_toks=255, max_tokens=300), task()),
        (task(max_new_tokens=9), task(max_tokens=300)),
    ):
        with pytest.raises(ModelError, match=r"task second: answers may have (256|300) tokens and the model sees 256"):
            check_answers_fit({"first": fitting, "second": filling}, model)


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


@pytest.mark.parametrize("responses", [[-3.5], [(-3.5, False), (-1.0, True)], ["a generated text"]])
def test_losses_of_texts_and_answers_are_finite(responses: list[Any]) -> None:
    assert harness._is_finite({"filtered_resps": responses})


@pytest.mark.parametrize("responses", [[math.nan], [-3.5, -math.inf], [(math.nan, False)]])
def test_losses_of_texts_and_answers_are_not_finite(responses: list[Any]) -> None:
    assert not harness._is_finite({"filtered_resps": responses})


def test_losses_too_large_for_a_perplexity_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"^task quiz: the model's losses are too large for a perplexity"):
        run_one(monkeypatch, Task("abc"), lambda **_: math.exp(710.0))


def test_groups_are_shown_instead_of_their_tasks_wherever_they_are() -> None:
    """`mine` has no scores of its own, and `law` is a group of `mmlu`."""
    results = results_of({"acc,none": 0.5})
    of_tasks = {name: [sample()] for name in ("quiz", "law_1", "law_2")}
    below = {"mine": ["mmlu", "quiz"], "mmlu": ["law"], "law": ["law_1", "law_2"]}
    scores = {name: {"acc,none": 0.5} for name in (*of_tasks, "mmlu", "law")}
    configs = {name: {"output_type": "generate_until"} for name in of_tasks}
    results |= {"samples": of_tasks, "group_subtasks": below, "results": scores, "configs": configs}
    assert entry_of(results | {"groups": {"mmlu": {}, "law": {}}}).shown == ["mmlu", "quiz"]
    alone = {"results": {name: scores[name] for name in of_tasks}, "group_subtasks": {"mine": list(of_tasks)}}
    assert entry_of(results | alone | {"groups": {}}).shown == list(of_tasks)


def test_a_standard_error_has_the_name_of_its_metric() -> None:
    found = entry_of(results_of({"exact_match,strict": 0.5, "exact_match_stderr,strict": 0.1})).scores["quiz"]
    assert (found["exact_match,strict"], found["exact_match,strict_stderr"]) == (0.5, 0.1)


def results_of(metrics: dict[str, float], **changes: Any) -> dict[str, Any]:
    """Return results of lm-evaluation-harness for a task of one document, which has `changes`."""
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
    """`run_task` turns a ValueError into a message of one line."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        local_jsonl.load(data_dir=str(tmp_path), file=name)
