"""Launcher that runs torchrun on this node for a recipe and reports by its exit code how the ranks ended.

Rendezvous is static: node numbers are given, so ranks, and with them replicas and shards, are on the same nodes
after every start. The c10d rendezvous would also let nodes leave and join, but that needs ranks that can join a
run. Here all ranks continue together from a checkpoint (`attempts`).
"""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from llmtrain.config import Recipe
from llmtrain.errors import DONE, FAILED, STOPPED_EARLY
from llmtrain.launch.attempts import Attempt, NodeExit, train_with_restarts
from llmtrain.launch.nodes import Nodes
from llmtrain.launch.process_count import processes_per_node
from llmtrain.launch.rank_server import rank_program, rank_server
from llmtrain.launch.watchdog import kill_hung_ranks
from llmtrain.recipe_check import check, check_vocabulary
from llmtrain.recipe_loader import load_recipe
from llmtrain.startup import imports_without_gc, note_command_start

if TYPE_CHECKING:
    from llmtrain.train.run_dir import RunDirectory

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""Signals that torchrun forwards to the ranks: its defaults, and the one that Slurm sends before the time limit."""
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
SUMMARY_SECONDS = 30.0
"""Maximum seconds until a file written by one node is visible to another in a shared folder."""


class StopRequested(BaseException):
    """Request to stop, received as a signal while no ranks were training. Not an Exception, so that no
    `except Exception` swallows it."""

    def __init__(self, number: signal.Signals, when: str):
        super().__init__(f"stopped by {number.name} {when}; start the same command again")


def launch_torchrun(recipe_path: Path, overrides: Sequence[str]) -> int:
    """Check the recipe, meet the launchers of other nodes, prepare the data, and run `llmtrain train` in as many
    processes as the recipe needs. Return their exit code, or STOPPED_EARLY if a signal arrives before training
    begins or between two attempts.

    Raises UserError before any rank is started, TrainingError if the nodes do not meet or one is lost.
    """
    try:
        with _stop_requests_raise("before training began"):
            return _launch(recipe_path, overrides)
    except StopRequested as request:
        print(request, flush=True)
        return STOPPED_EARLY


def _launch(recipe_path: Path, overrides: Sequence[str]) -> int:
    note_command_start()
    recipe = load_recipe(recipe_path, overrides)
    with rank_server():
        return _launch_with_server(recipe_path, overrides, recipe)


def _launch_with_server(recipe_path: Path, overrides: Sequence[str], recipe: Recipe) -> int:
    with imports_without_gc():
        from llmtrain.launch.node_rendezvous import rendezvous_nodes
        from llmtrain.train.run import prepare_for
        from llmtrain.train.run_dir import RunDirectory

    nodes = Nodes.from_environment()
    per_node = processes_per_node(recipe.parallel, nodes.count)
    check(recipe, nodes.count * per_node)
    _check_memory(recipe, nodes, per_node)

    directory = RunDirectory(recipe)

    def ready() -> str:
        """Prepare the data and return "", or return why there is nothing to train."""
        directory.check_recipe()
        if directory.finished():
            return directory.completed_message()
        check_vocabulary(recipe, prepare_for(recipe, show_progress=True).vocab_size)
        return ""

    with rendezvous_nodes(nodes, recipe.run.timeout_seconds) as rendezvous:
        # One node first: if the cache is shared, the others then find it filled, even if file locks do not work there.
        complete = rendezvous.main_first(ready, lambda: prepare_for(recipe, show_progress=True))
        if complete:
            print(complete, flush=True)
            return DONE

        program = rank_program()

        def run(attempt: Attempt) -> NodeExit:
            # With fewer nodes than at the start, use as many replicas as fit on them.
            fewer = ["parallel.replicas=auto"] if attempt.nodes.count < nodes.count else []
            check(load_recipe(recipe_path, [*overrides, *fewer]), attempt.nodes.count * per_node)
            with (
                _with_endpoint(attempt.nodes) as members,
                kill_hung_ranks(partial(rendezvous.has_failed, attempt.number)),
            ):
                options = torchrun_arguments(recipe, Attempt(attempt.number, members), per_node)
                return _run([*options, *program, str(recipe_path), *overrides, *fewer], directory, nodes)

        def exchange_exits(*how: Any) -> Mapping[int, NodeExit]:
            with _stop_requests_raise("between two attempts"):
                return rendezvous.exchange_exits(*how)

        return train_with_restarts(
            nodes, recipe.run.restarts, recipe.run.on_replica_loss == "continue", run, exchange_exits
        )


def _check_memory(recipe: Recipe, nodes: Nodes, per_node: int) -> None:
    """Raise RecipeError if the ranks do not have enough memory, assuming nodes like this one. Needs no data."""
    import torch

    from llmtrain.parallel.world import World
    from llmtrain.plan.mesh_plan import plan_mesh
    from llmtrain.train.devices import memory_of_rank

    places = [str(node) for node in range(nodes.count) for _ in range(per_node)]
    each = memory_of_rank(World(0, len(places), 0, per_node))
    plan_mesh(recipe, places, [each] * len(places), on_gpu=torch.cuda.is_available())


@contextmanager
def _with_endpoint(nodes: Nodes) -> Iterator[Nodes]:
    """Yield the nodes with the endpoint of their store. A single node opens a store on a free port until its ranks
    have ended.

    torchrun's own choice for one node, `--standalone`, uses the c10d rendezvous, which inspects its stack for each
    event that it records. This delays the first rank by a second.
    """
    if nodes.count > 1:
        yield nodes
        return
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    yield replace(nodes, address="localhost", port=store.port)


def torchrun_arguments(recipe: Recipe, attempt: Attempt, per_node: int) -> list[str]:
    """Return torchrun's options for the `per_node` ranks of an attempt on this node."""
    nodes = attempt.nodes
    options = ["--nnodes", str(nodes.count), "--nproc-per-node", str(per_node), "--signals-to-handle", SIGNALS]
    options += ["--master-addr", nodes.address, "--master-port", str(nodes.port), "--node-rank", str(nodes.rank)]
    options += ["--rdzv-id", f"attempt {attempt.number}"]  # the store can be that of earlier attempts
    return [*options, "--rdzv-conf", f"timeout={math.ceil(recipe.run.timeout_seconds)}"]


