"""Tests of runs that start from another run: on any mesh and under either engine, they have exactly its weights, and its loss."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from llmtrain.config import Recipe
from llmtrain.errors import UserError
from llmtrain.export.card import model_card
from llmtrain.export.export import export
from llmtrain.export.request import MEAN, Request
from llmtrain.export.source import ChosenWeights, Source, find_source
from llmtrain.model import model_config
from llmtrain.pretrained import architecture_keys
from llmtrain.recipe_loader import load_recipe
from llmtrain.sync.anchors import flatten
from llmtrain.train.build_trainer import build_trainer
from llmtrain.train.checkpoint_files import read_state
from llmtrain.train.initial_weights import check_initial_weights, open_initial_weights
from llmtrain.train.prepare_data import prepare_texts
from llmtrain.train.run_dir import RunDirectory
from tests.distributed.export_runs import IN_A_ROUND, ExportRun, make_run, open_run
from tests.distributed.pool import RankPool
from tests.distributed.real_engine import mesh_of

LLAMA, GPT_NEO = ExportRun(), ExportRun("gpt_neo", tied=True, replicas=4, shard=1)
"""Runs to start from. Their replicas differ at step IN_A_ROUND."""
AVERAGED = ExportRun(replicas=2, shard=1, method="gpa")
"""Another run to start from. Its model is its anchor, from which its replicas differ."""


@dataclass
class Started:
    """State of a rank before its first step."""

    loss: float
    weights: dict[str, torch.Tensor]
    """Weights of the replica, on the first rank of its shard group."""
    has_anchor: bool
    """True if the anchor equals the parameters bit for bit."""
    recorded: dict | None


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Provide a separate pool, because DeepSpeed keeps much global state."""
    made = RankPool(4)
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("initial")


def source_of(run: ExportRun, folder: Path, pool: RankPool) -> Source:
    path = folder / "runs" / str(run)
    if not path.exists():
        pool.run(make_run, run.recipe(folder), world_size=run.replicas * run.shard, timeout=280)
    return find_source(path, IN_A_ROUND)


def recipe_from(weights: Path, folder: Path, run: ExportRun, name: str = "second", **parallel: str) -> Recipe:
    """Return the recipe of a run on the mesh and engine of `run` that starts from weights, without a warm-up."""
    recipe = run.recipe(folder)
    changes = {
        "run": recipe.run.model_copy(update={"name": name}),
        "model": recipe.model.model_copy(update={"from_weights": str(weights)}),
        "sync": recipe.sync.model_copy(update={"warmup_steps": 0}),
        "parallel": recipe.parallel.model_copy(update=parallel),
    }
    return recipe.model_copy(update=changes)


def start(recipe: Recipe) -> Started:
    """Build the trainer on this rank as at the start of a run, and validate."""
    mesh = mesh_of(recipe.parallel.replicas, recipe.parallel.shards)
    run = open_run(recipe, mesh, prepare_texts(recipe, show_progress=False))
    trainer = build_trainer(run, open_initial_weights(recipe, mesh, run.prepared))
    trainer.method.block_sync.ensure_anchor()
    anchors = trainer.method.shared_state()["anchor"]
    return Started(
        trainer.validator.run(is_synchronized=True, with_sample=False)[0][0][1].loss,
        trainer.engine.full_weights(),
        all(torch.equal(a, flatten(b)) for a, b in zip(anchors, trainer.engine.blocks, strict=True)),
        trainer.checkpointer.from_weights,
    )


def train(recipe: Recipe) -> str:
    """Train the recipe on this rank to its end, and return the path that its checkpoints name."""
    mesh = mesh_of(recipe.parallel.replicas, recipe.parallel.shards)
    run = open_run(recipe, mesh, prepare_texts(recipe, show_progress=False))
    mesh.broadcast_from_main(run.directory.claim)
    newest = max(run.directory.checkpoints.glob("step-*"), default=None)
    trainer = build_trainer(run, open_initial_weights(recipe, mesh, run.prepared) if newest is None else None)
    if newest is not None:
        trainer.load(newest)
    trainer.fit()
    return trainer.checkpointer.from_weights["path"]


CASES = [
    (LLAMA, ExportRun(replicas=1, shard=2), "fp32", True),
    (AVERAGED, ExportRun(replicas=1, shard=2), "fp32", False),
    pytest.param(LLAMA, ExportRun(replicas=4, shard=1), "fp32", True, marks=pytest.mark.deep),
    pytest.param(GPT_NEO, ExportRun("gpt_neo", tied=True, replicas=2, shard=2), "fp32", False, marks=pytest.mark.deep),
]
if find_spec("deepspeed"):
    CASES += [
        (LLAMA, ExportRun(engine="zero3", replicas=1, shard=2), "bf16", False),
        pytest.param(
            GPT_NEO,
            ExportRun("gpt_neo", tied=True, engine="zero1", replicas=2, shard=2),
            "bf16",
            False,
            marks=pytest.mark.deep,
        ),
        pytest.param(
            GPT_NEO,
            ExportRun("gpt_neo", tied=True, engine="zero3", replicas=2, shard=1),
            "fp32",
            True,
            marks=pytest.mark.deep,
        ),
    ]


