"""Tests of the FSDP2 engine with real models: what must be equal to the last bit, and what measuring must not change. test_pairs
compares the engine with plain models."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from llmtrain.config import Recipe
from llmtrain.loss import IGNORE_INDEX
from llmtrain.parallel import fsdp, torch_engine
from llmtrain.parallel.comms import Comms
from llmtrain.parallel.engine import gradient_norm
from llmtrain.plan import memory
from llmtrain.sync.anchors import flatten
from llmtrain.sync.method import StepPlan
from llmtrain.train.build_trainer import build_trainer
from llmtrain.train.prepare_data import prepare_texts
from llmtrain.train.validation import validate, validated_parameters
from tests.distributed.export_runs import ExportRun, open_run
from tests.distributed.fake_engine import choices, edit
from tests.distributed.real_engine import (
    GPT_NEO,
    LLAMA,
    Case,
    Outcome,
    Run,
    mesh_of,
    train,
)
from tests.distributed.threads import on_each

EVERY_PART = {"z": 2.0, "temperature": 1.0, "clip": 0.5}


def outcomes(ranks, *cases: Case, how=train) -> list[list[Outcome]]:
    """Return the outcomes as [case][rank]."""
    size = cases[0].replicas * cases[0].shard
    return list(map(list, zip(*ranks.run(how, list(cases), world_size=size), strict=True)))


def assert_equal_weights(a: Outcome, b: Outcome) -> None:
    for name, tensor in a.weights.items():
        assert torch.equal(tensor, b.weights[name]), name


@pytest.mark.deep
def test_synchronous_losses_do_not_depend_on_the_mesh(ranks):
    """In fp32 with the same global batch, losses of 20 steps are equal to 1e-5 relative."""
    [[alone]] = outcomes(ranks, Case(steps=20))
    cases = [Case(replicas=n, shard=m, steps=20) for n, m in ((1, 4), (4, 1), (2, 2))]
    for case in outcomes(ranks, *cases):
        np.testing.assert_allclose(case[0].losses, alone.losses, rtol=1e-5)
        np.testing.assert_allclose(case[0].norms, alone.norms, rtol=1e-3)
    assert alone.losses[-1] < alone.losses[0] - 0.5


@pytest.mark.parametrize("model", [LLAMA, pytest.param(GPT_NEO, marks=pytest.mark.deep)], ids=["llama", "gpt_neo-tied"])
def test_layerwise_is_blocking_to_the_last_bit(ranks, model):
    """A step has two forward passes and their recomputations. Only its first forward pass may synchronize."""
    parallel = {"precision": "fp32", "activation_checkpointing": True}
    schedules = ["blocking", {"kind": "layerwise", "prefetch": 0}, {"kind": "layerwise", "prefetch": 9}]
    cases = [
        Case(edit(every=2, penalty=EVERY_PART, schedule=s), 2, 2, model, parallel, steps=5, micro_batch=1)
        for s in schedules
    ]
    blocking, *layerwise = outcomes(ranks, *cases)
    for other in layerwise:
        assert other[0].losses == blocking[0].losses
        assert_equal_weights(other[0], blocking[0])


def test_averaging_every_step_with_sgd_is_synchronous_sgd(ranks):
    common = {
        "replicas": 2,
        "shard": 2,
        "parallel": {"precision": "fp64"},
        "optim": {"kind": "sgd", "lr": 0.3, "clip_norm": None, "weight_decay": 0.0},
        "steps": 4,
    }
    local, synchronous = outcomes(ranks, Case(choices("local_sgd", every=1), **common), Case(**common))
    np.testing.assert_allclose(local[0].losses, synchronous[0].losses, rtol=1e-12)
    for name, tensor in local[0].weights.items():
        torch.testing.assert_close(tensor, synchronous[0].weights[name], rtol=1e-11, atol=1e-13)


def test_gradient_norm_does_not_jump_at_the_end_of_the_warm_up(ranks):
    """If both replicas have the same data, the gradient of a local step is that of a synchronous step."""
    common = {"replicas": 2, "shard": 2, "same_data": True, "steps": 5}
    crossing = Case(choices("diloco", every=100, warmup_steps=3), **common)
    local, synchronous = outcomes(ranks, crossing, Case(**common))
    np.testing.assert_allclose(local[0].norms, synchronous[0].norms, rtol=1e-5)


def train_traced(cases: list[Case]) -> list[Outcome]:
    """Train with `torch.compile` as far as dynamo, where hooks, recomputation and changed weights meet. No code is generated."""
    with mock.patch("torch.compile", partial(torch.compile, backend="eager")):
        return train(cases)


@pytest.mark.parametrize(
    ("model", "checkpointing", "how"),
    [
        (LLAMA, "selective", train_traced),
        *(
            pytest.param(model, checkpointing, train, marks=pytest.mark.deep)
            for model, checkpointing in ((LLAMA, True), (LLAMA, "selective"), (GPT_NEO, False))
        ),
    ],
    ids=["traced", "checkpointing", "selective checkpointing", "gpt_neo-tied"],
)
def test_compiled_layers_survive_layerwise_synchronization(ranks, model, checkpointing, how):
    compiled = {"precision": "fp32", "compile": True, "activation_checkpointing": checkpointing}
    layerwise, blocking, plain = outcomes(
        ranks,
        Case(edit(every=2), 2, 1, model, compiled),
        Case(edit(every=2, schedule="blocking"), 2, 1, model, compiled),
        Case(edit(every=2), 2, 1, model),
        how=how,
    )
    assert layerwise[0].losses == blocking[0].losses
    assert_equal_weights(layerwise[0], blocking[0])
    np.testing.assert_allclose(layerwise[0].losses, plain[0].losses, rtol=1e-5)


BATCH = torch.arange(1, 11)[None], torch.arange(10)[None]
NOTHING = BATCH[0], torch.full_like(BATCH[1], IGNORE_INDEX)


def validate_between_rounds(changes: dict[str, Any]) -> tuple[list[bool], list[float]]:
    """Validate between two rounds. Return whether each block is unchanged, and three losses: of the mean of replicas that differ, of
    replicas that the method has averaged, and of a batch that counts on one rank alone."""
    mesh = mesh_of(2, 2)
    run = Run(Case(choices("local_sgd", **changes), 2, 2), mesh)
    run.train(2)
    before = [flatten(block) for block in run.engine.blocks]
    sent = mesh.replica_comms.traffic.bytes
    with validated_parameters(run.engine, mesh):
        losses = [validate(run.engine, mesh, [lambda: [BATCH]])[0].loss]
    unchanged = [torch.equal(flatten(block), old) for block, old in zip(run.engine.blocks, before, strict=True)]
    assert mesh.replica_comms.traffic.bytes == sent, "measuring must not count as the method's traffic"
    run.method.finish()
    for batch in (BATCH, NOTHING if mesh.world.rank else BATCH):
        losses.append(validate(run.engine, mesh, [lambda batch=batch: [batch]])[0].loss)
    return unchanged, losses


@pytest.mark.parametrize(
    "changes", [{"every": 100}, {"every": 2, "schedule": "layerwise"}], ids=["in a round", "armed"]
)
def test_validation_is_of_the_mean_and_changes_nothing(ranks, changes):
    for unchanged, losses in ranks.run(validate_between_rounds, changes):
        assert all(unchanged)
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def validate_what_was_gathered_before(factor: float) -> tuple[float, float]:
    """Return the losses after a change of all weights, of an engine that had gathered them before and of one that had not."""
    mesh, found = mesh_of(1, 2), []
    for is_gathered in (True, False):
        engine = Run(Case(replicas=1, shard=2), mesh).engine
        for module in engine.model.modules():
            if is_gathered and isinstance(module, FSDPModule):
                module.unshard()
        for block in engine.blocks:
            for shard in block.shards:
                shard.mul_(factor)
            engine.parameters_changed(block)
        found.append(validate(engine, mesh, [lambda: [BATCH]])[0].loss)
    return tuple(found)


def test_what_was_gathered_before_a_change_is_not_computed_with(ranks):
    for gathered, fresh in ranks.run(validate_what_was_gathered_before, 3.0, world_size=2):
        assert gathered == fresh


def state_after_validation() -> bool:
    """Return whether an engine's state after a validation is what it was before."""
    mesh = mesh_of(1, 2)
    engine = Run(Case(replicas=1, shard=2), mesh).engine
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    validate(engine, mesh, [lambda: [BATCH]])
    after = engine.state_dict()
    return before.keys() == after.keys() and all(torch.equal(after[name], value) for name, value in before.items())


