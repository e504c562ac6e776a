"""Run assembly: build everything that the training loop needs from a recipe, then train and report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from llmtrain.config import Recipe, TraceSection
from llmtrain.data.index import TOKENIZER, TokenDataset
from llmtrain.data.loader import Loader, eval_batches
from llmtrain.data.prefetch import PrefetchLoader
from llmtrain.data.prepare import prepare
from llmtrain.data.verify import ChecksumScan, check_same_tokens
from llmtrain.errors import DONE, STOPPED_EARLY, CheckpointError, DataError, TrainingError
from llmtrain.lr import LRSchedule
from llmtrain.model import build, count_parameters, flops_per_token, model_config
from llmtrain.parallel.build_engine import build_engine, replica_backend
from llmtrain.parallel.comms import is_lost_peer
from llmtrain.parallel.mesh import Mesh, open_mesh
from llmtrain.parallel.rendezvous import rendezvous
from llmtrain.parallel.world import World
from llmtrain.plan.memory import size_of
from llmtrain.plan.mesh_plan import plan_mesh
from llmtrain.recipe_check import check, check_group, check_vocabulary
from llmtrain.seeding import derive_seed
from llmtrain.suites.suite import check_suite_data
from llmtrain.sync.build_method import build_method, build_wire
from llmtrain.trace import open_trace
from llmtrain.train.background_eval import BackgroundEval
from llmtrain.train.checkpoint import Checkpointer
from llmtrain.train.checkpoint_writer import one_line
from llmtrain.train.console import Console, format_si
from llmtrain.train.devices import enable_determinism, memory_of_rank, peak_flops
from llmtrain.train.instruments import collect_garbage_every, explain_out_of_memory, profile_steps
from llmtrain.train.integrity import checkpoint_folders, latest_valid, step_of
from llmtrain.train.io_errors import IoErrors
from llmtrain.train.metric_gather import MetricReducer
from llmtrain.train.metrics import Metrics
from llmtrain.train.mirror import Mirror
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.signals import StopRequest, stop_requests
from llmtrain.train.summary import draw_losses, final_report, write_sample
from llmtrain.train.trainer import Trainer
from llmtrain.train.validation import ValidationSet, Validator


def run_training(recipe: Recipe, world: World, alter: Callable[[Trainer], None] = lambda trainer: None) -> int:
    """Train `recipe` on this rank of `world`, or continue it. Returns the exit code. `alter` may change the
    trainer before its first step; a comparison uses it to inject faults.

    Raises UserError if the recipe can't be trained and TrainingError if the run fails; both on every rank.
    """
    check(recipe, world.size)
    check_suite_data(recipe.eval.suite)
    console, directory = Console(enabled=world.rank == 0), RunDirectory(recipe)
    mirror = Mirror(recipe, directory, console.print, is_main=world.rank == 0)
    timeout = recipe.run.timeout_seconds
    peers = rendezvous(world, recipe.parallel, lambda: memory_of_rank(world), timeout)
    memory = [rank_info.memory for rank_info in peers.ranks]
    replicas, shard, reason = plan_mesh(recipe, peers.nodes, memory, on_gpu=torch.cuda.is_available())
    check_group(recipe, replicas)
    prepared = prepare_for(recipe, show_progress=world.local_rank == 0)
    check_vocabulary(recipe, prepared.vocab_size)
    with (
        stop_requests() as stop,
        BackgroundEval(recipe.eval.suite if world.rank == 0 else None, recipe, directory, console, stop) as suites,
        open_mesh(world, replicas, shard, replica_backend(recipe.parallel), timeout, peers) as mesh,
    ):
        if mesh.broadcast_from_main(lambda: _is_finished(directory)):
            console.print(directory.completed_message())
            return DONE
        mirror.open(mesh)
        mesh.broadcast_from_main(lambda: _make_ready(directory, prepared))
        resume_from = _newest_anywhere(directory, mirror, mesh, console)
        trainer = build_trainer(recipe, mesh, prepared, directory, console, reason, stop)
        trainer.checkpointer.on_saved += [suites.after_checkpoint, mirror.upload_async]
        trainer.checkpointer.pinned_by += [suites.pinned_steps, mirror.pinned_steps]
        try:
            with (
                _traced(recipe.log.trace, directory.trace_of(world.rank)),
                profile_steps(recipe.log.profile, world.rank, directory.profile, console.print) as profile,
                collect_garbage_every(recipe.train.gc_every) as collect_garbage,
                explain_out_of_memory(world.rank, mesh.device, directory.out_of_memory),
            ):
                trainer.after_step += [profile, collect_garbage]
                alter(trainer)
                mirror.upload_if_newer(resume_from)
                ended = trainer.fit(resume_from)
            _finish_mirror(mirror, mesh, console, ended)
            _write_summary(directory, trainer, mirror, mesh, ended)
        except (RuntimeError, DataError) as error:
            trainer.method.close()
            if mesh.is_main:
                with suppress(OSError):  # the disk may have ended the run
                    directory.write_summary(_summary(trainer, mirror, "error"))
            if isinstance(error, TrainingError | DataError) or not is_lost_peer(error):
                raise
            reason = " ".join(str(error).splitlines()[0].split())
            raise TrainingError(
                f"rank {world.rank} (replica {mesh.replica_comms.rank}, shard {mesh.shard_comms.rank}) lost a peer in step "
                f"{trainer.state.step}: {reason}; start the same command again to continue from the last checkpoint"
            ) from error
        if ended != "done":
            console.print(f"stopped at step {trainer.state.step}; start the same command again to continue")
            return STOPPED_EARLY
        _print_report(directory, mesh, prepared, trainer)
    return DONE


def _traced(section: TraceSection | None, path: Path) -> AbstractContextManager[None]:
    return nullcontext() if section is None else open_trace(path, section.first, section.first + section.steps - 1)


def prepare_for(recipe: Recipe, show_progress: bool) -> TokenDataset:
    """Return the token shards that a recipe needs, preparing them if they are missing."""
    tokens = recipe.train.total_steps * recipe.train.tokens_per_step + 1
    prepared = prepare(recipe.data, tokens, recipe.eval.tokens + 1, show_progress=show_progress)
    prepare_sets(recipe, prepared, show_progress)
    return prepared


def prepare_sets(recipe: Recipe, prepared: TokenDataset, show_progress: bool) -> dict[str, TokenDataset]:
    """Return the texts of `eval.sets`, tokenized with the run's tokenizer. Only their validation split is used."""
    tokenizer, least = str(prepared.directory / TOKENIZER), {"max_tokens": 1}
    return {
        name: prepare(
            recipe.data.model_copy(update={"source": text, "validation": text, "tokenizer": tokenizer, **least}),
            1,
            recipe.eval.tokens + 1,
            show_progress=show_progress,
        )
        for name, text in recipe.eval.sets.items()
    }


