"""The command line as a user meets it: launch, look, repeat, and what is refused."""

from __future__ import annotations

import math
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from llmtrain.cli import app
from tests.end_to_end.runs import ROOT, Runs, exact_lines, free_port, losses, start, summary

QUICKSTART = [
    *("data.source=stdlib", "data.tokenizer=train:2048", "data.validation_fraction=0.05"),
    *("eval.every=8", "eval.tokens=4000", "eval.sample_prompt='def '", "checkpoint.every=6"),
    *("log.every=2", "log.tensorboard=true"),
]
MESHES = [(1, 1), (2, 1), (2, 2)]
"""(replicas, shard) of the runs that others are compared with."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("runs"))
    for mesh in MESHES:
        made.reference(*mesh)
    return made


@pytest.fixture(scope="module")
def whole(runs: Runs) -> str:
    """The output of a run as a user starts it, on the text of the quickstart."""
    code, output = runs.run("whole", *QUICKSTART, fresh=True)
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
    # Two synchronous steps and three rounds (the last one short), each 2 (N-1)/N x 4 bytes x parameters per replica; meetings are small.
    parameters = 2048 * 32 * 2 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert said["sync_count"] == 3
    assert said["bytes_sent"] == pytest.approx((2 + 3) * 2 * 4 * parameters, rel=0.01)
    assert "The model writes" in whole and "validation loss from" in whole
    assert "\x1b" not in whole, "no colors or bars outside a terminal"


@pytest.mark.fresh
def test_metrics_have_the_documented_tags_in_every_line(runs: Runs, whole: str):
    documented = (ROOT / "docs/metrics.md").read_text()
    lines = runs.lines("whole")
    assert [line["step"] for line in lines if "train/loss" in line] == [1, *range(2, 13, 2)]
    assert [line["step"] for line in lines if "eval/loss" in line] == [0, 8, 12]
    for tag in {tag for line in lines for tag in line}:
        assert f"`{tag}`" in documented, f"{tag} is not in docs/metrics.md"
    assert [line["sync/count"] for line in lines if "sync/count" in line] == [0, 0, 0, 0, 1, 1, 3]


@pytest.mark.fresh
def test_the_same_command_again_says_that_the_run_is_complete(runs: Runs, whole: str):
    code, output = runs.run("whole", *QUICKSTART)
    assert code == 0
    assert "is complete: 12 steps" in output and "run.name=" in output


@pytest.mark.fresh
def test_another_recipe_in_the_same_directory_is_refused_with_the_keys(runs: Runs, whole: str):
    code, output = runs.run("whole", *QUICKSTART, "optim.lr=0.5")
    assert code == 2
    assert "optim.lr" in output and "0.5 here" in output and "Traceback" not in output


@pytest.mark.parametrize(("replicas", "shard"), MESHES)
def test_what_is_sent_and_synchronized_does_not_depend_on_shards(runs: Runs, replicas: int, shard: int):
    said = summary(runs.reference(replicas, shard))
    parameters = 400 * 32 * 2 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert (said["stopped"], said["steps"], said["sync_count"]) == ("done", 12, 3)
    assert said["bytes_sent"] == pytest.approx((2 + 3) * 2 * 4 * parameters * (replicas - 1), rel=0.01)
    assert losses(runs.reference(replicas, shard))[:3] == pytest.approx(losses(runs.reference(1, 1))[:3], rel=1e-5)


NEO = [
    "model.type=gpt_neo",
    "model.config={hidden_size: 32, num_layers: 2, num_heads: 2, attention_types: [[[global, local], 1]], max_position_embeddings: 64}",
]


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.replicas=1", "parallel.shards=1", "sync.method=diloco"],
        ["parallel.replicas=4", "parallel.shards=1", "sync.method=local_sgd"],
    ],
    ids=["diloco alone", "local SGD of four"],
)
def test_other_meshes_and_methods_train_the_same_until_the_first_round(runs: Runs, overrides: list[str]):
    """Until then all steps are synchronous, and the global batch is the same."""
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
    last = [line for line in runs.lines("two-texts") if "eval/loss" in line][-1]
    assert last["eval/words/loss"] != last["eval/loss"]
    for prefix in ("eval/", "eval/words/"):
        bytes_per_token = last[f"{prefix}loss"] / math.log(2) / last[f"{prefix}bpb"]
        assert 1 < bytes_per_token < 5, "of a vocabulary of 400"


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


@pytest.mark.fresh
def test_python_runs_the_launch_script_as_deepspeed_does(runs: Runs):
    """DeepSpeed's launcher gives ranks by the environment and `--local_rank` before the script's arguments."""
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    variables = {**runs.environment, **ranks, "MASTER_PORT": str(free_port())}
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