def _run(arguments: Sequence[str], directory: RunDirectory, nodes: Nodes) -> NodeExit:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    command = parse_args([*arguments])
    cores = (os.cpu_count() or 1) // int(command.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
    # By default, torchrun kills ranks 30 s after it has passed a signal on, and a step and a checkpoint can take longer. This
    # does not apply to ranks that it stops because another one has failed: they always have 30 s.
    grace = math.ceil(directory.recipe.run.timeout_seconds)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(grace))
    opened_before = _opened_at(directory)
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_without_traceback)
    try:
        run(command)
    except ChildFailedError as error:
        # Ranks that were stopped because another rank failed have negative codes.
        return NodeExit(max(FAILED, *(failure.exitcode for failure in error.failures.values())))
    except SignalException as error:  # forwarded to the ranks, which have since ended
        if _opened_at(directory) == opened_before:
            raise StopRequested(error.sigval, "before training began") from None
        return NodeExit(
            _exit_code_after_signal(directory, patience=0 if nodes.rank == 0 else SUMMARY_SECONDS), by_signal=True
        )
    return NodeExit(DONE)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Drop the stack trace from the line that names the failed rank, because it shows only torchrun's own wait."""
    record.exc_info = None
    return True


def _opened_at(directory: RunDirectory) -> int | None:
    """Return when a run last began in the directory, in nanoseconds, or None if none has. Rank 0 writes the recipe
    once all ranks have met and handle signals."""
    recipe = directory.path / "recipe.yaml"
    return recipe.stat().st_mtime_ns if recipe.exists() else None


def _exit_code_after_signal(directory: RunDirectory, patience: float) -> int:
    """Return the exit code of ranks that ended after a signal, from the summary that rank 0 wrote, possibly on
    another node. Waits up to `patience` seconds for it; FAILED if it is missing."""
    deadline = time.monotonic() + patience
    while (summary := directory.summary()) is None and time.monotonic() < deadline:
        time.sleep(0.2)
    return {"signal": STOPPED_EARLY, "done": DONE}.get(summary["stopped"], FAILED) if summary else FAILED


@contextmanager
def _stop_requests_raise(when: str) -> Iterator[None]:
    """Raise StopRequested on signals while torchrun does not handle them itself."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StopRequested(signal.Signals(number), when)

    before = {number: signal.signal(number, stop) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
