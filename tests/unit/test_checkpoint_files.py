"""Tests of writing checkpoints, and of finding them later: complete, damaged, or missing."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from llmtrain.errors import CheckpointError, TrainingError
from llmtrain.files import LOCK_HOLDER
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.world import World
from llmtrain.run_files import STATE_FILE, complete_checkpoints
from llmtrain.train import checkpoint_files
from llmtrain.train.checkpoint_files import (
    FORMAT,
    CheckpointWriter,
    digests,
    find_corruption,
    latest_valid,
    read_state,
    share_of,
)

ALONE = SimpleNamespace(world=World(0, 1, 0, 1), all_ranks=Comms(None), broadcast_from_main=lambda ask: ask())


def write(folder: Path, step: int, numbers: int = 1000, loss: float | None = None) -> CheckpointWriter:
    """Write a checkpoint. With a `loss`, its state says that its step was validated."""
    validated = {"last_eval": {"loss": loss, "tokens": 100}, "last_evaluated": step}
    writing = CheckpointWriter(
        folder / f"step-{step:08d}",
        {"w": torch.full((numbers,), float(step))},
        {"format": FORMAT, "step": step},
        {"tokens": step * 10, **(validated if loss is not None else {})},
        Comms(None),
        lambda: None,
    )
    writing.start(in_thread=True)
    writing.wait(30)
    return writing


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Provide a folder with checkpoints of steps 10 and 20."""
    for step in (10, 20):
        write(tmp_path, step)
    return tmp_path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    said: list[str] = []
    return latest_valid(folder, ALONE, said.append), said


def test_what_is_written_is_whole_and_latest(folder: Path) -> None:
    state = read_state(folder / "step-00000020")
    assert state["step"] == 20 and state["ranks"] == [{"tokens": 200}]
    assert sorted(state["files"]) == [".metadata", "__0_0.distcp"]
    assert find_corruption(folder / "step-00000020", state["files"]) is None
    assert (folder / "latest").read_text() == "step-00000020\n"
    assert not list(folder.glob("*.tmp"))
    assert newest(folder) == (folder / "step-00000020", [])


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda path: flip(path / "__0_0.distcp"), "__0_0.distcp is not what was written: its digest differs"),
        (lambda path: os.truncate(path / "__0_0.distcp", 100), r"__0_0.distcp has 100 bytes, \d+ were written"),
        (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp is gone"),
        (lambda path: flip(path / ".metadata"), ".metadata is not what was written"),
        (lambda path: (path / STATE_FILE).write_text("{"), "state.json can't be read"),
        (
            lambda path: (path / STATE_FILE).write_text(
                (path / STATE_FILE).read_text().replace('"tokens": 200', '"tokens": 201')
            ),
            "state.json is not what was written",
        ),
    ],
    ids=["a bit", "cut off", "gone", "metadata", "state cut off", "state changed"],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(folder: Path, damage, problem: str) -> None:
    damage(folder / "step-00000020")
    path, said = newest(folder)
    assert path == folder / "step-00000010"
    [line] = said
    assert line.startswith(f"{folder}/step-00000020 is damaged: ") and line.endswith(
        "; falling back to the previous one"
    )
    assert re.search(problem, line)


@pytest.mark.parametrize(("name", "number"), [("__0_0.distcp", errno.ENOTCONN), (STATE_FILE, errno.ESTALE)])
def test_a_file_that_can_not_be_read_now_is_not_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    def fail(path: Path, *_: object) -> None:
        if path.name == name and path.parent.name == "step-00000020":
            raise OSError(number, "no answer")

    read, digest = Path.read_text, checkpoint_files._xxh3
    monkeypatch.setattr(Path, "read_text", lambda path, **given: fail(path) or read(path, **given))
    monkeypatch.setattr(checkpoint_files, "_xxh3", lambda path: fail(path) or digest(path))
    monkeypatch.setattr(checkpoint_files, "time", SimpleNamespace(sleep=pytest.fail))
    with pytest.raises(TrainingError, match=rf"step-00000020/{name} can't be read now \(no answer\); start the same"):
        newest(folder)


@pytest.mark.parametrize("name", ["__0_0.distcp", STATE_FILE])
@pytest.mark.parametrize(("errors", "step"), [(1, 20), (3, 20), (4, 10)])
def test_a_file_with_an_io_error_is_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, errors: int, step: int
) -> None:
    """A passing error must not count as damage, because a damaged checkpoint is set aside for good."""
    left, slept = [OSError(errno.EIO, "Input/output error")] * errors, []

    def fail(path: Path) -> None:
        if path.name == name and path.parent.name == "step-00000020" and left:
            raise left.pop()

    read, digest = Path.read_text, checkpoint_files._xxh3
    monkeypatch.setattr(Path, "read_text", lambda path, **given: fail(path) or read(path, **given))
    monkeypatch.setattr(checkpoint_files, "_xxh3", lambda path: fail(path) or digest(path))
    monkeypatch.setattr(checkpoint_files, "time", SimpleNamespace(sleep=slept.append))
    path, said = newest(folder)
    assert path == folder / f"step-{step:08d}" and len(said) == (step == 10)
    assert slept == list(checkpoint_files.RETRY_PAUSES[:errors])


