"""Tests of a run's mirror: URLs that are refused, copies of checkpoints, and copies that fail or hang."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import fsspec
import pytest

from llmtrain.config import CheckpointSection
from llmtrain.errors import RecipeError, TrainingError
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.world import World
from llmtrain.recipe_loader import load_recipe
from llmtrain.run_files import STATE_FILE, complete_checkpoints
from llmtrain.train.checkpoint import Checkpointer
from llmtrain.train.mirror import Mirror, RemoteRun
from llmtrain.train.run_dir import RunDirectory
from tests.unit.test_checkpoint_files import write

ROOT = Path(__file__).resolve().parents[2]
ALONE = SimpleNamespace(
    world=World(0, 1, 0, 1), all_ranks=Comms(None), is_main=True, broadcast_from_main=lambda ask: ask()
)
NUMBERS = itertools.count()


# A path without a protocol is deep here, because the tests below with a single kind of URL have such paths, too.
@pytest.fixture(params=["file", "memory", pytest.param("path", marks=pytest.mark.deep)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "memory":
        name = f"memory://mirror{next(NUMBERS)}"
        yield name
        fsspec.filesystem("memory").rm(name, recursive=True)
    else:
        yield f"file://{tmp_path}/there/" if request.param == "file" else f"{tmp_path}/there"


class Machine:
    """Machine with a disk of its own, and a run on it of which only checkpoints and metrics are written."""

    def __init__(self, disk: Path, url: str | None, *overrides: str):
        keys = [f"run.out_dir={disk}", "run.name=a", "checkpoint.keep=2", f"checkpoint.mirror={url or 'null'}"]
        self.recipe = load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml", [*keys, *overrides])
        self.directory, self.said = RunDirectory(self.recipe), []
        self.mirror = Mirror(self.recipe, self.directory, self.said.append, is_main=True)

    def start(self, newer_than: int = -1) -> Path | None:
        """Do what a run does before its first step, by default without a local checkpoint. Return the fetched checkpoint, if any."""
        self.mirror.open(ALONE)
        self.directory.claim()
        self.mirror.claim(ALONE)
        there = self.mirror.fetch(ALONE, newer_than)
        self.directory.metrics.touch()
        return there

    def save(self, step: int, loss: float | None = None) -> None:
        """Write a checkpoint and metrics up to it, and wait for the copy."""
        self.hand_in(step, loss)
        assert self.mirror.finish(ALONE) is None, self.said

    def hand_in(self, step: int, loss: float | None = None) -> None:
        self.directory.checkpoints.mkdir(exist_ok=True)
        with self.directory.metrics.open("a") as file:
            file.write(f'{{"step": {step}}}\n')
        write(self.directory.checkpoints, step, loss=loss)
        self.mirror.after_checkpoint(step)

    def steps(self) -> list[int]:
        return list(complete_checkpoints(self.directory.checkpoints))


def steps_at(url: str) -> list[int]:
    return RemoteRun(f"{url.rstrip('/')}/a").complete()


def file_at(url: str, step: int, name: str) -> tuple[fsspec.AbstractFileSystem, str]:
    files, root = fsspec.url_to_fs(f"{url.rstrip('/')}/a")
    return files, f"{root}/checkpoints/step-{step:08d}/{name}"


def flip_at(url: str, step: int, name: str) -> None:
    files, path = file_at(url, step, name)
    data = bytearray(files.cat_file(path))
    data[len(data) // 2] ^= 1
    files.pipe_file(path, bytes(data))


def test_another_recipes_mirror_is_refused_as_its_directory_would_be(tmp_path: Path, url: str) -> None:
    Machine(tmp_path / "first", url).start()
    other = Machine(tmp_path / "second", url, "optim.lr=0.5")
    with pytest.raises(RecipeError) as refused:
        other.mirror.open(ALONE)
    assert not other.directory.path.exists()
    other.directory.path.mkdir(parents=True)
    (other.directory.path / "recipe.yaml").write_text((tmp_path / "first/a/recipe.yaml").read_text())
    with pytest.raises(RecipeError) as refused_here:
        other.directory.check_recipe()
    assert str(refused.value) == str(refused_here.value).replace(str(other.directory.path), f"{url.rstrip('/')}/a")
    assert "optim.lr: 0.003 there, 0.5 here" in str(refused.value)
    Machine(tmp_path / "third", url, "checkpoint.every=7").start()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("nosuch://bucket", "Protocol not known: nosuch"),
        ("s3://bucket/runs", "Install s3fs to access S3"),
        ("{folder}/file/below", "File exists|Not a directory"),
        ("file:///proc/nothing/can/be/here", "No such file or directory"),
    ],
)
def test_a_url_that_is_of_no_use_is_one_line_before_training(tmp_path: Path, given: str, reason: str) -> None:
    if given.startswith("s3"):
        try:
            import s3fs  # noqa: F401

            pytest.skip("s3fs is installed")
        except ImportError:
            pass
    (tmp_path / "file").write_text("in the way")
    machine = Machine(tmp_path / "disk", given.format(folder=tmp_path))
    with pytest.raises(RecipeError, match=rf"checkpoint\.mirror: .*/a: .*({reason}).*; expected a .* URL") as refused:
        machine.start()
    assert "\n" not in str(refused.value) and not machine.directory.path.exists()


@pytest.mark.parametrize("where", ["disk", "linked", "file:///disk"])
def test_the_run_s_own_folder_is_no_mirror(tmp_path: Path, where: str) -> None:
    """A copy to this folder would first delete the checkpoint."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "linked").symlink_to("disk")
    url = where.replace("file:///", f"file://{tmp_path}/") if where.startswith("file") else f"{tmp_path}/{where}"
    machine = Machine(tmp_path / "disk", url)
    with pytest.raises(RecipeError, match=rf"checkpoint\.mirror: {url}/a is the run's own folder; give another one"):
        machine.start()
    RemoteRun("memory://disk/a").check_is_apart(Path("/disk/a"))
    RemoteRun(f"{tmp_path}/disk/a").check_is_apart(tmp_path / "disk/b")


