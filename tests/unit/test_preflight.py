"""`recipe check` refuses what a start on this machine would refuse, and warns of what it would warn of."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmtrain.cli import main
from llmtrain.data.prepare import prepare
from llmtrain.errors import DataError, RecipeError
from llmtrain.launch import preflight
from llmtrain.launch.nodes import Nodes
from llmtrain.launch.preflight import check_elsewhere, check_here, check_start
from llmtrain.parallel.world import World
from llmtrain.plan import recipe_warnings as warnings_module
from llmtrain.plan.model_size import size_of
from llmtrain.recipe_loader import load_recipe, resolved_yaml
from llmtrain.train.build_trainer import _start_warnings
from llmtrain.train.prepare_data import prepare_texts
from llmtrain.train.run import run_training

RECIPE = Path(__file__).parents[2] / "recipes" / "edit_llama_stdlib.yaml"
SMALL = [f"model.config.{key}" for key in ("hidden_size=32", "intermediate_size=64", "num_hidden_layers=2")]
SMALL += ["model.config.num_attention_heads=2", "train.sequence_length=32", "train.global_batch=16"]
SMALL += ["train.micro_batch=2", "train.steps=20", "sync.warmup_steps=2", "sync.period.every=1", "eval.tokens=64"]
SMALL += ["eval.sample_prompt=null", "schedule.warmup_steps=2"]
WAGMA = ["sync.method=wagma", "train.global_batch=48", "train.micro_batch=1"]
UNKNOWN = ["model.type=doge"]
MIXTRAL = ["model.type=mixtral", "model.config.num_key_value_heads=2", "model.config.num_local_experts=2"]


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    """Write a small text, and return overrides that make the recipe a tiny run in a folder of its own."""
    (tmp_path / "text.txt").write_text("<|endoftext|>".join(f"a text about {number}\n" * 20 for number in range(40)))
    folders = [f"data.source={tmp_path}/text.txt", f"data.cache_dir={tmp_path}/data", f"run.out_dir={tmp_path}/runs"]
    return [*SMALL, *folders, "data.tokenizer=train:300", "data.validation_fraction=0.2"]


def outcome(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["recipe", "check", str(RECIPE), *arguments])
    output = capsys.readouterr()
    return left.value.code or 0, output.out, output.err


@pytest.mark.parametrize(
    ("wrong", "fragment"),
    [
        (["model.type=bert", "model.config.is_decoder=true"], "BertModel has no list of 2 layers"),
        (UNKNOWN, "no initialization is known"),
        (MIXTRAL, "mixtral is a mixture of experts (MixtralExperts), and only dense models can be trained"),
        (["data.tokenizer=train:abc"], "train:SIZE with a whole number"),
        (["data.tokenizer=train:0"], "train:SIZE with a whole number"),
        (["train.global_batch=30"], "global_batch is 30, not a multiple"),
        (["train.micro_batch=64"], "x 4 = 256"),
        (["data.source=/no/text"], "data.source: /no/text: no such file"),
        (["data.validation=/no/text"], "data.validation: /no/text: no such file"),
        (["eval.sets={news: /no/text}"], "eval.sets.news: /no/text: no such file"),
        (["parallel.replica_network=none0"], "no such network interface"),
        (["checkpoint.mirror=none://a"], "checkpoint.mirror: none://a"),
        (["checkpoint.mirror=runs", "run.out_dir=runs"], "checkpoint.mirror: runs/"),
        ([f"run.out_dir={RECIPE}"], "is a file; choose another folder"),
        ([f"data.cache_dir={RECIPE}"], "is a file; choose another folder"),
        (["eval.suite={name: offline, data_dir: /no/data}"], "/no/data"),
        (["model.config.hidden_size=65536", "model.config.num_hidden_layers=99"], "for each process"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_a_start_here_would_refuse_is_refused(
    capsys: pytest.CaptureFixture[str], keys: list[str], wrong: Sequence[str], fragment: str
) -> None:
    code, out, err = outcome(capsys, *keys, *wrong)
    assert (code, out) == (2, "")
    assert fragment in err and len([line for line in err.splitlines() if line.startswith("error: ")]) == 1


def test_a_mirror_that_cannot_be_reached_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], keys: list[str]
) -> None:
    """Some of fsspec's file systems connect when they are opened."""

    def unreachable(url: str) -> None:
        raise OSError(f"no route to {url}")

    monkeypatch.setattr(preflight, "RemoteRun", unreachable)
    code, _, err = outcome(capsys, *keys, "checkpoint.mirror=ftp://a/b")
    assert (
        code
        and "checkpoint.mirror: ftp://a/b/edit_llama_stdlib: no route to ftp://a/b/edit_llama_stdlib; expected a folder"
        in err
    )


