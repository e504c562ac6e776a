"""Tests that a foreign checkpoint can't run code or read or write outside its folder, and that a damaged one is refused."""

from __future__ import annotations

import errno
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from llmtrain.errors import CheckpointError, TrainingError
from llmtrain.run_files import STATE_FILE, checkpoint_folders
from llmtrain.train.checkpoint_files import dump_state, latest_valid, read_state
from llmtrain.train.checkpoint_reader import METADATA_FILE, CheckpointReader, read_metadata
from llmtrain.train.mirror import RemoteRun
from tests.unit.test_checkpoint_files import ALONE, write


class RunsACommand:
    """Object that makes a folder when pickle itself loads it."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.target),)


def changed(checkpoint: Path, **changes: Any) -> None:
    """Rewrite the checkpoint's metadata with `changes`."""
    metadata = read_metadata(checkpoint)
    for name, value in changes.items():
        setattr(metadata, name, value)
    (checkpoint / METADATA_FILE).write_bytes(pickle.dumps(metadata))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write(tmp_path / "checkpoints", 10)
    return tmp_path / "checkpoints" / "step-00000010"


def test_metadata_of_our_own_is_read_as_torch_reads_it(checkpoint: Path) -> None:
    with (checkpoint / METADATA_FILE).open("rb") as file:
        assert read_metadata(checkpoint) == pickle.load(file)
    into = torch.empty(1000)
    CheckpointReader(checkpoint).read({"w": into})
    assert into.tolist() == [10.0] * 1000


@pytest.mark.parametrize("when", ["opening", "reading"])
def test_a_checkpoint_that_can_not_be_read_now_is_not_damaged(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A network file system may answer again, so the message does not advise to delete the checkpoint."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    reader = None if when == "opening" else CheckpointReader(checkpoint)
    monkeypatch.setattr(dcp.FileSystemReader, "__init__" if reader is None else "read_data", refuse)
    with pytest.raises(TrainingError, match=r"step-00000010 can't be read now \(Stale file handle\); start the same"):
        (reader or CheckpointReader(checkpoint)).read({"w": torch.empty(1000)})


def test_metadata_that_would_run_a_command_runs_none(tmp_path: Path, checkpoint: Path) -> None:
    target = tmp_path / "made by unpickling"
    for attack in (RunsACommand(target), [RunsACommand(target)], Metadata({"w": RunsACommand(target)})):
        (checkpoint / METADATA_FILE).write_bytes(pickle.dumps(attack))
        with pytest.raises(
            CheckpointError, match=r"can't be read: .metadata asks for posix.mkdir, which does not describe"
        ):
            CheckpointReader(checkpoint)
    assert not target.exists()
    pickle.loads(pickle.dumps(RunsACommand(target)))
    assert target.exists(), "with pickle itself, the attack works"


def test_what_torch_would_unpickle_in_turn_is_refused(checkpoint: Path) -> None:
    changed(checkpoint, state_dict_metadata={"w": BytesStorageMetadata()})
    with pytest.raises(CheckpointError, match=r"asks for .*BytesStorageMetadata, which does not describe a tensor"):
        CheckpointReader(checkpoint)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "a/../../b"])
def test_metadata_names_files_of_its_folder_only(checkpoint: Path, name: str) -> None:
    stored = read_metadata(checkpoint).storage_data
    changed(checkpoint, storage_data={index: replace(where, relative_path=name) for index, where in stored.items()})
    with pytest.raises(CheckpointError, match=rf"names '{name}', which is not a file in this folder"):
        CheckpointReader(checkpoint)


def test_an_attribute_of_an_allowed_module_is_no_way_around(checkpoint: Path) -> None:
    for module, name in (("torch", "load"), ("torch.distributed.checkpoint.metadata", "os.mkdir"), ("pathlib", "os")):
        words = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
        (checkpoint / METADATA_FILE).write_bytes(b"\x80\x04" + words + b"\x93.")  # load the global of this name, stop
        with pytest.raises(CheckpointError, match=rf"asks for {module}.{name}, which"):
            CheckpointReader(checkpoint)
    (checkpoint / METADATA_FILE).write_bytes(pickle.dumps(torch.float32))
    with pytest.raises(CheckpointError, match="holds a dtype, which is not metadata"):
        CheckpointReader(checkpoint)


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "a/b", "..", ""])
def test_a_mirror_writes_into_the_runs_folder_only(tmp_path: Path, checkpoint: Path, name: str) -> None:
    state = read_state(checkpoint)
    state["files"][name] = [3, "0"]
    there = tmp_path / "there/checkpoints/step-00000010"
    there.mkdir(parents=True)
    (there / STATE_FILE).write_text(dump_state(state))
    (tmp_path / "there/checkpoints/escaped").write_text("abc")
    here = tmp_path / "run" / "fetched"
    here.mkdir(parents=True)
    wrong = RemoteRun(str(tmp_path / "there")).download(10, here)
    assert wrong == f"state.json lists {name!r}, not a file in its folder"
    assert [path.name for path in here.iterdir()] == [STATE_FILE] and not (tmp_path / "run/escaped").exists()


def test_a_checkpoint_that_lost_its_state_is_named_and_never_trained_over(tmp_path: Path) -> None:
    said: list[str] = []
    for step in (10, 20):
        write(tmp_path, step)
    (tmp_path / "step-00000020" / STATE_FILE).unlink()
    (tmp_path / "step-00000030.tmp").mkdir()
    assert latest_valid(tmp_path, ALONE, said.append) == tmp_path / "step-00000010"
    assert len(said) == 1 and "step-00000020 is damaged: state.json can't be read" in said[0]
    (tmp_path / "step-00000010" / STATE_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints is valid; restore one, or delete them"):
        latest_valid(tmp_path, ALONE, said.append)
    assert checkpoint_folders(tmp_path / "nowhere") == []
