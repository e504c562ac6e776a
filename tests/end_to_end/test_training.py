"""Tests of training from the command line: what a run writes, the same command again, other meshes, and refused input."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.main import get_command
from typer.testing import CliRunner

from llmtrain.cli import app
from llmtrain.parallel.network import unused_port
from llmtrain.run_list import find_runs
from tests.end_to_end.runs import ROOT, Runs, exact_lines, losses, start, summary
from tests.in_process import run_here

STDLIB = [
    "sync.outer.rounds.momentum_warmup=0",
    *("data.source=stdlib", "data.tokenizer=train:2048", "data.validation_fraction=0.05"),
    *("eval.every=8", "eval.tokens=4000", "eval.sample_prompt='<unk> def '", "checkpoint.every=6"),
    *("log.every=2", "log.tensorboard=true"),
]
MESHES = [(1, 1), (2, 1), (2, 2)]
"""(replicas, shards) of the reference runs."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("runs"))
    for mesh in MESHES:
        made.reference(*mesh)
    return made


@pytest.fixture(scope="module")
def whole(runs: Runs) -> str:
    """Train on Python's own source as a user would, and return the output."""
    code, output = runs.run("whole", *STDLIB, fresh=True)
    assert code == 0, output
    return output


@pytest.mark.fresh
def test_a_run_leaves_everything_it_promises(runs: Runs, whole: str):
    path = runs.path("whole")
    for name in ("recipe.yaml", "metrics.jsonl", "summary.json", "loss.png", "samples.txt", "checkpoints/latest"):
        assert (path / name).stat().st_size > 0, name
    assert list((path / "tensorboard").iterdir())
    assert (path / "checkpoints/latest").read_text().strip() == "step-00000012"
    said = summary(path)
    assert (said["stopped"], said["steps"], said["tokens"]) == ("done", 12, 12 * 16 * 32)
    assert said["final_eval_loss"] < runs.lines("whole")[0]["eval/loss"] - 0.5
    # Two synchronous steps and three rounds each send 2 (N-1)/N x 4 bytes x parameters per replica. The rest is little.
    parameters = 2048 * 32 * 2 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert said["sync_count"] == 3
    assert said["bytes_sent"] == pytest.approx((2 + 3) * 2 * 4 * parameters, rel=0.01)
    samples = (path / "samples.txt").read_text()
    assert re.findall(r"^==== step (\d+) ====\n<unk> def ", samples, re.M) == ["8", "12"], (
        "<unk> should be split as in training"
    )
    assert "The model writes" in whole and "validation loss from" in whole
    assert "\x1b" not in whole, "colors or bars outside a terminal"


def test_a_large_model_writes_only_at_the_end(runs: Runs):
    """A small model counts as large if a million tokens are asked for. Its sequence has room for only a few of them."""
    keys = ["train.steps=4", "eval.every=2", "eval.sample_prompt='def '", "eval.sample_tokens=1_000_000"]
    code, output = runs.train("late-sample", *keys)
    assert code == 0, output
    samples = (runs.path("late-sample") / "samples.txt").read_text()
    assert samples.startswith("==== step 4 ====\ndef ") and samples.count("====") == 2
    assert "| writes: " not in output and "The model writes" in output


@pytest.mark.fresh
def test_metrics_have_the_documented_tags_in_every_line(runs: Runs, whole: str):
    documented = (ROOT / "docs/metrics.md").read_text()
    lines = runs.lines("whole")
    assert [line["step"] for line in lines if "train/loss" in line] == [1, *range(2, 13, 2)]
    assert [line["step"] for line in lines if "eval/loss" in line] == [0, 8, 12]
    for tag in {tag for line in lines for tag in line}:
        assert f"`{tag}`" in documented, f"{tag} is not in docs/metrics.md"
    assert [line["sync/count"] for line in lines if "sync/count" in line] == [0, 0, 0, 0, 1, 1, 3]
    assert [line["sync/round"] for line in lines if "sync/round" in line] == [0, 0, 1, 1, 2, 2, 3]


@pytest.mark.fresh
def test_the_same_command_again_says_that_the_run_is_complete(runs: Runs, whole: str):
    code, output = runs.run("whole", *STDLIB)
    assert code == 0
    assert "is complete: 12 steps" in output and "run.name=" in output