def test_a_folder_that_holds_another_recipe_is_refused(keys: list[str]) -> None:
    from llmtrain.train.run_dir import RunDirectory

    directory = RunDirectory(load_recipe(RECIPE, keys))
    directory.claim()
    with pytest.raises(ValueError, match=rf"^process {os.getpid()} on \S+ works in"):
        check_here(load_recipe(RECIPE, keys))
    del directory  # and its lock
    check_here(load_recipe(RECIPE, keys))
    with pytest.raises(ValueError, match=r"holds a run of another recipe \(optim.lr"):
        check_here(load_recipe(RECIPE, [*keys, "optim.lr=0.5"]))


def test_no_processes_are_no_number_of_processes(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = outcome(capsys, "--processes", "0")
    assert code == 2 and "--processes" in err


def test_a_recipe_for_a_cluster_is_checked_without_this_machines_memory_and_files(keys: list[str]) -> None:
    large = ["model.config.hidden_size=65536", "model.config.num_hidden_layers=99", "data.source=/no/text"]
    assert check_elsewhere(load_recipe(RECIPE, [*keys, *large, "parallel.shards=4"]), 8) == []
    with pytest.raises(ValueError, match="no initialization is known"):
        check_elsewhere(load_recipe(RECIPE, [*keys, *UNKNOWN]), 8)
    with pytest.raises(ValueError, match="mixtral is a mixture of experts"):
        check_elsewhere(load_recipe(RECIPE, [*keys, *MIXTRAL]), 8)


@pytest.mark.parametrize(
    ("recipe", "processes", "overrides", "settled", "reason"),
    [
        (
            "text_per_replica",
            16,
            ["train.micro_batch=1"],
            "parallel.shards=1",
            "data.per_replica has 2 entries, but the run has 16 replicas",
        ),
        ("edit_llama_stdlib", 12, WAGMA, "parallel.shards=1", "need a power of two"),
    ],
)
def test_a_mesh_that_depends_on_a_clusters_nodes_is_not_refused(
    recipe: str, processes: int, overrides: Sequence[str], settled: str, reason: str
) -> None:
    """2 nodes of 8 GPUs make 2 replicas, and 4 nodes of 3 GPUs make 4."""
    path, keys = RECIPE.with_stem(recipe), [*overrides, "parallel.replicas=auto"]
    assert check_elsewhere(load_recipe(path, [*keys, "parallel.shards=auto"]), processes) == []
    with pytest.raises(ValueError, match=reason):
        check_elsewhere(load_recipe(path, [*keys, settled]), processes)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            "parallel.replica_backend=nccl",
            r"^parallel\.replica_backend is nccl, which needs GPUs, and there is none here; use",
        ),
        ("log.wandb={project: p}", r"^log\.wandb is given, but wandb is not installed; pip install wandb, or"),
        (
            "parallel.engine=zero",
            r"^parallel\.engine is zero, but DeepSpeed is not installed; pip install -c constraints.txt -e '.\[zero\]', or",
        ),
    ],
)
def test_gpus_and_packages_are_those_of_the_machine_that_trains(
    monkeypatch: pytest.MonkeyPatch, keys: list[str], given: str, reason: str
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name in {"deepspeed", "wandb"} else find_spec(name, *of)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = load_recipe(RECIPE, [*keys, given])
    assert check_elsewhere(recipe, 8) == []
    for start in (lambda: check_start(recipe, Nodes(1, 0), 4), lambda: run_training(recipe, World(0, 4, 0, 4))):
        with pytest.raises(RecipeError, match=reason):
            start()


def gib(memory_line: str) -> float:
    """Return the number in a line about memory, without its unit."""
    return float(memory_line.split()[2])


def test_a_recipe_that_is_fine_says_how_it_would_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, keys: list[str]
) -> None:
    def lines(*more: str) -> list[str]:
        code, out, error = outcome(capsys, *keys, *more)
        assert code == (2 if error else 0)
        return [*out.splitlines(), *error.splitlines()]

    parameters = size_of(load_recipe(RECIPE, keys)).parameters
    mesh, model, note, memory, end = lines()
    assert mesh == "mesh: 2 replicas x 2 shards on cpu (no GPU: parallel.on_cpu)"
    assert model.startswith(f"model: {parameters / 1000:.3g}k parameters ") and model.endswith(
        "in 4 blocks · 20 steps of 512 tokens, 10.2k in all · data: not tokenized yet"
    )
    assert note.startswith("note: the text is not tokenized yet")
    assert memory.startswith("memory: about 0.0") and "for each of 4 processes, which may use" in memory
    assert end == f"{RECIPE}: fine on this machine"
    of_four = lines("parallel.in_process=true", "parallel.replicas=4")
    assert of_four[0] == "mesh: 4 replicas x 1 shard on cpu (in one process, in turns)"
    of_two = lines("parallel.in_process=true", "parallel.replicas=2")[3]
    assert gib(of_four[3]) == pytest.approx(2 * gib(of_two), abs=0.02) and "for the process, which" in of_two
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"], "nothing is written"
    assert lines("train.micro_batch=64")[-1].startswith("error: train.global_batch is 16, not a multiple")
    prepared = prepare(load_recipe(RECIPE, keys).data, 1, 10**9)
    sequences = (prepared.index.splits["train"].tokens - 1) // 32
    assert f"data: {sequences} sequences, {20 * 16 / sequences:.2f} epochs" in lines()[1]


