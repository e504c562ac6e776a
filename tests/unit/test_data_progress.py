"""Tests of the line of progress while text is tokenized."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pyarrow.parquet
import pytest

from llmtrain.config import DataSection
from llmtrain.data import extend as extending
from llmtrain.data.extend import ProgressBar
from llmtrain.data.prepare import prepare
from llmtrain.data.sources import TextStream


def test_the_rate_is_that_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(extending.time, "monotonic", lambda: clock[0])
    progress = extending.ProgressBar("train tokens", 100_000_000, show=False)
    for million_a_second in (4, 1):
        for _ in range(10):
            clock[0] += 10
            progress.advance(10**6, million_a_second * 10**6)
    assert progress.line() == "train tokens: 20.0 MB, 50.00 M tokens, 0.10 M tokens/s, 8 min left"


def test_the_time_left_of_files_is_that_of_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that a continued preparation skips do not count toward the speed. If the tokens needed are reached before the
    end of the files, the time left is that of the tokens."""
    clock = [1000.0]
    monkeypatch.setattr(extending.time, "monotonic", lambda: clock[0])
    progress = extending.ProgressBar("train tokens", sys.maxsize, show=False)
    few = extending.ProgressBar("train tokens", 4 * 10**6, show=False)
    for read in (500, 520, 540):
        clock[0] += 10
        for bar in (progress, few):
            bar.advance(10**6, 10**6, read * 10**6, 1000 * 10**6)
    assert progress.line().endswith(", 6 min left")  # 460 MB are left, at 40 MB in 30 s
    assert few.line().endswith(", 0 min left")


@pytest.mark.parametrize("ending", ["txt", "txt.gz", "jsonl", "jsonl.gz", "parquet"])
def test_bytes_read_of_files_come_to_their_size(tmp_path: Path, ending: str) -> None:
    texts = [f"document {i} " * 2000 for i in range(100)]
    for part in ("a", "b"):
        path = tmp_path / f"{part}.{ending}"
        lines = "<|endoftext|>".join(texts) if "txt" in ending else "\n".join(json.dumps({"text": t}) for t in texts)
        if ending == "parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": texts * 30}), path)
        else:
            path.write_bytes(gzip.compress(lines.encode()) if ending.endswith("gz") else lines.encode())
    stream = TextStream(DataSection(source=str(tmp_path)), "data.source")
    read = [int(stream.bytes_read) for _ in stream]
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert stream.bytes_read.total == read[-1] == int(stream.bytes_read) == size
    assert read == sorted(read) and read[len(read) // 2 - 1] == size // 2
    if ending not in ("txt.gz", "jsonl.gz"):  # these are read in one piece here
        assert 0 < read[0] < size // 2


@pytest.mark.parametrize("source", ["stories", "stdlib"])
def test_bytes_read_of_text_that_is_everywhere(source: str) -> None:
    stream = TextStream(DataSection(source=source), "data.source")
    *_, last = (int(stream.bytes_read) for _ in stream)
    assert 0.98 * stream.bytes_read.total < last <= stream.bytes_read.total


def test_a_wait_for_validation_tokens_alone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that needs few training tokens has to read much more text until enough validation tokens are held out."""
    monkeypatch.setattr(extending, "BATCH_CHARACTERS", 1000)
    monkeypatch.setattr(extending, "PLAIN_SECONDS", 0.0)
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("<|endoftext|>".join(f"Document {i} says {i * i} times." for i in range(1000)))
    for name in ("b.jsonl.zst", "c.jsonl.zst", "README.md"):
        (folder / name).write_text("")
    data = DataSection(
        source=str(folder),
        tokenizer="train:320",
        validation_fraction=0.1,
        max_tokens=500,
        cache_dir=str(tmp_path),
    )
    prepare(data, 1, 700, show_progress=True)
    said = capsys.readouterr()
    assert said.out == f"{folder}: 1 of 4 files are read; not read: .zst (2)\n"
    lines = said.err.splitlines()
    assert any(line.startswith("train and validation tokens: ") for line in lines)
    alone = [
        line
        for line in lines
        if line.startswith("validation tokens, 10 % of the text that is read: 0.0 MB, 0.00 M tokens, ")
    ]
    assert len(alone) > 3 and alone[0].endswith(" min left") and not alone[-1].endswith("left"), lines


def test_preparing_says_how_far_it_is_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("llmtrain.data.extend.PLAIN_SECONDS", 0.0)
    with ProgressBar("train", 4_000_000, show=True) as progress:
        progress.advance(5_000_000, 1_250_000)
    assert "train: 5.0 MB, 1.25 M tokens" in capsys.readouterr().err.splitlines()[0]
