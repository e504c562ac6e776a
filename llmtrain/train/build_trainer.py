"""Construction of a rank's trainer from an open run: its model, engine, method, loader and other parts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch

from llmtrain.attention import CAUSAL_FAMILIES
from llmtrain.config import Recipe
from llmtrain.data.dataset import TokenDataset
from llmtrain.data.loader import Loader, PrefetchLoader
from llmtrain.lr import LRSchedule
from llmtrain.model import LanguageModel, build, count_parameters, flops_per_token, model_config, placeholders
from llmtrain.parallel.build_engine import build_engine
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.engine_parts import EngineParts
from llmtrain.parallel.mesh import Mesh
from llmtrain.parallel.public_network import ADVICE
from llmtrain.parallel.virtual_clock import VirtualClock
from llmtrain.plan.mesh_plan import with_reshard_after_forward_decided
from llmtrain.plan.recipe_warnings import MeshSize, recipe_warnings
from llmtrain.seeding import derive_seed
from llmtrain.sync.build_method import build_method, build_wire
from llmtrain.train.background_eval import BackgroundEval
from llmtrain.train.checkpoint import Checkpointer
from llmtrain.train.devices import (
    avoid_cudnn_attention,
    enable_determinism,
    explain_out_of_memory,
    keep_freed_memory,
    peak_flops,
)
from llmtrain.train.initial_weights import InitialWeights
from llmtrain.train.loggers import Console, mesh_line, model_line
from llmtrain.train.metric_gather import MetricReducer
from llmtrain.train.metrics import Metrics
from llmtrain.train.mirror import Mirror
from llmtrain.train.prepare_data import prepare_sets
from llmtrain.train.rank_errors import IoErrors
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.run_log import RunLog
from llmtrain.train.run_texts import RunTexts
from llmtrain.train.sample import Sampler
from llmtrain.train.signals import StopRequest
from llmtrain.train.text_kinds import open_texts
from llmtrain.train.train_text import TrainText
from llmtrain.train.trainer import Trainer
from llmtrain.train.validation import Validator


@dataclass(frozen=True)
class OpenRun:
    """Everything that one rank opens for a run before it builds the trainer."""

    recipe: Recipe
    directory: RunDirectory
    console: Console
    mirror: Mirror
    texts: Mapping[str, TokenDataset]
    """Training texts of this rank by name, prepared for the first step."""
    train_text: TrainText | None
    """The training text if it may grow while the run reads it."""
    mesh: Mesh
    mesh_reason: str
    """Why the mesh has its shape."""
    stop: StopRequest
    background_eval: BackgroundEval
    at_end: ExitStack
    """Functions to call once the mesh is closed and no rank waits for this one any more."""

    @property
    def prepared(self) -> TokenDataset:
        """Return the first training text."""
        return next(iter(self.texts.values()))

    def explain_out_of_memory(self) -> AbstractContextManager[None]:
        """Report what occupies the memory if the enclosed code runs out of memory."""
        return explain_out_of_memory(self.mesh.world.rank, self.mesh.device, self.directory.out_of_memory)


def build_trainer(run: OpenRun, weights: InitialWeights | None) -> Trainer:
    """Build this rank's model, engine, method and loader, print their description, and return them in a Trainer. The
    model starts from `weights`, or from random ones if None. A collective of all ranks."""
    recipe, mesh, prepared = run.recipe, run.mesh, run.prepared
    texts = open_texts(recipe, mesh, run.texts, prepare_sets(recipe, prepared, show_progress=False), run.train_text)
    scan = texts.scan()
    _configure_process(recipe, mesh)
    model, loader = _build_model(recipe, mesh, prepared), texts.loader()
    parameters, flops = count_parameters(model), flops_per_token(model, loader.attended_length)
    engine = _build_engine(recipe, mesh, model, prepared, weights)
    timeout = recipe.run.timeout_seconds
    method = build_method(
        recipe.sync,
        engine,
        mesh.replica_comms,
        mesh.shard_comms,
        LRSchedule.of(recipe),
        seed=recipe.run.seed,
        compiled=recipe.parallel.compile,
        store=mesh.store,
        timeout_seconds=timeout,
        clock=mesh.clock or time.monotonic,
        stop_seen=run.stop.seen,
    )
    for line in _start_lines(run, parameters, len(engine.blocks), texts, loader, weights):
        run.console.print(line)
    checkpointer = Checkpointer(
        run.directory.checkpoints, mesh, engine, method, recipe.checkpoint, timeout, recipe, run.console.print
    )
    checkpointer.from_weights = None if weights is None else weights.recorded
    io_errors = IoErrors(mesh, scan, None if run.train_text is None else run.train_text.problem)
    run_log = RunLog(recipe, run.directory, run.console, io_errors, mesh.is_main)
    reducer = MetricReducer(mesh, flops, peak_flops(mesh.device))
    sampler = Sampler(recipe, engine, mesh, prepared, run.console, parameters)
    trainer = Trainer(
        recipe,
        engine,
        method,
        PrefetchLoader(loader, timeout, pin=mesh.device.type == "cuda"),
        Metrics(recipe, mesh, engine, method, checkpointer, reducer, run_log, run.stop),
        Validator(engine, mesh, texts.validation_sets(), sampler, run.console),
        checkpointer,
        texts,
    )
    if mesh.clock is not None:
        _run_clock(trainer, mesh.clock)
    return trainer


def _run_clock(trainer: Trainer, clock: VirtualClock) -> None:
    """Advance the virtual clock by a step's duration just before the forward pass of its last block. By then, a
    synchronization has done its work in the forward pass, and no gradients have been sent. A step that computes no
    gradient takes no time."""
    last = len(trainer.engine.blocks) - 1

    def before_block(index: int) -> None:
        if index == last:
            clock.complete_step(trainer.state.step)

    trainer.engine.register_block_hook(before_block)


def _configure_process(recipe: Recipe, mesh: Mesh) -> None:
    """Configure what is global to the process: reuse of freed memory, deterministic kernels, and torch's seed."""
    if mesh.device.type == "cpu":
        keep_freed_memory()
    if recipe.train.deterministic:
        enable_determinism(mesh.device)
    torch.manual_seed(derive_seed(recipe.run.seed, "rank", mesh.world.rank))


