"""Tests of suites and their task files: which suites there are, what is refused, and what counts as a change."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

import pytest

from llmtrain.config import SuiteSection
from llmtrain.errors import DataError, SuiteError, UserError
from llmtrain.eval.units import units_of
from llmtrain.suites import (
    FILES,
    check_suite,
    check_suite_data,
    harness_version,
    load_suite,
    suite_digest,
    suite_names,
)
from llmtrain.task_files import digest_of, local_tasks
from tests.unit.test_eval_units import options

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


def test_the_repository_has_these_suites_and_tasks() -> None:
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
        ("tasks: [{task: piqa}, {task: piqa}]", "piqa is listed twice; leave one out, or put it into another suite"),
        (
            "{texts: [{name: samples, file: a.txt}], samples: {prompts: [Once]}}",
            "samples is listed twice; leave one out, or put it into another suite",
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


def test_a_file_of_another_kind_is_refused_with_what_a_suite_is(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Once upon a time")
    with pytest.raises(
        SuiteError, match=r"^--suite .*/text\.txt: this file is not a suite; give a file that ends in \.yaml and"
    ):
        load_suite(str(tmp_path / "text.txt"))


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
        f"{FILES / 'tasks' / Path(missing).name} there"
    )


def test_a_folder_of_tasks_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Without this error, its tasks would be looked up among the thousands of lm-evaluation-harness."""
    with pytest.raises(
        SuiteError, match=r"mine.yaml: task_folders has \S+/task, which is not a folder; they are relative to"
    ):
        load_suite(suite_file(tmp_path, "task_folders: [task]\ntasks: [{task: mine}]"))


