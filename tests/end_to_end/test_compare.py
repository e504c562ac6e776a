"""Tests of `llmtrain compare` on loopback and on virtual hosts: reports, evaluations, interruptions and failures."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmtrain.compare.cluster.hosts import why_no_cluster
from tests.end_to_end import forked_trials
from tests.end_to_end.runs import ROOT, Runs, start, wait_until
from tests.mother import ADDRESS, session

needs_hosts = pytest.mark.skipif(why_no_cluster() is not None, reason=str(why_no_cluster()))
FILE = """
name: small
out_dir: {out}
recipe: {root}/recipes/edit_llama_stdlib.yaml
overrides: [{overrides}, train.steps={steps}, eval.every=4, checkpoint.every=null]
hosts: {{count: 2}}
runs:
{runs}
conditions:
{conditions}
baseline: {baseline}
trace: {{first: 4, steps: 4}}
"""
SYNCHRONOUS = "  synchronous: {overrides: [sync.method=synchronous]}"
DILOCO = "  diloco: {overrides: [sync.method=diloco, sync.warmup_steps=2, sync.period.every=4]}"
BROKEN = "  broken: {overrides: [sync.method=diloco, sync.warmup_steps=2, sync.period.every=4, optim.lr=1e30]}"
ELASTIC = """  elastic:
    overrides: [sync.method=diloco, sync.warmup_steps=2, sync.period.every=4, train.steps=20]
    replicas: 1
    restarts: [{after_step: 2, replicas: 2}]"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def comparison(folder: Path, runs: Runs, *compared: str, steps: int = 8, conditions: str) -> Path:
    """Write a comparison file, with the first run as the baseline, and return its path."""
    file = folder / "small.yaml"
    common = [f'"{key}"' for key in runs.command("")[3:] if not key.startswith(("sync.", "run.name=", "run.out_dir="))]
    file.write_text(
        FILE.format(
            out=folder,
            root=ROOT,
            overrides=", ".join(common),
            steps=steps,
            runs="\n".join(compared),
            conditions=conditions,
            baseline=compared[0].split(":")[0].strip(),
        )
    )
    return file


def compare(*arguments: str | Path) -> tuple[int, str]:
    """Run a comparison on loopback, or a report, and return the exit code and the output."""
    words = map(str, arguments)
    process = session().fork(forked_trials.compare, *words, environment={ADDRESS: session().address}, capture=True)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def start_on_hosts(file: Path, runs: Runs) -> subprocess.Popen:
    return start([sys.executable, "-m", "llmtrain", "compare", str(file)], runs.environment, fresh=True)


def records(folder: Path) -> dict[tuple[str, str], dict]:
    found = [json.loads(path.read_text()) for path in folder.glob("small/*/*/*/trial.json")]
    return {(record["condition"], record["run"]): record for record in found}


SLEEPY = "  plain: {delays: {host: 0, seconds: 0.1}}"


@pytest.fixture(scope="module")
def on_loopback(tmp_path_factory: pytest.TempPathFactory, runs: Runs) -> tuple[Path, Path, str]:
    """Compare two runs, and return the folder, the comparison file and the output."""
    folder = tmp_path_factory.mktemp("loopback")
    file = comparison(folder, runs, SYNCHRONOUS, DILOCO, conditions=SLEEPY)
    code, output = compare(file, "--no-shaping")
    assert code == 0, output
    return folder, file, output


def test_on_loopback_without_root(on_loopback: tuple[Path, Path, str]) -> None:
    folder, _, output = on_loopback
    assert "trial 2 of 2: plain · diloco · seed 1234" in output
    states = {key: record["state"] for key, record in records(folder).items()}
    assert states == {("plain", "synchronous"): "done", ("plain", "diloco"): "done"}
    report = (folder / "small" / "report.md").read_text()
    assert "on loopback, without limits" in report and "| diloco" in report
    assert (folder / "small" / "report.html").stat().st_size > 50_000
    spans = (folder / "small/plain/diloco/seed-1234/trace/rank-00001.jsonl").read_text()
    assert '"kind": "message"' in spans and '"kind": "wait"' in spans


