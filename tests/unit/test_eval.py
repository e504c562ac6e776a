"""Evaluation without a model: suites, caches, paired tests, what a score may be called, what is refused."""

from __future__ import annotations

import importlib.metadata
import io
import json
import math
import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from llmtrain.errors import DataError, ModelError, SuiteError, UserError
from llmtrain.eval.evaluated_checkpoint import Checkpoint, check_model_folder, find_checkpoints, labels
from llmtrain.eval.harness import per_document
from llmtrain.eval.scores import (
    BOOTSTRAP,
    MCNEMAR,
    Cache,
    Entry,
    bits_per_byte,
    chance_of,
    compare,
    compare_with_chance,
    mcnemar,
    paired_bootstrap,
    ratio_of_sums,
)
from llmtrain.eval.table import Evaluated, Row, cell, comparison, draw_curves, lines_of, scores_on_one_line, table_of
from llmtrain.eval.units import Options, units_of
from llmtrain.suites import (
    FILES,
    digests_of_data,
    harness_version,
    load_suite,
    local_tasks,
    suite_names,
)

TASKS = (FILES / "tasks",)


def suite_file(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", suite_names())
def test_suites_of_the_repository_load(name: str) -> None:
    stem, suite, folders = load_suite(name)
    assert stem == name and suite.about and folders == [*TASKS]
    local = local_tasks(folders)
    assert all(task.task in local for task in suite.tasks if task.task.startswith("offline_"))


def test_the_briefs_suites_are_there() -> None:
    assert suite_names() == ["edit_paper", "offline", "small", "tinystories"]
    tasks = [task.task for task in load_suite("small")[1].tasks]
    assert tasks == ["lambada_openai", "blimp", "hellaswag", "arc_easy", "piqa"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks: [{task: piqa, fewshot: 5}]", "tasks.0.fewshot is not a key; did you mean few_shot?"),
        ("task: []", "task is not a key; did you mean tasks?"),
        ("tasks: [{few_shot: 5}]", "tasks.0.task is not given and has no default"),
        ("tasks: [{task: piqa, limit: 0}]", "tasks.0.limit is 0; input should be greater than 0"),
        ("about: nothing", "has nothing to evaluate; give it tasks, texts or samples"),
        ("tasks: [{task: piqa}, {task: piqa}]", "piqa is there twice; leave one out, or put it into another suite"),
        (
            "{texts: [{name: samples, file: a.txt}], samples: {prompts: [Once]}}",
            "samples is there twice; leave one out, or put it into another suite",
        ),
        ("[1]", "is not a mapping; a suite has about, batch_size, task_folders, tasks, texts, samples"),
    ],
)
def test_wrong_suites_are_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = suite_file(tmp_path, text)
    with pytest.raises(SuiteError) as error:
        load_suite(path)
    assert str(error.value) == f"{path}: {message}"


def test_an_unknown_suite_names_the_nearest() -> None:
    with pytest.raises(SuiteError) as error:
        load_suite("tinystory")
    assert str(error.value) == "--suite tinystory: there is no such suite; did you mean tinystories?"


def options(suite: str, data_dir: Path | None, limit: int | None = None) -> Options:
    _, loaded, folders = load_suite(suite)
    return Options(loaded, tuple(folders), data_dir, limit, loaded.batch_size, None)


def test_missing_data_is_named_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        units_of(options("tinystories", None))
    assert str(error.value) == (
        "text tinystories_valid reads tinystories/valid.txt: give the folder that has it with --data-dir"
    )
    with pytest.raises(DataError) as error:
        units_of(options("tinystories", tmp_path))
    assert str(error.value) == (
        f"--data-dir {tmp_path} has no tinystories/valid.txt, which text tinystories_valid reads; see eval/README.md"
    )


def test_a_group_needs_its_members_data() -> None:
    blimp = local_tasks(TASKS)["offline_blimp"]
    assert len(blimp.files) == 6 and "blimp/passive_1.jsonl.gz" in blimp.files


def test_without_the_harness_the_command_to_install_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    with pytest.raises(
        UserError, match=r"not installed; install it with: pip install -c constraints.txt -e '.\[eval\]'"
    ):
        harness_version()


