"""Checks that refuse combinations of recipe keys that can't run, with the reason.

`check` needs no process group, no data and no GPU, so `recipe check --processes N` gives the same result on a laptop and a
cluster. `check_machine` (machine_check.py) makes the checks that depend on the machine on which a run starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmtrain.config import ModelSection, ParallelSection, Recipe
from llmtrain.config.section import leaves
from llmtrain.data.batch_shape import batch_unit
from llmtrain.data.text_list import check_replicas, check_text_list
from llmtrain.errors import RecipeError
from llmtrain.lr import LRSchedule
from llmtrain.quantities import counted
from llmtrain.recipe_messages import closest
from llmtrain.step_counts import warmup_steps
from llmtrain.suites import check_suite
from llmtrain.sync.compatibility import find_conflict

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SIZES = {"hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings", "window_size", "head_dim"} | {
    f"num_{part}" for part in ("layers", "hidden_layers", "heads", "attention_heads", "key_value_heads")
}
"""Keys for which transformers' configs accept numbers below 1, which fail only later."""

OWN_DEEPSPEED = {
    *("zero_optimization.round_robin_gradients", "zero_optimization.parameter_alignment"),
    *("zero_optimization.sub_group_size", "zero_optimization.stage3_param_persistence_threshold"),
    *("zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.zero_hpz_partition_size"),
    *("zero_optimization.stage3_max_reuse_distance", "zero_optimization.mics_shard_size"),
    *("zero_optimization.memory_efficient_linear", "zero_optimization.cpu_offload"),
    *("data_types.grad_accum_dtype", "managed_gradient_accumulation", "zero_force_ds_cpu_optimizer"),
}
"""Keys of DeepSpeed whose values the engine must choose. They decide the layout of DeepSpeed's tensors, or whether a layer computes
with the synchronized parameters."""
DEEPSPEED_EQUIVALENTS = {
    "zero_optimization.stage": "parallel.zero_stage",
    "zero_optimization.offload_optimizer": "parallel.zero_offload",
    "optimizer": "optim",
    "scheduler": "schedule",
    "gradient_clipping": "optim.clip_norm",
    "bf16": "parallel.precision",
    "fp16": "parallel.precision",
    "train_batch_size": "train.global_batch",
    "train_micro_batch_size_per_gpu": "train.micro_batch",
    "gradient_accumulation_steps": "train.global_batch",
}
"""Recipe keys that replace keys of DeepSpeed's configuration, by DeepSpeed's key."""

MOST_STEPS = 10**8
"""Upper limit of a run's number of steps: more than any run takes, but few enough to loop over."""


