"""Checks of a recipe on this machine, before any process is started or any file is written.

`launch` makes the checks of `check_start` before it prepares data. `recipe check` makes all checks, with the functions that a
launch, `prepare` and ranks also call. It can't check whether a text that is not prepared yet has enough tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from llmtrain.config import DataSection, Recipe
from llmtrain.config.data import HUB
from llmtrain.data.batch_shape import BatchShape
from llmtrain.data.build_loader import build_loader, check_set, validation_batches
from llmtrain.data.dataset import TokenDataset, open_dataset
from llmtrain.data.hub import require_on_hub
from llmtrain.data.mixture_loader import count_samples
from llmtrain.data.prepare import cache_path, check_documents
from llmtrain.data.ready_made import check_separators, find_ready_made
from llmtrain.data.sites import check_site
from llmtrain.data.sources import Split
from llmtrain.data.text_list import check_token_files, key_of, reported_as, sets_of, texts_of, with_tokenizer_of
from llmtrain.data.tokenizer import check_tokenizer_exists, trained_size
from llmtrain.errors import DataError, RecipeError, one_line
from llmtrain.files import lock_holder, nearest_existing
from llmtrain.launch.nodes import Nodes, check_thread_count, processes_per_node
from llmtrain.loss import summed_loss
from llmtrain.machine_check import check_machine
from llmtrain.model import blocks_of, build, check_initial_values, model_config
from llmtrain.parallel.network import Networks
from llmtrain.parallel.world import World
from llmtrain.plan.mesh_plan import given_shards, plan_mesh, size_or_assumed
from llmtrain.plan.recipe_warnings import MeshSize, recipe_warnings
from llmtrain.recipe_check import check, check_group, check_vocabulary
from llmtrain.run_list import is_locked
from llmtrain.suites import check_suite_data
from llmtrain.train.devices import memory_of_rank
from llmtrain.train.initial_weights import InitialWeights, check_initial_weights
from llmtrain.train.mirror import RemoteRun
from llmtrain.train.run_dir import RunDirectory
from llmtrain.train.run_texts import check_texts, is_complete


@dataclass(frozen=True)
class Preflight:
    """Outcome of the checks: the mesh of a start, and known facts about its texts and weights."""

    processes: int
    replicas: int
    shards: int
    reason: str
    """Reason for this mesh, in a few words."""
    memory: float
    """Bytes that each process may use."""
    texts: Mapping[str, TokenDataset] = field(default_factory=dict)
    """The token shards of each text by name, if all are prepared; otherwise empty."""
    warnings: Sequence[str] = ()
    """Lines of `recipe_warnings`, and one if the run's change of length makes the learning rate jump."""
    weights: InitialWeights | None = None
    """Weights from which the run starts, if the recipe names any and they are on this machine."""
    completed: str | None = None
    """Message about the finished run that the run directory holds; None if there is something to train."""

    @property
    def prepared(self) -> TokenDataset | None:
        """Return the token shards of the first text, if all are prepared."""
        return next(iter(self.texts.values()), None)

    def ranks_on_each(self, nodes: Nodes) -> int:
        """Return the number of ranks on each node."""
        return self.replicas * self.shards // nodes.count

    def replicas_of(self, nodes: Nodes) -> range:
        """Return the replicas of which this node has at least one rank."""
        per_node = self.ranks_on_each(nodes)
        return range(nodes.rank * per_node // self.shards, -(-(nodes.rank + 1) * per_node // self.shards))


def check_start(recipe: Recipe, nodes: Nodes, per_node: int) -> Preflight:
    """Return the mesh for `per_node` processes on each of the nodes. Raises UserError if ranks on nodes like this one would
    refuse the recipe before they read data."""
    world, on_gpu = nodes.count * per_node, torch.cuda.is_available()
    check(recipe, world)
    check_machine(recipe)
    each = memory_of_rank(World(per_node - 1, world, per_node - 1, per_node))
    places = [str(node) for node in range(nodes.count) for _ in range(per_node)]
    replicas, shards, reason = plan_mesh(recipe, places, [each] * world, on_gpu)
    check_group(recipe, replicas)
    summed_loss(recipe.parallel.loss_kernel, recipe.parallel.loss_chunk, recipe.parallel.compile)
    check_model(recipe)
    return Preflight(world, replicas, shards, reason, each, weights=check_initial_weights(recipe))


def check_elsewhere(recipe: Recipe, processes: int) -> list[str]:
    """Return the warnings about a recipe for this number of processes on unknown machines. Raises UserError for a recipe that
    such machines would refuse regardless of their memory, devices, files and number of nodes. An automatic mesh depends on these
    properties, and is not checked."""
    check(recipe, processes)
    check_model(recipe)
    ranks = processes * recipe.parallel.ranks_per_process
    replicas = 1 if ranks == 1 else None
    if (given := given_shards(recipe.parallel, ranks, on_gpu=True)) is not None:  # holds without GPUs, too
        replicas = ranks // given[0]
    return recipe_warnings(recipe, mesh=MeshSize(ranks, replicas))


def check_here(recipe: Recipe, nodes: Nodes | None = None, per_node: int | None = None) -> Preflight:
    """Return the outcome of all checks of a start on this machine, by default with the processes that `launch` would start.
    Raises UserError if the start would refuse the recipe before its first step."""
    check_thread_count()
    nodes = nodes or Nodes.from_environment()
    start = check_start(recipe, nodes, per_node or processes_per_node(recipe.parallel, nodes.count))
    # In a run, ranks make the following checks and tell the ranks of other nodes, because nodes can differ in these respects.
    Networks.from_recipe(recipe.parallel)
    check_suite_data(recipe.eval.suite)
    if recipe.parallel.engine == "zero":
        import llmtrain.parallel.zero  # noqa: F401  raises RecipeError without DeepSpeed
    directory = RunDirectory(recipe)
    directory.check_recipe()
    if is_locked(directory.path):
        raise RecipeError(
            f"{lock_holder(directory.path)} works in {directory.path}; wait until it has ended, or choose another run.name"
        )
    _check_folder("run.out_dir", directory.path)
    _check_mirror(recipe.mirror_url, directory.path)
    texts = check_data(recipe, start.replicas, start.shards, start.replicas_of(nodes))
    check_texts(directory, texts)
    prepared = next(iter(texts.values()), None)
    if prepared is not None:  # again, now with the vocabulary of the tokens
        check_initial_weights(recipe, prepared)
    sets = check_sets(recipe, prepared)
    mesh = MeshSize(start.replicas * start.shards, start.replicas, start.ranks_on_each(nodes))
    warnings = recipe_warnings(recipe, {**texts, **sets}, mesh)
    change = directory.length_change()
    return replace(
        start,
        texts=texts,
        warnings=[*warnings, *(change.warnings() if change is not None else ())],
        completed=directory.completed_message() if directory.finished_summary() else None,
    )


def check_model(recipe: Recipe) -> None:
    """Raise ModelError if the recipe's model can't be built, split into blocks or initialized. Allocates no weights."""
    separator = 0 if recipe.train.document_mask and recipe.data.packing == "packed" else None  # any token stands for it
    config = model_config(recipe.model, size_or_assumed(recipe).vocabulary)
    model = build(config, recipe.parallel.loss_chunk, separator)
    blocks_of(model)
    if recipe.model.from_weights is None:
        check_initial_values(model)


def check_data(recipe: Recipe, replicas: int, shards: int, here: Iterable[int]) -> dict[str, TokenDataset]:
    """Return the token shards of the recipe's texts by name, or an empty mapping if a text is not prepared yet. With
    `data.per_replica`, only the texts of the replicas `here` are read. Raises UserError if `prepare` would fail at its start, or if
    the prepared tokens are too few or belong to another vocabulary."""
    for name, text in recipe.eval.sets.items():
        with reported_as(f"eval.sets.{name}"):
            # The tokenizer is the run's, which may still have to be trained. A placeholder stands for its name here.
            section = {"source": text, "validation": text, "tokenizer": "the tokenizer of the run"}
            _check_source(recipe.data.model_copy(update=section))
    sections = texts_of(recipe.data, here)
    check_token_files(recipe.data, sections)
    prepared: dict[str, TokenDataset] = {}
    for name, section in sections.items():
        with reported_as(key_of(recipe.data, name)):
            if (text := _find_prepared(recipe, with_tokenizer_of(prepared.values(), section))) is not None:
                prepared[name] = text
    if len(prepared) < len(sections):
        return {}
    limits: dict[str, dict[Split, int]] = {
        name: {"train": recipe.data.max_tokens or text.index.splits["train"].tokens} for name, text in prepared.items()
    }
    prepared = {name: TokenDataset(text.directory, text.index, limits[name]) for name, text in prepared.items()}
    for name, text in prepared.items():
        with reported_as(key_of(recipe.data, name)):
            if recipe.train.document_mask:
                check_separators(text, "train.document_mask")
            _check_token_count(recipe, name, text, replicas, shards)
    return prepared


def check_sets(recipe: Recipe, prepared: TokenDataset | None) -> dict[str, TokenDataset]:
    """Return, by name, the token shards of the texts of `eval.sets` that are already prepared with the tokenizer of `prepared`,
    the run's first text. Raises DataError if one of them is damaged or too short."""
    if prepared is None:
        return {}
    texts: dict[str, TokenDataset] = {}
    for name, section in sets_of(recipe.data, recipe.eval.sets, prepared).items():
        with reported_as(f"eval.sets.{name}"):
            if not (folder := cache_path(section)).exists():
                continue
            texts[name] = text = open_dataset(folder)
            if text.index.splits["validation"].exhausted:  # otherwise `prepare` adds what the run needs
                check_set(recipe, name, text)
                validation_batches(recipe, text, rank=0, world=1, write=False)()
    return texts


def _find_prepared(recipe: Recipe, section: DataSection) -> TokenDataset | None:
    """Return the token shards of a text, or None if they are not prepared yet. Raises UserError if they can't be prepared."""
    try:
        prepared = open_dataset(cache_path(section))
    except DataError:
        if cache_path(section).exists():
            raise
        _check_source(section)
        check_tokenizer_exists(section)
        _check_folder("data.cache_dir", Path(section.cache_dir))
        if (size := trained_size(section.tokenizer)) is not None:
            check_vocabulary(recipe, size)
        return None
    check_vocabulary(recipe, prepared.vocab_size)
    return prepared


def _check_token_count(recipe: Recipe, name: str, prepared: TokenDataset, replicas: int, shards: int) -> None:
    train, splits, data = recipe.train, prepared.index.splits, recipe.data.texts()[name]
    if is_complete(prepared, data):
        # the folder has all training tokens of the run; otherwise `prepare` adds the missing ones
        shape = BatchShape.of(recipe, replicas=replicas, shards=shards)
        if recipe.data.per_replica:
            sites = [entry.name for entry in recipe.data.per_replica[:replicas]]
            check_site(prepared.tokens("train"), sites, name, shape)
        elif recipe.data.sources:
            count_samples(name, prepared.tokens("train"), train.sequence_length)
        else:
            build_loader(recipe, prepared, shape, write=False)
    elif data.source.startswith(HUB) and splits["train"].tokens <= train.total_steps * train.tokens_per_step:
        _check_source(data)
    if splits["validation"].exhausted:
        validation_batches(recipe, prepared, rank=0, world=1, write=False)()


def _check_source(data: DataSection) -> None:
    """Raise DataError if the text can't be read, or has no training or no validation documents. For a local text, the first
    documents are read. For a hub dataset, only its existence is checked."""
    if data.source.startswith(HUB):
        name = data.source.removeprefix(HUB)
        require_on_hub(name, "dataset", key="data.source", instead="data.source=/path/to/files or data.source=stdlib")
        return
    cache_path(data)  # lists the files, and reads the headers of token files
    if find_ready_made(data) is None:
        check_documents(data)


def _check_folder(key: str, folder: Path) -> None:
    """Raise RecipeError if `folder` can't be created or written. Creates nothing."""
    nearest = nearest_existing(folder.absolute())
    if not nearest.is_dir():
        raise RecipeError(f"{key}: {nearest} is a file; choose another folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise RecipeError(f"{key}: {nearest} can't be written; choose another folder, or change its permissions")


def _check_mirror(url: str | None, folder: Path) -> None:
    """Raise RecipeError if fsspec can't open the mirror at `url`, or if the mirror is the run's own `folder`."""
    if url is None:
        return
    try:
        mirror = RemoteRun(url)
    except Exception as error:  # some file systems connect at once, with errors of their own
        raise RecipeError(
            f"checkpoint.mirror: {url}: {one_line(error)}; expected a folder or URL that fsspec opens"
        ) from None
    mirror.check_is_apart(folder)