def test_a_unit_is_kept_for_one_model_one_setting_and_one_state_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "tinystories").mkdir()
    for name in ("train", "valid"):
        (tmp_path / f"tinystories/{name}.txt").write_text("Once upon a time.")
    unit = units_of(options("tinystories", tmp_path))[0]
    entry = Entry(scores={"a": {"loss": 1.5, "loss_stderr": None, "n": 1}}, shown=["a"])
    cache = Cache(tmp_path / "cache", "model 1")
    assert cache.read(unit.name, unit.key) is None
    cache.write(unit.name, unit.key, entry)
    assert cache.read(unit.name, unit.key) == entry
    assert type(cache.read(unit.name, unit.key).scores["a"]["n"]) is int
    assert Cache(tmp_path / "cache", "model 2").read(unit.name, unit.key) is None
    limited = units_of(options("tinystories", tmp_path, limit=3))[0]
    assert cache.read(limited.name, limited.key) is None
    (tmp_path / "tinystories/valid.txt").write_text("Another time.")
    changed = units_of(options("tinystories", tmp_path))
    assert cache.read(changed[0].name, changed[0].key) is None
    assert digests_of_data(tmp_path, ["tinystories/train.txt"], "x") == changed[1].key["data"]


def test_a_damaged_cache_file_is_as_none(tmp_path: Path) -> None:
    cache = Cache(tmp_path, "model")
    cache.write("piqa", {"limit": None}, Entry())
    cache.path("piqa", {"limit": None}).write_text('{"key": ')
    assert cache.read("piqa", {"limit": None}) is None


def test_a_checkpoint_is_another_when_its_weights_or_tokenizer_are(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "tokenizer.json").write_text("{}")
    checkpoint = Checkpoint("a", tmp_path, tmp_path)
    before = checkpoint.fingerprint()
    (tmp_path / "README.md").write_text("a model card may change")
    assert checkpoint.fingerprint() == before
    (tmp_path / "tokenizer.json").write_text("[]")
    changed = checkpoint.fingerprint()
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    assert len({before, changed, checkpoint.fingerprint()}) == 3


def test_what_is_no_model_is_refused_in_one_line(tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(ModelError, match=message) as error:
            check_model_folder(tmp_path)
        assert "\n" not in str(error.value)

    refused("has no config.json")
    (tmp_path / "config.json").write_text("{}")
    refused("has no tokenizer_config.json")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    refused("model.safetensors is missing")
    whole = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    whole = len(whole).to_bytes(8, "little") + whole + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(whole)
    check_model_folder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(whole[:-3])
    refused(r"model.safetensors is damaged or cut short \(.*\); export the model again")
    (tmp_path / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}}))
    refused("model-00001-of-00001.safetensors is missing")
    index.write_text("{}")
    refused("index.json is damaged")
    (tmp_path / "model.safetensors").write_bytes(whole)
    check_model_folder(tmp_path)  # an old index beside a complete file, which transformers takes
    with pytest.raises(ModelError, match="there is no such folder"):
        find_checkpoints(tmp_path / "none", "none", None, False)