def test_a_checkpoint_can_follow_a_validation(ranks):
    """The head stays gathered from forward until backward, which a validation does not have."""
    assert all(ranks.run(state_after_validation, world_size=2))


def norm_of_part(comms: Comms, parts: list[list[torch.Tensor]]) -> float:
    return float(gradient_norm(parts[comms.rank], comms, exact=True))


def test_parameters_that_stay_gathered_change_no_bit(ranks):
    """Layer-wise synchronization changes parameters, which an engine may still hold gathered."""
    cases = [
        Case(replicas=2, shard=2, sync=edit(), parallel={"precision": "fp32", "reshard_after_forward": value})
        for value in (True, False)
    ]
    freed, kept = outcomes(ranks, *cases)
    for one, other in zip(freed, kept, strict=True):
        assert_equal_weights(one, other)


def resharded_units(value: bool) -> list[bool]:
    """Return whether each unit of an engine reshards after forward. The first unit has the head."""
    with mock.patch.object(fsdp, "fully_shard", wraps=fsdp.fully_shard) as wrapped:
        Run(Case(shard=2, parallel={"precision": "fp32", "reshard_after_forward": value}), mesh_of(1, 2))
    return [
        call.kwargs["reshard_after_forward"]
        for call in wrapped.call_args_list
        if "reshard_after_forward" in call.kwargs
    ]


