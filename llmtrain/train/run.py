"""A run of one rank, from start to end: it meets the other ranks, prepares, builds the trainer, trains and reports."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from pathlib import Path

import torch

from llmtrain.config import Recipe, TraceSection
from llmtrain.data.dataset import TOKENIZER, TokenDataset
from llmtrain.errors import DONE, STOPPED_EARLY, CheckpointError, DataError, TrainingError, one_line
from llmtrain.machine_check import check_machine
from llmtrain.parallel.build_engine import replica_backend
from llmtrain.parallel.comms import MESSAGE_LENGTH, is_lost_peer
from llmtrain.parallel.device_time import clock_of
from llmtrain.parallel.in_process import InProcess
from llmtrain.parallel.mesh import Mesh, open_mesh
from llmtrain.parallel.network import Networks
from llmtrain.parallel.rendezvous import rendezvous
from llmtrain.parallel.shared_flag import shared_flag
from llmtrain.parallel.virtual_clock import VirtualClock
from llmtrain.parallel.world import World
from llmtrain.plan.mesh_plan import plan_mesh
from llmtrain.recipe_check import check, check_group, check_vocabulary
from llmtrain.run_files import step_of
from llmtrain.suites import check_suite_data
from llmtrain.trace import open_trace
from llmtrain.train.background_eval import BackgroundEval
from llmtrain.train.build_trainer import build_trainer
from llmtrain.train.checkpoint_files import latest_valid, set_aside_newer
from llmtrain.train.devices import (
    collect_garbage_every,
    explain_out_of_memory,
    memory_of_rank,
    profile_steps,
    share_freed_memory,
    use_expandable_segments,
)
from llmtrain.train.initial_weights import open_initial_weights
from llmtrain.train.loggers import Console
from llmtrain.train.mirror import Mirror
from llmtrain.train.prepare_data import prepare_for
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.signals import StopRequest, stop_requests
from llmtrain.train.summary import print_report, summary_of, write_summary
from llmtrain.train.train_text import open_train_text
from llmtrain.train.trainer import Trainer


def run_training(recipe: Recipe, world: World, alter: Callable[[Trainer], None] = lambda trainer: None) -> int:
    """Train `recipe`, or continue its run, as this process's rank of `world`. Returns the exit code. `alter` may change the
    trainer before its first step; a comparison uses it to inject faults.

    Raises UserError if the recipe can't be trained and TrainingError if the run fails; both on every rank.
    """
    use_expandable_segments()  # llmtrain's own launcher has done this already, but torchrun or srun has not
    check(recipe, world.size)
    check_machine(recipe)
    check_suite_data(recipe.eval.suite)
    if not recipe.parallel.in_process:
        return _run_rank(recipe, world, alter)
    share_freed_memory()
    parallel = recipe.parallel
    networks, section = Networks.from_recipe(parallel), parallel.virtual_clock
    clocks = section and [VirtualClock(section, recipe.run.seed, replica) for replica in range(parallel.replicas)]
    process = InProcess(parallel.replicas, recipe.run.timeout_seconds, networks, clocks or ())
    return process.run(lambda replica: _run_rank(recipe, replica, alter, process))


def _run_rank(recipe: Recipe, world: World, alter: Callable[[Trainer], None], process: InProcess | None = None) -> int:
    """Train on one rank. The rank is this process or, if `process` is given, the calling thread of it. Returns the exit
    code."""
    console, directory = Console(enabled=world.rank == 0), RunDirectory(recipe)
    mirror = Mirror(recipe, directory, console.print, is_main=world.rank == 0)
    timeout = recipe.run.timeout_seconds
    with console.progress("waiting for the other ranks"):
        if process is not None:
            peers = process.rendezvous(memory_of_rank)
        else:
            peers = rendezvous(world, recipe.parallel, lambda: memory_of_rank(world), timeout)
    memory = [rank_info.memory for rank_info in peers.ranks]
    replicas, shards, reason = plan_mesh(recipe, peers.nodes, memory, on_gpu=torch.cuda.is_available())
    check_group(recipe, replicas)
    prepared = _prepare_own(recipe, world, shards)
    check_vocabulary(recipe, prepared.vocab_size)
    if process is not None:
        opened_mesh = process.open_mesh(world)
    else:
        backend, connections = replica_backend(recipe.parallel), recipe.parallel.connections
        opened_mesh = open_mesh(world, replicas, shards, backend, timeout, peers, connections)
    with (
        closing(directory),
        stop_requests() as stop,
        ExitStack() as at_end,
        BackgroundEval(recipe.eval.suite if world.rank == 0 else None, recipe, directory, console, stop) as suites,
        opened_mesh as mesh,
        _shared_stop(recipe, mesh, stop) as end_early,
        open_train_text(recipe, mesh, prepared) as text,
    ):
        if mesh.broadcast_from_main(lambda: _is_finished(directory)):
            console.print(directory.completed_message())
            return DONE
        mirror.open(mesh)
        mesh.broadcast_from_main(lambda: _make_ready(directory, prepared))
        resume_from = _newest_anywhere(directory, mirror, mesh, console)
        weights = open_initial_weights(recipe, mesh, prepared) if resume_from is None else None
        with (
            console.progress("building the model"),
            explain_out_of_memory(world.rank, mesh.device, directory.out_of_memory),
        ):
            trainer = build_trainer(recipe, mesh, prepared, directory, console, reason, stop, end_early, weights, text)
        del weights  # closes its files
        at_end.callback(trainer.metrics.run_log.wait)
        suites.newest = 0 if resume_from is None else step_of(resume_from)
        trainer.checkpointer.on_saved += [suites.after_checkpoint, mirror.upload_async]
        trainer.checkpointer.pinned_by += [suites.worker.pending_steps, mirror.pinned_steps]
        is_loaded = resume_from is None  # until the checkpoint is loaded, the trainer's state is not the run's
        try:
            with explain_out_of_memory(world.rank, mesh.device, directory.out_of_memory):
                alter(trainer)
                if resume_from is not None:
                    trainer.load(resume_from)
                    is_loaded = True
                # Only now is the run directory changed, so that a start that is refused (for damaged weights, a checkpoint or
                # the text) changes nothing.
                mesh.broadcast_from_main(directory.open)
                if resume_from is not None and mesh.is_main:
                    set_aside_newer(directory.checkpoints, step_of(resume_from), console.print)
                mirror.claim(mesh)
                mirror.upload_if_newer(resume_from)
                with (
                    _traced(recipe.log.trace, directory.trace_of(world.rank), mesh.device, trainer.state.step),
                    profile_steps(recipe.log.profile, world.rank, directory.profile, console.print) as profile,
                    collect_garbage_every(recipe.train.gc_every) as collect_garbage,
                ):
                    trainer.after_step += [profile, collect_garbage]
                    ended = trainer.fit()
            _finish_mirror(mirror, mesh, console, ended)
            write_summary(trainer, ended, mirror.newest)
        except (RuntimeError, DataError) as error:
            trainer.method.close()
            trainer.checkpointer.finish_writing()
            if mesh.is_main and is_loaded:
                with suppress(OSError, RuntimeError):  # a full disk or a broken GPU may have ended the run
                    failed = summary_of(trainer, "error", mirror.newest)
                    directory.write_summary({**failed, "error": one_line(error, MESSAGE_LENGTH)})
            if isinstance(error, TrainingError | DataError) or not is_lost_peer(error):
                raise
            raise _lost_peer(error, mesh, trainer.state.step) from error
        if ended != "done":
            step, plot = trainer.state.global_step, directory.plot
            console.print(f"stopped at step {step}; start the same command again to continue · losses: {plot}")
            return STOPPED_EARLY
        print_report(trainer)
    return DONE


def _lost_peer(error: Exception, mesh: Mesh, step: int) -> TrainingError:
    """Return the error that says in which step this rank lost a peer, and how to continue."""
    return TrainingError(
        f"rank {mesh.world.rank} (replica {mesh.replica_comms.rank}, shard {mesh.shard_comms.rank}) lost a peer in step "
        f"{step}: {one_line(error, MESSAGE_LENGTH)}; start the same command again to continue from the last checkpoint"
    )


def _prepare_own(recipe: Recipe, world: World, shards: int) -> TokenDataset:
    """Prepare the text that this rank reads. With a text per replica, one replica's text may be faulty and the others' not. The
    first rank of that replica then prints the error."""
    replica, shard = divmod(world.rank, shards)
    try:
        return prepare_for(recipe, show_progress=world.local_rank == 0, to_begin=True, replicas=[replica])
    except DataError as error:
        error.is_shared = not (recipe.data.per_replica and shard == 0)
        raise


def _shared_stop(recipe: Recipe, mesh: Mesh, stop: StopRequest) -> AbstractContextManager[Callable[[], bool]]:
    """Provide a function that returns whether any rank was asked to stop, for rounds of seconds, whose log lines are too
    rare for agreeing on it. Otherwise the function returns False, and ranks agree at log lines. So they do by a virtual clock, too: a
    round that a signal cuts short would make another run of one that is continued."""
    if not recipe.sync.period.is_timed or mesh.clock is not None:
        return nullcontext(lambda: False)
    return shared_flag(mesh.store, "stop", lambda: stop.requested)


def _traced(section: TraceSection | None, path: Path, device: torch.device, step: int) -> AbstractContextManager[None]:
    """Record what the section asks for, in a run that is at `step`."""
    if section is None:
        return nullcontext()
    return open_trace(path, section.first, section.first + section.steps - 1, clock_of(device), resumed_at=step)


def _is_finished(directory: RunDirectory) -> bool:
    """Return whether the run is already complete. Raises RecipeError if the directory belongs to another
    recipe. Main rank only."""
    directory.check_recipe()
    return directory.finished() is not None


def _make_ready(directory: RunDirectory, prepared: TokenDataset) -> None:
    """Lock the run directory and copy the tokenizer into it. Main rank only."""
    directory.reserve()
    directory.copy_tokenizer(prepared.directory / TOKENIZER)


def _newest_anywhere(directory: RunDirectory, mirror: Mirror, mesh: Mesh, console: Console) -> Path | None:
    """Return the newest valid checkpoint of the run directory and the mirror, from which it is fetched; None if there is none.
    A collective of all ranks."""
    here, problem = None, None
    try:
        here = latest_valid(directory.checkpoints, mesh, console.print)
    except CheckpointError as error:
        problem = error
    there = mirror.fetch(mesh, newer_than=-1 if here is None else step_of(here))
    if there is None and problem is not None:
        raise problem
    return there or here


def _finish_mirror(mirror: Mirror, mesh: Mesh, console: Console, ended: str) -> None:
    """Wait for the last copy to the mirror. If that fails, raise TrainingError on every rank of a complete run, but only
    print the problem for a stopped one, which can copy it later."""
    if (problem := mirror.finish(mesh, is_stopped=ended != "done")) is None:
        return
    if ended == "done":
        error = TrainingError(problem)
        error.is_shared = True
        raise error
    console.print(problem)
