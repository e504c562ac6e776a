"""Launcher that runs torchrun on this node for a recipe and reports by its exit code how the ranks ended.

Rendezvous is static: node numbers are given, so after every start each rank, and with it each replica and shard, is on the
same node as before. After a failure, all ranks continue together from a checkpoint (`attempts`). benchmarks/results/restarts
compares static rendezvous with torchrun's c10d rendezvous under eight faults, and says why llmtrain uses the static one.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from llmtrain.config import Recipe
from llmtrain.data.batch_shape import batch_unit
from llmtrain.errors import (
    BAD_USAGE,
    DONE,
    FAILED,
    STOPPED_EARLY,
    RecipeError,
    TrainingError,
    UserError,
    first_line,
    one_line,
)
from llmtrain.files import revalidate
from llmtrain.launch.attempts import Attempt, NodeExit, train_with_restarts
from llmtrain.launch.node_info import NodeInfo
from llmtrain.launch.nodes import Nodes, check_thread_count, processes_per_node
from llmtrain.launch.rank_server import rank_server
from llmtrain.launch.watchdog import kill_hung_ranks, stop_on_signals
from llmtrain.parallel.network import check_localhost
from llmtrain.parallel.world import environment_without_rank, gpu_count
from llmtrain.process_limits import usable_cores
from llmtrain.quantities import counted
from llmtrain.recipe_check import check, check_vocabulary
from llmtrain.recipe_loader import check_not_moved, load_recipe, resolved_yaml
from llmtrain.run_files import RECIPE
from llmtrain.startup import import_transformers, imports_without_gc, note_command_start, single_threaded_imports
from llmtrain.stop_signals import STOP_SIGNALS
from llmtrain.train.output import outlive_readers
from llmtrain.train.run_length import batch_problem
from llmtrain.train.signals import handled
from llmtrain.waiting import announced

if TYPE_CHECKING:
    from llmtrain.launch.preflight import Preflight
    from llmtrain.train.run_dir import RunDirectory

UNUSED_SIGNAL = "SIGVTALRM"
"""The only signal that torchrun is told to handle, so that its default signals are left to `stop_on_signals`.
torchrun's option can't be empty, and no process sends this signal."""
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
    outlive_readers()
    check_thread_count()
    with single_threaded_imports(), imports_without_gc():  # reading `model.from_config` imports libraries
        recipe = load_recipe(recipe_path, overrides)
    check_not_moved(recipe, recipe_path, overrides)
    tokens = f"{recipe.data.at_most}{recipe.train.tokens_per_step:,} tokens"
    length = f"{counted(recipe.train.total_steps, 'step', ',')} of {tokens}"
    print(f"{recipe.run.name}: {recipe.sync.method}, {length}; loading torch", flush=True)
    with single_threaded_imports(), imports_without_gc():
        import_transformers()
        # Forked ranks need these modules, too, and inherit them from this process instead of importing them.
        import torch.distributed.run
        import torch.utils.tensorboard

        import llmtrain.train.run
        from llmtrain.consistency import common_values
        from llmtrain.launch.preflight import check_start

        if recipe.parallel.engine == "zero" and not torch.cuda.is_available():  # ranks on GPUs are not forked
            import llmtrain.parallel.zero  # noqa: F401  imports DeepSpeed

    nodes = Nodes.from_environment()
    per_node = processes_per_node(recipe.parallel, nodes.count)
    with single_threaded_imports():  # the checks import the recipe's model
        start, refusal = _result_or_refusal(nodes, lambda: check_start(recipe, nodes, per_node))
    info = NodeInfo(per_node, gpu_count(), common_values(recipe), refusal)
    with rank_server() as program, _kept(recipe) as kept_path:
        return _launch_ranks(recipe, kept_path, nodes, info, start, program)


@contextmanager
def _kept(recipe: Recipe) -> Iterator[Path]:
    """Write the resolved recipe to a temporary file and yield its path. Ranks read this copy at every start, so the
    user may edit the original files for the next run. Raises RecipeError if the file can't be written."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="llmtrain-")
        path = Path(folder.name) / f"{recipe.run.name}.yaml"
        path.write_text(resolved_yaml(recipe), encoding="utf-8")
    except OSError as error:
        raise RecipeError(
            f"no temporary folder can be written ({one_line(error)}); set TMPDIR to one with some free space"
        ) from error
    with folder:
        yield path


