"""Tests of `PrefetchingFile`."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from llmtrain.files import PART_BYTES, PREFETCH_BYTES, PrefetchingFile

needs_requests = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no requests")


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Collect the (start, length) that are requested."""
    found: list[tuple[int, int]] = []

    def advise(_: int, start: int, length: int, how: int) -> None:
        assert how == os.POSIX_FADV_WILLNEED
        found.append((start, length))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return found


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1, PREFETCH_BYTES + 3 * PART_BYTES - 1])
def test_it_reads_the_content(tmp_path: Path, size: int) -> None:
    file = tmp_path / "file"
    file.write_bytes(content := os.urandom(size))
    with io.BufferedReader(PrefetchingFile(file)) as opened:
        assert opened.read(size + 1) == content
        into = bytearray(size // 2)
        opened.seek(size - len(into))
        assert opened.readinto(into) == len(into) and into == content[size - len(into) :]


@needs_requests
def test_all_parts_are_requested_in_time(tmp_path: Path, requested: list[tuple[int, int]]) -> None:
    """Each part is requested once, and in pieces that Linux does not shorten; soon, PREFETCH_BYTES before it is read."""
    file, into = tmp_path / "file", bytearray(4 * PART_BYTES)
    file.write_bytes(bytes(size := 2 * PREFETCH_BYTES + 1))
    read, ahead = 0, []
    with PrefetchingFile(file) as opened:
        while count := opened.readinto(into):
            start, length = requested[-1]
            ahead.append(start + length - read)
            read += count
    assert read == size and PART_BYTES == 128 * 1024
    assert ahead[:3] == [PART_BYTES, 3 * PART_BYTES, 7 * PART_BYTES] and set(ahead[6:]) == {PREFETCH_BYTES}
    assert [start for start, _ in requested] == list(range(0, len(requested) * PART_BYTES, PART_BYTES))


@needs_requests
def test_little_is_requested_after_a_jump(tmp_path: Path, requested: list[tuple[int, int]]) -> None:
    file, into = tmp_path / "file", bytearray(10)
    file.write_bytes(bytes(PREFETCH_BYTES))
    with PrefetchingFile(file) as opened:
        for place in (1000 * PART_BYTES // 64, 7, 0):
            opened.seek(place)
            opened.readinto(into)
    assert requested == [(1000 * PART_BYTES // 64, PART_BYTES), (7, PART_BYTES), (0, PART_BYTES)]


def refuse(*_: object) -> None:
    raise OSError("no such request here")


@pytest.mark.parametrize("refused", [True, False])
def test_a_system_without_requests_reads_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    if refused:
        monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    else:
        monkeypatch.delattr(os, "posix_fadvise", raising=False)
    (tmp_path / "file").write_bytes(bytes(10))
    with PrefetchingFile(tmp_path / "file") as opened:
        assert opened.read(20) == bytes(10)
