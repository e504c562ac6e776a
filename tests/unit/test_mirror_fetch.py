"""Tests of fetching from a mirror: the newest valid checkpoint, unless the disk has it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain.errors import CheckpointError, NewerFormatError, RecipeError
from llmtrain.train import mirror
from llmtrain.train.checkpoint_files import FORMAT, STATE_FILE, find_corruption, read_state
from llmtrain.train.mirror import RemoteRun
from llmtrain.train.run import _newest_checkpoint
from tests.unit.test_checkpoint_files import flip, write
from tests.unit.test_mirror import ALONE, Machine, file_at, flip_at, steps_at, url

__all__ = ["url"]  # the fixture


def test_what_was_copied_comes_back_on_an_empty_machine(tmp_path: Path, url: str) -> None:
    first = Machine(tmp_path / "first", url)
    assert first.start() is None
    for step in (10, 20):
        first.save(step)
    assert [line.partition(" (in ")[0] for line in first.said] == [
        f"copied to {url.rstrip('/')}/a/checkpoints/step-{step:08d}" for step in (10, 20)
    ]
    second = Machine(tmp_path / "second", url)
    there = second.start()
    assert there == second.directory.checkpoints / "step-00000020" and second.steps() == [20]
    here = first.directory.checkpoints / "step-00000020"
    assert {path.name: path.read_bytes() for path in there.iterdir()} == {
        path.name: path.read_bytes() for path in here.iterdir()
    }
    assert second.directory.metrics.read_text() == first.directory.metrics.read_text() == '{"step": 10}\n{"step": 20}\n'
    assert (second.directory.checkpoints / "latest").read_text() == "step-00000020\n"
    assert second.said == [f"fetched {url.rstrip('/')}/a/checkpoints/step-00000020"]
    assert sorted(path.name for path in second.directory.checkpoints.iterdir()) == ["latest", "step-00000020"]
    second.mirror.upload_at_start(there)
    assert second.mirror.finish(ALONE) is None and len(second.said) == 1, "the mirror has it already"
    second.save(30)
    assert steps_at(url) == [20, 30]


def test_a_disk_that_has_the_newest_fetches_nothing_and_copies_what_is_missing(tmp_path: Path, url: str) -> None:
    machine = Machine(tmp_path / "disk", url)
    machine.start()
    machine.save(10)
    write(machine.directory.checkpoints, 20)  # the run was killed before the copy began
    again = Machine(tmp_path / "disk", url)
    again.mirror.open(ALONE)
    assert again.mirror.fetch(ALONE, newer_than=20) is None and steps_at(url) == [10]
    again.mirror.upload_at_start(again.directory.checkpoints / "step-00000020")
    assert again.mirror.finish(ALONE) is None
    assert steps_at(url) == [10, 20] and again.mirror.newest == 20


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda url: flip_at(url, 20, "__0_0.distcp"), "__0_0.distcp is not what was written: its digest differs"),
        (lambda url: flip_at(url, 20, STATE_FILE), "state.json "),
        (lambda url: (lambda files, path: files.rm(path))(*file_at(url, 20, ".metadata")), ".metadata is gone"),
        (
            lambda url: (lambda files, path: files.pipe_file(path, b"short"))(*file_at(url, 20, "__0_0.distcp")),
            "__0_0.distcp has 5 bytes, ",
        ),
    ],
    ids=["a bit", "a bit of state.json", "gone", "cut off"],
)
def test_damage_in_the_mirror_is_named_and_the_one_before_is_taken(
    tmp_path: Path, url: str, damage, problem: str
) -> None:
    first = Machine(tmp_path / "first", url)
    first.start()
    for step in (10, 20):
        first.save(step)
    damage(url)
    second = Machine(tmp_path / "second", url)
    there = second.start()
    assert there == second.directory.checkpoints / "step-00000010"
    assert find_corruption(there, read_state(there)["files"]) is None
    line, fetched = second.said
    assert line.startswith(f"{url.rstrip('/')}/a/checkpoints/step-00000020 is damaged: {problem}"), line
    assert line.endswith("; falling back to the previous one") and "\n" not in line
    assert fetched.endswith("step-00000010")
    second.save(20)  # trained again, it replaces the damaged one
    assert Machine(tmp_path / "third", url).start().name == "step-00000020"


def test_where_all_in_the_mirror_are_damaged_nothing_is_trained_anew(tmp_path: Path, url: str) -> None:
    first = Machine(tmp_path / "first", url)
    first.start()
    for step in (10, 20):
        first.save(step)
        flip_at(url, step, "__0_0.distcp")
    second = Machine(tmp_path / "second", url)
    with pytest.raises(
        CheckpointError,
        match=r"step-00000010 is damaged: .*; none of the 2 checkpoints is valid; restore one, or delete",
    ):
        second.start()
    assert second.steps() == [] and not list(second.directory.checkpoints.iterdir())
    assert second.mirror.fetch(ALONE, newer_than=5) is None, "the disk has an older checkpoint, which is enough"


def test_a_download_may_take_longer_than_the_timeout_as_long_as_bytes_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = f"{tmp_path}/there"
    first = Machine(tmp_path / "first", there)
    first.start()
    first.save(10)
    download, clock = RemoteRun.download, Clock()
    monkeypatch.setattr("llmtrain.train.rank_errors.time", clock)

    def slowly(self: RemoteRun, step: int, here: Path) -> object:
        for part in range(4):
            (here / "growing").write_bytes(bytes(part + 1))
            clock.is_looked_at(2)  # the first look may have counted the bytes before this write
            clock.now += 0.06
        (here / "growing").unlink()
        return download(self, step, here)

    monkeypatch.setattr(RemoteRun, "download", slowly)
    second = Machine(tmp_path / "second", there, "run.timeout_seconds=0.1")
    assert second.start() is not None and clock.now == pytest.approx(0.24)


class Clock:
    """Clock that replaces `time` and that the test moves."""

    def __init__(self) -> None:
        self.now, self._looks = 0.0, threading.Semaphore(0)

    def monotonic(self) -> float:
        self._looks.release()
        return self.now

    def is_looked_at(self, times: int) -> None:
        """Wait until the clock has been read that many times from now on."""
        while self._looks.acquire(blocking=False):
            pass
        for _ in range(times):
            assert self._looks.acquire(timeout=30)


def test_a_damaged_local_copy_makes_way_for_the_mirrors(tmp_path: Path, url: str) -> None:
    machine = Machine(tmp_path / "disk", url)
    machine.start()
    for step in (10, 20):
        machine.save(step)
    here = machine.directory.checkpoints / "step-00000020"
    flip(here / "__0_0.distcp")
    again = Machine(tmp_path / "disk", url)
    again.mirror.open(ALONE)
    assert again.mirror.fetch(ALONE, newer_than=10) == here
    assert find_corruption(here, read_state(here)["files"]) is None


def test_what_is_on_the_disk_is_not_fetched_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "disk", f"file://{tmp_path}/there")
    machine.start()
    machine.save(10)
    assert machine.mirror.fetch(ALONE, newer_than=10) is None
    assert not [line for line in machine.said if line.startswith("fetched")]


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
    second.mirror.upload_at_start(second.directory.checkpoints / "step-00000015")
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


def newest_of(machine: Machine) -> Path | None:
    """Return the checkpoint from which a run of this machine continues."""
    console = SimpleNamespace(print=machine.said.append)
    run = SimpleNamespace(directory=machine.directory, mirror=machine.mirror, mesh=ALONE, console=console)
    return _newest_checkpoint(run)


def test_a_newer_versions_checkpoint_is_not_given_up_for_an_older_one_of_the_mirror(tmp_path: Path) -> None:
    """The mirror lacks the newer version's checkpoint, as if its copy was cut short when the run was stopped."""
    machine = Machine(tmp_path / "disk", f"file://{tmp_path}/there")
    machine.start()
    machine.save(10)
    write(machine.directory.checkpoints, 20)
    state = machine.directory.checkpoints / "step-00000020" / STATE_FILE
    state.write_text(f'{{"format": {FORMAT + 1}}}')
    with pytest.raises(NewerFormatError, match="step-00000020 has format"):
        newest_of(machine)
    state.write_text("{")
    assert newest_of(machine).name == "step-00000010", "a damaged checkpoint is given up"