def test_a_mirror_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    monkeypatch.setattr(RemoteRun, "check_owner", lambda self, recipe: answer.wait())
    machine = Machine(tmp_path / "disk", f"{tmp_path}/there", "run.timeout_seconds=0.1")
    with pytest.raises(TrainingError, match=r"checkpoint\.mirror: .*/a: no answer for 0\.1 s \(run\.timeout_seconds\)"):
        machine.start()
    answer.set()


@pytest.mark.parametrize("error", [OSError(errno.ETIMEDOUT, "Connection timed out"), RuntimeError("503 Slow Down")])
def test_a_mirror_that_can_not_be_reached_now_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Launchers start a run again after a TrainingError."""
    monkeypatch.setattr(RemoteRun, "check_owner", Mock(side_effect=error))
    with pytest.raises(TrainingError, match=r"checkpoint\.mirror: .*/a: .*(timed out|Slow Down).*; start the same"):
        Machine(tmp_path / "disk", f"{tmp_path}/there").start()


class Held:
    """Copies that wait until the test releases them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.go, self.begun = threading.Semaphore(0), threading.Semaphore(0)
        upload = RemoteRun.upload

        def held(remote: RemoteRun, checkpoint: Path, step: int, metrics: Path) -> None:
            self.begun.release()
            assert self.go.acquire(timeout=30)
            upload(remote, checkpoint, step, metrics)

        monkeypatch.setattr(RemoteRun, "upload", held)


def test_the_newest_goes_next_and_none_on_its_way_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, there = Held(monkeypatch), f"{tmp_path}/there"
    machine = Machine(tmp_path / "disk", there, "checkpoint.keep=1")
    machine.start()
    section = CheckpointSection(keep=1)
    checkpoints = Checkpointer(machine.directory.checkpoints, None, None, None, section, 1.0)
    checkpoints.followers.append(machine.mirror)
    machine.hand_in(10)
    assert held.begun.acquire(timeout=30)
    for step in (20, 30, 40):
        machine.hand_in(step)
        checkpoints._prune(step)
    assert machine.steps() == [10, 40], "10 is being copied, 40 is the newest"
    assert machine.mirror.worker.pending_steps() == {10, 40}
    assert [line for line in machine.said if "not copied" in line] == [
        f"step {left_out} is not copied to {there}/a: step 10 is still being copied, and step {step} is next"
        for left_out, step in ((20, 30), (30, 40))
    ]
    held.go.release(2)
    assert machine.mirror.finish(ALONE) is None
    assert machine.mirror.worker.pending_steps() == set()
    assert steps_at(there) == [40] and machine.mirror.newest == 40