@pytest.mark.deep
def test_a_complete_comparison_trains_nothing_again_and_is_reported_elsewhere(
    on_loopback: tuple[Path, Path, str], tmp_path: Path
) -> None:
    folder, file, _ = on_loopback
    again, output = compare(file, "--no-shaping")
    assert again == 0 and "trial 1" not in output
    code, output = compare("--report", folder / "small", "--out", tmp_path / "another")
    assert code == 0 and (tmp_path / "another" / "report.html").exists(), output


@pytest.mark.deep
def test_finished_runs_are_evaluated_once_and_against_the_baseline(tmp_path: Path, runs: Runs) -> None:
    file = comparison(tmp_path, runs, SYNCHRONOUS, DILOCO, conditions=SLEEPY)
    (tmp_path / "valid.txt").write_text("".join(f"def number_{n}():\n    return {n}\n\n" for n in range(50)))
    (tmp_path / "suite.yaml").write_text("about: a text\ntexts: [{name: numbers, file: valid.txt}]\n")
    file.write_text(f"{file.read_text()}suite: {{name: {tmp_path}/suite.yaml, data_dir: {tmp_path}}}\n")
    code, output = compare(file, "--no-shaping")
    assert code == 0 and "evaluating 2 of 2: plain · diloco · seed 1234" in output, output
    result = json.loads((tmp_path / "small/plain/diloco/seed-1234/eval/suite.json").read_text())
    assert result["checkpoint_step"] == 8 and "plain/synchronous/seed-1234" in result["against"]["baseline"]
    report = (tmp_path / "small" / "report.md").read_text()
    assert "## Benchmarks" in report and "| numbers | bits_per_byte |" in report
    code, output = compare(file, "--no-shaping")
    assert code == 0 and "evaluating" not in output


def test_a_run_goes_on_with_more_replicas(tmp_path: Path, runs: Runs) -> None:
    file = comparison(tmp_path, runs, ELASTIC, conditions=SLEEPY)
    code, output = compare(file, "--no-shaping")
    assert code == 0, output
    assert records(tmp_path)["plain", "elastic"]["state"] == "done"
    elastic = tmp_path / "small/plain/elastic/seed-1234"
    assert "written by 1 replica x 1 shard" in (elastic / "host0.log").read_text()
    assert json.loads((elastic / "summary.json").read_text())["replicas"] == 2


@needs_hosts
@pytest.mark.deep
def test_two_hosts_one_run_that_fails_and_an_interruption(tmp_path: Path, runs: Runs) -> None:
    """The report shows the last lines of the failed run, the other runs succeed, and an interrupted comparison continues."""
    thin = "  thin: {bandwidth_mbit: 50, delays: {host: 1, seconds: 0.05}}"
    file = comparison(tmp_path, runs, SYNCHRONOUS, DILOCO, BROKEN, steps=20, conditions=thin)
    process = start_on_hosts(file, runs)
    wait_until(
        lambda: ("thin", "synchronous") in records(tmp_path) or process.poll() is not None, "no trial has ended", 200
    )
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3 and "interrupted; start the same command again" in output
    first = records(tmp_path)["thin", "synchronous"]

    code, output = runs.end(start_on_hosts(file, runs))
    assert code == 1, output
    made = records(tmp_path)
    assert made["thin", "synchronous"] == first, "a finished trial was run again"
    assert {run: record["state"] for (_, run), record in made.items()} == {
        "synchronous": "done",
        "diloco": "done",
        "broken": "failed",
    }
    reason = re.compile(r"the (loss|norm of the gradient) is (nan|inf) on rank ")
    assert any(map(reason.search, made["thin", "broken"]["last_lines"]))
    summary = json.loads((tmp_path / "small/thin/diloco/seed-1234/summary.json").read_text())
    sent = sum(host["sent"] for host in made["thin", "diloco"]["hosts"])
    assert sent > summary["bytes_sent"] > 0
    report = (tmp_path / "small" / "report.md").read_text()
    assert "bandwidth_mbit: 50.0, delays: {host: 1, seconds: 0.05}" in report and reason.search(report)
