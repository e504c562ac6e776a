"""Training text that may still be tokenized while the run trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

from llmtrain.config import Recipe
from llmtrain.data.background import BackgroundTokenizer
from llmtrain.data.dataset import TokenDataset
from llmtrain.data.host_blocks import HostBlocks, chosen_to_tokenize, hosts_of, posted_blocks
from llmtrain.data.stream import GrowingTokens, shuffles_in_blocks
from llmtrain.errors import DataError
from llmtrain.parallel.mesh import Mesh


@dataclass(frozen=True)
class TrainText:
    """Training tokens of a run that may begin before all of them exist."""

    tokens: GrowingTokens
    problem: Callable[[], DataError | None]
    """Function that returns the error with which this host's tokenizing process has failed permanently, or None."""


def tokens_read(recipe: Recipe) -> int:
    """Return the number of training tokens that a run reads, including the last label."""
    return recipe.train.total_steps * recipe.train.tokens_per_step + 1


@contextmanager
def open_train_text(recipe: Recipe, mesh: Mesh, prepared: TokenDataset) -> Iterator[TrainText | None]:
    """Provide the training tokens if the run reads its first epoch in shuffled blocks, which may be tokenized while it trains;
    None otherwise. The first rank of each host, or of all hosts that share a folder, starts the process that tokenizes what is
    missing, and ends it on exit. A collective of all ranks."""
    if not shuffles_in_blocks(recipe.data):
        yield None
        return
    timeout, is_first = recipe.run.timeout_seconds, mesh.world.local_rank == 0
    hosts = [0] if mesh.store is None else hosts_of(mesh)
    with ExitStack() as stack:
        tokenizer: BackgroundTokenizer | None = None
        choice = chosen_to_tokenize(mesh, prepared.directory) if len(hosts) > 1 else nullcontext(is_first)
        with choice as tokenizes:
            if tokenizes and not GrowingTokens(prepared, timeout).is_complete:
                tokenizer = BackgroundTokenizer(recipe.data, tokens_read(recipe), recipe.eval.tokens + 1, timeout)
                stack.enter_context(tokenizer)  # deletes the status of an earlier run before another host may read it
        if len(hosts) == 1:
            tokens = GrowingTokens(prepared, timeout, announce=is_first)
        else:
            if is_first:
                stack.enter_context(posted_blocks(mesh.store, mesh.world.rank, GrowingTokens(prepared, timeout)))
            tokens = GrowingTokens(prepared, timeout, announce=is_first, agree=HostBlocks(mesh.store, hosts).agree)
        stack.callback(tokens.closed.set)
        yield TrainText(tokens, lambda: None if tokenizer is None else tokenizer.problem)
