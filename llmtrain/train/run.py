"""One rank's part of a run, from start to end. Start with `_run_rank`, the outline; the functions below follow its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch

from llmtrain.config import Recipe
from llmtrain.consistency import common_values
from llmtrain.data.dataset import TOKENIZER, TokenDataset
from llmtrain.errors import (
    DONE,
    STOPPED_EARLY,
    CheckpointError,
    DataError,
    NewerFormatError,
    TrainingError,
    one_line,
)
from llmtrain.machine_check import check_machine
from llmtrain.parallel.comms import MESSAGE_LENGTH, is_lost_peer
from llmtrain.parallel.device_time import clock_of
from llmtrain.parallel.in_process import InProcess
from llmtrain.parallel.mesh import Mesh
from llmtrain.parallel.network import Networks
from llmtrain.parallel.ranks import Processes, Ranks
from llmtrain.parallel.shared_flag import shared_flag
from llmtrain.parallel.virtual_clock import VirtualClock
from llmtrain.parallel.world import World
from llmtrain.plan.mesh_plan import plan_mesh
from llmtrain.recipe_check import check, check_group, check_vocabulary
from llmtrain.run_files import step_of
from llmtrain.suites import check_suite_data
from llmtrain.trace import open_trace
from llmtrain.train.background_eval import BackgroundEval
from llmtrain.train.build_trainer import OpenRun, build_trainer
from llmtrain.train.checkpoint_files import latest_valid, set_aside_newer
from llmtrain.train.devices import (
    collect_garbage_every,
    memory_of_rank,
    profile_steps,
    share_freed_memory,
    use_expandable_segments,
)
from llmtrain.train.initial_weights import open_initial_weights
from llmtrain.train.loggers import Console
from llmtrain.train.mirror import Mirror
from llmtrain.train.prepare_data import prepare_texts
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.shared_folder import check_is_shared
from llmtrain.train.signals import StopRequest, stop_requests
from llmtrain.train.summary import print_report, write_error_summary, write_summary
from llmtrain.train.train_text import open_train_text
from llmtrain.train.trainer import Trainer


def run_training(recipe: Recipe, world: World, alter: Callable[[Trainer], None] = lambda trainer: None) -> int:
    """Train `recipe`, or continue its run, in this process, whose rank is `world`. Returns the exit code. `alter` may change the
    trainer before its first step; a comparison uses it to inject faults.

    Raises UserError if the recipe can't be trained and TrainingError if the run fails; both on every rank.
    """
    use_expandable_segments()  # llmtrain's own launcher has done this already, but torchrun or srun has not
    check(recipe, world.size)
    check_machine(recipe)
    ranks = _ranks_of(recipe, world)
    return ranks.run(lambda world: _run_rank(recipe, ranks, world, alter))


def _ranks_of(recipe: Recipe, world: World) -> Ranks:
    """Return the run's ranks: processes, of which this one is `world`, or, with `parallel.in_process`, threads of this
    process."""
    parallel, timeout = recipe.parallel, recipe.run.timeout_seconds
    if not parallel.in_process:
        return Processes(world, parallel, timeout, common_values(recipe) if world.size > 1 else {})
    share_freed_memory()
    clock = parallel.virtual_clock
    clocks = [VirtualClock(clock, recipe.run.seed, replica) for replica in range(parallel.replicas)] if clock else []
    return InProcess(parallel.replicas, timeout, Networks.from_recipe(parallel), clocks)


def _run_rank(recipe: Recipe, ranks: Ranks, world: World, alter: Callable[[Trainer], None]) -> int:
    """Train as the rank `world`, which is this process or, with `parallel.in_process`, this thread. Return the exit code.

    Any call before `_train` may refuse to start, for example because of damaged weights, or of a checkpoint of another
    recipe or text. Until then, the run does not change. Its directory is only locked and cleared of partial
    checkpoints, and receives the tokenizer and, from the mirror, checkpoints that it has lost.
    """
    with _open(recipe, ranks, world) as run:
        if (message := run.mesh.broadcast_from_main(lambda: _message_if_finished(run.directory))) is not None:
            run.console.print(message)
            return DONE
        run.mirror.open(run.mesh)
        run.mesh.broadcast_from_main(lambda: _lock(run.directory, run.prepared))
        check_is_shared(run.directory.path, run.mesh, recipe.run.timeout_seconds)
        checkpoint = _newest_checkpoint(run)
        trainer = _build(run, checkpoint)
        _load(run, trainer, checkpoint, alter)
        ended = _train(run, trainer, checkpoint)
        if ended != "done":
            step, plot = trainer.state.global_step, run.directory.plot
            run.console.print(f"stopped at step {step}; start the same command again to continue · losses: {plot}")
            return STOPPED_EARLY
        print_report(trainer)
    return DONE


@contextmanager
def _open(recipe: Recipe, ranks: Ranks, world: World) -> Iterator[OpenRun]:
    """Find the other ranks, choose the mesh and prepare the text. Then open what training uses.

    On exit, all of it is closed in reverse order: the mesh before the last evaluation and the loggers of the main rank, so that
    no other rank waits for them, and the lock on the directory last.
    """
    console, directory = Console(enabled=world.rank == 0), RunDirectory(recipe)
    with console.progress("waiting for the other ranks"):
        peers = ranks.find_peers(partial(_usable_memory, recipe))
    memory = [rank_info.memory for rank_info in peers.ranks]
    replicas, shards, mesh_reason = plan_mesh(recipe, peers.nodes, memory, on_gpu=torch.cuda.is_available())
    check_group(recipe, replicas)
    texts = _prepare_own(recipe, world, shards)
    prepared = next(iter(texts.values()))
    check_vocabulary(recipe, prepared.vocab_size)
    mirror = Mirror(recipe, directory, console.print, is_main=world.rank == 0)
    with (
        closing(directory),
        stop_requests() as stop,
        ExitStack() as at_end,
        BackgroundEval(
            recipe.eval.suite if world.rank == 0 else None, recipe, directory, console, stop
        ) as background_eval,
        ranks.open_mesh(world, peers, shards) as mesh,
        _shared_stop(recipe, mesh, stop) as stop.seen,
        open_train_text(recipe, mesh, prepared) as train_text,
    ):
        yield OpenRun(
            recipe=recipe,
            directory=directory,
            console=console,
            mirror=mirror,
            texts=texts,
            train_text=train_text,
            mesh=mesh,
            mesh_reason=mesh_reason,
            stop=stop,
            background_eval=background_eval,
            at_end=at_end,
        )


def _usable_memory(recipe: Recipe, world: World) -> float:
    """Return the bytes that this rank may use. Raises UserError on rank 0 if the recipe's suite could not be evaluated there."""
    if world.rank == 0:
        check_suite_data(recipe.eval.suite)
    return memory_of_rank(world)