def _result_or_refusal(nodes: Nodes, check_here: Callable[[], Preflight]) -> tuple[Preflight | None, str]:
    """Return the result of a check and "". If the check refuses the recipe and there are several nodes, return None and
    the reason. An error raised before the nodes meet would leave the others waiting, and the cause may be that this
    node has fewer GPUs than the others."""
    try:
        return check_here(), ""
    except UserError as error:
        if nodes.count == 1 or error.exit_code != BAD_USAGE:
            raise
        print(f"node {nodes.rank} refuses the recipe, and tells the other nodes: {error}", flush=True)
        return None, str(error)


def _launch_ranks(
    recipe: Recipe,
    recipe_path: Path,
    nodes: Nodes,
    info: NodeInfo,
    start: Preflight,
    program: Sequence[str],
) -> int:
    from llmtrain.launch.node_rendezvous import connect_nodes
    from llmtrain.train.initial_weights import check_initial_weights
    from llmtrain.train.prepare_data import prepare_texts
    from llmtrain.train.run_dir import RunDirectory
    from llmtrain.train.run_texts import check_texts

    directory = RunDirectory(recipe)

    def prepare_node() -> None:
        """Prepare the data that the first step needs, and download initial weights from the hub."""
        texts = prepare_texts(recipe, show_progress=True, to_begin=True, replicas=start.replicas_of(nodes))
        check_texts(directory, texts)
        first, *_ = texts.values()
        check_vocabulary(recipe, first.vocab_size)
        check_initial_weights(recipe, first, download=True)

    def ready() -> str:
        """Prepare this node and return "". If the run is complete already, return a message that says so."""
        directory.check_recipe()
        if directory.finished_summary():
            return directory.completed_message()
        prepare_node()
        return ""

    with connect_nodes(nodes, recipe.run.timeout_seconds, info) as link:
        # One node goes first. If the cache is shared, the others then find it filled, even on a file system without working locks.
        complete = link.main_first(ready, prepare_node)
        if complete:
            print(complete, flush=True)
            return DONE

        allow_node_loss = recipe.run.on_replica_loss == "continue"
        fewer_replicas = partial(_fewer_replicas, recipe, recipe_path, start, nodes)
        if nodes.rank == 0 and allow_node_loss:
            _warn_of_lost_node(nodes, fewer_replicas)
        print(f"starting {counted(info.processes, 'process')} on this node", flush=True)

        def run(attempt: Attempt) -> NodeExit:
            fewer = fewer_replicas(attempt)
            with (
                _stop_requests_raise("between two attempts"),
                _with_endpoint(attempt.nodes) as reachable,
                kill_hung_ranks(partial(link.has_failed, attempt.number)),
            ):
                options = torchrun_arguments(recipe, Attempt(attempt.number, reachable), info.processes)
                return _run([*options, *program, str(recipe_path), *fewer], directory, nodes)

        def exchange_exits(*how: Any) -> Mapping[int, NodeExit]:
            with _stop_requests_raise("between two attempts"):
                return link.exchange_exits(*how)

        return train_with_restarts(nodes, recipe.run.restarts, allow_node_loss, run, exchange_exits)


