"""What mutants of evaluation, comparisons, the doctor and the console showed to be untested."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtrain.compare.measures import gather, measure
from llmtrain.compare.results import load_trials
from llmtrain.compare.tables import headline
from llmtrain.doctor import links, recipe_fit
from llmtrain.doctor.finding import ok
from llmtrain.doctor.links import links_between
from llmtrain.doctor.node_ranks import RankIdentity, group
from llmtrain.eval import texts
from llmtrain.eval.units import Options
from llmtrain.recipe_loader import load_recipe
from llmtrain.suites.local_tasks import local_tasks
from llmtrain.suites.suite import Suite, TextSection
from llmtrain.train import console
from tests.unit.written_trials import straight, write_trial

ROOT = Path(__file__).parents[2]
NESTED = (("gradient", 1.0, 2.0), ("step", 0.5, 3.0))
"""(kind, start, end), the inner one first."""


def test_the_standard_error_of_a_perplexity_follows_that_of_the_loss(tmp_path: Path, monkeypatch) -> None:
    """By the delta method: the derivative of exp is exp."""
    monkeypatch.setattr(texts, "losses", lambda documents, *_: ([30.0, 90.0, 60.0], [10, 20, 20]))
    (tmp_path / "text.txt").write_text("one|two|three")
    section = TextSection(name="text", file="text.txt", separator="|", window=8)
    scores = texts.evaluate_text(section, tmp_path / "text.txt", None, SimpleNamespace(), 1).scores["text"]
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
    monkeypatch.setattr(links, "_ping", lambda connection: next(pings))
    server = links.LinkServer("127.0.0.1", bytes(links.SECRET_BYTES), 5)
    try:
        link = links.measure(0, 1, "127.0.0.1", ("127.0.0.1", server.port), bytes(links.SECRET_BYTES), 5)
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
    same = {"llmtrain": "1"}
    hosts = group([RankIdentity(i, f"n{i}", f"n{i}", "eth0", f"10.0.0.{i}", "cpu", same) for i in range(3)])
    measured = [links.Link(0, 1, 0.5, 1e8, 1e8), links.Link(0, 2, 0.5, 1e8, 1e6), links.Link(1, 2, 0.5, 1e8, 1e8)]
    levels = [finding.level.value for finding in links_between(hosts, measured)]
    assert levels == ["warning", "ok", "ok", "ok"], "the slowest first, then the others and the clocks"


def test_there_is_to_be_room_for_a_checkpoint_more_than_is_kept(tmp_path: Path, monkeypatch) -> None:
    """The oldest is deleted when the newest is complete."""
    needed = []
    monkeypatch.setattr(recipe_fit, "disk", lambda key, folder, size: needed.append(size) or ok(key))
    for keep in (1, 3):
        overrides = [f"run.out_dir={tmp_path}", "data.tokenizer=train:400", f"checkpoint.keep={keep}"]
        recipe_fit.fit(load_recipe(ROOT / "recipes/quickstart.yaml", overrides), ["node"] * 4, [2.0**34] * 4)
    assert needed[0] > 0 and needed[2] == 2 * needed[0]


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
    now = iter([50.0, 150.0])
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: next(now)))
    tags = ("train/loss", "train/lr", "train/grad_norm", "perf/tokens_per_second", "sync/count", "comm/bytes_total")
    shown = console.Console(enabled=True)
    shown.start(step=900, total=1000)
    shown.log_step(950, 1, dict.fromkeys((*tags, "perf/peak_memory_gib"), 1.0))
    assert capsys.readouterr().out.rstrip().endswith("eta 1m40s")