def test_a_copy_that_fails_is_a_line_and_the_next_one_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = f"{tmp_path}/there"
    machine = Machine(tmp_path / "disk", there)
    machine.start()
    put_whole = RemoteRun._put_file

    def broken(self: RemoteRun, here: Path, path: str) -> None:
        if here.name == STATE_FILE:
            raise OSError("the network is\ngone")
        put_whole(self, here, path)

    monkeypatch.setattr(RemoteRun, "_put_file", broken)
    machine.hand_in(10)
    lacking = machine.mirror.finish(ALONE)
    assert machine.said[-1] == (
        f"step 10 could not be copied to {there}/a: the network is gone; training continues, and the next checkpoint is tried again"
    )
    assert lacking == (
        f"step 10 could not be copied to {there}/a: the network is gone; it is complete in {machine.directory.checkpoints}, "
        "start the same command again to copy it"
    )
    assert steps_at(there) == [] and os.listdir(f"{there}/a/checkpoints") == ["step-00000010"], "step 10 is half copied"
    assert Machine(tmp_path / "other", there).start() is None, "a half copied checkpoint is not fetched"
    monkeypatch.undo()
    machine.save(20)
    assert os.listdir(f"{there}/a/checkpoints") == ["step-00000020"], "the half copied one is deleted"


def test_a_copy_that_hangs_is_waited_for_until_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, there = Held(monkeypatch), f"{tmp_path}/there"
    machine = Machine(tmp_path / "disk", there)
    machine.start()
    machine.mirror.timeout_seconds = 0.2
    machine.hand_in(10)
    assert machine.mirror.finish(ALONE) == (
        f"step 10 was not copied to {there}/a within 0.2 s (run.timeout_seconds); it is complete in "
        f"{machine.directory.checkpoints}, start the same command again to copy it"
    )
    missing = machine.mirror.finish(ALONE, is_stopped=True)
    assert missing is not None and missing.startswith(f"step 10 was not copied to {there}/a within 0.1 s; "), missing
    held.go.release()
    machine.mirror.worker.join(30)


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


def test_a_wait_for_the_last_copy_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path / "disk", f"file://{tmp_path}/there")
    machine.start()
    answers = iter([True, True, True, False])
    monkeypatch.setattr(machine.mirror, "_is_busy", lambda deadline: next(answers))
    assert machine.mirror.finish(ALONE) is None
    assert [line.partition(" to ")[0] for line in machine.said] == ["waiting for the copy"]


def test_the_mirror_keeps_what_the_disk_keeps(tmp_path: Path, url: str) -> None:
    machine = Machine(tmp_path / "disk", url, "checkpoint.keep_every=30")
    machine.start()
    section = machine.recipe.checkpoint
    checkpoints = Checkpointer(machine.directory.checkpoints, None, None, None, section, 1.0)
    checkpoints.followers.append(machine.mirror)
    for step in range(10, 80, 10):
        machine.save(step)
        checkpoints._prune(step)
        assert steps_at(url) == machine.steps()
    assert machine.steps() == [30, 60, 70]


def test_without_a_mirror_nothing_is_asked_of_anybody(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "disk", None)
    mesh = SimpleNamespace(world=ALONE.world, is_main=True)  # no broadcast_from_main
    machine.mirror.open(mesh)
    machine.mirror.claim(mesh)
    assert machine.mirror.fetch(mesh, -1) is None and machine.mirror.finish(mesh) is None
    machine.mirror.after_checkpoint(10)
    machine.mirror.upload_at_start(None)
    assert machine.mirror.newest is None and machine.mirror.worker.pending_steps() == set() and machine.said == []
