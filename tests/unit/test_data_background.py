"""Tests of the process that tokenizes during training: it is restarted when it fails and ends with the run, and no
tokens are lost."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from llmtrain.config import DataSection
from llmtrain.data import background, stream
from llmtrain.data.background import BackgroundTokenizer
from llmtrain.data.dataset import open_dataset
from llmtrain.data.prepare import cache_path, prepare
from llmtrain.errors import DataError, UnavailableError
from tests.end_to_end.runs import is_gone, wait_until
from tests.unit.test_data_damage import all_tokens
from tests.unit.test_data_stream import MANY, begun, data, expected, growing

__all__ = ["data", "expected"]  # the fixtures
TIMEOUT = 600.0


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PAUSES", (0.0,))


SMALL = """
import sys
from llmtrain.data import background, extend, order, tokenizing
extend.BATCH_CHARACTERS, background.STATUS_SECONDS = 1000, 0.0
order.FIRST_BLOCK, order.LARGEST_BLOCK = 600, 2400
tokenize, count = tokenizing.tokenize, 0
def counted(*arguments):
    global count
    count += 1
    if count == {batches}:
        {then}
    return tokenize(*arguments)
tokenizing.tokenize = counted
from llmtrain.errors import exit_with_status
exit_with_status(background.main)
"""
KILL = "import os; os.kill(os.getpid(), 9)"
FULL = "raise OSError(28, 'No space left on device')"
FAIL = "from llmtrain.errors import DataError, UnavailableError; raise DataError('hf:o/d: reading it from the hub failed (gone)')"
HANG = "import threading; threading.Event().wait()"


def small(batches: int, then: str) -> tuple[str, ...]:
    """Return the command of a tokenizing process with small batches and blocks that runs `then` in batch `batches`."""
    return (sys.executable, "-c", SMALL.format(batches=batches, then=then))


KILLED = r"the tokenizer of .* was killed by SIGKILL; the tokenizer is started again"
FAILURES = {
    KILL: KILLED,
    FAIL: r"hf:o/d: reading it from the hub failed \(gone\)",
    FULL: "data.cache_dir: .*: No space left",
}


@pytest.mark.fresh
@pytest.mark.parametrize("failures", [[KILL], pytest.param([FAIL, KILL, FULL], marks=pytest.mark.deep)], ids=len)
def test_a_process_that_is_killed_or_fails_is_started_again_and_nothing_is_lost(
    data: DataSection,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failures: list[str],
) -> None:
    prepared = begun(data)
    commands = iter([*(small(5, failure) for failure in failures), background.COMMAND])

    class Started(BackgroundTokenizer):
        def _start(self) -> None:
            monkeypatch.setattr(background, "COMMAND", next(commands))
            super()._start()

    tokens = growing(prepared)
    with Started(data, MANY, 100, TIMEOUT) as tokenizer:
        assert tokens.wait_for(MANY) == len(expected)
        tokenizer._thread.join(60)
    assert tokens.window(0, len(expected)).tolist() == expected and tokenizer.problem is None
    lines = [line for line in capsys.readouterr().err.splitlines() if "started again" in line]
    assert len(lines) == len(failures)
    assert all(re.match(FAILURES[failure], line) for failure, line in zip(failures, lines, strict=True)), lines
    assert prepare(data, MANY, 100).index.splits["train"].exhausted


def test_one_that_adds_nothing_ends_the_run_with_its_line(
    data: DataSection, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = begun(data)
    script = f"read job; echo noise >&2; echo 'error: {data.source}: it is gone' >&2; exit 2"
    monkeypatch.setattr(background, "COMMAND", ("bash", "-c", script))
    with BackgroundTokenizer(data, MANY, 100, TIMEOUT) as tokenizer:
        with pytest.raises(DataError, match=rf"^{data.source}: it is gone \(attempt 3 without new text\)$"):
            growing(prepared).wait_for(MANY)
        tokenizer._thread.join(60)
        assert str(tokenizer.problem) == f"{data.source}: it is gone (attempt 3 without new text)"
        assert type(tokenizer.problem) is DataError
    assert capsys.readouterr().err.count("; the tokenizer is started again\n") == background.ATTEMPTS - 1


def test_a_failure_that_may_end_by_itself_ends_only_ranks_that_wait_for_too_long(
    data: DataSection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared, log = begun(data), tmp_path / "log"
    fails_four_times = f"read job; echo >> {log}; echo Traceback >&2; [ $(wc -l < {log}) = 5 ]"
    monkeypatch.setattr(background, "COMMAND", ("bash", "-c", fails_four_times))
    with BackgroundTokenizer(data, MANY, 100, TIMEOUT) as tokenizer:
        tokenizer._thread.join(60)
    assert tokenizer.problem is None and stream.read_status(prepared.directory) == {}
    assert capsys.readouterr().err.count("ended with code 1 (Traceback); the tokenizer is started again\n") == 4
    monkeypatch.setattr(background, "PAUSES", (0.0, 0.0, 10.0**6))
    with BackgroundTokenizer(data, MANY, 100, 0.0) as tokenizer:
        with pytest.raises(
            UnavailableError, match=r"code 1 \(Traceback\) \(no new text for 0 s, run\.timeout_seconds\)$"
        ):
            growing(prepared, 20.0).wait_for(MANY)
        assert tokenizer.problem is None
    assert "the tokenizer is started again in 1e+06 s\n" in capsys.readouterr().err


@pytest.mark.parametrize("ended", [pytest.param("exit", marks=pytest.mark.deep), "killed"])
def test_the_process_ends_with_the_run_and_keeps_what_it_has(
    data: DataSection, expected: list[int], monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    """A killed run closes the pipe, like a run that ends, but does not wait for the process."""
    prepared = begun(data)
    before = prepared.index.splits["train"].tokens
    monkeypatch.setattr(background, "COMMAND", small(2, HANG))  # hangs before a block is complete
    tokenizer = BackgroundTokenizer(data, MANY, 100, TIMEOUT)
    with tokenizer:
        process = psutil.Process(tokenizer._process.pid)
        wait_until(
            lambda: stream.read_status(prepared.directory).get("tokens", 0) > before + 300, "nothing is reported"
        )
        assert open_dataset(prepared.directory).index.splits["train"].tokens == before, "not committed yet"
        assert process.nice() >= background.NICENESS
        if ended == "killed":
            tokenizer._over.set()
            os.close(tokenizer._process.stdin.fileno())
            wait_until(lambda: is_gone(process), "the process has not ended")
    assert is_gone(process)
    kept = open_dataset(prepared.directory)
    assert before + 300 < kept.index.splits["train"].tokens < len(expected)
    assert all_tokens(kept) == expected[: kept.index.splits["train"].tokens]
    assert all_tokens(prepare(data, MANY, 100)) == expected


@pytest.mark.deep
def test_a_signal_to_the_process_alone_does_not_end_the_run(
    data: DataSection, expected: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = begun(data)
    monkeypatch.setattr(background, "COMMAND", small(4, HANG))
    with BackgroundTokenizer(data, MANY, 100, TIMEOUT) as tokenizer:
        wait_until(lambda: stream.read_status(prepared.directory).get("tokens"), "nothing is reported")
        monkeypatch.setattr(background, "COMMAND", small(10**6, HANG))
        tokenizer._process.send_signal(signal.SIGUSR1)  # from Slurm, meant for the ranks
        tokenizer._process.send_signal(signal.SIGTERM)
        assert growing(prepared).wait_for(MANY) == len(expected)
    assert "SIGUSR1" not in capsys.readouterr().err
    assert cache_path(data) == prepared.directory
