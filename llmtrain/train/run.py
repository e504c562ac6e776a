"""Assembly of a run: everything that the training loop needs is built from a recipe, then the run trains and reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from pathlib import Path

import torch

from llmtrain.attention import CAUSAL_FAMILIES
from llmtrain.config import Recipe, TraceSection
from llmtrain.data.build_loader import check_set
from llmtrain.data.dataset import TOKENIZER, TokenDataset
from llmtrain.data.documents import document_samples
from llmtrain.data.loader import PrefetchLoader
from llmtrain.data.prepare import prepare
from llmtrain.data.ready_made import check_separators
from llmtrain.data.text_list import sets_of
from llmtrain.errors import DONE, STOPPED_EARLY, CheckpointError, DataError, TrainingError, one_line
from llmtrain.lr import LRSchedule
from llmtrain.machine_check import check_machine
from llmtrain.model import build, count_parameters, flops_per_token, model_config, placeholders
from llmtrain.parallel.build_engine import build_engine, replica_backend
from llmtrain.parallel.comms import MESSAGE_LENGTH, is_lost_peer
from llmtrain.parallel.device_time import clock_of
from llmtrain.parallel.in_process import InProcess
from llmtrain.parallel.mesh import Mesh, open_mesh
from llmtrain.parallel.network import Networks
from llmtrain.parallel.public_network import ADVICE
from llmtrain.parallel.rendezvous import rendezvous
from llmtrain.parallel.shared_flag import shared_flag
from llmtrain.parallel.world import World
from llmtrain.plan.ineffective_keys import seconds_of_step
from llmtrain.plan.mesh_plan import plan_mesh, with_resharding_decided
from llmtrain.plan.recipe_warnings import recipe_warnings
from llmtrain.recipe_check import check, check_group, check_vocabulary
from llmtrain.seeding import derive_seed
from llmtrain.suites import check_suite_data
from llmtrain.sync.build_method import build_method, build_wire
from llmtrain.sync.methods import is_for_one_replica
from llmtrain.trace import open_trace
from llmtrain.train.background_eval import BackgroundEval
from llmtrain.train.checkpoint import Checkpointer
from llmtrain.train.checkpoint_files import latest_valid, set_aside_newer, step_of
from llmtrain.train.devices import (
    avoid_cudnn_attention,
    collect_garbage_every,
    enable_determinism,
    explain_out_of_memory,
    keep_freed_memory,
    memory_of_rank,
    peak_flops,
    profile_steps,
    share_freed_memory,
    use_expandable_segments,
)
from llmtrain.train.initial_weights import InitialWeights, open_initial_weights
from llmtrain.train.loggers import Console, mesh_line, model_line
from llmtrain.train.metric_gather import MetricReducer
from llmtrain.train.metrics import Metrics
from llmtrain.train.mirror import Mirror
from llmtrain.train.rank_errors import IoErrors
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.run_texts import RunTexts, prepare_texts
from llmtrain.train.sample import Sampler
from llmtrain.train.signals import StopRequest, stop_requests
from llmtrain.train.summary import print_report, summary_of, write_summary
from llmtrain.train.train_text import TrainText, open_train_text
from llmtrain.train.trainer import Trainer
from llmtrain.train.validation import Validator


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
    networks = Networks.from_recipe(recipe.parallel)
    process = InProcess(recipe.parallel.replicas, recipe.run.timeout_seconds, networks)
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
        at_end.callback(trainer.metrics.wait_for_loggers)
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
    rare for agreeing on it. Otherwise the function returns False, and ranks agree at log lines."""
    if not recipe.sync.period.is_timed:
        return nullcontext(lambda: False)
    return shared_flag(mesh.store, "stop", lambda: stop.requested)


def _traced(section: TraceSection | None, path: Path, device: torch.device, step: int) -> AbstractContextManager[None]:
    """Record what the section asks for, in a run that is at `step`."""
    if section is None:
        return nullcontext()
    return open_trace(path, section.first, section.first + section.steps - 1, clock_of(device), resumed_at=step)


def prepare_for(
    recipe: Recipe, show_progress: bool, to_begin: bool = False, replicas: Iterable[int] | None = None
) -> TokenDataset:
    """Prepare those token shards of a recipe that do not exist yet, and return the recipe's text (of a list, the first).

    With `to_begin`, only shards for the first step are prepared, if the run can tokenize the others while it trains. Of
    `data.per_replica`, only the texts of the given `replicas` are prepared; None means all.
    """
    texts = prepare_texts(recipe, replicas, show_progress, to_begin)
    prepared = next(iter(texts.values()))
    if recipe.train.document_mask:
        for text in texts.values():
            check_separators(text, "train.document_mask")
    sets = prepare_sets(recipe, prepared, show_progress)
    if recipe.data.packing == "none":  # now, because it takes a while, and later all ranks would wait for it
        check_separators(prepared, "data.packing")
        document_samples(prepared, "train", recipe.train.sequence_length)
        for text in (prepared, *sets.values()):
            document_samples(text, "validation", recipe.train.sequence_length)
    return prepared


def prepare_sets(recipe: Recipe, prepared: TokenDataset, show_progress: bool) -> dict[str, TokenDataset]:
    """Return the texts of `eval.sets`, tokenized with the run's tokenizer. Raises DataError if one is too short to be validated."""
    sets = {
        name: prepare(section, 1, recipe.eval.tokens + 1, show_progress=show_progress)
        for name, section in sets_of(recipe.data, recipe.eval.sets, prepared).items()
    }
    for name, text in sets.items():
        check_set(recipe, name, text)
    return sets


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