def check(recipe: Recipe, world_size: int | None) -> None:
    """Raise RecipeError for the first impossible combination, or another UserError for an invalid model, tokenizer
    name or suite.

    `world_size` is the number of processes, which is 1 with `parallel.in_process`. None skips the checks that need it.
    """
    if recipe.parallel.in_process:
        _check_in_process(recipe, world_size)
        world_size = recipe.parallel.replicas
    elif recipe.parallel.virtual_clock is not None:
        raise RecipeError(
            "parallel.virtual_clock is for replicas in one process, and processes have their own speed; give in_process=true, or "
            "leave out virtual_clock"
        )
    check_text_list(recipe.data, recipe.eval.sets)
    _check_length(recipe)
    _check_sync(recipe)
    _check_engine(recipe.parallel)
    _check_nonfinite(recipe)
    _check_optimizer(recipe)
    _check_first_passes(recipe)
    if world_size is not None:
        check_mesh(recipe.parallel, world_size)
    if recipe.parallel.replicas != "auto":
        check_group(recipe, recipe.parallel.replicas)
    elif world_size is not None and recipe.parallel.shards != "auto":
        check_group(recipe, world_size // recipe.parallel.shards)
    ranks = world_size or _explicit_ranks(recipe.parallel)
    if ranks is not None:
        _check_batch(recipe, ranks)
    _check_model(recipe)
    check_suite(recipe.eval.suite)


def _check_in_process(recipe: Recipe, processes: int | None) -> None:
    parallel, sync, profile = recipe.parallel, recipe.sync, recipe.log.profile
    given = "parallel.in_process=true trains all replicas in one process"
    if parallel.replicas == "auto":
        raise RecipeError(f"{given}, but not how many; give parallel.replicas")
    if processes not in (None, 1):
        raise RecipeError(f"{given}, but there are {processes}; start one (llmtrain train), or leave out in_process")
    if (is_zero := parallel.engine == "zero") or parallel.shards not in ("auto", 1):
        what = "parallel.engine is zero" if is_zero else f"parallel.shards is {parallel.shards}"
        raise RecipeError(
            f"{given}, each on one device without sharding, but {what}; give engine=fsdp2 and shards=1, or leave out in_process"
        )
    clock = parallel.virtual_clock
    if clock is not None and len(clock.step_seconds) != parallel.replicas:
        raise RecipeError(
            f"parallel.virtual_clock.step_seconds has {len(clock.step_seconds)} numbers for {parallel.replicas} replicas; give one each"
        )
    if clock is None and (sync.period.is_timed or sync.schedule.needs_threads):
        what = "sync.period is in seconds" if sync.period.is_timed else f"sync.schedule is {sync.schedule.kind}"
        raise RecipeError(
            f"{given}, in lockstep, but {what}, for replicas of different speeds; give their speeds in parallel.virtual_clock, "
            "leave out in_process, or choose another method"
        )
    if sync.schedule.needs_threads and sync.pull is not None:
        raise RecipeError(
            f"{given}; steps of sync.pull take no time by a virtual clock, and sync.schedule={sync.schedule.kind} can't tell which "
            "they are; leave out one of the three"
        )
    if recipe.log.trace or (profile and len(profile.ranks) > 1):
        what = "log.trace" if recipe.log.trace else f"log.profile with {len(profile.ranks)} ranks"
        raise RecipeError(f"{given}, which has one timeline, but {what} records one per rank; leave one of them out")


def _check_nonfinite(recipe: Recipe) -> None:
    choice = recipe.optim.nonfinite
    if choice != "stop" and recipe.parallel.engine == "zero":
        raise RecipeError(f"optim.nonfinite={choice} is not supported with engine=zero; use stop, or engine=fsdp2")
    if choice == "rollback" and (recipe.sync.period.averages_gradients or not recipe.sync.needs_anchor):
        raise RecipeError(
            f"optim.nonfinite is rollback, but sync.method={recipe.sync.method} keeps no anchor to go back to; use skip or stop"
        )


def _check_optimizer(recipe: Recipe) -> None:
    if recipe.optim.kind == "muon" and recipe.parallel.engine == "zero":
        raise RecipeError(
            "optim.kind is muon, which needs whole matrices, and ZeRO's optimizer has flat parts of a block's parameters; use "
            "engine=fsdp2, or kind=adamw"
        )
    if recipe.optim.kind == "sgd" and recipe.sync.moments is not None:
        what = "sync.moments averages the optimizer's moments, but optim.kind is sgd, which has none"
        raise RecipeError(f"{what}; use kind=adamw, or sync.moments=null")


def _check_first_passes(recipe: Recipe) -> None:
    parallel = recipe.parallel
    if (parallel.engine, parallel.zero_stage) != ("zero", 3) or parallel.replicas == 1:
        return
    for choice, given, why in (
        ("sync.pull", recipe.sync.pull is not None, "a replica that pulls runs none"),
        ("sync.period=seconds", recipe.sync.period.is_timed, "a replica that ends its round waits elsewhere"),
        ("train.batch_shares", len(set(recipe.train.batch_shares)) > 1, "a replica with a smaller share runs fewer"),
    ):
        if given:
            raise RecipeError(
                f"{choice} can't be combined with zero_stage=3: in its first forward passes DeepSpeed waits for all ranks, and {why}; "
                "use zero_stage=2, or engine=fsdp2"
            )


def check_vocabulary(recipe: Recipe, vocab_size: int) -> None:
    """Raise RecipeError if the model has fewer rows than the tokenizer has tokens (`vocab_size`)."""
    from llmtrain.model import model_config

    rows = getattr(model_config(recipe.model, vocab_size), "vocab_size", vocab_size)
    if rows < vocab_size:
        raise RecipeError(
            f"model.config.vocab_size is {rows}, but the tokenizer {recipe.data.tokenizer} has {vocab_size} tokens; "
            f"give at least {vocab_size} as model.config.vocab_size, or the tokenizer that belongs to the model"
        )


def check_mesh(parallel: ParallelSection, world_size: int) -> None:
    """Raise RecipeError if replicas x shards can't be `world_size`."""
    ranks = _explicit_ranks(parallel)
    if ranks is not None and ranks != world_size:
        raise RecipeError(
            f"parallel.replicas x parallel.shards = {parallel.replicas} x {parallel.shards} needs {counted(ranks, 'process')}, there "
            f"{'is' if world_size == 1 else 'are'} {world_size}; start them with `llmtrain launch RECIPE` or `deepspeed "
            f"--num_accelerators {ranks}`, or let llmtrain choose the mesh: parallel.replicas=auto parallel.shards=auto"
        )
    for key in ("replicas", "shards"):
        size = getattr(parallel, key)
        if size != "auto" and world_size % size:
            raise RecipeError(
                f"parallel.{key} is {size}, which does not divide {counted(world_size, 'process')}; "
                f"start a multiple of {size} with `llmtrain launch RECIPE`, or change parallel.{key}"
            )


def _explicit_ranks(parallel: ParallelSection) -> int | None:
    if parallel.replicas == "auto" or parallel.shards == "auto":
        return None
    return parallel.replicas * parallel.shards


def _check_length(recipe: Recipe) -> None:
    train, total = recipe.train, recipe.train.total_steps
    if (train.steps is None) == (train.tokens is None):
        both = "both are" if train.steps is not None else "neither is"
        raise RecipeError(f"train.steps and train.tokens: {both} given, expected one of them; it is the run's length")
    if train.tokens is not None and recipe.data.packing == "none":
        raise RecipeError(
            f"train.tokens is {train.tokens}, but with data.packing=none a step has as many tokens as its documents; give "
            "train.steps (and train.tokens=null)"
        )
    if recipe.data.shuffle == "blocks" and recipe.data.packing == "none":
        raise RecipeError(
            "data.shuffle is blocks, but data.packing=none needs the lengths of all documents before the first step; use "
            "shuffle=auto or all, or packing=packed"
        )
    if total == 0:
        raise RecipeError(
            f"train.tokens is {train.tokens}, less than one step of global_batch x sequence_length = "
            f"{train.tokens_per_step} tokens; give more tokens or a smaller batch"
        )
    if total > MOST_STEPS:
        given = (
            f"train.steps is {train.steps}"
            if train.steps is not None
            else f"train.tokens={train.tokens} is {total} steps"
        )
        raise RecipeError(f"{given}, expected at most {MOST_STEPS:,}; shorten the run, or enlarge its batch")
    if recipe.schedule.warmup_steps > total:
        raise RecipeError(
            f"schedule.warmup_steps is {recipe.schedule.warmup_steps}, but the run has {counted(total, 'step')}; "
            f"lower it or train longer"
        )
    decay = LRSchedule.of(recipe).decay_steps
    if recipe.schedule.kind == "wsd" and recipe.schedule.warmup_steps + decay > total:
        raise RecipeError(
            f"schedule.warmup_steps={recipe.schedule.warmup_steps} and schedule.decay_fraction={recipe.schedule.decay_fraction:g} "
            f"({decay} steps) are more than the run's {total} steps; lower one of them or train longer"
        )
    if recipe.eval.tokens < train.sequence_length:
        raise RecipeError(
            f"eval.tokens is {recipe.eval.tokens}, less than one sequence of train.sequence_length = "
            f"{train.sequence_length}; give at least that many"
        )


def _check_sync(recipe: Recipe) -> None:
    sync, total = recipe.sync, recipe.train.total_steps
    if (reason := find_conflict(sync)) is not None:
        raise RecipeError(reason)
    if sync.period.averages_gradients:
        return
    if warmup_steps(recipe) >= total:
        key = f"sync.warmup_steps is {sync.warmup_steps}"
        if sync.warmup_steps < total:
            key = f"sync.warmup_until_lr is {sync.warmup_until_lr}, which optim.lr's schedule never falls to"
        raise RecipeError(
            f"{key}, which leaves none of {counted(total, 'step')} to sync.method={sync.method}; "
            f"lower it, or use sync.method=synchronous"
        )
    sync.schedule.check(sync, blocks=None)
    if sync.pull is not None:
        kappa = recipe.optim.lr * sync.pull.strength / sync.pull.probability
        if kappa > 1:
            raise RecipeError(
                f"optim.lr x sync.pull.strength / sync.pull.probability is {kappa:.3g}: a pull would go beyond the anchor; "
                f"expected at most 1, so lower sync.pull.strength to {0.99 * sync.pull.probability / recipe.optim.lr:.3g}"
            )


def check_group(recipe: Recipe, replicas: int) -> None:
    """Raise RecipeError if `replicas` does not suit the schedule's groups, the texts of `data.per_replica`, or the shares of
    `train.batch_shares`."""
    check_replicas(recipe.data, replicas)
    shares = recipe.train.batch_shares
    if shares and len(shares) != replicas:
        raise RecipeError(
            f"train.batch_shares has {counted(len(shares), 'share')}, but the run has "
            f"{counted(replicas, 'replica')}; give one for each replica, or [] for equal shares"
        )
    recipe.sync.schedule.resolve_group_size(replicas)


def _check_batch(recipe: Recipe, ranks: int) -> None:
    train, shares = recipe.train, recipe.train.batch_shares
    if shares and ranks % len(shares):
        raise RecipeError(
            f"train.batch_shares has {len(shares)} shares, one for each replica, but {counted(ranks, 'rank')} can't be "
            "divided into so many replicas; start a multiple of them, or give [] for equal shares"
        )
    at_once = batch_unit(train.micro_batch, ranks, shares)
    if train.global_batch % at_once == 0:
        return
    below = train.global_batch // at_once * at_once
    works = f"train.global_batch={f'{below} or ' if below else ''}{below + at_once}"
    if shares:
        raise RecipeError(
            f"train.global_batch is {train.global_batch}, which train.batch_shares={[*shares]} does not divide into complete micro-batches "
            f"of {train.micro_batch} x {counted(ranks // len(shares), 'shard')}; use {works}"
        )
    micro = next(
        (m for m in range(min(train.micro_batch, train.global_batch), 0, -1) if train.global_batch % (m * ranks) == 0),
        None,
    )
    or_micro = f", or train.micro_batch={micro}" if micro else ""
    raise RecipeError(
        f"train.global_batch is {train.global_batch}, not a multiple of micro_batch x replicas x shards = "
        f"{train.micro_batch} x {ranks} = {at_once}; use {works}{or_micro}"
    )


def _check_engine(parallel: ParallelSection) -> None:
    if parallel.engine != "zero":
        for key in ("zero_offload", "deepspeed"):
            if getattr(parallel, key):
                raise RecipeError(f"parallel.{key} is DeepSpeed's, but parallel.engine is fsdp2; use engine=zero")
        return
    if parallel.precision == "fp64":
        raise RecipeError("parallel.precision is fp64, which DeepSpeed does not have; use bf16, fp32, or engine=fsdp2")
    if parallel.compile and parallel.zero_stage == 3:
        raise RecipeError(
            "parallel.compile can't be combined with zero_stage=3, whose hooks inside a layer cause repeated recompilation; "
            "use zero_stage=2, or engine=fsdp2"
        )
    if parallel.zero_offload and parallel.replica_backend == "nccl":
        raise RecipeError(
            "parallel.replica_backend is nccl, but with zero_offload replicas send from CPU memory; use auto or gloo"
        )
    for key, value in leaves(parallel.deepspeed).items():
        if key in OWN_DEEPSPEED:
            raise RecipeError(
                f"parallel.deepspeed.{key} is {value!r}, but the engine needs its own value; leave it out"
            )
        known = next(
            (ours for theirs, ours in DEEPSPEED_EQUIVALENTS.items() if key == theirs or key.startswith(theirs + ".")),
            None,
        )
        if known is not None:
            raise RecipeError(
                f"parallel.deepspeed.{key} is {value!r}, but a recipe sets it with {known}; change that key instead"
            )


def _check_model(recipe: Recipe) -> None:
    from llmtrain.model import model_config

    section = recipe.model
    _check_model_keys(section)
    for key in SIZES & section.config.keys():
        if isinstance(section.config[key], int) and section.config[key] < 1:
            raise RecipeError(f"model.config.{key} is {section.config[key]}, expected a number greater than 0")
    config = model_config(section)
    if not hasattr(config, "num_hidden_layers"):
        raise RecipeError(
            f"model: {config.model_type} is not only a language model, and its config has no num_hidden_layers; choose its "
            "text model, as gemma3_text for gemma3"
        )
    _check_heads(config)
    blocks = config.num_hidden_layers + (1 if config.tie_word_embeddings else 2)
    recipe.sync.schedule.check(recipe.sync, blocks)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and recipe.train.sequence_length > positions:
        raise RecipeError(
            f"train.sequence_length is {recipe.train.sequence_length}, but the model has {positions} positions; "
            f"shorten it or raise model.config.max_position_embeddings"
        )


def _check_model_keys(section: ModelSection) -> None:
    """Raise RecipeError for an unknown model type or config key, because transformers' configs accept any key."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal

    if section.type not in causal:
        near = closest(section.type, causal)
        hint = f"did you mean {near}?" if near else "llama and gpt_neo are two of them"
        raise RecipeError(
            f"model.type is {section.type!r}, not one of transformers' {len(causal)} causal language models; {hint}"
        )
    default = AutoConfig.for_model(section.type)
    known = {*default.to_dict(), *default.attribute_map}
    for key in section.config:
        if key not in known:
            near = closest(key, known)
            hint = f"did you mean model.config.{near}?" if near else f"see transformers' {type(default).__name__}"
            raise RecipeError(f"model.config.{key} is not a key of {default.model_type}'s config; {hint}")


def _check_heads(config: PretrainedConfig) -> None:
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    # Some kinds of models, such as Qwen3, choose the size of a head independently of the hidden size.
    if hidden and heads and hidden % heads and getattr(config, "head_dim", None) in (None, hidden // heads):
        raise RecipeError(
            f"model.config: hidden_size {hidden} is not divisible by {heads} attention heads; change one of them"
        )
    groups = getattr(config, "num_key_value_heads", None)
    if heads and groups and heads % groups:
        raise RecipeError(
            f"model.config: {heads} attention heads are not divisible by num_key_value_heads {groups}; change one of them"
        )