def _fewer_replicas(recipe: Recipe, recipe_path: Path, start: Preflight, nodes: Nodes, attempt: Attempt) -> list[str]:
    """Return overrides for the nodes that remain in an attempt: as many replicas as fit on them, and a smaller batch if
    they can't share the recipe's. Return no overrides if no node is lost. Raises TrainingError, not UserError, if the
    remaining nodes can't train the recipe: a later start may have all nodes again."""
    if attempt.nodes.count == nodes.count:
        return []
    processes = start.processes // nodes.count * attempt.nodes.count
    left = _replicas_left(start, nodes, attempt)
    # The remaining replicas keep their number of shards, because each has its own text or share of the batch.
    has_own = recipe.data.per_replica or recipe.train.batch_shares
    mesh = ["parallel.replicas=auto", *([f"parallel.shards={start.shards}"] if has_own else [])]
    fewer = [*mesh, *_texts_left(recipe, left), *_shared_batch(recipe, processes, left)]
    try:
        smaller = load_recipe(recipe_path, fewer)
        check(smaller, processes)
        if problem := batch_problem(recipe, smaller):
            raise RecipeError(f"train.global_batch would be {smaller.train.global_batch}, and {problem}")
    except UserError as error:
        reason = str(error).partition(";")[0]  # without the advice, because most keys can't change in a run
        raise TrainingError(
            f"the run can't continue on {attempt.nodes.count} of {nodes.count} nodes: {reason}; start it again on all "
            f"{nodes.count}"
        ) from error
    return fewer


def _replicas_left(start: Preflight, nodes: Nodes, attempt: Attempt) -> list[int]:
    """Return the replicas with at least one rank on the remaining nodes."""
    left = (start.replicas_of(replace(nodes, rank=member)) for member in attempt.members)
    return list(dict.fromkeys(itertools.chain(*left)))


def _shared_batch(recipe: Recipe, ranks: int, left: Sequence[int]) -> list[str]:
    """Return overrides with the largest batch, up to the recipe's, that `ranks` ranks can share, and with the recipe's
    number of steps. The batch is not overridden if the ranks can share the recipe's own, or none up to it. The replicas
    `left` keep their `train.batch_shares` relative to one another."""
    train = recipe.train
    shares = [train.batch_shares[replica] for replica in left] if train.batch_shares else []
    given = [f"train.batch_shares={shares}"] if shares else []
    unit = batch_unit(train.micro_batch, ranks, shares)
    batch = train.global_batch // unit * unit
    if batch in (0, train.global_batch):
        return given
    return [*given, f"train.global_batch={batch}", "train.tokens=null", f"train.steps={train.total_steps}"]


def _warn_of_lost_node(nodes: Nodes, fewer_replicas: Callable[[Attempt], list[str]]) -> None:
    """Print a warning if the run could not continue without one of its nodes."""
    if nodes.count == 1:
        return
    try:
        fewer_replicas(Attempt(1, replace(nodes, count=nodes.count - 1), range(nodes.count - 1)))
    except TrainingError as error:
        print(f"warning: after the loss of a node, {error}", flush=True)


def _texts_left(recipe: Recipe, left: Sequence[int]) -> list[str]:
    """Return an override that keeps only the texts of the replicas `left`, because the remaining nodes may not have the
    other texts. Return no override if all replicas share one text."""
    if not recipe.data.per_replica:
        return []
    entries = [recipe.data.per_replica[replica] for replica in left]
    return [f"data.per_replica={json.dumps([entry.model_dump(mode='json') for entry in entries])}"]


@contextmanager
def _with_endpoint(nodes: Nodes) -> Iterator[Nodes]:
    """Yield the nodes with the endpoint of their store. For a single node, open a store on a free port until its ranks have ended.

    torchrun's own choice for one node, `--standalone`, uses the c10d rendezvous, which inspects the call stack for each
    event that it records. This delays the first rank by a second.
    """
    if nodes.count > 1:
        yield nodes
        return
    from torch.distributed import TCPStore

    check_localhost()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    yield replace(nodes, address="localhost", port=store.port)


def torchrun_arguments(recipe: Recipe, attempt: Attempt, per_node: int) -> list[str]:
    """Return torchrun's options for the `per_node` ranks of an attempt on this node."""
    nodes = attempt.nodes
    options = ["--nnodes", str(nodes.count), "--nproc-per-node", str(per_node), "--signals-to-handle", UNUSED_SIGNAL]
    options += ["--master-addr", nodes.address, "--master-port", str(nodes.port), "--node-rank", str(nodes.rank)]
    options += ["--log-dir", os.devnull]  # otherwise each attempt leaves empty folders in /tmp
    options += ["--rdzv-id", f"attempt {attempt.number}"]  # earlier attempts may have used the same store
    return [*options, "--rdzv-conf", f"timeout={math.ceil(recipe.run.timeout_seconds)}"]


