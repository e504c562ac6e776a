"""Tests of exported folders: complete or absent, one process at a time, one line if the disk is full, and each score once."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors import SafetensorError
from transformers import AutoConfig

from llmtrain.errors import UserError
from llmtrain.export import folder
from llmtrain.export.card import read_scores
from llmtrain.export.folder import (
    Manifest,
    destination,
    keep_others,
    locked,
    read_manifest,
    replacing,
    write_configs,
    write_manifest,
    written_files,
)
from llmtrain.export.parity import Parity

MANIFEST = Manifest(
    step=1000,
    weights="mean",
    dtype="fp32",
    checkpoint="abc",
    max_shard_size="5GB",
    parameters=1_900_000,
    sequence_length=32,
    separate_documents=False,
    parity=Parity(2e-7, 8.0),
    files={},
)


def complete(folder: Path) -> None:
    """Write a manifest that lists the files in the folder."""
    write_manifest(folder, MANIFEST.model_copy(update={"files": written_files(folder)}))


def make(folder: Path, text: str = "weights") -> None:
    (folder / "model.safetensors").write_text(text)
    complete(folder)


def test_a_folder_is_complete_or_absent(tmp_path: Path) -> None:
    final = tmp_path / "export/step-00001000"
    with locked(final):
        with pytest.raises(RuntimeError), replacing(final) as folder:
            make(folder)
            raise RuntimeError("half-way")
        assert not final.exists() and read_manifest(final) is None
        with replacing(final) as folder:
            make(folder)
        assert [(name, size) for name, (size, _) in read_manifest(final).files.items()] == [("model.safetensors", 7)]
        with replacing(final) as folder:
            make(folder, "others")
    assert (final / "model.safetensors").read_text() == "others"
    assert [path.name for path in final.parent.iterdir() if path.is_dir()] == [final.name]
    for damaged in ("cut", "otherz"):
        (final / "model.safetensors").write_text(damaged)
        assert read_manifest(final) is None


def test_an_export_to_a_link_replaces_the_folder_that_it_names(tmp_path: Path) -> None:
    link, models = tmp_path / "out", tmp_path / "disk" / "models"
    models.mkdir(parents=True)
    link.symlink_to(models)
    for content in ("one", "another"):
        with replacing(destination(link)) as made:
            make(made, content)
        assert link.is_symlink() and (models / "model.safetensors").read_text() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "out"]


def test_a_folder_that_a_killed_process_had_moved_away_comes_back(tmp_path: Path) -> None:
    final = tmp_path / "x"
    with replacing(final) as made:
        make(made)
    (final / "eval").mkdir()
    (final / "eval/small.json").write_text("{}")
    final.rename(tmp_path / ".x.old")
    with replacing(final) as made:
        make(made)
        keep_others(final, made)
    assert (final / "eval/small.json").is_file() and not (tmp_path / ".x.old").exists()


def test_a_disk_that_takes_no_more_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "x"
    with replacing(final) as made:
        make(made)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    message = (
        r"x can't be written \(No space left on device\); make room, or choose another folder: export RUN --out FOLDER"
    )
    with pytest.raises(UserError, match=message), replacing(final):
        raise full
    with pytest.raises(UserError, match=message), replacing(final):
        raise shutil.Error([("from", "to", "No space left on device"), ("one", "two", "other")])
    with pytest.raises(OSError, match="no such model"), replacing(final):
        raise OSError("no such model")
    with pytest.raises(UserError, match=r"x can't be written \(Error while serializing\)"), replacing(final):
        raise SafetensorError("Error while serializing")
    rename = Path.rename

    def rename_no_second_time(path: Path, target: Path) -> None:
        if path.name == ".x.tmp":
            raise full
        rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_no_second_time)
    with pytest.raises(UserError, match=message), replacing(final) as made:
        make(made, "others")
    assert (final / "model.safetensors").read_text() == "weights"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]

    def interrupt_the_second_time(path: Path, target: Path) -> None:
        if path.name == ".x.tmp":
            raise KeyboardInterrupt
        rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupt_the_second_time)
    with pytest.raises(KeyboardInterrupt), replacing(final) as made:
        make(made, "others")
    assert (final / "model.safetensors").read_text() == "weights"

    def rename_no_second_and_third_time(path: Path, target: Path) -> None:
        if path.name in (".x.tmp", ".x.old"):
            raise full
        rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_no_second_and_third_time)
    with pytest.raises(UserError, match=message), replacing(final) as made:
        make(made, "others")
    assert [path.name for path in tmp_path.iterdir()] == [".x.old"], "the next export restores it"


@pytest.mark.parametrize("is_readable", [True, False])
def test_what_an_export_has_not_written_is_kept(tmp_path: Path, is_readable: bool) -> None:
    final = tmp_path / "x"
    with replacing(final) as made:
        (made / "model-00001-of-00002.safetensors").write_text("old shard")
        make(made)
        keep_others(final, made)
    (final / "eval").mkdir()
    (final / "eval/small.json").write_text("scores")
    (final / "eval/newest").symlink_to("small.json")
    (final / "README.md").write_text("a card")
    if is_readable:
        (final / "notes.txt").write_text("mine")
    else:
        (final / "export.json").write_text("{")
    with replacing(final) as made:
        make(made, "others")
        keep_others(final, made)
    others = {"eval", "notes.txt"} if is_readable else {"eval"}
    assert {path.name for path in final.iterdir()} == {"model.safetensors", "export.json", *others}
    assert (final / "eval/newest").read_text() == "scores" and (final / "eval/newest").is_symlink()
    assert (final / "model.safetensors").read_text() == "others"


def test_a_card_has_each_score_once(tmp_path: Path) -> None:
    """It comes from the newest evaluation, because SUITE-step-N.json and SUITE.json may be of the same step."""

    def write(
        file: str, day: int, n: int, limit: int | None = None, digest: str | None = "new", **scores: float
    ) -> None:
        content = {"suite": "small", "checkpoint_step": 1000, "date": f"2026-01-{day:02}T00:00:00+00:00"}
        content |= {"limit": limit, "digest": digest}
        (tmp_path / file).write_text(json.dumps(content | {"results": {"piqa": {**scores, "n": n}}}))

    write("small-step-00001000.json", 9, 200, **{"acc,none": 0.5, "acc,other": 0.1})
    write("small.json", 3, 200, **{"acc,none": 0.5, "f1,none": 0.3})
    assert [(s.metric, str(s)) for s in read_scores(tmp_path, 1000, "new")] == [
        ("acc", "0.5000"),
        ("acc,other", "0.1000"),
        ("f1", "0.3000"),
    ]
    write("small.json", 12, 1838, **{"acc,none": 0.6})
    assert [(str(s), s.n) for s in read_scores(tmp_path, 1000, "new")] == [("0.6000", 1838), ("0.1000", 200)]
    write("quick.json", 13, 20, limit=20, **{"acc,none": 0.7})
    write("before.json", 14, 1838, digest="old", **{"acc,none": 0.8})
    assert [(str(s), s.n) for s in read_scores(tmp_path, 1000, "new")] == [("0.6000", 1838), ("0.1000", 200)]


def test_a_card_has_the_standard_errors_of_tasks_with_filters(tmp_path: Path) -> None:
    numbers = {"exact_match,strict": 0.5, "exact_match,strict_stderr": 0.1, "acc": 0.25, "acc_stderr": 0.2}
    content = {"suite": "mine", "checkpoint_step": 10, "results": {"quiz": numbers}}
    (tmp_path / "mine.json").write_text(json.dumps(content))
    assert [(s.metric, str(s)) for s in read_scores(tmp_path, 10, "new")] == [
        ("exact_match,strict", "0.5000 ± 0.1000"),
        ("acc", "0.2500 ± 0.2000"),
    ]


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years")
    with (
        pytest.raises(UserError, match=r"mine exists and is not an exported model; choose another folder"),
        replacing(tmp_path / "mine"),
    ):
        pass
    assert (tmp_path / "mine/thesis.txt").read_text() == "years"


def test_waiting_for_another_export_is_announced_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(folder, "LOCK_SECONDS", 0.1)
    message = r"x: another process has been exporting it for 0\.1 s"
    with FileLock(tmp_path / ".x.lock"), pytest.raises(UserError, match=message), locked(tmp_path / "x"):
        pass
    assert capsys.readouterr().err == (
        f"waiting for another process that exports to {tmp_path}/x (it holds {tmp_path}/.x.lock), at most 0.1 s\n"
    )
    with locked(tmp_path / "x"):
        pass
    assert capsys.readouterr().err == ""


def test_waiting_is_announced_when_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process ends as soon as the wait is announced."""
    other, acquire, order = FileLock(tmp_path / ".x.lock"), FileLock.acquire, []
    other.acquire()

    def try_to_acquire(lock: FileLock, timeout: float) -> object:
        order.append(timeout)
        return acquire(lock, timeout=timeout)

    def announce(text: str) -> None:
        order.append("announced")
        other.release()

    monkeypatch.setattr(folder, "LOCK_SECONDS", 2.0)
    monkeypatch.setattr(FileLock, "acquire", try_to_acquire)
    monkeypatch.setattr(folder, "note", announce)
    with locked(tmp_path / "x"):
        pass
    assert order == [0, "announced", 2.0]


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place is below a file, or in a folder in which no file can be made. FileLock alone would retry there until its timeout."""
    monkeypatch.setattr(folder, "LOCK_SECONDS", 0.1)
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file/x", Path("/proc/x")):
        message = rf"{place} can't be written \(.*\); make room, or choose another folder: export RUN --out FOLDER"
        with pytest.raises(UserError, match=message), locked(place):
            pass


@pytest.mark.parametrize(
    ("kind", "rope", "older"),
    [
        ("llama", {"rope_type": "default", "rope_theta": 5e5}, {"rope_theta": 5e5}),
        ("llama", {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": ...}),
        (
            "phi",
            {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.4},
            {"partial_rotary_factor": 0.4},
        ),
    ],
)
def test_rotary_positions_have_the_older_keys_too(tmp_path: Path, kind: str, rope: dict, older: dict) -> None:
    """They are written as transformers 4 reads them, and transformers 5 reads back what it has written."""
    config = AutoConfig.for_model(kind, hidden_size=32, rope_parameters=dict(rope))
    write_configs(config, "Model", 7, tmp_path, torch.float32)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {key: written[key] for key in older} == {k: rope if v is ... else v for k, v in older.items()}
    assert ("rope_scaling" in written) is ("rope_scaling" in older)
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.rope_parameters == rope and read.to_dict().keys() == config.to_dict().keys()