@pytest.mark.fresh
def test_another_recipe_in_the_same_directory_is_refused_with_the_keys(runs: Runs, whole: str):
    code, output = runs.run("whole", *STDLIB, "optim.lr=0.5")
    assert code == 2
    assert "optim.lr" in output and "0.5 here" in output and "Traceback" not in output


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
def test_what_is_sent_and_synchronized_does_not_depend_on_shards(runs: Runs, replicas: int, shard: int):
    said = summary(runs.reference(replicas, shard))
    parameters = 400 * 32 * 2 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert (said["stopped"], said["steps"], said["sync_count"]) == ("done", 12, 3)
    assert said["bytes_sent"] == pytest.approx((2 + 3) * 2 * 4 * parameters * (replicas - 1), rel=0.01)
    assert losses(runs.reference(replicas, shard))[:3] == pytest.approx(losses(runs.reference(1, 1))[:3], rel=1e-5)


def test_a_block_that_is_always_left_out_is_named_and_ends_the_run(runs: Runs):
    """Norms grow with the learning rate in its warm-up, so by the paper's rule they are anomalous from some round on."""
    penalty = ["z=0.1", "min_rounds=2", "statistics=paper", "max_exclusions=8"]
    keys = [
        "parallel.shards=1",
        "train.steps=60",
        "schedule.warmup_steps=60",
        "sync.warmup_steps=1",
        "sync.period.every=2",
    ]
    code, output = runs.run("left-out", *keys, *(f"sync.reduction.{key}" for key in penalty), "checkpoint.every=null")
    assert code == 1 and "Traceback" not in output, output
    assert "| warning: replica 0: " in output and "excluded from the mean 5 rounds in a row" in output
    assert "error: replica 0: " in output and "excluded from the mean 8 rounds in a row" in output
    assert max(line.get("sync/longest_exclusion", 0) for line in runs.lines("left-out")) in (6, 7)


def test_a_run_that_diverges_says_so(runs: Runs):
    keys = ["parallel.shards=1", "optim.lr=30", "optim.clip_norm=null", "sync.method=diloco", "sync.warmup_steps=2"]
    code, output = runs.run("diverges", *keys)
    assert code == 0 and "Traceback" not in output, output
    said = json.loads((runs.path("diverges") / "summary.json").read_text(), parse_constant=pytest.fail)
    assert said["final_eval_step"] == 12 and said["final_eval_loss"] > 10
    assert any("the run is diverging" in warning and warning.startswith("step 12: ") for warning in said["warnings"])
    assert "| warning: validation loss " in output
    assert re.search(r"warnings?, the last at step 12: validation loss", output), output
    assert not re.search(r"\d{20}", output), "a perplexity of hundreds of digits"


NEO = [
    "model.type=gpt_neo",
    "model.config={hidden_size: 32, num_layers: 2, num_heads: 2, attention_types: [[[global, local], 1]], max_position_embeddings: 64}",
]


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.replicas=1", "parallel.shards=1", "sync.method=diloco"],
        pytest.param(["parallel.replicas=4", "parallel.shards=1", "sync.method=local_sgd"], marks=pytest.mark.deep),
    ],
    ids=["diloco alone", "local SGD of four"],
)
def test_other_meshes_and_methods_train_the_same_until_the_first_round(runs: Runs, overrides: list[str]):
    """Before the first round, all steps are synchronous and have the same global batch."""
    name = overrides[2].partition("=")[2]
    code, output = runs.run(name, *overrides, "train.steps=8")
    assert code == 0, output
    ours, theirs = losses(runs.path(name)), losses(runs.reference(1, 1))
    assert ours[:2] == pytest.approx(theirs[:2], rel=1e-5)
    assert ours[-1] < ours[2] and summary(runs.path(name))["sync_count"] == 2


def test_another_model_trains_the_same_in_one_process_and_in_two(runs: Runs):
    keys = [*NEO, "train.steps=4", "sync.warmup_steps=3", "checkpoint.every=null"]
    ended = [runs.run("neo", *keys, "parallel.shards=1"), runs.train("neo-alone", *keys, "train.deterministic=true")]
    assert [code for code, _ in ended] == [0, 0], ended
    assert losses(runs.path("neo")) == pytest.approx(losses(runs.path("neo-alone")), rel=1e-5)


