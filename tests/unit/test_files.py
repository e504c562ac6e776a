"""Tests of reading large files in parts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmtrain.files import AHEAD_BYTES, PART_BYTES, read_in_parts


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1, AHEAD_BYTES + 3 * PART_BYTES - 1])
def test_parts_are_the_content(tmp_path: Path, size: int) -> None:
    file = tmp_path / "file"
    file.write_bytes(content := os.urandom(size))
    assert b"".join(read_in_parts(file)) == content


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no requests")
def test_all_parts_are_requested_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is requested once, as long before it is read as AHEAD_BYTES say, in pieces that Linux does not shorten."""
    file, requested = tmp_path / "file", []
    file.write_bytes(bytes(size := 2 * AHEAD_BYTES + 1))
    monkeypatch.setattr(os, "posix_fadvise", lambda _, start, length, how: requested.append((start, length, how)))
    for read, _ in enumerate(read_in_parts(file), start=1):
        assert len(requested) == read + AHEAD_BYTES // PART_BYTES
    assert PART_BYTES == 128 * 1024
    starts = [start for start, length, how in requested if (length, how) == (PART_BYTES, os.POSIX_FADV_WILLNEED)]
    assert starts == list(range(0, starts[-1] + 1, PART_BYTES)) and starts[-1] >= size - PART_BYTES


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
    assert list(read_in_parts(tmp_path / "file")) == [bytes(10)]