def test_a_folder_with_one_model_has_no_steps(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--step 5: .* is one model, not a run with checkpoints; leave --step out"):
        find_checkpoints(tmp_path, "a", 5, False)


def test_several_processes_do_not_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.yaml").write_text("")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="several processes can't export it at once; first `llmtrain export"):
        find_checkpoints(tmp_path, "a", None, False)


def test_labels_are_as_long_as_needed() -> None:
    assert labels([Path("runs/a"), Path("runs/b")]) == ["a", "b"]
    assert labels([Path("one/a"), Path("two/a"), Path("two/b")]) == ["one/a", "two/a", "b"]
    with pytest.raises(UserError, match="a is given twice"):
        labels([Path("a"), Path("b/../a")])


def test_mcnemar_by_hand() -> None:
    ours, theirs = [1, 1, 1, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 1, 1, 0]
    assert mcnemar(ours, theirs) == mcnemar(theirs, ours) == 2 * (1 + 6) / 2**6  # 5 against 1
    assert mcnemar([1, 0], [0, 1]) == 1.0
    assert mcnemar([1, 1], [1, 1]) == 1.0
    ours, theirs = [1] * 900 + [0] * 1100, [0] * 900 + [1] * 1100
    assert mcnemar(ours, theirs) == 2 * sum(math.comb(2000, k) for k in range(901)) / 2**2000


def test_the_paired_bootstrap_sees_pairs() -> None:
    theirs = [float(10 + i % 7) for i in range(40)]
    better = [value - 0.1 for value in theirs]  # far less than the documents differ among themselves
    assert paired_bootstrap(better, theirs, [1.0] * 40) == pytest.approx(2 / 10_001)
    assert paired_bootstrap(theirs, theirs, [1.0] * 40) == 1.0
    mixed = [value + (0.1 if i % 2 else -0.1) for i, value in enumerate(theirs)]
    assert paired_bootstrap(mixed, theirs, [1.0] * 40) > 0.5
    assert paired_bootstrap([1.0], [2.0], [1.0]) == 1.0, "one document shows no difference"
    assert paired_bootstrap([1.0] * 3, [2.0] * 3, [1.0] * 3) == 0.25


def test_only_the_same_documents_are_compared() -> None:
    a = {"doc": ["0:x", "1:y"], "acc": [1.0, 1.0], "nll": [1.0, 2.0], "bytes": [4, 4]}
    b = {"doc": ["0:x", "1:y"], "acc": [0.0, 1.0], "nll": [2.0, 2.0], "bytes": [4, 4]}
    found = compare([a], [b], "acc")
    assert found is not None and (found.difference, found.p, found.test, found.n) == (0.5, 1.0, MCNEMAR, 2)
    bits = compare([a], [b], "bits_per_byte")
    assert bits is not None and bits.test == BOOTSTRAP and bits.difference == pytest.approx(-1 / math.log(2) / 8)
    assert compare([a], [b | {"doc": ["0:x", "2:z"]}], "acc") is None
    assert compare([a], [b], "perplexity") is None


def test_bits_per_byte_and_its_standard_error() -> None:
    value, error = bits_per_byte([math.log(2) * 3, math.log(2) * 5], [2, 2])
    assert value == pytest.approx(2.0)
    assert error == pytest.approx(0.5)  # of the mean of 1.5 and 2.5
    assert ratio_of_sums([3.0], [2.0]) == (1.5, None)


def test_chance_is_a_guess_or_the_commonest_answer() -> None:
    assert chance_of([([["a", "b"], ["c", "d", "e", "f"]], [0, 1])]) == 0.375
    fixed = ([["no", "yes"]] * 4, [1, 1, 1, 0])
    assert chance_of([fixed]) == 0.75
    assert chance_of([([["no", "yes"], ["bad", "good"]], [1, 1])]) == 0.5
    assert chance_of([([["no", "yes"]], [1])]) == 0.5, "one answer is common by accident"
    subjects = [([["A", "B", "C", "D"]] * 6, [0, 0, 0, 1, 2, 3]), ([["A", "B", "C", "D"]] * 6, [3, 3, 3, 1, 2, 0])]
    assert chance_of(subjects) == pytest.approx(4 / 12), "each subject has another commonest letter"
    assert chance_of([*subjects, fixed]) == pytest.approx((4 + 3) / 16)


@pytest.mark.parametrize(
    ("value", "stderr", "called"),
    [(0.27, 0.014, "near chance"), (0.28, 0.014, ""), (0.20, 0.012, "below chance"), (0.25, 0.0, "near chance")],
)
def test_what_a_score_is_called(value: float, stderr: float, called: str) -> None:
    assert compare_with_chance(value, stderr, chance=0.25, n=1000) == called


def test_a_perfect_score_on_two_documents_says_nothing() -> None:
    assert compare_with_chance(1.0, 0.0, chance=0.5, n=2) == "near chance"


def test_answers_are_kept_in_the_order_of_documents() -> None:
    def sample(doc_id: int, target: int) -> dict:
        return {
            "doc_id": doc_id,
            "doc_hash": "0123456789",
            "filter": "none",
            "metrics": ["acc"],
            "acc": 1.0,
            "arguments": [("Question", " ä"), ("Question", " bc")],
            "filtered_resps": [(-1.5, False), (-2.5, True)],
            "target": target,
        }

    kept = per_document([sample(1, 1), sample(0, 0)])
    assert kept == {"doc": ["0:01234567", "1:01234567"], "acc": [1.0, 1.0], "nll": [1.5, 2.5], "bytes": [3, 3]}


def evaluated(label: str, acc: list[float], tokens: int = 1000) -> Evaluated:
    value = sum(acc) / len(acc)
    error = math.sqrt(value * (1 - value) / (len(acc) - 1))
    entry = Entry(
        scores={"quiz": {"acc": value, "acc_stderr": error, "n": len(acc)}},
        about={"quiz": {"chance": 0.5, "members": ["quiz"]}},
        shown=["quiz"],
        answers={"quiz": {"doc": [str(i) for i in range(len(acc))], "acc": acc}},
    )
    return Evaluated(Checkpoint(label, Path(label), Path(label), step=10, tokens=tokens), {"quiz": entry})


def test_the_table_says_near_chance_and_names_the_test() -> None:
    good, guess = evaluated("good", [1.0] * 30 + [0.0] * 2), evaluated("guess", [1.0, 0.0] * 16)
    table, notes = table_of("quiz", [good, guess], {"quiz": ["acc", "acc_norm"]}, baseline=guess)
    screen = io.StringIO()
    Console(file=screen, width=120).print(table)
    lines = screen.getvalue().splitlines()
    row = next(line for line in lines if "quiz" in line and "acc" in line)
    assert "0.9375 ± 0.0435" in row and "0.5000 ± 0.0898 near chance" in row and row.count("chance") == 1
    assert any("+0.4375, p = 0.00052" in line for line in lines)  # 15 against 1
    assert any("guess (baseline)" in line for line in lines) and any("step 10, 1k tokens" in line for line in lines)
    assert notes[0].startswith("near chance: within 2 standard errors")
    assert notes[1] == (
        "p: two-sided, against guess, paired by document (McNemar's exact test); not corrected for the number of comparisons"
    )


def test_texts_read_one_document_at_a_time_are_tested_among_themselves() -> None:
    """Do not test losses of documents in other contexts against each other, and say why."""
    apart, also, joined = (evaluated(label, [1.0] * 30 + [0.0] * 2) for label in ("apart", "also", "joined"))
    for each in (apart, also):
        each.entries["quiz"].about["quiz"]["separate_documents"] = True
    row = Row("quiz", "quiz", "acc")
    assert comparison(apart, also, row) and not comparison(apart, joined, row) and not comparison(joined, apart, row)
    _, notes = table_of("quiz", [joined, apart], {"quiz": ["acc"]}, baseline=joined)
    assert notes == table_of("quiz", [joined], {"quiz": ["acc"]}, baseline=apart)[1]
    assert len(notes) == 1 and notes[0].startswith(
        "apart: trained on separate documents, so texts are read one document at"
    )


def test_in_short_there_is_the_first_score_of_each_task() -> None:
    guess = evaluated("guess", [1.0, 0.0] * 16)
    entry = Entry(scores={"text": {"loss": 1.5, "loss_stderr": None, "n": 3}}, about={"text": {}}, shown=["text"])
    both = Evaluated(guess.checkpoint, {**guess.entries, "text": entry})
    show = {"quiz": ["acc_norm", "acc", "n"], "text": ["loss"]}
    assert scores_on_one_line(both, show) == "quiz acc 0.500 ± 0.090 near chance, text loss 1.500"


def test_a_score_that_is_not_there_is_a_dash() -> None:
    assert cell(evaluated("a", [1.0, 0.0]).entries["quiz"], Row("quiz", "quiz", "f1")) == "–"


def test_curves_are_in_the_order_of_training(tmp_path: Path) -> None:
    points = [evaluated("a", [1.0, 1.0, 0.0, 1.0], 3000), evaluated("a", [1.0, 0.0, 0.0, 1.0], 1000)]
    lines = lines_of(points, Row("quiz", "quiz", "acc"), over_tokens=True)
    assert [(place, value) for place, value, _ in lines["a"]] == [(1000, 0.5), (3000, 0.75)]
    draw_curves(points, {"quiz": ["acc"]}, "quiz", tmp_path / "new/curves.png")
    assert (tmp_path / "new/curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("task", "missing", "reason"),
    [
        ("piqa.yaml", "local_jsonl.py", "!function local_jsonl.load"),
        ("hellaswag.yaml", "hellaswag.py", "!function hellaswag.process_docs"),
        ("blimp/passive_1.yaml", "../_blimp_template", "include"),
    ],
)
def test_a_copied_task_names_the_file_that_must_lie_beside_it(
    tmp_path: Path, task: str, missing: str, reason: str
) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    shutil.copy(FILES / "tasks" / task, tasks)
    if task == "hellaswag.yaml":
        shutil.copy(FILES / "tasks/local_jsonl.py", tasks)
    with pytest.raises(SuiteError) as error:
        units_of(options(suite_file(tmp_path, "task_folders: [tasks]\ntasks: [{task: offline_piqa}]"), tmp_path))
    assert str(error.value) == (
        f"{tasks / Path(task).name}: needs {tasks / missing} ({reason}), which is missing; copy "
        f"{FILES / 'tasks' / Path(missing).name} to there"
    )


def test_a_folder_of_tasks_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Else its tasks are sought among the thousands of lm-evaluation-harness's."""
    with pytest.raises(
        SuiteError, match=r"mine.yaml: task_folders has \S+/task, which is no folder; they are relative to"
    ):
        load_suite(suite_file(tmp_path, "task_folders: [task]\ntasks: [{task: mine}]"))


def test_a_task_file_that_includes_itself_is_refused(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.yaml").write_text(f"include: {other}.yaml")
    with pytest.raises(SuiteError, match=r"a\.yaml: includes itself; leave out one include of a\.yaml, b\.yaml"):
        local_tasks([tmp_path])