def _prepare_own(recipe: Recipe, world: World, shards: int) -> Mapping[str, TokenDataset]:
    """Prepare the texts that this rank reads. With one text per replica, a single replica's text may be faulty. The first rank of
    that replica then prints the error."""
    replica, shard = divmod(world.rank, shards)
    try:
        return prepare_texts(recipe, show_progress=world.local_rank == 0, to_begin=True, replicas=[replica])
    except DataError as error:
        error.is_shared = not (recipe.data.per_replica and shard == 0)
        raise


def _shared_stop(recipe: Recipe, mesh: Mesh, stop: StopRequest) -> AbstractContextManager[Callable[[], bool]]:
    """Provide the function for `StopRequest.seen`. With timed rounds, log lines are too rare for agreeing on a
    stop, so the function asks the job's store. Otherwise ranks agree at log lines, and the function returns False. With
    a virtual clock, ranks also agree at log lines: if a signal cut a round short, a continued run would differ from an
    uninterrupted one."""
    if not recipe.sync.period.is_timed or mesh.clock is not None:
        return nullcontext(lambda: False)
    return shared_flag(mesh.store, "stop", lambda: stop.requested)


def _message_if_finished(directory: RunDirectory) -> str | None:
    """Return the console message for a run that is already complete, or None. Raises RecipeError if the directory belongs to
    another recipe. Main rank only, whose host has the folder."""
    directory.check_recipe()
    return directory.completed_message() if directory.finished_summary() is not None else None


def _lock(directory: RunDirectory, prepared: TokenDataset) -> None:
    """Lock the run directory and copy the tokenizer into it. Main rank only."""
    directory.lock()
    directory.copy_tokenizer(prepared.directory / TOKENIZER)


def _newest_checkpoint(run: OpenRun) -> Path | None:
    """Return the newest valid checkpoint of the run directory and the mirror, fetched from the mirror if necessary. If
    neither has one, return None, or raise RecipeError if the run was complete. A collective of all ranks."""
    here, problem = None, None
    try:
        here = latest_valid(run.directory.checkpoints, run.mesh, run.console.print)
    except NewerFormatError:
        raise  # it is not damaged, and the mirror may only have older ones
    except CheckpointError as error:
        problem = error
    there = run.mirror.fetch(run.mesh, newer_than=-1 if here is None else step_of(here))
    if there is None and problem is not None:
        raise problem
    found = there or here
    if found is None:
        run.mesh.broadcast_from_main(run.directory.check_may_begin)
    return found


