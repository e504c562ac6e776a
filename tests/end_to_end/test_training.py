"""The command line as a user meets it: launch, look, kill, continue, repeat."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys

import pytest

from tests.end_to_end.runs import ROOT, Runs, environment, exact


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def whole(runs: Runs) -> str:
    """The output of a run that nobody disturbed."""
    code, output = runs.run("whole")
    assert code == 0, output
    return output


def test_a_run_leaves_everything_it_promises(runs: Runs, whole: str):
    path = runs.path("whole")
    for name in ("recipe.yaml", "metrics.jsonl", "summary.json", "loss.png", "samples.txt", "checkpoints/latest"):
        assert (path / name).stat().st_size > 0, name
    assert list((path / "tensorboard").iterdir())
    assert (path / "checkpoints/latest").read_text().strip() == "step-00000024"
    summary = json.loads((path / "summary.json").read_text())
    assert (summary["stopped"], summary["steps"], summary["tokens"]) == ("done", 24, 24 * 16 * 32)
    assert summary["final_eval_loss"] < runs.lines("whole")[0]["eval/loss"] - 0.5
    # Two synchronous steps and six rounds (the last one short), each 2 (N-1)/N x 4 bytes x parameters per replica; meetings are small.
    parameters = 2048 * 32 * 2 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert summary["sync_count"] == 6
    assert summary["bytes_sent"] == pytest.approx((2 + 6) * 2 * 4 * parameters, rel=0.01)
    assert "The model writes" in whole and "validation loss from" in whole
    assert "\x1b" not in whole, "no colours or bars outside a terminal"


def test_metrics_have_the_documented_tags_in_every_line(runs: Runs, whole: str):
    documented = (ROOT / "docs/metrics.md").read_text()
    lines = runs.lines("whole")
    assert [line["step"] for line in lines if "train/loss" in line] == [1, *range(2, 25, 2)]
    for tag in {tag for line in lines for tag in line}:
        assert f"`{tag}`" in documented, f"{tag} is not in docs/metrics.md"
    assert [line["sync/count"] for line in lines if "sync/count" in line] == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 6]


def test_the_same_command_again_says_that_the_run_is_complete(runs: Runs, whole: str):
    code, output = runs.run("whole")
    assert code == 0
    assert "is complete: 24 steps" in output and "run.name=" in output


def test_another_recipe_in_the_same_directory_is_refused_with_the_keys(runs: Runs, whole: str):
    code, output = runs.run("whole", "optim.lr=0.5")
    assert code == 2
    assert "optim.lr" in output and "0.5 here" in output and "Traceback" not in output


@pytest.mark.parametrize("step", [12, 18], ids=["in a round", "with a synchronisation armed"])
def test_a_killed_run_continues_to_the_same_losses(runs: Runs, whole: str, step: int):
    name = f"killed{step}"
    process = runs.start(runs.command(name, "checkpoint.every=6"))
    runs.wait_for(name, step)
    os.killpg(process.pid, signal.SIGKILL)
    subprocess.run(["pkill", "-9", "-f", f"run.name={name}"], check=False)  # ranks have sessions of their own
    process.wait()
    assert not (runs.path(name) / "summary.json").exists()
    code, output = runs.run(name)
    assert code == 0 and f"step-{step:08d}" in output, output
    assert [exact(line) for line in runs.lines(name)] == [exact(line) for line in runs.lines("whole")]


def test_a_stopped_run_writes_a_checkpoint_exits_with_3_and_continues_to_the_same_losses(runs: Runs, whole: str):
    process = runs.start(runs.command("stopped", "checkpoint.every=8"))
    runs.wait_for("stopped", 8)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 3, output
    assert json.loads((runs.path("stopped") / "summary.json").read_text())["stopped"] == "signal"
    code, output = runs.run("stopped", "checkpoint.every=8")
    assert code == 0, output
    assert [exact(line) for line in runs.lines("stopped")] == [exact(line) for line in runs.lines("whole")]


def test_a_run_killed_after_its_last_checkpoint_only_writes_its_summary(runs: Runs, whole: str):
    lines = runs.lines("whole")
    summary = (runs.path("whole") / "summary.json").read_text()
    (runs.path("whole") / "summary.json").unlink()
    code, output = runs.run("whole")
    assert code == 0, output
    assert runs.lines("whole") == lines
    assert json.loads((runs.path("whole") / "summary.json").read_text()) == json.loads(summary)


def test_other_meshes_methods_and_models_train_from_the_command_line(runs: Runs, whole: str):
    neo = [
        "model.type=gpt_neo",
        "model.config={hidden_size: 32, num_layers: 2, num_heads: 2, attention_types: [[[global, local], 1]], max_position_embeddings: 64}",
    ]
    for name, overrides in {
        "alone": ["parallel.replicas=1", "parallel.shard=1", "sync.method=diloco"],
        "four": ["parallel.replicas=4", "parallel.shard=1", "sync.method=local_sgd"],
        "neo": ["parallel.shard=1", *neo],
    }.items():
        code, output = runs.run(name, *overrides, "train.steps=8", "eval.sample_prompt=null")
        assert code == 0, output


def test_other_texts_are_validated_beside_the_runs_own(runs: Runs, whole: str):
    text = runs.folder / "words.txt"
    text.write_text("<|endoftext|>".join(["def words(): return 'many words'\n"] * 200))
    one = ["parallel.replicas=1", "parallel.shard=1", "train.steps=8", "eval.sample_prompt=null"]
    code, output = runs.run("two-texts", *one, f"eval.sets={{words: {text}}}")
    assert code == 0, output
    assert "step 8/8 | words: validation loss" in output
    last = [line for line in runs.lines("two-texts") if "eval/loss" in line][-1]
    assert last["eval/words/loss"] != last["eval/loss"]
    for prefix in ("eval/", "eval/words/"):
        bytes_per_token = last[f"{prefix}loss"] / math.log(2) / last[f"{prefix}bpb"]
        assert 1 < bytes_per_token < 5, "of a vocabulary of 2048"


def test_a_rank_that_dies_ends_the_run_with_an_error(runs: Runs):
    process = runs.start(runs.command("broken", "train.steps=100000", "run.timeout_seconds=20"))
    runs.wait_for("broken", 6)
    victim = subprocess.run(
        ["pgrep", "-f", "llmtrain train.*run.name=broken"], capture_output=True, text=True
    ).stdout.split()[-1]
    os.kill(int(victim), signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert ("error: rank" in output and "lost a peer" in output) or "a peer died" in output, output


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


def test_one_process_trains_without_a_launcher(runs: Runs, whole: str):
    arguments = runs.command("single", "parallel.replicas=1", "parallel.shard=1", "train.steps=8")[2:]
    command = [sys.executable, "-m", "llmtrain", "train", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_python_runs_the_launch_script_as_deepspeed_does(runs: Runs, whole: str):
    """DeepSpeed's launcher gives ranks by the environment and `--local_rank` before the script's arguments."""
    arguments = runs.command("by_python", "parallel.replicas=1", "parallel.shard=1", "train.steps=8")[2:]
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    command = [sys.executable, "-u", "launch/train.sh", "--local_rank=0", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**environment(), **ranks}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_help_is_there_for_every_command():
    for command in (
        [],
        ["train"],
        ["launch"],
        ["prepare"],
        ["recipe"],
        ["recipe", "check"],
        ["recipe", "show"],
        ["recipe", "schema"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "llmtrain", *command, "--help"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0 and "Usage" in done.stdout
