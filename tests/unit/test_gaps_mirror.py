"""What mutants of the mirror showed to be untested."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.errors import NewerFormatError
from llmtrain.train import mirror
from llmtrain.train.mirror import RemoteRun
from tests.unit.test_checkpoint_files import write
from tests.unit.test_mirror import ALONE, Machine, flip_at, steps_at


def test_what_is_on_the_disk_is_not_fetched_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "disk", f"file://{tmp_path}/there")
    machine.start()
    machine.save(10)
    assert machine.mirror.fetch(ALONE, newer_than=10) is None
    assert not [line for line in machine.said if line.startswith("fetched")]


def test_the_last_copy_is_missed_though_there_is_an_older_one(tmp_path: Path, monkeypatch) -> None:
    url = f"file://{tmp_path}/there"
    machine = Machine(tmp_path / "disk", url)
    machine.start()
    machine.save(10)

    def refuse(*_) -> None:
        raise OSError("no room")

    monkeypatch.setattr(RemoteRun, "upload", refuse)
    machine.hand_in(20)
    missing = machine.mirror.finish(ALONE)
    assert missing is not None and missing.startswith("step 20 could not be copied")
    assert steps_at(url) == [10]


def damaged_at_20(disk: Path, url: str) -> None:
    """Fill the mirror with a checkpoint of step 10 and a damaged one of step 20."""
    machine = Machine(disk, url)
    machine.start()
    for step in (10, 20):
        machine.save(step)
    flip_at(url, 20, "__0_0.distcp")


def test_a_local_checkpoint_older_than_a_damaged_one_of_the_mirror_is_copied(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there"
    damaged_at_20(tmp_path / "first", url)
    second = Machine(tmp_path / "second", url)
    assert second.start(newer_than=15) is None
    second.directory.checkpoints.mkdir(exist_ok=True)
    write(second.directory.checkpoints, 15)
    second.mirror.upload_if_newer(second.directory.checkpoints / "step-00000015")
    assert second.mirror.finish(ALONE) is None, second.said
    assert Machine(tmp_path / "third", url).start().name == "step-00000015"


def test_a_checkpoint_of_a_newer_version_is_not_taken_for_a_damaged_one(tmp_path: Path, monkeypatch) -> None:
    url = f"file://{tmp_path}/there"
    first = Machine(tmp_path / "first", url)
    first.start()
    first.save(10)

    def refuse(folder: Path) -> None:
        raise NewerFormatError(f"{folder} is of a newer version")

    monkeypatch.setattr(mirror, "read_state", refuse)
    with pytest.raises(NewerFormatError):
        Machine(tmp_path / "second", url).start()


def test_only_the_main_rank_removes_what_it_fetched_in_vain(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there"
    damaged_at_20(tmp_path / "first", url)
    second = Machine(tmp_path / "second", url)
    second.mirror.open(ALONE)
    second.directory.open()
    second.mirror.is_main = False
    there = second.mirror.fetch(ALONE, newer_than=-1)
    assert there is not None and there.name == "step-00000010"


def test_a_wait_for_the_last_copy_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path / "disk", f"file://{tmp_path}/there")
    machine.start()
    answers = iter([True, True, True, False])
    monkeypatch.setattr(machine.mirror, "_is_busy", lambda deadline: next(answers))
    assert machine.mirror.finish(ALONE) is None
    assert [line.partition(" to ")[0] for line in machine.said] == ["waiting for the copy"]


def test_a_mirror_without_metrics_leaves_those_of_the_disk(tmp_path: Path) -> None:
    here = tmp_path / "metrics.jsonl"
    here.write_text("{}\n")
    (tmp_path / "there").mkdir()
    RemoteRun(f"{tmp_path}/there").download_metrics(here)
    assert here.read_text() == "{}\n" and list(tmp_path.glob("*.tmp")) == []