def _build_model(recipe: Recipe, mesh: Mesh, prepared: TokenDataset) -> LanguageModel:
    """Return the model, whose parameters have no memory yet, and exclude attention kernels that are unsuitable for it."""
    is_packed = recipe.data.packing == "packed"
    separator = prepared.eos_id if recipe.train.document_mask and is_packed else None
    config = model_config(recipe.model, prepared.vocab_size)
    has_masks = separator is not None or config.model_type not in CAUSAL_FAMILIES
    if has_masks or not is_packed:  # unless packed, micro-batches have many shapes
        avoid_cudnn_attention(mesh.device)
    return build(config, recipe.parallel.loss_chunk, separator)


def _build_engine(
    recipe: Recipe, mesh: Mesh, model: LanguageModel, prepared: TokenDataset, weights: InitialWeights | None
) -> Engine:
    """Return the engine that trains `model`, from `weights` or random ones."""
    compiled = recipe.parallel.compile
    read = None if weights is None else weights.read
    if read is None and recipe.model.from_weights is not None:  # a continued run; initial values may be unknown
        read = placeholders(model)
    parts = EngineParts(
        model=model,
        mesh=mesh,
        parallel=with_reshard_after_forward_decided(recipe, prepared.vocab_size, mesh.replicas, mesh.shard_comms.size),
        optim=recipe.optim,
        seed=recipe.run.seed,
        read=read,
        gradient_wire=build_wire(recipe.sync.wire, compiled) if recipe.sync.wire.gradients else None,
        changes_in_forward=recipe.sync.schedule.syncs_in_forward,
        sends_while_training=recipe.sync.schedule.sends_while_training,
        lengths_vary=recipe.data.packing != "packed",
    )
    return build_engine(parts)


def _start_lines(
    run: OpenRun, parameters: int, blocks: int, texts: RunTexts, loader: Loader, weights: InitialWeights | None
) -> Iterator[str]:
    """Yield the console's lines about a run that is about to start."""
    mesh, samples = run.mesh, texts.samples(loader)
    connections = len(mesh.replica_comms.groups)
    yield mesh_line(mesh.replicas, mesh.shard_comms.size, mesh.device.type, run.mesh_reason, connections)
    yield model_line(run.recipe, parameters, blocks, None if samples is None else sum(samples.values()))
    yield from texts.describe(loader)
    yield f"run: {run.directory.path} · Ctrl-C stops with a checkpoint, from which the same command continues"
    if weights is not None:
        yield weights.describe()
    for line in _start_warnings(run.recipe, mesh, texts) if mesh.is_main else ():
        yield f"warning: {line}"
    if mesh.device.type == "cuda" and peak_flops(mesh.device) is None:
        name = torch.cuda.get_device_name(mesh.device)
        yield f"MFU (fraction of the GPU's peak speed) is not shown, because the peak of {name} is not known"


def _start_warnings(recipe: Recipe, mesh: Mesh, texts: RunTexts) -> Iterator[str]:
    """Yield the warnings that are known before the run's first step."""
    yield from recipe_warnings(recipe, texts.all_texts, MeshSize(mesh.world.size, mesh.replicas, mesh.world.local_size))
    if mesh.unencrypted and not recipe.parallel.allow_unencrypted:
        yield f"{mesh.unencrypted}; {ADVICE}"