def test_a_finished_run_without_checkpoints_does_not_begin_anew_for_an_empty_mirror(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "disk", f"file://{tmp_path}/there")
    machine.start()
    assert newest_of(machine) is None
    steps = machine.recipe.train.total_steps
    machine.directory.write_summary({"stopped": "done", "steps": steps - 1})
    machine.directory.check_recipe()  # does not look into the mirror
    with pytest.raises(
        RecipeError, match=f"a is complete after {steps - 1} steps, but has no checkpoint to continue from"
    ):
        newest_of(machine)


def test_only_the_main_rank_removes_what_it_fetched_in_vain(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there"
    damaged_at_20(tmp_path / "first", url)
    second = Machine(tmp_path / "second", url)
    second.mirror.open(ALONE)
    second.directory.claim()
    second.mirror.is_main = False
    there = second.mirror.fetch(ALONE, newer_than=-1)
    assert there is not None and there.name == "step-00000010"


def test_a_mirror_without_metrics_leaves_those_of_the_disk(tmp_path: Path) -> None:
    here = tmp_path / "metrics.jsonl"
    here.write_text("{}\n")
    (tmp_path / "there").mkdir()
    RemoteRun(f"{tmp_path}/there").download_metrics(here)
    assert here.read_text() == "{}\n" and list(tmp_path.glob("*.tmp")) == []