def test_prepared_tokens_that_are_too_few_are_refused(capsys: pytest.CaptureFixture[str], keys: list[str]) -> None:
    recipe = load_recipe(RECIPE, keys)
    prepared = prepare(recipe.data, 1, 10**9)
    assert check_here(recipe).prepared is not None
    code, _, err = outcome(capsys, *keys, "train.global_batch=1024", "train.sequence_length=64")
    assert code == 2 and "training data: " in err
    validation = prepared.index.splits["validation"].tokens
    code, out, _ = outcome(capsys, *keys, "eval.tokens=1e8")
    assert code == 0
    assert out.startswith(
        f"warning: eval.tokens is 100,000,000, but the validation text has {validation:,} tokens: all of them are used\n"
    )
    for tokenizer in ("train:300", "train:301"):  # prepared, and not prepared
        with pytest.raises(ValueError, match=r"model\.config\.vocab_size is 200"):
            check_here(load_recipe(RECIPE, [*keys, "model.config.vocab_size=200", f"data.tokenizer={tokenizer}"]))


def test_a_prepared_text_of_eval_sets_that_is_too_short_is_refused_before_the_model_is_built(
    tmp_path: Path, keys: list[str]
) -> None:
    """The text is refused once its tokens exist: by the preparation itself, and then by `recipe check`."""
    (tmp_path / "short.txt").write_text("A text.\n")
    (tmp_path / "long.txt").write_text("A text of more tokens than a sequence has.\n" * 9)
    recipe = load_recipe(RECIPE, [*keys, f"eval.sets={{long: {tmp_path}/long.txt, news: {tmp_path}/short.txt}}"])
    assert check_here(recipe).prepared is None
    prepare(recipe.data, 1, 10**9)
    assert check_here(recipe).warnings == []
    reason = rf"^eval\.sets\.news: {tmp_path}/short\.txt: \d+ tokens, 33 needed for one sequence; give a longer text"
    for start in (lambda: prepare_texts(recipe, show_progress=False), lambda: check_here(recipe)):
        with pytest.raises(DataError, match=reason):
            start()
    recipe = load_recipe(RECIPE, [*keys, f"eval.sets={{long: {tmp_path}/long.txt}}", "eval.tokens=1e4"])
    prepare_texts(recipe, show_progress=False)
    assert "eval.tokens is 10,000, but the text long of eval.sets has" in check_here(recipe).warnings[1]


