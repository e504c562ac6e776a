"""Tests of launch/slurm.sbatch and srun, on a real Slurm with two nodes and with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.runs import RECIPE, ROOT, Runs, environment, exact_lines, summary, wait_until
from tests.multi_node.slurm import Slurm, slurm_cluster

NODES, RANKS_PER_NODE = 2, 2
LONG = ("train.steps=40",)
SUBMIT = ["sbatch", "--parsable", f"--nodes={NODES}", "--gpus-per-node=0", f"--cpus-per-task={RANKS_PER_NODE}"]
JOB_SECONDS = 150
HELD = """#!/bin/sh
# In place of python3 -m llmtrain launch, as launch/train.sh calls it.
shift 3
exec {python} -c 'import sys; from tests.end_to_end.held_rank import launch; launch({step}, "{file}", *sys.argv[1:])' "$@"
"""


class Jobs:
    """Runs of a tiny recipe as Slurm jobs."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs

    def arguments(self, name: str, *overrides: str) -> list[str]:
        return self.runs.command(name, *LONG, "run.timeout_seconds=60", *overrides)[2:]

    def submit(self, slurm: Slurm, name: str, *overrides: str, held_after: int | None = None) -> str:
        """Submit a job that trains the recipe with launch/slurm.sbatch, and return its number. With `held_after`, rank
        1 of its first start waits for a signal after that step."""
        variables = environment()
        if held_after is not None:
            stand_in = self.runs.folder / f"{name}-programs" / "python3"
            stand_in.parent.mkdir()
            stand_in.write_text(HELD.format(python=sys.executable, step=held_after, file=self.runs.hold_file(name)))
            stand_in.chmod(0o755)
            variables["PATH"] = f"{stand_in.parent}:{variables['PATH']}"
        words = [*SUBMIT, f"--output={self.log(name)}", "launch/slurm.sbatch", *self.arguments(name, *overrides)]
        return slurm.command(*words, cwd=ROOT, env=variables).strip()

    def log(self, name: str) -> Path:
        return self.runs.folder / f"{name}.log"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), NODES, RANKS_PER_NODE) as cluster:
        yield cluster


@pytest.fixture
def jobs(slurm: Slurm, runs: Runs) -> Jobs:
    return Jobs(runs)


@pytest.mark.deep
def test_a_preempted_job_is_requeued_and_continues_to_the_same_losses(slurm: Slurm, jobs: Jobs, runs: Runs):
    job = jobs.submit(slurm, "preempted", held_after=7)
    wait_until(runs.hold_file("preempted").exists, "rank 1 has not reached step 7")
    slurm.command("scancel", "--signal=USR1", job)
    slurm.wait_for_job(job, lambda shown: shown["Restarts"] == "1", JOB_SECONDS, "not requeued")
    stopped = jobs.log("preempted").read_text()
    assert "stopped at step" in stopped and f"job {job} goes back to the queue" in stopped
    assert "before training began" not in stopped, "torchrun did not pass on the signal"
    assert summary(runs.path("preempted"))["stopped"] == "signal"

    slurm.wait_for_job(job, lambda shown: shown["JobState"] == "COMPLETED", JOB_SECONDS, "not completed")
    log = jobs.log("preempted").read_text()
    assert log.startswith(stopped) and "continuing from" in log.removeprefix(stopped)
    assert runs.exact("preempted") == exact_lines(runs.reference(2, 2, *LONG))


@pytest.mark.deep
def test_a_cancelled_job_writes_a_checkpoint_and_stays_cancelled(slurm: Slurm, jobs: Jobs, runs: Runs):
    job = jobs.submit(slurm, "cancelled", "train.steps=100000", "parallel.shards=1")
    runs.wait_for("cancelled", 6)
    slurm.command("scancel", job)
    slurm.wait_for_job(job, lambda shown: shown["JobState"] == "CANCELLED", JOB_SECONDS, "not cancelled")
    assert "stopped at step" in jobs.log("cancelled").read_text()
    assert slurm.job(job)["Restarts"] == "0"


@pytest.mark.deep
def test_srun_with_one_task_a_rank_trains_the_same(slurm: Slurm, jobs: Jobs, runs: Runs):
    tasks = [f"--nodes={NODES}", f"--ntasks-per-node={RANKS_PER_NODE}", "--kill-on-bad-exit=1"]
    command = ["srun", *tasks, sys.executable, "-m", "llmtrain", "train", *jobs.arguments("by_srun")]
    environ = {**environment(), "SLURM_CONF": slurm.environment["SLURM_CONF"]}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=JOB_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert runs.exact("by_srun") == exact_lines(runs.reference(2, 2, *LONG))


STAND_INS = {
    "srun": 'echo "srun $*" >> "$CALLS"; exit "$CODE"',
    "scontrol": 'echo "scontrol $*" >> "$CALLS"; [ "$(grep -c scontrol "$CALLS")" -gt "${REFUSALS:-0}" ]',
    "squeue": 'echo squeue >> "$CALLS.squeue"; [ "$(wc -l < "$CALLS.squeue")" -gt "${SILENT:-0}" ] && echo "$STATE"',
    "sleep": "exit 0",
}


