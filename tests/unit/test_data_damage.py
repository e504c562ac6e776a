"""Token shards that a disk has changed, and preparing that is killed or has no room: nothing half-written is ever used."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain.config import DataSection
from llmtrain.data.index import INDEX, ShardWriter
from llmtrain.data.prepare import TokenDataset, cache_path, open_dataset, prepare
from llmtrain.data.verify import ChecksumScan, verify
from llmtrain.errors import DataError
from tests.mother import session
from tests.unit import processes

TEXTS = [f"Document {i}.\n\n  It is read {i * i} times.\té" for i in range(400)]
MANY = 10**9


@pytest.fixture
def data(tmp_path: Path) -> DataSection:
    source = tmp_path / "stories.txt"
    source.write_text("\n~~~\n".join(TEXTS))
    keys = {"tokenizer": "train:320", "validation_fraction": 0.2, "cache_dir": str(tmp_path / "cache")}
    return DataSection(source=str(source), separator="\n~~~\n", **keys)


@pytest.fixture
def prepared(data: DataSection, monkeypatch: pytest.MonkeyPatch) -> TokenDataset:
    monkeypatch.setattr(ShardWriter.__init__, "__defaults__", (700,))
    return prepare(data, MANY, MANY)


def names(prepared: TokenDataset) -> list[str]:
    return [shard.name for split in prepared.index.splits.values() for shard in split.shards]


def searched(prepared: TokenDataset, *share: int) -> str | None:
    search = ChecksumScan([prepared], *share)
    search.wait()
    return search.problem


def test_a_flipped_bit_anywhere_is_found_by_the_rank_whose_share_it_is(prepared: TokenDataset) -> None:
    assert searched(prepared) is None
    assert len(names(prepared)) > 5
    for number, name in enumerate(names(prepared)):
        path = prepared.directory / name
        good = path.read_bytes()
        for place in (128, len(good) - 1):  # the first and the last byte of the tokens
            path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
            problem = searched(prepared)
            assert problem is not None and problem.startswith(f"{path} on ") and "\n" not in problem
            assert problem.endswith(
                f"delete {prepared.directory} and start the same command again: it prepares the same tokens"
            )
            found = [searched(prepared, share, 3) for share in range(3)]
            assert [one is not None for one in found] == [number % 3 == share for share in range(3)]
            with pytest.raises(
                DataError, match=rf"{name} on .*: checksum [0-9a-f]{{8}} found, [0-9a-f]{{8}} expected; "
            ):
                verify(open_dataset(prepared.directory))
        path.write_bytes(good)
    verify(prepared)


def test_what_is_cut_off_or_gone_after_the_opening_is_found_too(prepared: TokenDataset) -> None:
    path = prepared.directory / names(prepared)[-1]
    os.truncate(path, path.stat().st_size - 2)
    assert ": checksum " in searched(prepared)
    path.unlink()
    assert f"{path} on " in searched(prepared) and "can't be read (No such file or directory); delete" in searched(
        prepared
    )


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("where", processes.KILLED_AT)
def test_preparing_that_is_killed_begins_again_and_makes_the_same_shards(data: DataSection, where: str) -> None:
    expected = files_in(prepare(data.model_copy(update={"cache_dir": data.cache_dir + "-whole"}), MANY, MANY).directory)
    directory = cache_path(data)
    if where == "between":  # the renames of a smaller folder and of the larger one that takes its place
        prepare(data.model_copy(update={"max_tokens": 500}), 500, 100)
    process = session().fork(processes.prepare_until_killed, data.model_dump_json(), where)
    assert process.wait(60) == -signal.SIGKILL
    left = sorted(path.name for path in Path(data.cache_dir).iterdir() if path.is_dir())
    assert left == [f"{directory.name}.{word}-tmp" for word in ("new", "old")[: 1 + (where == "between")]]
    if where == "half written":
        written = directory.with_name(left[0]) / "train-00000.npy"
        assert 1000 < written.stat().st_size < len(expected["train-00000.npy"])
    with pytest.raises(DataError, match=r"no such file; expected a folder made by prepare"):
        open_dataset(directory)

    assert files_in(prepare(data, MANY, MANY).directory) == expected
    assert [path for path in Path(data.cache_dir).iterdir() if path.is_dir()] == [directory]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_one_line_and_leaves_it_as_it_was(data: DataSection) -> None:
    cache = Path(data.cache_dir)
    cache.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(cache)]
    mounted = subprocess.run(mount, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small disk here: {mounted.stderr.decode().strip()}")
    try:
        (cache / "others").write_bytes(bytes(40_000))
        with pytest.raises(DataError, match=r"data\.cache_dir: .*: No space left on device; make room") as refused:
            prepare(data, MANY, MANY)
        assert "\n" not in str(refused.value)
        assert [path.name for path in cache.iterdir() if path.is_dir()] == []
        (cache / "others").unlink()
        verify(prepare(data, MANY, MANY))
    finally:
        subprocess.run(["umount", "--lazy", str(cache)], check=True)


def test_a_larger_folder_in_its_place_is_no_damage(data: DataSection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run wants more of the same tokens, while this one still looks through its own."""
    monkeypatch.setattr("llmtrain.data.prepare.BATCH_CHARACTERS", 1000)
    some = prepare(data, 500, 100)
    more = prepare(data, MANY, MANY)
    assert some.directory == more.directory and some.index != more.index
    assert searched(some) is None and searched(more) is None


@pytest.mark.parametrize("appears", ["the same", "a larger one", "none"])
def test_a_folder_that_is_gone_for_a_moment_is_looked_at_again(
    data: DataSection, monkeypatch: pytest.MonkeyPatch, appears: str
) -> None:
    """Between the two renames of a run that wants more of the same tokens."""
    monkeypatch.setattr("llmtrain.data.prepare.BATCH_CHARACTERS", 1000)
    some = prepare(data, 500, 100)
    (some.directory / names(some)[0]).unlink()
    index = some.directory / INDEX
    aside = index.rename(index.with_suffix(".aside"))
    larger = some.index.model_copy(update={"source": "larger"}).model_dump_json()
    rests = []

    def rest(seconds: float) -> None:
        rests.append(seconds)
        if appears != "none":
            index.write_text(aside.read_text() if appears == "the same" else larger)

    monkeypatch.setattr("llmtrain.data.verify.time", SimpleNamespace(sleep=rest))
    problem = searched(some)
    assert rests and (problem is None) == (appears == "a larger one")
    assert problem is None or "can't be read (No such file or directory)" in problem