def test_a_task_file_that_includes_itself_is_refused(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.yaml").write_text(f"include: {other}.yaml")
    with pytest.raises(SuiteError, match=r"a\.yaml: includes itself; leave out one include of a\.yaml, b\.yaml"):
        local_tasks([tmp_path])


def test_a_suite_with_its_folder_needs_no_data_before_training() -> None:
    check_suite(SuiteSection(name="offline", data_dir="/nowhere"))
    check_suite(SuiteSection(name="small"))  # reads no local data
    with pytest.raises(DataError, match=r"give the folder that has it with eval\.suite\.data_dir"):
        check_suite(SuiteSection(name="offline"))


def test_a_suite_of_texts_needs_no_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr("llmtrain.suites.harness_version", lambda: pytest.fail("the harness is not needed"))
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


def test_a_task_file_changes_what_it_includes(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("task: base\ndataset_kwargs: {file: of_base.txt}")
    (tmp_path / "own.yaml").write_text("include: base.yaml\ntask: own\ndataset_kwargs: {file: its_own.txt}")
    tasks = local_tasks([tmp_path])
    assert {name: task.files for name, task in tasks.items()} == {"base": ("of_base.txt",), "own": ("its_own.txt",)}


def test_groups_and_tags_read_what_their_members_read(tmp_path: Path) -> None:
    """Settings of groups and members apply as in lm-evaluation-harness. Its own tasks are told from inline ones."""
    files = {
        "quiz": "task: quiz\ntag: [mine, other]\ndataset_kwargs: {file: quiz.jsonl}",
        "plain": "task: plain\ntag: mine",
        "of_group": "group: of_group\ntask: [{task: quiz, dataset_kwargs: {file: b.jsonl}}, mine]",
        "outer": "group: outer\ndataset_kwargs: {file: c.jsonl}\ntask: [of_group, {group: in, task: [plain]}]",
        "inline": "group: inline\ntask: [{task: new, dataset_path: json, dataset_kwargs: {file: a.jsonl}}]",
        "far": "group: far\ntask: [arc_easy, {task: piqa, num_fewshot: 5}, quiz]",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    found = local_tasks([tmp_path])
    assert {name: task.files for name, task in found.items()} == {
        **{name: ("quiz.jsonl",) for name in ("quiz", "mine", "other", "far")},
        **{"plain": (), "of_group": ("b.jsonl", "quiz.jsonl"), "outer": ("b.jsonl", "c.jsonl"), "inline": ("a.jsonl",)},
    }
    assert {name: task.elsewhere for name, task in found.items() if task.elsewhere} == {"far": ("arc_easy", "piqa")}
    assert [name for name, task in found.items() if not task.is_complete] == ["far", "inline"]
    (tmp_path / "far.yaml").write_text("group: far\ntask: [{group: near, task: [far]}]")
    with pytest.raises(SuiteError, match="task far: is a member of itself; leave it out of its group"):
        local_tasks([tmp_path])


def test_task_files_of_the_harness_are_accepted(tmp_path: Path) -> None:
    """A task file may have several includes, of which the last one counts, and functions of subfolders and installed packages."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/utils.py").write_text("")
    (tmp_path / "a").write_text("dataset_kwargs: {file: a.jsonl}\ndoc_to_text: !function sub.utils.text")
    (tmp_path / "b").write_text("dataset_kwargs: {file: b.jsonl}")
    text = "include: [a, b]\ntask: quiz\nprocess_docs: !function json.decoder.scan\n"
    (tmp_path / "quiz.yaml").write_text(text)
    assert local_tasks([tmp_path])["quiz"].files == ("b.jsonl",)
    digest = digest_of([tmp_path / "sub", tmp_path])
    (tmp_path / "b").write_text("dataset_kwargs: {file: c.jsonl}")
    assert digest_of([tmp_path / "sub", tmp_path]) != digest
    for wrong in ("quiz.text", "code.text", "sub.other.text", "json.other.text", "code.text.text", ".text", "text"):
        (tmp_path / "quiz.yaml").write_text(f"{text}doc_to_text: !function {wrong}")
        with pytest.raises(SuiteError, match=r"which is missing; copy it from the source of the task file"):
            local_tasks([tmp_path])


def test_a_suite_may_bring_its_own_tasks(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    shutil.copy(FILES / "tasks/local_jsonl.py", tmp_path / "tasks")
    text = (FILES / "tasks/piqa.yaml").read_text().replace("offline_piqa", "mine")
    (tmp_path / "tasks/mine.yaml").write_text(text)
    (tmp_path / "piqa").mkdir()
    (tmp_path / "piqa/validation.jsonl").write_text("{}\n")
    unit = units_of(options(suite_file(tmp_path, "task_folders: [tasks]\ntasks: [{task: mine}]"), tmp_path))[0]
    assert unit.name == "mine" and list(unit.key["data"]) == ["piqa/validation.jsonl"]
    (tmp_path / "tasks/mine.yaml").write_text(text + "description: 'Think.'\n")
    again = units_of(options(suite_file(tmp_path, "task_folders: [tasks]\ntasks: [{task: mine}]"), tmp_path))[0]
    assert again.key["task_files"] != unit.key["task_files"]


def test_a_changed_file_that_a_task_includes_from_elsewhere_is_another_task(tmp_path: Path) -> None:
    """A file with functions that the task uses counts, too."""
    (tmp_path / "tasks").mkdir()
    shutil.copy(FILES / "tasks/local_jsonl.py", tmp_path)
    text = (FILES / "tasks/piqa.yaml").read_text().replace("offline_piqa", "mine")
    template, code = tmp_path / "_template", tmp_path / "local_jsonl.py"
    template.write_text(text)
    (tmp_path / "tasks/mine.yaml").write_text("include: ../_template\n")
    (tmp_path / "piqa").mkdir()
    (tmp_path / "piqa/validation.jsonl").write_text("{}\n")
    suite = suite_file(tmp_path, "task_folders: [tasks]\ntasks: [{task: mine}]")
    keys = [units_of(options(suite, tmp_path))[0].key["task_files"]]
    for path in (template, code):
        path.write_text(path.read_text() + "# changed\n")
        keys.append(units_of(options(suite, tmp_path))[0].key["task_files"])
    assert len(set(keys)) == 3
    _, section, folders = load_suite(suite)
    assert suite_digest(section, folders) != suite_digest(section.model_copy(update={"batch_size": 7}), folders)