def test_the_rate_is_shared_by_the_ranks_of_this_node(monkeypatch: pytest.MonkeyPatch, keys: list[str]) -> None:
    """The run has two nodes with two ranks each."""
    mesh = ["parallel.replicas=2", "parallel.shards=2"]
    asked: list[int] = []
    monkeypatch.setattr(warnings_module, "rate_here", lambda recipe, local_ranks: asked.append(local_ranks) or 1e9)
    recipe = load_recipe(RECIPE, [*keys, "sync.method=a_edit", "sync.period.every=600", *mesh])
    check_here(recipe, Nodes(count=2), per_node=2)
    assert asked == [2]


def test_the_recipe_that_a_run_writes_gives_no_more_warnings_than_its_own(tmp_path: Path, keys: list[str]) -> None:
    """A run writes a recipe that gives every key, also those that its own recipe leaves at their defaults."""
    for changed in ([], ["sync.wire={kind: int4, keep: 3}"]):
        recipe = load_recipe(RECIPE, [*keys, *changed])
        (tmp_path / "recipe.yaml").write_text(resolved_yaml(recipe))
        assert check_here(load_recipe(tmp_path / "recipe.yaml")).warnings == check_here(recipe).warnings


def test_token_files_of_eval_sets_may_be_of_the_tokenizer_that_is_trained(tmp_path: Path, keys: list[str]) -> None:
    np.save(tmp_path / "held.npy", np.arange(640, dtype="<u2") % 300)
    recipe = load_recipe(RECIPE, [*keys, f"eval.sets={{held: {tmp_path}/held.npy}}"])
    assert check_here(recipe).prepared is None
    prepare_texts(recipe, show_progress=False)
    assert check_here(recipe).prepared is not None
    with pytest.raises(DataError, match=r"eval\.sets\.held: .*none\.npy: no such file"):
        check_here(load_recipe(RECIPE, [*keys, f"eval.sets={{held: {tmp_path}/none.npy}}"]))


ONE_REPLICA, RANK_4 = (
    "there is one replica, so sync.method=edit has no other replica to average with",
    "log.profile.ranks has 4, but the ranks",
)
AUTO = ["parallel.replicas=auto", "parallel.shards=auto", "parallel.on_cpu=null"]


@pytest.mark.parametrize(
    ("changed", "processes", "lines"),
    [
        (AUTO, 1, [ONE_REPLICA]),
        ([*AUTO, "log.profile={ranks: [0, 4]}"], 1, [ONE_REPLICA, f"{RANK_4} are 0 to 0,"]),
        (["parallel.shards=2"], 2, [ONE_REPLICA]),
        (["parallel.shards=2", "log.profile={ranks: [0, 4]}"], 4, [f"{RANK_4} are 0 to 3,"]),
        (["parallel.shards=2", "log.profile={ranks: [0, 3]}"], 4, []),
        ([*AUTO, "parallel.replicas=1"], 1, [ONE_REPLICA]),
        ([*AUTO, "sync.method=gpa", "sync.period=1", "sync.outer.decay=0.5"], 1, []),
        ([*AUTO, "sync.method=synchronous", "sync.period=every_step", "sync.warmup_steps=0"], 1, []),
        ([*AUTO, "parallel.replicas=4", "parallel.in_process=true", "log.profile={ranks: [3]}"], 1, []),
    ],
    ids=str,
)
def test_recipe_check_warns_of_the_mesh_as_a_start_does(
    keys: list[str], changed: list[str], processes: int, lines: list[str]
) -> None:
    recipe = load_recipe(RECIPE, [*keys, *changed])
    here = check_here(recipe, per_node=processes)
    ranks, shards = here.replicas * here.shards, SimpleNamespace(size=here.shards)
    world = SimpleNamespace(size=ranks, local_size=ranks)
    mesh = SimpleNamespace(replicas=here.replicas, shard_comms=shards, world=world, unencrypted=None)
    start = list(_start_warnings(recipe, mesh, SimpleNamespace(all_texts={})))
    assert start == here.warnings == check_elsewhere(recipe, processes)
    assert len(start) == len(lines) and all(map(str.startswith, start, lines))


def test_the_number_of_replicas_elsewhere_may_depend_on_nodes(keys: list[str]) -> None:
    (line,) = check_elsewhere(load_recipe(RECIPE, [*keys, *AUTO, "log.profile={ranks: [4]}"]), 2)
    assert line.startswith(f"{RANK_4} are 0 to 1,")
