"""Training tokens of a folder that another process extends while a run reads it.

A rank reads the folder's index again when it needs tokens that the index did not have. The tokenizing process also writes
`tokenizing.json` to the folder, with its progress or the error that ended it.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.config import DataSection
from llmtrain.config.data import HUB
from llmtrain.data.dataset import (
    INDEX,
    LazyShard,
    TokenDataset,
    TokenShards,
    check_shard,
    read_index,
)
from llmtrain.data.order import FIRST_BLOCK
from llmtrain.data.tokens import Tokens
from llmtrain.errors import DataError, UnavailableError
from llmtrain.waiting import QUIET_SECONDS

STATUS = "tokenizing.json"
POLL_SECONDS = 0.2
REPEAT_SECONDS = 60.0
"""Seconds between lines about the same wait."""


def shuffles_in_blocks(data: DataSection) -> bool:
    """Return whether the first epoch is shuffled in blocks, so that a run may begin before all of its text is tokenized."""
    if data.is_list:
        return False
    if data.packing == "none":  # the number of samples is known only when all documents exist
        return False
    return data.shuffle == "blocks" or (data.shuffle == "auto" and data.source.startswith(HUB))


def first_block(prepared: TokenDataset) -> TokenDataset:
    """Return the part of a prepared folder that exists on every host before the first step."""
    least = min(prepared.limits.get("train", sys.maxsize), FIRST_BLOCK + 1)
    return replace(prepared, limits={**prepared.limits, "train": least})


def read_status(directory: Path) -> Mapping[str, Any]:
    """Return the last status of the tokenizing process: the number of its training `tokens`, or its `error`. The status is empty
    if the process has written none."""
    try:
        status = json.loads((directory / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def text_error(problem: str, is_temporary: bool) -> DataError:
    """Return the error for a text that can't be tokenized. A failure that may end by itself is an UnavailableError."""
    return UnavailableError(problem) if is_temporary else DataError(problem)


def write_status(directory: Path, **status: Any) -> None:
    """Replace the status of the tokenizing process, which ranks read. A reader never sees a half-written status."""
    temporary = directory / f"{STATUS}.tmp"
    temporary.write_text(json.dumps(status), encoding="utf-8")
    temporary.rename(directory / STATUS)


class GrowingTokens(Tokens):
    """Sequence of the training tokens of a folder, which another process may extend up to the recipe's limit."""

    def __init__(
        self,
        prepared: TokenDataset,
        timeout_seconds: float,
        *,
        announce: bool = True,
        agree: Callable[[GrowingTokens, int], None] = lambda tokens, needed: None,
    ) -> None:
        """Read a folder that has at least its first block. A wait fails after `timeout_seconds` without progress. With `announce`,
        waits are announced on stderr. `agree(self, tokens)` is called whenever `wait_for` has waited for more tokens than ever
        before. It may wait for other hosts, and raises DataError if their tokens differ."""
        self.directory, self.source = prepared.directory, prepared.index.source
        self._max_tokens = prepared.limits.get("train", sys.maxsize)
        self.closed = threading.Event()
        """Set at the end of the run, to end a wait."""
        self.is_complete = False
        """True once the folder has all tokens that the run needs, or all tokens of the source."""
        self._timeout, self._announce, self._agree = timeout_seconds, announce, agree
        self._shards: list[LazyShard] = []
        self._tokens = TokenShards([])
        self._stamp = (0, 0, 0)
        """Inode number, size and modification time (ns) of the index that was read last. The time alone does not suffice, because
        two indexes may be written within one tick of the file system's clock."""
        self._last_wait = -math.inf
        """Last time, by `time.monotonic`, at which a wait for text was in progress."""
        self._agreed = 0
        """Largest number of tokens for which `agree` has been called."""
        self.refresh()

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def max_tokens(self) -> int:
        """Return the largest number of tokens that the sequence can ever have; sys.maxsize if the length of the source is
        unknown."""
        return self._max_tokens

    def window(self, start: int, length: int) -> np.ndarray:
        return self._tokens.window(start, length)

    def wait_for(self, tokens: int) -> int:
        """Wait until `tokens` tokens exist or the source has ended, and return the number of tokens that exist. Raises DataError if
        the tokenizing process has failed, or if no tokens are added for `timeout_seconds`."""
        tokens = min(tokens, self.max_tokens)
        if tokens > self._agreed:
            if tokens > len(self) and not self.is_complete:
                self.wait_until(lambda: tokens <= len(self) or self.is_complete, tokens)
            self._agree(self, tokens)
            self._agreed = tokens
        return len(self)

    def is_waiting(self, seconds: float) -> bool:
        return time.monotonic() - self._last_wait < seconds + POLL_SECONDS

    def count_as_waiting(self) -> None:
        """Count the time until now as a wait for text, so that it is not taken for a disk that does not answer."""
        self._last_wait = time.monotonic()

    def refresh(self) -> None:
        """Read the index if it has changed. Raises DataError if the index or a new shard is damaged."""
        stamp = (0, 0, 0)
        with suppress(OSError):  # read_index says why
            found = (self.directory / INDEX).stat()
            if (stamp := (found.st_ino, found.st_size, found.st_mtime_ns)) == self._stamp:
                return
        index = read_index(self.directory)
        entry = index.splits["train"]
        for shard in entry.shards[len(self._shards) :]:
            check_shard(self.directory, index, shard)
            self._shards.append(LazyShard(self.directory, shard))
        self._tokens = TokenShards(self._shards, self.max_tokens)
        self.is_complete = entry.exhausted or entry.tokens >= self.max_tokens
        self._stamp = stamp

    def wait_until(
        self, condition: Callable[[], bool], tokens: int, elsewhere: Callable[[], Mapping[str, Any]] = dict
    ) -> None:
        """Wait until `condition` is true. It may depend on the tokens of this host, or on other hosts, whose status `elsewhere`
        returns. `tokens` is the number of tokens needed, for messages. Raises DataError as `wait_for` does, and when the run
        has ended."""
        last_progress = time.monotonic()
        shown = last_progress + QUIET_SECONDS - REPEAT_SECONDS  # the first line comes after QUIET_SECONDS
        before = None
        while not condition():
            self.count_as_waiting()
            now = self._last_wait
            here = {} if self.is_complete else read_status(self.directory)  # may be that of an earlier run
            status = {**here, **elsewhere()}
            if "error" in status:
                raise text_error(status["error"], status.get("is_temporary", False))
            if (progress := (len(self), status)) != before:
                before, last_progress = progress, now
            if now - last_progress > self._timeout:
                raise UnavailableError(
                    f"{self.source}: no text was tokenized for {self._timeout:g} s (run.timeout_seconds) while {tokens:,} tokens "
                    f"were needed and {len(self):,} were on this host; look at {self.directory}, and start the same command again"
                )
            if self._announce and now - shown >= REPEAT_SECONDS:
                shown = now
                ready = status.get("on_slowest_host", max(len(self), status.get("tokens", 0)))
                counts = f"{ready / 1e6:,.1f} M of {tokens / 1e6:,.1f} M tokens"
                print(f"waiting for the tokenizer of {self.source}: {counts}", file=sys.stderr, flush=True)
            if self.closed.wait(POLL_SECONDS):
                raise DataError(f"{self.source}: the run has ended while it waited for text")
            self.refresh()
        if before is not None:  # the condition was not true at once
            self.count_as_waiting()
