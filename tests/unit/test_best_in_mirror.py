"""Tests of the best checkpoint in a mirror: it is kept there, and copied even if newer checkpoints went first."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain.train.mirror import RemoteRun
from tests.unit.test_checkpoint_files import write
from tests.unit.test_mirror import ALONE, Machine, file_at, steps_at


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/there"


def test_a_mirror_keeps_the_best_also_for_a_machine_that_lacks_it(tmp_path: Path, url: str) -> None:
    first = Machine(tmp_path / "first", url)
    first.start()
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 2.5), (50, None)):
        first.save(step, loss)
    assert steps_at(url) == [20, 40, 50]
    second = Machine(tmp_path / "second", url)
    assert second.start().name == "step-00000050" and second.steps() == [50]
    for step, loss in ((60, 1.5), (70, 1.6), (80, 1.7)):
        second.save(step, loss)
    assert steps_at(url) == [20, 70, 80], "the best checkpoint on this machine is worse than the best in the mirror"
    second.save(90, 0.5)
    second.save(100, 0.9)
    second.save(110, 0.8)
    assert steps_at(url) == [90, 100, 110]


def test_without_the_key_the_newest_stay_alone(tmp_path: Path, url: str) -> None:
    machine = Machine(tmp_path / "disk", url, "checkpoint.keep_best=false")
    machine.start()
    for step, loss in ((10, 1.0), (20, 2.0), (30, 3.0)):
        machine.save(step, loss)
    assert steps_at(url) == [20, 30]


def test_a_best_that_was_passed_over_is_copied_with_the_next(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, upload = Machine(tmp_path / "disk", url), RemoteRun.upload
    machine.start()
    machine.save(10, 3.0)
    write(machine.directory.checkpoints, 20, loss=1.0)  # completed during a copy, then passed over for a newer one
    write(machine.directory.checkpoints, 90, loss=0.1)  # of steps that have been trained again since
    pinned = []

    def recorded(self: RemoteRun, checkpoint: Path, step: int, metrics: Path) -> None:
        pinned.append(machine.mirror.pending_steps())
        upload(self, checkpoint, step, metrics)

    monkeypatch.setattr(RemoteRun, "upload", recorded)
    machine.save(30, 2.0)
    assert pinned == [{30}, {30, 20}], "a checkpoint is protected from deletion while it is copied"
    machine.save(40, 2.0)
    assert steps_at(url) == [20, 30, 40] and machine.mirror.pending_steps() == set()


def test_a_checkpoint_trained_again_has_its_new_loss(tmp_path: Path, url: str) -> None:
    machine = Machine(tmp_path / "disk", url)
    machine.start()
    for step, loss in ((10, 3.0), (20, 1.0)):
        machine.save(step, loss)
    machine.save(20, 5.0)
    for step in (30, 40):
        machine.save(step, 4.0)
    assert steps_at(url) == [10, 30, 40]


def test_a_best_that_is_damaged_in_the_mirror_is_copied_again(tmp_path: Path, url: str) -> None:
    machine = Machine(tmp_path / "disk", url)
    machine.start()
    machine.save(10, 1.0)
    files, path = file_at(url, 10, "state.json")
    files.pipe_file(path, b"{")
    again = Machine(tmp_path / "disk", url)
    again.mirror.open(ALONE)
    for step in (20, 30, 40):
        again.save(step, 2.0 + step)
    assert steps_at(url) == [10, 30, 40]


def test_a_best_that_is_not_copied_at_the_end_is_said_and_copied_by_the_next_start(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, upload = Machine(tmp_path / "disk", url), RemoteRun.upload
    machine.start()
    machine.directory.checkpoints.mkdir()
    write(machine.directory.checkpoints, 20, loss=1.0)

    def recorded(self: RemoteRun, checkpoint: Path, step: int, metrics: Path) -> None:
        if step == 20:
            raise OSError("the network is gone")
        upload(self, checkpoint, step, metrics)

    monkeypatch.setattr(RemoteRun, "upload", recorded)
    machine.hand_in(30, 2.0)
    missing = machine.mirror.finish(ALONE)
    assert missing.startswith(
        f"the best checkpoint could not be copied to {url}/a: the network is gone; it is complete"
    )
    monkeypatch.undo()
    again = Machine(tmp_path / "disk", url)
    again.mirror.open(ALONE)
    again.mirror.fetch(ALONE, newer_than=30)
    again.mirror.upload_at_start(again.directory.checkpoints / "step-00000030")
    assert again.mirror.finish(ALONE) is None and again.mirror.newest == 30
    assert steps_at(url) == [20, 30] and len(again.said) == 1, "only the best is copied"


def test_a_later_checkpoint_of_the_mirror_from_before_a_run_went_back_is_not_the_best(tmp_path: Path, url: str) -> None:
    first = Machine(tmp_path / "first", url)
    first.start()
    first.save(40, 0.5)
    second = Machine(tmp_path / "second", url)
    second.start(newer_than=40)
    second.directory.checkpoints.mkdir()
    write(second.directory.checkpoints, 10, loss=1.0)
    second.save(20, 2.0)
    assert steps_at(url) == [10, 20, 40]