def build_trainer(
    recipe: Recipe,
    mesh: Mesh,
    prepared: TokenDataset,
    directory: RunDirectory,
    console: Console,
    mesh_reason: str,
    stop: StopRequest,
    end_early: Callable[[], bool] = lambda: False,
    weights: InitialWeights | None = None,
    train_text: TrainText | None = None,
) -> Trainer:
    """Build this rank's model, engine, method and loader, print what they are, and return them in a Trainer. A collective of
    all ranks.

    The model starts from `weights`, or from random ones. `mesh_reason`, why the mesh has this shape, is shown to the user.
    `train_text` is the training text if it may grow while the run reads it.
    """
    own = {"": prepared}
    if recipe.data.is_list:
        own = prepare_texts(recipe, [mesh.replica_comms.rank], show_progress=False)
    texts = RunTexts.open(recipe, mesh, own, prepare_sets(recipe, prepared, show_progress=False), train_text)
    scan = texts.scan()
    if mesh.device.type == "cpu":
        keep_freed_memory()
    if recipe.train.deterministic:
        enable_determinism(mesh.device)
    torch.manual_seed(derive_seed(recipe.run.seed, "rank", mesh.world.rank))
    is_packed = recipe.data.packing == "packed"
    separator = prepared.eos_id if recipe.train.document_mask and is_packed else None
    config = model_config(recipe.model, prepared.vocab_size)
    has_masks = separator is not None or config.model_type not in CAUSAL_FAMILIES
    if has_masks or not is_packed:  # then micro-batches have many shapes
        avoid_cudnn_attention(mesh.device)
    model = build(config, recipe.parallel.loss_chunk, separator)
    loader = texts.loader()
    parameters, flops = count_parameters(model), flops_per_token(model, loader.attended_length)
    compiled = recipe.parallel.compile
    gradient_wire = build_wire(recipe.sync.wire, compiled) if recipe.sync.wire.gradients else None
    read = None if weights is None else weights.read
    if read is None and recipe.model.from_weights is not None:  # continued; perhaps the model has no initial values
        read = placeholders(model)
    engine = build_engine(
        model,
        mesh,
        with_resharding_decided(recipe, prepared.vocab_size, mesh.replicas, mesh.shard_comms.size),
        recipe.optim,
        seed=recipe.run.seed,
        read=read,
        gradient_wire=gradient_wire,
        changes_in_forward=recipe.sync.schedule.syncs_in_forward,
        lengths_vary=not is_packed,
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
        end_early=end_early,
    )
    peak = peak_flops(mesh.device)
    shards, connections = mesh.shard_comms.size, len(mesh.replica_comms.groups)
    console.print(mesh_line(mesh.replicas, shards, mesh.device.type, mesh_reason, connections))
    samples = texts.samples(loader)
    console.print(
        model_line(recipe, parameters, len(engine.blocks), None if samples is None else sum(samples.values()))
    )
    for line in texts.describe(loader):
        console.print(line)
    console.print(f"run: {directory.path} · Ctrl-C stops with a checkpoint, from which the same command continues")
    if weights is not None:
        console.print(weights.describe())
    if mesh.is_main:
        for line in _start_warnings(recipe, mesh, prepared, texts):
            console.print(f"warning: {line}")
    if peak is None and mesh.device.type == "cuda":
        name = torch.cuda.get_device_name(mesh.device)
        console.print(f"no MFU (share of the card's peak speed) is shown: the peak of {name} is not known")
    section, timeout = recipe.checkpoint, recipe.run.timeout_seconds
    checkpointer = Checkpointer(directory.checkpoints, mesh, engine, method, section, timeout, recipe, console.print)
    checkpointer.from_weights = None if weights is None else weights.recorded
    reducer = MetricReducer(mesh, flops, peak)
    io_errors = IoErrors(mesh, scan, None if train_text is None else train_text.problem)
    sampler = Sampler(recipe, engine, mesh, prepared, console, parameters)
    return Trainer(
        recipe,
        engine,
        method,
        PrefetchLoader(loader, timeout, pin=mesh.device.type == "cuda"),
        Metrics(recipe, mesh, engine, method, checkpointer, reducer, console, directory, stop, io_errors),
        Validator(engine, mesh, texts.validation_sets(), sampler, console),
        checkpointer,
        texts,
    )


def _start_warnings(recipe: Recipe, mesh: Mesh, prepared: TokenDataset, texts: RunTexts) -> Iterator[str]:
    """Yield the warnings about a run that are known before its first step."""
    mesh_size = mesh.replicas, mesh.shard_comms.size, mesh.world.local_size
    yield from recipe_warnings(recipe, texts.all, seconds_of_step(recipe, prepared.vocab_size, *mesh_size))
    is_given = recipe.parallel.replicas == 1 or is_for_one_replica(recipe.sync.method)
    if mesh.replicas == 1 and not (is_given or recipe.sync.period.averages_gradients):
        yield (
            f"there is one replica, so sync.method={recipe.sync.method} averages with nobody; for several, start more processes "
            "(llmtrain launch), or give parallel.in_process=true parallel.replicas=2"
        )
    if mesh.unencrypted and not recipe.parallel.allow_unencrypted:
        yield f"{mesh.unencrypted}; {ADVICE}"
