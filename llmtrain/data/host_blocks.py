"""Agreement of several hosts on a text that each of them tokenizes while a run reads it.

A thread of each host's first rank posts, in the job's store, a digest of each block that the host has. A rank reads a
block once all hosts have posted it and their digests are equal: hosts never train on different text, and a rank never
waits in a collective for another host's tokenizer. An error on one host is raised on all ranks that wait.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from llmtrain.data.order import block_of
from llmtrain.data.same_tokens import remedy_for
from llmtrain.data.stream import POLL_SECONDS, GrowingTokens, read_status
from llmtrain.data.token_digests import digest_windows, spaced_windows
from llmtrain.errors import DataError, UnavailableError
from llmtrain.parallel.mesh import Mesh
from llmtrain.threads import store_thread

BLOCK_WINDOWS = 16
"""Number of windows per block that its digest covers."""
BLOCKS_PER_REQUEST = 256
"""Largest number of blocks in one request to the store. A run that continues compares all blocks up to its position."""


class HostBlocks:
    """Digests of the blocks of all hosts, in the job's store."""

    def __init__(self, store: dist.Store, hosts: Sequence[int]) -> None:
        """Compare the given hosts, each identified by its first rank."""
        self._store, self._hosts = store.clone(), hosts
        self._agreed = 0
        """Number of tokens, in complete blocks, that are equal on all hosts."""

    def agree(self, tokens: GrowingTokens, needed: int) -> None:
        """Wait until all hosts have every block up to the one with the last input among the first `needed` tokens, the
        last of which is only a label. Raises DataError if the hosts' texts differ, or if a host has failed or adds no
        text within the run's timeout."""
        last, _ = block_of(max(min(needed, len(tokens)) - 2, 0))
        while self._agreed <= last:
            starts, end = [], self._agreed
            while end <= last and len(starts) < BLOCKS_PER_REQUEST:
                starts.append(end)
                end = block_of(end)[1]
            self._compare(tokens, starts, needed)
            self._agreed = end
            if end <= last:  # a run that continues asks many times
                tokens.count_as_waiting()

    def _compare(self, tokens: GrowingTokens, starts: Sequence[int], needed: int) -> None:
        """Wait until all hosts have the blocks that begin at the tokens `starts`, and compare them, as `agree` does."""
        hosts = len(self._hosts)
        keys = [f"text/{host}/{start}" for start in starts for host in self._hosts]
        tokens.wait_until(lambda: self._store.check(keys), needed, self._status)
        found = [json.loads(post) for post in self._store.multi_get(keys)]
        for index, start in enumerate(starts):
            posts = found[index * hosts : (index + 1) * hosts]
            for post in posts:
                if post["digest"] != posts[0]["digest"]:
                    raise DataError(
                        f"{tokens.source}: {post['host']} has different tokens ({post['digest']}) than {posts[0]['host']} "
                        f"({posts[0]['digest']}) from token {start:,} on; {remedy_for(tokens.source, tokens.directory)}"
                    )

    def _status(self) -> Mapping[str, Any]:
        """Return the progress of each host, and the error of one that has failed."""
        keys = [f"text/{host}" for host in self._hosts]
        # Many ranks ask at every poll, so two requests have to suffice once all hosts have posted.
        posted = keys if self._store.check(keys) else [key for key in keys if self._store.check([key])]
        found = [json.loads(status) for status in self._store.multi_get(posted)] if posted else []
        failed = next((status for status in found if "error" in status), None)
        slowest = min(
            (max(status["committed"], status.get("tokens", 0)) for status in found if "committed" in status), default=0
        )
        ended = {} if failed is None else {"error": failed["error"], "is_temporary": failed.get("is_temporary", False)}
        return {"hosts": found, "on_slowest_host": slowest, **ended}


@contextmanager
def posted_blocks(store: dist.Store, rank: int, tokens: GrowingTokens) -> Iterator[None]:
    """Post the digests of this host's blocks from a thread. Only that thread may use `tokens`."""
    with store_thread("posts blocks of text", partial(_post, store.clone(), f"text/{rank}", tokens)):
        yield


def _post(store: dist.Store, key: str, tokens: GrowingTokens, closed: threading.Event) -> None:
    before, start = "", 0
    try:
        while not closed.is_set():
            tokens.refresh()
            posts: dict[str, str] = {}
            while len(posts) < BLOCKS_PER_REQUEST and not closed.is_set() and (post := _describe(tokens, start)):
                posts[f"{key}/{start}"] = json.dumps(post)
                start = block_of(start)[1]
            own = {} if tokens.is_complete else read_status(tokens.directory)  # a status may be of an earlier run
            # Posting itself is progress: the first digests of a long text may take as long as the timeout.
            status = json.dumps({"committed": len(tokens), "posted": start, **own})
            if status != before:
                store.multi_set([*posts, key], [*posts.values(), status])
                before = status
            if tokens.is_complete and start >= len(tokens):
                return
            if not posts:
                closed.wait(POLL_SECONDS)
    except (DataError, OSError, ValueError) as error:
        is_temporary = isinstance(error, UnavailableError | OSError)
        store.set(key, json.dumps({"error": f"{socket.gethostname()}: {error}", "is_temporary": is_temporary}))
    except dist.DistError:  # the store is gone; this rank's next collective says why
        return


def _describe(tokens: GrowingTokens, start: int) -> dict[str, str] | None:
    """Return the digest of the block that begins at token `start`, or None if it is not complete."""
    end = min(block_of(start)[1] + 1, tokens.max_tokens)
    if start >= len(tokens) or (len(tokens) < end and not tokens.is_complete):
        return None
    end = min(end, len(tokens))
    digest = digest_windows(spaced_windows(tokens, start, end, BLOCK_WINDOWS))
    return {"host": socket.gethostname(), "digest": f"{end - start:,} tokens, {digest}"}


def hosts_of(mesh: Mesh) -> list[int]:
    """Return the first rank of each host. A collective of all ranks."""
    local = mesh.all_ranks.all_gather_object(mesh.world.local_rank, "counting hosts")
    return [rank for rank, number in enumerate(local) if number == 0]


@contextmanager
def chosen_to_tokenize(mesh: Mesh, folder: Path) -> Iterator[bool]:
    """Yield whether this rank tokenizes for all hosts that share its prepared folder. Without this choice, several
    hosts would write the same shards on file systems whose locks hold on one host only.

    The first rank of each host puts a file into its folder, and all ranks look for these files. A collective of all ranks on entry
    and on exit, so no rank leaves the block before all ranks have reached its end.
    """
    is_first = mesh.world.local_rank == 0
    mark = folder / f"{secrets.token_hex(8)}.host"
    try:
        if is_first:
            with suppress(OSError):  # the tokenizer reports a folder that can't be written
                mark.touch()
        marks = mesh.all_ranks.all_gather_object(mark.name if is_first else None, "choosing hosts that tokenize")
        seen = (rank for rank, name in enumerate(marks) if name is not None and os.path.exists(folder / name))
        yield is_first and next(seen, mesh.world.rank) == mesh.world.rank
        mesh.all_ranks.all_gather_object(None, "starting to tokenize")
    finally:
        with suppress(OSError):
            mark.unlink(missing_ok=True)
