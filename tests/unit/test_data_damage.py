"""Tests of damaged token shards, and of preparing that is killed or finds a full disk. Nothing half-written is used."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from llmtrain.config import DataSection
from llmtrain.data import prepare as preparing
from llmtrain.data.bytes_read import BytesRead
from llmtrain.data.checksum_scan import ChecksumScan
from llmtrain.data.dataset import INDEX, TokenDataset, open_dataset
from llmtrain.data.local_files import documents_of_file
from llmtrain.data.prepare import cache_path, prepare
from llmtrain.data.stream import GrowingTokens
from llmtrain.errors import DataError, UnavailableError
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
    monkeypatch.setattr("llmtrain.data.dataset.SHARD_TOKENS", 700)
    return prepare(data, MANY, MANY)


def names(prepared: TokenDataset) -> list[str]:
    return [shard.name for split in prepared.index.splits.values() for shard in split.shards]


def searched(prepared: TokenDataset, share: int = 0, of: int = 1) -> str | None:
    search = ChecksumScan([prepared], share, of)
    search._thread.join()
    if search.problem is not None:
        assert type(search.problem) is DataError
    return None if search.problem is None else str(search.problem)


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
            again = searched(open_dataset(prepared.directory))
            assert re.search(rf"{name} on .*: checksum [0-9a-f]{{8}} found, [0-9a-f]{{8}} expected; ", again)
        path.write_bytes(good)
    assert searched(prepared) is None


def test_what_is_cut_off_or_gone_after_the_opening_is_found_too(prepared: TokenDataset) -> None:
    path = prepared.directory / names(prepared)[-1]
    os.truncate(path, path.stat().st_size - 2)
    assert ": checksum " in searched(prepared)
    path.unlink()
    assert f"{path} on " in searched(prepared) and "can't be read (No such file or directory); delete" in searched(
        prepared
    )


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_shard_that_can_not_be_read_now_is_not_damaged(
    prepared: TokenDataset, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The run ends with an error after which launchers restart it. The error does not say to delete the tokens."""

    def refuse(path: Path, skip: int) -> int:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("llmtrain.data.checksum_scan._crc32", refuse)
    search = ChecksumScan([prepared], 0, 1)
    search._thread.join()
    assert type(search.problem) is UnavailableError and not search.problem.is_shared
    assert os.strerror(number) in str(search.problem) and "delete" not in str(search.problem)


def all_tokens(prepared: TokenDataset, split: str = "train") -> list[int]:
    tokens = TokenDataset(prepared.directory, prepared.index).tokens(split)
    return tokens.window(0, len(tokens)).tolist()


@pytest.mark.parametrize("where", processes.KILLED_AT)
def test_preparing_that_is_killed_goes_on_and_makes_the_same_tokens(data: DataSection, where: str) -> None:
    whole = prepare(data.model_copy(update={"cache_dir": data.cache_dir + "-whole"}), MANY, MANY)
    directory = cache_path(data)
    process = session().fork(processes.prepare_until_killed, data.model_dump_json(), where)
    assert process.wait(60) == -signal.SIGKILL
    left = sorted(path.name for path in Path(data.cache_dir).iterdir() if path.is_dir())
    if where == "no folder yet":
        assert left == [f"{directory.name}.new-tmp"]
    else:
        kept = open_dataset(directory).index.splits["train"]
        assert left == [directory.name] and 0 < kept.tokens < whole.index.splits["train"].tokens
        assert {path.name for path in directory.glob("*.npy")} - set(names(open_dataset(directory))), "not indexed yet"

    prepared = prepare(data, MANY, MANY)
    for split in ("train", "validation"):
        assert all_tokens(prepared, split) == all_tokens(whole, split)
    assert searched(prepared) is None and prepared.index.splits["train"].exhausted
    assert [path for path in Path(data.cache_dir).iterdir() if path.is_dir()] == [directory]
    assert {path.name for path in directory.glob("*.npy")} == set(names(prepared))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_one_line_and_preparing_goes_on_once_there_is_room(data: DataSection) -> None:
    cache = Path(data.cache_dir)
    cache.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(cache)]
    mounted = subprocess.run(mount, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small disk here: {mounted.stderr.decode().strip()}")
    try:
        (cache / "others").write_bytes(bytes(40_000))
        with pytest.raises(
            UnavailableError, match=r"data\.cache_dir: .*: No space left on device; make room"
        ) as refused:
            prepare(data, MANY, MANY)
        assert "\n" not in str(refused.value)
        (cache / "others").unlink()
        assert searched(prepare(data, MANY, MANY)) is None
    finally:
        subprocess.run(["umount", "--lazy", str(cache)], check=True)


def test_an_index_that_is_written_twice_in_one_tick_of_the_clock_is_read_twice(prepared: TokenDataset) -> None:
    path = prepared.directory / INDEX
    whole = path.read_text()
    path.write_text(whole.replace('"exhausted": true', '"exhausted": false'))
    written, tokens = path.stat().st_mtime_ns, GrowingTokens(prepared, 60)
    assert not tokens.is_complete
    path.write_text(whole)
    os.utime(path, ns=(written, written))
    tokens.refresh()
    assert tokens.is_complete


def test_a_disk_that_fails_for_a_moment_is_no_fault_of_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, kind in ((errno.ESTALE, UnavailableError), (errno.EACCES, DataError)):
        fail = Mock(side_effect=OSError(number, "said"))
        monkeypatch.setattr(Path, "open", fail)
        with pytest.raises(DataError, match="said") as caught:
            list(documents_of_file(tmp_path / "a.txt", DataSection(), BytesRead()))
        assert type(caught.value) is kind
        monkeypatch.setattr(preparing, "acquire", fail)
        with (
            pytest.raises(DataError, match=rf"^data\.cache_dir: {tmp_path}: said") as caught,
            preparing._lock(tmp_path / "a", False),
        ):
            pass
        assert type(caught.value) is kind
