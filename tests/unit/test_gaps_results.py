"""What mutants of evaluation, comparisons, the doctor and the console showed to be untested."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain.compare.measures import gather, measure
from llmtrain.compare.report import headline
from llmtrain.compare.results import load_trials
from llmtrain.doctor import network_speed, run_checks
from llmtrain.doctor.finding import ok
from llmtrain.doctor.network_speed import SECRET_BYTES, Link, LinkServer, links_between
from llmtrain.eval import texts
from llmtrain.eval.units import Options
from llmtrain.recipe_loader import load_recipe
from llmtrain.suites import Suite, TextSection, local_tasks
from llmtrain.train import loggers
from tests.unit.written_trials import straight, write_trial

ROOT = Path(__file__).parents[2]
NESTED = (("gradient", 1.0, 2.0), ("step", 0.5, 3.0))
"""(kind, start, end), the inner one first."""


def test_the_standard_error_of_a_perplexity_follows_that_of_the_loss(tmp_path: Path, monkeypatch) -> None:
    """By the delta method: the derivative of exp is exp."""
    monkeypatch.setattr(texts, "losses", lambda documents, *_: ([30.0, 90.0, 60.0], [10, 20, 20]))
    (tmp_path / "text.txt").write_text("one|two|three")
    section = TextSection(name="text", file="text.txt", separator="|", window=8)
    loaded = SimpleNamespace(model=None, positions=None, separate_documents=False)
    scores = texts.evaluate_text(section, tmp_path / "text.txt", None, loaded, 1).scores["text"]
    assert scores["loss"] == pytest.approx(3.6) and scores["perplexity"] == pytest.approx(math.exp(3.6))
    assert scores["loss_stderr"] > 0
    assert scores["perplexity_stderr"] == pytest.approx(math.exp(3.6) * scores["loss_stderr"])


@pytest.mark.parametrize(
    ("of_suite", "given", "limit"), [(5, 3, 3), (2, 3, 2), (None, 3, 3), (5, None, 5), (None, None, None)]
)
def test_the_smaller_of_two_limits_holds(of_suite: int | None, given: int | None, limit: int | None) -> None:
    options = Options(Suite(), (), None, limit=given, batch_size=1, device=None)
    assert options.limited(of_suite) == limit


def test_a_task_file_changes_what_it_includes(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("task: base\ndataset_kwargs: {file: of_base.txt}")
    (tmp_path / "own.yaml").write_text("include: base.yaml\ntask: own\ndataset_kwargs: {file: its_own.txt}")
    tasks = local_tasks([tmp_path])
    assert {name: task.files for name, task in tasks.items()} == {"base": ("of_base.txt",), "own": ("its_own.txt",)}


def test_clocks_are_compared_by_the_quickest_round_trip(monkeypatch) -> None:
    """What a message takes there and what it takes back differ most in a slow one."""
    pings = itertools.cycle([(0.5, 3.0), (0.01, 0.2), (0.8, -5.0)])
    monkeypatch.setattr(network_speed, "_ping", lambda connection: next(pings))
    server = LinkServer("127.0.0.1", bytes(SECRET_BYTES), 5)
    try:
        link = network_speed.measure_link(0, 1, "127.0.0.1", ("127.0.0.1", server.port), bytes(SECRET_BYTES), 5)
    finally:
        server.close()
    assert (link.skew, link.milliseconds) == (0.2, pytest.approx(500))


def test_a_run_of_one_seed_is_pointed_out_beside_a_baseline_of_three(tmp_path: Path) -> None:
    for condition in ("a", "b"):
        for seed in (1, 2, 3):
            write_trial(tmp_path, condition, "synchronous", seed, straight(900.0, 4.0))
        write_trial(tmp_path, condition, "edit", 1, straight(100.0, 4.0))
    assert "1 seed: chance is not excluded" in headline(gather(load_trials([tmp_path])))


def test_the_slower_direction_of_a_link_is_what_it_is_worth() -> None:
    measured = [Link(0, 1, 0.5, 1e8, 1e8), Link(0, 2, 0.5, 1e8, 1e6), Link(1, 2, 0.5, 1e8, 1e8)]
    levels = [finding.level.value for finding in links_between(["n0", "n1", "n2"], measured)]
    assert levels == ["warning", "ok", "ok", "ok"], "the slowest first, then the others and the clocks"


def test_there_is_to_be_room_for_a_checkpoint_more_than_is_kept(tmp_path: Path, monkeypatch) -> None:
    """The oldest is deleted when the newest is complete. The best one may be older than those that are kept."""
    needed = []
    monkeypatch.setattr(run_checks, "disk", lambda key, folder, size: needed.append(size) or ok(key))
    for keep, best in ((1, "false"), (3, "false"), (2, "true")):
        keys = (f"checkpoint.keep={keep}", f"checkpoint.keep_best={best}", "checkpoint.every=10")
        overrides = [f"run.out_dir={tmp_path}", "data.tokenizer=train:400", *keys]
        run_checks.fit(load_recipe(ROOT / "recipes/edit_llama_stdlib.yaml", overrides), ["node"] * 4, [2.0**34] * 4)
    assert needed[0] > 0 and needed[2] == needed[4] == 2 * needed[0]


def test_bytes_received_are_known_where_all_hosts_tell(tmp_path: Path) -> None:
    hosts = [{"name": "one", "sent": 50, "received": 40}, {"name": "two", "sent": 50, "received": None}]
    write_trial(tmp_path, "plain", "edit", 1, straight(100.0, 4.0), hosts=hosts)
    found = measure(load_trials([tmp_path])[0])
    assert (found["wire_sent"], found["wire_received"]) == (100, None)


def test_a_span_comes_before_those_within_it(tmp_path: Path) -> None:
    """A timeline draws one over the other; they are written as they end."""
    path = write_trial(tmp_path, "plain", "edit", 1, straight(100.0, 4.0))
    spans = [{"kind": kind, "name": "", "step": 1, "start": begin, "end": end} for kind, begin, end in NESTED]
    (path / "trace").mkdir()
    (path / "trace" / "rank-00000.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans))
    assert list(load_trials([tmp_path])[0].spans["kind"]) == ["step", "gradient"]


def test_the_time_left_follows_from_the_steps_since_this_start(monkeypatch, capsys) -> None:
    now = [50.0]
    monkeypatch.setattr(loggers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tags = ("train/loss", "train/lr", "train/grad_norm", "perf/tokens_per_second", "sync/count", "sync/round")
    tags += ("comm/bytes_total", "sync/divergence", "perf/peak_memory_gib")
    shown = loggers.Console(enabled=True)
    shown.start(step=900, total=1000, rounds=9)
    now[0] = 150.0
    shown.log_step(950, dict.fromkeys(tags, 1.0))
    assert capsys.readouterr().out.rstrip().endswith("eta 1m40s")


def test_a_replica_alone_reports_its_step_now_and_then(monkeypatch, capsys) -> None:
    now = [0.0]
    monkeypatch.setattr(loggers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    shown = loggers.Console(enabled=True)
    shown.start(step=0, total=100, rounds=None)
    for step, seconds in enumerate(range(0, 50, 5), start=1):
        now[0] = seconds
        shown.advance(step, is_alone=step > 1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" on")[0] for line in lines[1:]] == ["step 5/100", "step 9/100"]