def test_other_texts_are_validated_beside_the_runs_own(runs: Runs):
    text = runs.folder / "words.txt"
    text.write_text("<|endoftext|>".join(["def words(): return 'many words'\n"] * 200))
    code, output = runs.train("two-texts", "train.steps=4", f"eval.sets={{words: {text}}}")
    assert code == 0, output
    assert "step 4/4 | words: validation loss" in output
    assert output.count("warning: sync.period.every is 4, but the run has 2 local steps") == 1
    last = [line for line in runs.lines("two-texts") if "eval/loss" in line][-1]
    assert last["eval/words/loss"] != last["eval/loss"]
    for prefix in ("eval/", "eval/words/"):
        bytes_per_token = last[f"{prefix}loss"] / math.log(2) / last[f"{prefix}bpb"]
        assert 1 < bytes_per_token < 5, "implausible for a vocabulary of 400"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.lr=fast"], "optim.lr"),
        (["sync.perod.every=3"], "did you mean"),
        (["data.source=/no/such/file.txt"], "/no/such/file.txt"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(runs: Runs, overrides: list[str], message: str):
    code, output = runs.run("bad", *overrides)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert code == 2, output
    assert len(errors) == 1 and message in errors[0] and "Traceback" not in output


ALONE = ("parallel.replicas=1", "parallel.shards=1")


@pytest.mark.fresh
def test_one_process_trains_without_a_launcher(runs: Runs):
    command = [sys.executable, "-m", "llmtrain", "train", *runs.command("single", *ALONE)[2:]]
    code, output = runs.end(runs.start(command, fresh=True))
    assert code == 0, output
    assert runs.exact("single") == exact_lines(runs.reference(1, 1))


@pytest.mark.deep  # test_zero.py starts the same script with DeepSpeed's launcher
@pytest.mark.fresh
def test_python_runs_the_launch_script_as_deepspeed_does(runs: Runs):
    """DeepSpeed's launcher passes ranks in the environment, and `--local_rank` before the script's arguments."""
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    variables = {**runs.environment, **ranks, "MASTER_PORT": str(unused_port())}
    command = [sys.executable, "-u", "launch/train.sh", "--local_rank=0", *runs.command("by_python", *ALONE)[2:]]
    code, output = runs.end(start(command, variables, fresh=True))
    assert code == 0, output
    assert runs.exact("by_python") == exact_lines(runs.reference(1, 1))


def test_help_is_there_for_every_command():
    group = get_command(app)
    names = [
        [],
        *([name] for name in group.commands),
        *(["recipe", name] for name in group.commands["recipe"].commands),
    ]
    assert len(names) >= 12
    for command in names:
        shown = CliRunner().invoke(app, [*command, "--help"])
        assert shown.exit_code == 0 and "Usage" in shown.output, command


@pytest.mark.deep
def test_a_run_starts_from_another_and_later_needs_it_no_more(runs: Runs):
    first = shutil.copytree(runs.reference(1, 1), runs.path("first"))
    keys = ("parallel.replicas=2", "parallel.shards=1", f"model.from_weights={first}", "sync.method=edit")
    code, output = runs.run("wrong", *keys, "model.config.hidden_size=64")
    assert code == 2 and "starting" not in output
    assert "error: model.from_weights: " in output and " has hidden_size 32, but the recipe's model has 64; " in output
    code, output = runs.run("further", *keys)
    assert code == 0, output
    assert f"weights: from {first}/checkpoints/step-00000012 (21 tensors)" in output
    undisturbed = runs.exact("further")
    assert undisturbed[0]["eval/loss"] == pytest.approx(summary(first)["final_eval_loss"], rel=1e-6)
    record = summary(runs.path("further"))["from_weights"]
    assert record["path"] == f"{first}/checkpoints/step-00000012"
    shutil.rmtree(first)
    shutil.rmtree(runs.path("further") / "checkpoints/step-00000012")
    (runs.path("further") / "summary.json").unlink()
    code, output = runs.run("further", *keys)
    assert code == 0 and "continuing from" in output and "weights: from" not in output, output
    assert runs.exact("further") == undisturbed and summary(runs.path("further"))["from_weights"] == record


def test_weights_that_are_not_finite_leave_no_run(runs: Runs, tmp_path: Path):
    weights = tmp_path / "weights"
    assert run_here(["export", str(runs.reference(1, 1)), "--out", str(weights)])[0] == 0
    (weights / "export.json").unlink()  # as if another program had written the weights
    tensors = load_file(weights / "model.safetensors")
    tensors["model.norm.weight"][3] = math.nan
    save_file(tensors, weights / "model.safetensors", {"format": "pt"})
    code, output = runs.train("damaged", f"model.from_weights={weights}")
    assert code == 2 and "model.norm.weight holds a value that is not finite; give other weights" in output, output
    assert (runs.path("damaged") / ".lock").exists() and not find_runs(runs.path("damaged"))