def _run(arguments: Sequence[str], directory: RunDirectory, nodes: Nodes) -> NodeExit:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    from llmtrain.train.devices import use_expandable_segments

    use_expandable_segments()
    with patch.dict(os.environ, environment_without_rank(), clear=True):  # PET_ variables replace torchrun's defaults
        command = parse_args([*arguments])
    cores = usable_cores() // int(command.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores)))
    # By default, torchrun kills ranks 30 s after it has passed a signal on, and a step and a checkpoint can take longer. torch
    # before 2.12 ignores this variable. It does not apply to ranks that torchrun stops because another rank has failed: they
    # always have 30 s.
    grace = math.ceil(directory.recipe.run.timeout_seconds)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(grace))
    opened_before = _opened_at(directory)
    for logger in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{logger}").addFilter(_filter_line)
    try:
        with stop_on_signals() as are_killed:
            run(command)
    except ChildFailedError as error:
        # Ranks that a signal has ended have negative codes; torchrun ends the other ranks of a failed rank's node in
        # this way. Python and libraries use exit codes of their own.
        codes = {failure.exitcode for failure in error.failures.values()}
        return NodeExit(max(codes & {BAD_USAGE, STOPPED_EARLY}, default=FAILED))
    except SignalException as error:  # the signal was forwarded to the ranks, which have since ended
        if _opened_at(directory) == opened_before:
            raise StopRequested(error.sigval, "before training began") from None
        patience = 0 if nodes.rank == 0 or are_killed() else SUMMARY_SECONDS
        return NodeExit(_exit_code_after_signal(directory, patience), by_signal=True)
    except DistError as error:  # another node's torchrun did not arrive; if that node is lost, `exchange_exits` says so
        print(f"error: node {nodes.rank} could not start its ranks: {first_line(error)}", file=sys.stderr, flush=True)
        return NodeExit(FAILED)
    return NodeExit(DONE)


def _filter_line(record: logging.LogRecord) -> bool:
    """Return whether to print a log line of torchrun. Drop lines about forwarded signals, and about nodes that end
    later than this one, because the launchers wait for those nodes themselves. Remove the stack trace from the line
    that names the failed rank, because it only shows where torchrun waited."""
    record.exc_info = None
    dropped = "Closing process", "Sending process", "Received %s death signal", "Error waiting on exit barrier"
    return not record.msg.startswith(dropped)


def _opened_at(directory: RunDirectory) -> int | None:
    """Return when a run last began in the directory, in nanoseconds, or None if none has. Rank 0 writes the recipe
    once all ranks have met and handle signals."""
    revalidate(directory.path)  # rank 0 may be on another host
    recipe = directory.path / RECIPE
    return recipe.stat().st_mtime_ns if recipe.exists() else None


def _exit_code_after_signal(directory: RunDirectory, patience: float) -> int:
    """Return the exit code of ranks that ended after a signal, from the summary that rank 0 wrote, possibly on another
    node. Waits up to `patience` seconds for the summary, and returns FAILED if it does not appear."""
    deadline = time.monotonic() + patience
    with announced(f"the summary of the run in {directory.path}", patience):
        while (summary := directory.summary()) is None and time.monotonic() < deadline:
            time.sleep(0.2)
    return {"signal": STOPPED_EARLY, "done": DONE}.get(summary["stopped"], FAILED) if summary else FAILED


@contextmanager
def _stop_requests_raise(when: str) -> Iterator[None]:
    """Raise StopRequested on signals that arrive in the enclosed code, while `stop_on_signals` does not handle them."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StopRequested(signal.Signals(number), when)

    with handled(STOP_SIGNALS, stop):
        yield