def test_a_checkpoints_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    size = (tmp_path / "weights").stat().st_size
    assert find_corruption(tmp_path, {"weights": (size, "0")}) == "weights can't be read (Is a directory)"


def test_a_checkpoint_of_a_newer_version_is_not_damaged(folder: Path) -> None:
    where = folder / "step-00000020" / STATE_FILE
    state = json.loads(where.read_text())
    where.write_text(json.dumps(state | {"format": FORMAT + 1}))
    with pytest.raises(
        CheckpointError, match=f"step-00000020 has format {FORMAT + 1}, .*; use the version that wrote it"
    ):
        newest(folder)
    where.write_text(json.dumps(state | {"format": FORMAT - 1}))
    assert newest(folder)[0] == folder / "step-00000010"


@pytest.mark.parametrize(
    ("text", "message"), [("{", "can't be read"), ('{"format": 99}', f"format 99, this version reads {FORMAT}")]
)
def test_a_damaged_or_foreign_checkpoint_is_named(tmp_path: Path, text: str, message: str):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_state(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_old_checkpoints_that_can_not_be_deleted_do_not_make_the_new_one_fail(tmp_path: Path) -> None:
    def fail() -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    final = tmp_path / "step-00000010"
    writing = CheckpointWriter(final, {"w": torch.ones(3)}, {"format": FORMAT, "step": 10}, {}, Comms(None), fail)
    writing.start(in_thread=True)
    writing.wait(30)
    assert writing.error is None and newest(tmp_path) == (final, [])


def test_ranks_do_not_wait_until_old_checkpoints_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deletion may take longer than the timeout of the ranks, and the new checkpoint is already complete."""
    events: list[str] = []
    monkeypatch.setattr(Comms, "broadcast_object", lambda comms, value, what: events.append(what) or value)
    final = tmp_path / "step-00000010"
    state = {"format": FORMAT, "step": 10}
    CheckpointWriter(final, {}, state, {}, Comms(None), lambda: events.append("deleted")).start(in_thread=False)
    assert events[-2:] == ["writing step-00000010", "deleted"] and events.count("deleted") == 1


def test_a_run_that_another_process_has_taken_over_changes_nothing(tmp_path: Path) -> None:
    """The run has lost its lock. Otherwise both processes would write and delete checkpoints in one folder."""
    folder, state, deleted = tmp_path / "checkpoints", {"format": FORMAT, "step": 20}, []
    (tmp_path / LOCK_HOLDER).write_text("process 1 on here\nboot")
    write(folder, 10)

    def writing(step: int) -> CheckpointWriter:
        delete = partial(deleted.append, step)
        return CheckpointWriter(
            folder / f"step-{step:08d}", {}, state, {}, Comms(None), delete, holder="process 1 on here\nboot"
        )

    writing(20).start(in_thread=False)
    (tmp_path / LOCK_HOLDER).write_text("process 1 on here\nlater")  # a pod that replaces another one has the same name
    with pytest.raises(TrainingError, match=rf"30 could not be written: process 1 on here works in {tmp_path} now"):
        writing(30).start(in_thread=False)
    assert deleted == [20] and list(complete_checkpoints(folder)) == [10, 20]
    assert (folder / "step-00000030.tmp").exists(), "the other process may be writing it"
    (tmp_path / LOCK_HOLDER).unlink()
    writing(30).start(in_thread=False)


def test_where_all_are_damaged_nothing_is_trained_anew(folder: Path) -> None:
    for path in folder.glob("step-*"):
        flip(path / "__0_0.distcp")
    with pytest.raises(
        CheckpointError,
        match=r"step-00000010 is damaged: .*; none of the 2 checkpoints is valid; restore one, or delete",
    ):
        newest(folder)


def test_hosts_may_have_the_folder_under_different_paths(folder: Path) -> None:
    flip(folder / "step-00000020/__0_0.distcp")
    answers: list[object] = []
    first = SimpleNamespace(**vars(ALONE))
    first.broadcast_from_main = lambda ask: answers.append(ask()) or answers[-1]
    assert latest_valid(folder, first, lambda line: None) == folder / "step-00000010"
    there = folder.with_name("there")
    folder.rename(there)
    told = iter(answers)
    second = SimpleNamespace(**vars(ALONE))
    second.broadcast_from_main = lambda ask: next(told)
    assert latest_valid(there, second, lambda line: None) == there / "step-00000010"


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert newest(tmp_path) == (None, [])


def test_only_complete_checkpoints_count(tmp_path: Path):
    for name, whole in (("step-00000020", True), ("step-00000010", True), ("step-00000030", False)):
        (tmp_path / name).mkdir()
        if whole:
            (tmp_path / name / "state.json").write_text("{}")
    (tmp_path / "step-00000040.tmp").mkdir()
    assert list(complete_checkpoints(tmp_path)) == [10, 20]
    assert not complete_checkpoints(tmp_path / "nowhere")


def test_a_step_written_again_replaces_the_one_that_was_there(folder: Path) -> None:
    flip(folder / "step-00000020" / "__0_0.distcp")
    write(folder, 20)
    assert newest(folder) == (folder / "step-00000020", [])


def test_what_cannot_be_written_is_one_line_and_loses_nothing(tmp_path: Path) -> None:
    write(tmp_path, 10)
    (tmp_path / "step-00000020.tmp").write_text("a file in the way")
    with pytest.raises(
        TrainingError, match=r"step-00000020 could not be written: .*; older checkpoints are as they were"
    ) as failed:
        write(tmp_path, 20)
    assert "\n" not in str(failed.value)
    assert newest(tmp_path) == (tmp_path / "step-00000010", [])


def test_a_checkpoint_whose_files_are_gone_before_it_is_whole_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = dcp.save

    def and_lose(*arguments: object, **options: object) -> None:
        save(*arguments, **options)
        shutil.rmtree(tmp_path / "step-00000010.tmp")

    monkeypatch.setattr(dcp, "save", and_lose)
    with pytest.raises(TrainingError, match=r"step-00000010 could not be written: .*No such file.*; older checkpoints"):
        write(tmp_path, 10)
    assert newest(tmp_path) == (None, [])


def test_a_checkpoint_that_can_not_get_its_name_is_none(tmp_path: Path) -> None:
    write(tmp_path, 10)
    (tmp_path / "step-00000020").write_text("a file in the way")
    with pytest.raises(TrainingError, match=r"step-00000020 could not be written: .*; older checkpoints are as"):
        write(tmp_path, 20)
    assert newest(tmp_path)[0] == tmp_path / "step-00000010" and not list(tmp_path.glob("*.tmp"))


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(TrainingError, match=r"step-00000010 could not be written: .*; older checkpoints are as"):
        write(tmp_path / "checkpoints" / "of this run", 10)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_loses_nothing_and_is_given_back(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small disk here: {mounted.stderr.decode().strip()}")
    try:
        write(tmp_path, 10)
        with pytest.raises(TrainingError, match=r"could not be written: no space left: 0 MB are free \("):
            write(tmp_path, 20, numbers=200_000)
        assert newest(tmp_path) == (tmp_path / "step-00000010", [])
        assert not list(tmp_path.glob("*.tmp"))
        write(tmp_path, 30)  # there is room again
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_bad_disk_is_not_called_full_once_the_tensors_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(directory: Path, names: list[str]) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint_files, "digests", fail)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(TrainingError, match=r"could not be written: \[Errno 5\] Input/output error; older checkpoints"):
        write(tmp_path, 10)


def test_a_disk_that_hangs_is_given_up_after_the_timeout(tmp_path: Path) -> None:
    answer = threading.Event()

    class Hanging(CheckpointWriter):
        def _run(self) -> None:
            answer.wait()

    writing = Hanging(tmp_path / "step-00000010", {}, {}, {}, Comms(None), lambda: None)
    writing.start(in_thread=True)
    with pytest.raises(TrainingError, match=r"was not written within 0.1 s \(run.timeout_seconds\)"):
        writing.wait(0.1)
    answer.set()


def test_digests_are_of_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert digests(tmp_path, ["a"]) == {"a": (3, "06b05ab6733a618578af5f94892f3950")}


def test_files_of_ranks_that_are_gone_are_divided_among_the_others() -> None:
    names = [".metadata", *(f"__{rank}_0.distcp" for rank in range(12))]
    shares = [share_of(rank, 3, names) for rank in range(3)]
    assert shares[0] == [".metadata", "__0_0.distcp", "__3_0.distcp", "__6_0.distcp", "__9_0.distcp"]
    assert shares[2] == ["__11_0.distcp", "__2_0.distcp", "__5_0.distcp", "__8_0.distcp"]
    assert sorted(name for share in shares for name in share) == sorted(names)
    assert [share_of(rank, 3, ["__1_0.distcp"]) for rank in range(3)] == [[], ["__1_0.distcp"], []]
