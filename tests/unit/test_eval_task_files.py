"""Task files that a suite brings, and what counts as a change of them."""

from __future__ import annotations

import shutil
from pathlib import Path

from llmtrain.eval.units import units_of
from llmtrain.suites import FILES, load_suite, suite_digest
from tests.unit.test_eval import options, suite_file


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
    """Count a file with its functions, too."""
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
