"""What mutants of the mirror showed to be untested."""

from __future__ import annotations

from pathlib import Path

from llmtrain.train.remote import RemoteRun
from tests.unit.test_mirror import ALONE, Machine, steps_at


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
