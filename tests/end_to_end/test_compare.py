"""`llmtrain compare`: runs on virtual hosts, continues, survives a run that fails, reports; and on loopback."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmtrain.compare.cluster import why_no_cluster
from tests.end_to_end.runs import ROOT, TINY, environment

needs_hosts = pytest.mark.skipif(why_no_cluster() is not None, reason=str(why_no_cluster()))
FILE = """
name: small
out_dir: {out}
recipe: {root}/recipes/quickstart.yaml
overrides: [{overrides}, train.steps=20, eval.every=10, checkpoint.every=null, log.tensorboard=false, data.cache_dir={data}]
hosts: {{count: 2}}
runs:
  synchronous: {{overrides: [sync.method=synchronous]}}
  diloco: {{overrides: [sync.method=diloco, sync.warmup_steps=2, sync.period.every=4]}}
{more}
baseline: synchronous
trace: {{first: 6, steps: 10}}
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards, made once."""
    return tmp_path_factory.mktemp("data")


def comparison(folder: Path, data: Path, more: str = "") -> Path:
    file = folder / "small.yaml"
    common = [f'"{key}"' for key in TINY if not key.startswith("sync.")]
    keys = {"out": folder, "root": ROOT, "data": data, "overrides": ", ".join(common), "more": more}
    file.write_text(FILE.format(**keys))
    return file


def start(*arguments: str | Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "llmtrain", "compare", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def compare(*arguments: str | Path) -> tuple[int, str]:
    process = start(*arguments)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def records(folder: Path) -> dict[tuple[str, str], dict]:
    found = [json.loads(path.read_text()) for path in folder.glob("small/*/*/*/trial.json")]
    return {(record["condition"], record["run"]): record for record in found}


ELASTIC = """  elastic:
    overrides: [sync.method=diloco, sync.warmup_steps=2, sync.period.every=4, train.steps=40]
    replicas: 1
    restarts: [{after_step: 5, replicas: 2}]
conditions:
  plain: {delays: {who: 0, seconds: 0.1}}"""


def test_on_loopback_without_root(tmp_path: Path, data: Path) -> None:
    file = comparison(tmp_path, data, ELASTIC)
    code, output = compare(file, "--no-shaping")
    assert code == 0, output
    assert "trial 2 of 3: plain · diloco · seed 1234" in output
    assert {key: record["state"] for key, record in records(tmp_path).items()} == {
        ("plain", "synchronous"): "done",
        ("plain", "diloco"): "done",
        ("plain", "elastic"): "done",
    }
    elastic = tmp_path / "small/plain/elastic/seed-1234"
    assert "written by 1 replicas x 1 shards" in (elastic / "host0.log").read_text()
    assert json.loads((elastic / "summary.json").read_text())["replicas"] == 2
    report = (tmp_path / "small" / "report.md").read_text()
    assert "on loopback, without limits" in report and "| diloco" in report
    assert (tmp_path / "small" / "report.html").stat().st_size > 50_000
    spans = (tmp_path / "small/plain/diloco/seed-1234/trace/rank-00001.jsonl").read_text()
    assert '"kind": "message"' in spans and '"kind": "wait"' in spans
    again, output = compare(file, "--no-shaping")
    assert again == 0 and "trial 1" not in output
    code, output = compare("--report-only", tmp_path / "small", "--out", tmp_path / "another")
    assert code == 0 and (tmp_path / "another" / "report.html").exists(), output


@needs_hosts
def test_two_hosts_one_run_that_fails_and_an_interruption(tmp_path: Path, data: Path) -> None:
    """The failing run is shown with its last lines and loses nobody else; an interrupted comparison goes on."""
    more = """  broken: {overrides: [sync.method=diloco, sync.warmup_steps=2, sync.period.every=4, optim.lr=1e30]}
conditions:
  thin: {bandwidth_mbit: 50, delays: {who: 1, seconds: 0.05}}"""
    file = comparison(tmp_path, data, more)
    process = start(file)
    deadline = time.monotonic() + 120
    while ("thin", "synchronous") not in records(tmp_path):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3 and "interrupted; start the same command again" in output
    first = records(tmp_path)["thin", "synchronous"]

    code, output = compare(file)
    assert code == 1, output
    made = records(tmp_path)
    assert made["thin", "synchronous"] == first, "a finished trial is not made again"
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
    assert "50 Mbit/s, host 1 sleeps 0.05 s in every step" in report and reason.search(report)