@pytest.fixture
def batch(tmp_path: Path):
    """Provide a function that runs launch/slurm.sbatch as Slurm does, with stand-ins for Slurm's commands. It returns
    the exit code, the calls of the stand-ins and the output."""
    for name, line in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)

    def run(arguments: list[str], code: int, **variables: str) -> tuple[int, list[str], str]:
        calls = tmp_path / "calls"
        calls.write_text("")
        Path(f"{calls}.squeue").unlink(missing_ok=True)
        given = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "77", "CALLS": str(calls), "CODE": str(code)}
        given["STATE"] = "RUNNING"
        copied = tmp_path / "slurm_script"  # Slurm runs a copy from its spool folder
        copied.write_bytes((ROOT / "launch/slurm.sbatch").read_bytes())
        done = subprocess.run(
            ["bash", str(copied), *arguments],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **given, **variables},
            capture_output=True,
            text=True,
            timeout=30,
        )
        return done.returncode, calls.read_text().splitlines(), done.stdout + done.stderr

    return run


SRUN = "srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=120 bash launch/train.sh"


@pytest.mark.parametrize("code", [0, 1, 2, 137])
def test_only_exit_code_3_requeues(batch, code: int):
    assert batch([RECIPE, "optim.lr=1e-3"], code)[:2] == (code, [f"{SRUN} {RECIPE} optim.lr=1e-3"])


def test_exit_code_3_requeues_the_job(batch):
    assert batch([RECIPE], 3)[:2] == (3, [f"{SRUN} {RECIPE}", "scontrol requeue 77"])


def test_a_job_that_no_longer_runs_is_not_requeued(batch):
    assert batch([RECIPE], 3, STATE="COMPLETING")[:2] == (3, [f"{SRUN} {RECIPE}"])


def test_a_job_that_is_stopped_at_once_is_not_requeued_for_ever(batch):
    """This happens if the job's --time is no longer than the seconds of --signal."""
    code, calls, output = batch([RECIPE], 3, SLURM_RESTART_COUNT="5")
    assert (code, calls, output.count("\n")) == (3, [f"{SRUN} {RECIPE}"], 1)
    assert output.startswith(
        "error: job 77 was stopped within a minute, after 5 returns to the queue; give it a --time well above"
    )
    assert batch([RECIPE], 3, SLURM_RESTART_COUNT="4")[1][1:] == ["scontrol requeue 77"]


def test_a_busy_controller_is_asked_again(batch, tmp_path: Path):
    code, calls, output = batch([RECIPE], 3, SILENT="4", REFUSALS="1")
    assert (code, calls) == (3, [f"{SRUN} {RECIPE}", *["scontrol requeue 77"] * 2]) and "error: " not in output
    code, calls, output = batch([RECIPE], 3, SILENT="99")
    assert (code, calls) == (3, [f"{SRUN} {RECIPE}"])
    assert (tmp_path / "calls.squeue").read_text().count("squeue") == 5
    assert (
        output.splitlines()[-1] == "error: job 77 did not go back to the queue, because squeue failed; submit it again"
    )
    code, calls, output = batch([RECIPE], 3, REFUSALS="99")
    assert (code, calls) == (3, [f"{SRUN} {RECIPE}", *["scontrol requeue 77"] * 2])
    assert output.splitlines()[-1] == (
        "error: job 77 did not go back to the queue, because scontrol requeue failed; submit it again"
    )


def test_sbatch_sees_all_options_since_no_command_stands_above_them():
    lines = (ROOT / "launch/slurm.sbatch").read_text().splitlines()
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert len(options) == 9 and max(options) < first_command


def test_each_task_of_an_array_trains_its_recipe_and_requeues_itself_alone(batch):
    listed = []
    for task in ("0", "1"):
        # Slurm gives the array's last task the number of the array.
        array = {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": task}
        _, calls, _ = batch(["optim.lr=1e-3"], 3, **array)
        assert calls[1:] == [f"scontrol requeue 77_{task}"]
        command, recipe, override = calls[0].rsplit(" ", 2)
        assert (command, override) == (SRUN, "optim.lr=1e-3")
        assert (ROOT / recipe).is_file()
        listed.append(recipe)
    assert len(set(listed)) == 2
    code, calls, output = batch([], 0, SLURM_ARRAY_JOB_ID="77", SLURM_ARRAY_TASK_ID="9")
    assert (code, calls) == (2, []) and "lists recipes 0 to 1" in output


def test_srun_is_told_the_cpus_of_a_task(batch):
    _, calls, _ = batch([RECIPE], 0, SLURM_CPUS_PER_TASK="12")
    assert calls[0].startswith("srun --ntasks-per-node=1 --cpus-per-task=12 --kill-on-bad-exit=0")


def test_a_job_from_another_folder_is_refused_in_one_line(batch, tmp_path: Path):
    code, calls, output = batch([RECIPE], 0, SLURM_SUBMIT_DIR=str(tmp_path))
    assert (code, calls) == (2, []) and output.count("\n") == 1 and "has no launch/train.sh" in output