def _is_finished(directory: RunDirectory) -> bool:
    """Return whether the run is already complete. Raises RecipeError if the directory belongs to another
    recipe. Main rank only."""
    directory.check_recipe()
    return directory.finished() is not None


def _make_ready(directory: RunDirectory, prepared: TokenDataset) -> None:
    """Create the run directory and copy the tokenizer into it. Main rank only."""
    directory.open()
    directory.copy_tokenizer(prepared.directory / TOKENIZER)


def _newest_anywhere(directory: RunDirectory, mirror: Mirror, mesh: Mesh, console: Console) -> Path | None:
    """Return the newest valid checkpoint, fetched if it is in the mirror, or None if none exists. A
    collective of all ranks."""
    here, problem = None, None
    try:
        here = latest_valid(checkpoint_folders(directory.checkpoints), mesh, console.print)
    except CheckpointError as error:
        problem = error
    there = mirror.fetch(mesh, newer_than=-1 if here is None else step_of(here))
    if there is None and problem is not None:
        raise problem
    return there or here


def _finish_mirror(mirror: Mirror, mesh: Mesh, console: Console, ended: str) -> None:
    """Wait for the last copy to the mirror. If it is missing, raise TrainingError on every rank for a finished
    run, and only print the problem for a stopped run."""
    if (problem := mirror.finish(mesh)) is None:
        return
    if ended == "done":
        raise TrainingError(problem)
    console.print(problem)


def _summary(trainer: Trainer, mirror: Mirror, ended: str) -> dict[str, Any]:
    return trainer.metrics.summary(trainer.state, ended) | {"mirrored": mirror.newest}


def _write_summary(directory: RunDirectory, trainer: Trainer, mirror: Mirror, mesh: Mesh, ended: str) -> None:
    """Write the summary and the plot. All ranks wait until both exist. Raises TrainingError, on every rank, if
    writing fails."""
    recipe = trainer.recipe

    def write() -> str | None:
        try:
            directory.write_summary(_summary(trainer, mirror, ended))
            draw_losses(directory.metrics, directory.plot, f"{recipe.run.name} · {recipe.sync.method}")
        except OSError as error:
            return f"{directory.path} can't be written: {one_line(error)}; start the same command again when it can"
        return None

    if (problem := mesh.broadcast_from_main(write)) is not None:
        raise TrainingError(problem)