def test_blocks_are_resharded_as_the_recipe_says(ranks):
    [resharded, _], [kept, _] = (ranks.run(resharded_units, value, world_size=2) for value in (True, False))
    assert len(kept) == len(resharded) > 2 and not any(kept)
    assert resharded.count(False) == 1


def freed_after_forward(recipe: Recipe) -> list[bool]:
    """Return whether each unit of a run's engine reshards after forward. KEPT_BYTES is 0, so that the parameters' share of the
    memory decides, however few they are."""
    mesh = mesh_of(1, 2)
    shares_decide = mock.patch.object(memory, "KEPT_BYTES", 0)
    with shares_decide, mock.patch.object(fsdp, "fully_shard", wraps=fsdp.fully_shard) as wrapped:
        build_trainer(open_run(recipe, mesh, prepare_texts(recipe, show_progress=False)), None)
    units = [call.kwargs for call in wrapped.call_args_list if "reshard_after_forward" in call.kwargs]
    return [unit["reshard_after_forward"] for unit in units]


def test_a_run_frees_parameters_that_would_add_much_to_its_memory(ranks, tmp_path):
    run = ExportRun(replicas=1, shard=2).recipe(tmp_path)
    for sequences, frees in ((1, True), (64, False)):
        update = {"train": run.train.model_copy(update={"micro_batch": sequences, "global_batch": 2 * sequences})}
        [of_units, _] = ranks.run(freed_after_forward, run.model_copy(update=update), world_size=2)
        assert any(of_units) is frees, sequences


def which_norms_are_exact() -> list[bool]:
    """Return whether the norm is exact in a step whose gradients are averaged over two replicas, and in a local step."""
    run, asked = Run(Case(replicas=2, shard=1, steps=2), mesh_of(2, 1)), []

    def noted(*arguments: Any, exact: bool) -> torch.Tensor:
        asked.append(exact)
        return gradient_norm(*arguments, exact=exact)

    with mock.patch.object(torch_engine, "gradient_norm", noted):
        run.train(1)
        run.engine.average_gradients = False
        with mock.patch.object(run.method, "begin_step", return_value=StepPlan(1e-3)):
            run.train(2)
    return asked


def test_norms_are_exact_where_replicas_must_agree(ranks):
    assert ranks.run(which_norms_are_exact, world_size=2) == [[True, False]] * 2


def test_a_gradient_norm_does_not_depend_on_the_order_of_additions() -> None:
    """GPUs of different kinds add in different orders. Replicas that clipped by different norms would get different anchors."""
    gradients = [torch.randn(7, generator=torch.Generator().manual_seed(seed)).exp() for seed in range(30)]
    exact = torch.cat(gradients).double().norm().float()
    for turn in range(20):
        order = torch.randperm(30, generator=torch.Generator().manual_seed(turn)).tolist()
        parts = [[gradients[number] for number in order[rank::3]] for rank in range(3)]
        assert set(on_each(3, norm_of_part, parts)) == {float(exact)}
    for exact in (True, False):
        assert gradient_norm([gradients[0].double()], Comms(None), exact).dtype == torch.float64
    narrow = [gradient.bfloat16() for gradient in gradients]
    found = gradient_norm(narrow, Comms(None), exact=False)
    assert found.dtype == torch.float32, "bf16 would round the norm"
    torch.testing.assert_close(found, torch.cat(narrow).double().norm().float())