def _build(run: OpenRun, checkpoint: Path | None) -> Trainer:
    """Build the trainer, with the recipe's initial weights unless the run continues from a checkpoint. Let the mirror and the
    background evaluation follow its checkpoints. A collective of all ranks."""
    weights = open_initial_weights(run.recipe, run.mesh, run.prepared) if checkpoint is None else None
    with run.console.progress("building the model"), run.explain_out_of_memory():
        trainer = build_trainer(run, weights)
    run.at_end.callback(trainer.metrics.run_log.wait)
    run.background_eval.newest = 0 if checkpoint is None else step_of(checkpoint)
    trainer.checkpointer.followers += [run.background_eval, run.mirror]
    return trainer


def _load(run: OpenRun, trainer: Trainer, checkpoint: Path | None, alter: Callable[[Trainer], None]) -> None:
    """Let `alter` change the trainer, and load the checkpoint, if there is one. Errors are not written to the summary, because the
    trainer does not have the run's state yet. A collective of all ranks."""
    with _handle_errors(run, trainer):
        alter(trainer)
        if checkpoint is not None:
            trainer.load(checkpoint)


def _train(run: OpenRun, trainer: Trainer, checkpoint: Path | None) -> str:
    """Claim the run directory, which from here on may be changed. Train and write the summary. Return how the run has ended, "done"
    or "signal". A collective of all ranks."""
    recipe, directory, rank = run.recipe, run.directory, run.mesh.world.rank
    with _handle_errors(run, trainer, in_summary=True):
        _claim(run, checkpoint)
        with (
            _traced(run, trainer.state.step),
            profile_steps(recipe.log.profile, rank, directory.profile, run.console.print) as profile,
            collect_garbage_every(recipe.train.gc_every) as collect_garbage,
        ):
            trainer.after_step += [profile, collect_garbage]
            ended = trainer.fit()
        _finish_mirror(run, ended)
        write_summary(trainer, ended, run.mirror.newest)
    return ended


def _claim(run: OpenRun, checkpoint: Path | None) -> None:
    """Write the recipe to the run directory and the mirror, which then belong to this run, continued from `checkpoint`. A
    collective of all ranks."""
    run.mesh.broadcast_from_main(run.directory.claim)
    if checkpoint is not None and run.mesh.is_main:
        set_aside_newer(run.directory.checkpoints, step_of(checkpoint), run.console.print)
    run.mirror.claim(run.mesh)
    run.mirror.upload_at_start(checkpoint)


@contextmanager
def _traced(run: OpenRun, step: int) -> Iterator[None]:
    """Record the timeline that `log.trace` asks for, in a run that is at `step`. If it can't be written, print a line and continue."""
    section = run.recipe.log.trace
    with ExitStack() as opened:
        if section is not None:
            path, last = run.directory.trace_of(run.mesh.world.rank), section.first + section.steps - 1
            try:
                opened.enter_context(open_trace(path, section.first, last, clock_of(run.mesh.device), resumed_at=step))
            except OSError as error:
                run.console.print(f"no timeline is written to {path} ({error.strerror})")
        yield


def _finish_mirror(run: OpenRun, ended: str) -> None:
    """Wait for the last copy to the mirror. If the copy fails, raise TrainingError on every rank of a complete run. For a stopped
    run, only print the problem, because its next start can copy the checkpoint."""
    if (problem := run.mirror.finish(run.mesh, is_stopped=ended != "done")) is None:
        return
    if ended == "done":
        error = TrainingError(problem)
        error.is_shared = True
        raise error
    run.console.print(problem)


@contextmanager
def _handle_errors(run: OpenRun, trainer: Trainer, in_summary: bool = False) -> Iterator[None]:
    """Clean up if the enclosed code fails: close the method, wait for the checkpoint in progress and, with
    `in_summary`, write the error to summary.json. Explain a lost peer and a lack of memory."""
    try:
        with run.explain_out_of_memory():
            yield
    except (RuntimeError, DataError) as error:
        trainer.method.close()
        trainer.checkpointer.finish_writing()
        if in_summary and run.mesh.is_main:
            write_error_summary(trainer, error, run.mirror.newest)
        if isinstance(error, TrainingError | DataError) or not is_lost_peer(error):
            raise
        raise _lost_peer(error, run.mesh, trainer.state.step) from error


def _lost_peer(error: Exception, mesh: Mesh, step: int) -> TrainingError:
    """Return the error that says in which step this rank lost a peer, and how to continue."""
    return TrainingError(
        f"rank {mesh.world.rank} (replica {mesh.replica_comms.rank}, shard {mesh.shard_comms.rank}) lost a peer in step "
        f"{step}: {one_line(error, MESSAGE_LENGTH)}; start the same command again to continue from the last checkpoint"
    )