def build_trainer(
    recipe: Recipe,
    mesh: Mesh,
    prepared: TokenDataset,
    directory: RunDirectory,
    console: Console,
    mesh_reason: str,
    stop: StopRequest,
) -> Trainer:
    """Build this rank's model, engine, method and loader, and return them in a Trainer. `mesh_reason` is shown
    to the user."""
    texts = {"": prepared, **prepare_sets(recipe, prepared, show_progress=False)}
    check_same_tokens(mesh, texts)
    search = ChecksumScan(texts.values(), mesh.world.local_rank, mesh.world.local_size)
    if recipe.train.deterministic:
        enable_determinism(mesh.device)
    torch.manual_seed(derive_seed(recipe.run.seed, "rank", mesh.world.rank))
    separator = prepared.eos_id if recipe.train.document_mask else None
    model = build(model_config(recipe.model, prepared.vocab_size), recipe.parallel.loss_chunk, separator)
    parameters, flops = count_parameters(model), flops_per_token(model, recipe.train.sequence_length)
    compiled = recipe.parallel.compile
    gradient_wire = build_wire(recipe.sync.wire.kind, compiled) if recipe.sync.wire.gradients else None
    engine = build_engine(
        model,
        mesh,
        recipe.parallel,
        recipe.optim,
        seed=recipe.run.seed,
        gradient_wire=gradient_wire,
        changes_in_forward=recipe.sync.schedule.syncs_in_forward,
    )
    method = build_method(
        recipe.sync,
        engine,
        mesh.replica_comms,
        mesh.shard_comms,
        LRSchedule.of(recipe),
        seed=recipe.run.seed,
        compiled=compiled,
        store=mesh.store,
        timeout_seconds=recipe.run.timeout_seconds,
    )
    loader = Loader(
        prepared.tokens("train"),
        sequence_length=recipe.train.sequence_length,
        global_batch=recipe.train.global_batch,
        micro_batch=recipe.train.micro_batch,
        replica=mesh.replica_comms.rank,
        replicas=mesh.replicas,
        shard_rank=mesh.shard_comms.rank,
        shard=mesh.shard_comms.size,
        seed=recipe.run.seed,
    )
    peak = peak_flops(mesh.device)
    total = recipe.train.total_steps
    console.print(
        f"mesh: {mesh.replicas} replicas x {mesh.shard_comms.size} shards on {mesh.device.type} ({mesh_reason})"
    )
    epochs = total * recipe.train.global_batch / loader.num_samples
    console.print(
        f"model: {format_si(parameters)} parameters in {len(engine.blocks)} blocks · {total} steps of "
        f"{format_si(recipe.train.tokens_per_step)} tokens · data: {format_si(loader.num_samples)} sequences, {epochs:.2f} epochs"
    )
    if peak is None:
        console.print(f"no MFU is shown: the peak of this {mesh.device.type} device is not known")
    section, timeout = recipe.checkpoint, recipe.run.timeout_seconds
    checkpointer = Checkpointer(directory.checkpoints, mesh, engine, method, section, timeout, recipe, console.print)
    reducer, io_errors = MetricReducer(mesh, flops, peak), IoErrors(mesh, search)
    return Trainer(
        recipe,
        engine,
        method,
        PrefetchLoader(loader, timeout, pin=mesh.device.type == "cuda"),
        Metrics(recipe, mesh, engine, method, checkpointer, reducer, console, directory, stop, io_errors),
        Validator(engine, mesh, [_validation_set(recipe, mesh, name, text) for name, text in texts.items()]),
        checkpointer,
    )


def _validation_set(recipe: Recipe, mesh: Mesh, name: str, text: TokenDataset) -> ValidationSet:
    batches = partial(
        eval_batches,
        text.tokens("validation"),
        max_tokens=recipe.eval.tokens,
        sequence_length=recipe.train.sequence_length,
        micro_batch=recipe.train.micro_batch,
        rank=mesh.world.rank,
        world=mesh.world.size,
    )
    return ValidationSet(name, batches, text.bytes_per_token("validation"))


def _print_report(directory: RunDirectory, mesh: Mesh, prepared: TokenDataset, trainer: Trainer) -> None:
    recipe, console, metrics = trainer.recipe, trainer.metrics.console, trainer.metrics
    parameters = size_of(recipe, prepared.vocab_size).parameters
    if recipe.eval.sample_prompt is not None:
        text = write_sample(recipe, trainer.engine, mesh, model_config(recipe.model, prepared.vocab_size), prepared)
        if mesh.is_main:
            with suppress(OSError):  # the text is printed anyway
                directory.samples.write_text(text + "\n")
            console.print(f"\nThe model writes ({directory.samples}):\n\n{text}\n")
    if mesh.is_main:
        summary = metrics.summary(trainer.state, "done")
        for line in final_report(recipe, summary, metrics.first_eval.loss, parameters, directory):
            console.print(line)