@pytest.mark.parametrize(
    ("first", "second", "precision", "is_exported"),
    CASES,
    ids=lambda value: value if isinstance(value, str) else str(value),
)
def test_a_run_starts_from_exactly_the_mean_of_another_and_its_loss(
    folder: Path, pool: RankPool, first: ExportRun, second: ExportRun, precision: str, is_exported: bool
) -> None:
    source = source_of(first, folder, pool)
    expected = ChosenWeights(source.open_tensors(), source.state, MEAN)
    weights = export(source, Request())[0] if is_exported else source.checkpoint
    recipe = recipe_from(weights, folder, second, precision=precision)
    ranks = pool.run(start, recipe, world_size=second.replicas * second.shard, timeout=200)
    for rank in ranks:
        assert rank.has_anchor
        assert rank.recorded.keys() == {"path", "step", "digest"} and rank.recorded["path"] == str(weights)
        if rank.weights:
            assert rank.weights.keys() == expected.shapes.keys()
            for name, value in rank.weights.items():
                assert torch.equal(value, expected.read(name)), name
    assert sum(bool(rank.weights) for rank in ranks) == second.replicas
    assert source.state.get("validated") == ("anchor" if first == AVERAGED else None)
    loss = source.state["ranks"][0]["last_eval"]["loss"]
    assert all(rank.loss == pytest.approx(loss, rel=1e-6 if precision == "fp32" else 3e-3) for rank in ranks)


@pytest.mark.deep
def test_a_resumed_run_needs_no_weights_and_remembers_them(folder: Path, pool: RankPool) -> None:
    source = source_of(LLAMA, folder, pool)
    run = shutil.copytree(source.run, folder / "copied", ignore=shutil.ignore_patterns("export"))
    recipe = recipe_from(run, folder, LLAMA, "resumed")
    newest = str(max(run.glob("checkpoints/step-*")))
    assert pool.run(train, recipe, timeout=200) == [newest] * 4
    mine = RunDirectory(recipe)
    checkpoints = sorted(mine.checkpoints.glob("step-*"))
    record = read_state(checkpoints[0])["from_weights"]
    assert record["path"] == newest and record["step"] == 5 and len(record["digest"]) == 64
    before = read_state(checkpoints[1])["files"]
    shutil.rmtree(run)
    shutil.rmtree(checkpoints[1])
    assert check_initial_weights(recipe) is None
    assert pool.run(train, recipe, timeout=200) == [newest] * 4
    state = read_state(checkpoints[1])
    assert state["from_weights"] == record
    assert {name for name in before if before[name] == state["files"][name]} >= {
        name for name in before if "distcp" in name
    }
    shutil.copytree(source.tokenizer_folder, mine.tokenizer)
    (folder / "base.yaml").touch()
    found = find_source(mine.path)
    card = model_card(found, export(found, Request())[1])
    assert (
        f"trained further from `{newest}`" in card
        and f"| started from | `{newest}`, digest `{record['digest']}` |" in card
    )


def test_a_damaged_checkpoint_and_another_model_are_refused(folder: Path, pool: RankPool) -> None:
    source = source_of(LLAMA, folder, pool)
    copied = folder / "damaged" / source.checkpoint.name
    shutil.copytree(source.checkpoint, copied)
    victim = max(copied.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with pytest.raises(
        AssertionError, match=rf"damaged/.* on .* is damaged: {victim.name} is not what was written; copy"
    ):
        pool.run(start, recipe_from(copied, folder, LLAMA))
    for second, fragment in (
        (ExportRun(tied=True), "has tie_word_embeddings false, but the recipe's model has true"),
        (ExportRun("gpt_neo"), "is a llama model, but the recipe's is gpt_neo"),
    ):
        with pytest.raises(UserError, match=fragment):
            check_initial_weights(recipe_from(source.run, folder, second))
    state = json.loads((copied / "state.json").read_text())
    (copied / "state.json").write_text(json.dumps(state | {"step": 3}))
    with pytest.raises(UserError, match=r"is damaged: state.json is not what was written"):
        check_initial_weights(recipe_from(copied, folder, LLAMA))


def test_a_recipe_without_an_architecture_has_that_of_the_run(folder: Path, pool: RankPool) -> None:
    source = source_of(GPT_NEO, folder, pool)
    theirs = architecture_keys(model_config(source.recipe.model, 400))
    for weights, has_vocabulary in (
        (source.run, False),
        (source.checkpoint, False),
        (export(source, Request())[0], True),
    ):
        (folder / "third.yaml").write_text(f"model: {{from_weights: {weights}}}\ntrain: {{steps: 5}}\n")
        model = load_recipe(folder / "third.yaml", [f"run.out_dir={folder}/runs"]).model
        assert (model.type, model.from_weights) == ("gpt_neo", str(weights))
        assert ("vocab_size" in model.config) is has_vocabulary, "a run leaves it to the tokenizer"
        assert architecture_keys(model_config(model, 400)) == theirs
