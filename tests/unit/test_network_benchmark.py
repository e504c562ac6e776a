"""Tests of benchmarks/network.py: the choice of cells, the length of steps, and the text of rows."""

from __future__ import annotations

import importlib
import itertools
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from llmtrain.compare.cluster.hosts import loopback_cluster
from llmtrain.config import OverlappedSection
from llmtrain.parallel.comms import Comms
from tests import ROOT
from tests.distributed.fake_engine import meeting_store
from tests.distributed.pool import RankPool

sys.path.append(str(ROOT / "benchmarks"))
network, cells, ranks_of_network = map(importlib.import_module, ("network", "network_cells", "network_ranks"))
loops = importlib.import_module("loops")
Cell = cells.Cell


def options(*words: str) -> Namespace:
    arguments = network.parser("")
    network.add_options(arguments)
    return network.options_of(arguments, words)


def test_every_pair_is_in_one_of_few_cells() -> None:
    factors = {"a": range(5), "b": range(4), "c": range(3), "d": range(2)}
    candidates = [one for one in cells.product(factors) if (one["a"], one["b"]) != (4, 3)]
    chosen = cells.pairwise(candidates, cost=lambda one: 0.0)

    def pairs(one: dict) -> set:
        return set(itertools.combinations(one.items(), 2))

    covered: set = set()
    for one in chosen:
        new = len(pairs(one) - covered)
        assert new == max(len(pairs(other) - covered) for other in candidates), "each cell covers the most new pairs"
        covered |= pairs(one)
    assert covered == set().union(*map(pairs, candidates))
    assert 19 <= len(chosen) <= 24
    assert chosen == cells.pairwise(candidates, cost=lambda one: 0.0)


def test_of_equal_candidates_the_cheapest_is_chosen() -> None:
    candidates = cells.product({"a": "xy", "b": "uv"})
    assert cells.pairwise(candidates, cost=lambda one: one["b"] == "u")[0] == {"a": "x", "b": "v"}


def test_the_default_cells_cover_methods_wires_rounds_and_networks() -> None:
    found = network.cells_of(options())
    assert len(found) < 60 and found == network.cells_of(options())
    pairs = {pair for one in found for pair in itertools.combinations((one.method, one.wire, one.mbit), 2)}
    methods, wires, mbits = options().methods, cells.WIRES, options().mbit
    assert {pair for pair in itertools.product(methods, wires)} <= pairs
    missing = set(itertools.product(methods, mbits)) - pairs
    assert {method for method, _ in missing} <= {"synchronous", "wagma"}, "no cell of other methods takes too long"
    assert {one.latency_ms for one in found} == {0.0, 20.0, 100.0} and {one.every for one in found} == {10, 20, 50}
    assert network.cells_of(options("--cells", "3")) == found[:3]
    minutes = sum(network.seconds_of(one, options()) for one in found) / 60
    assert 30 < minutes < 90
    quick = options("--quick")
    assert sum(network.seconds_of(one, quick) for one in network.cells_of(quick)) < 240


def test_rows_that_are_named_are_all_measured_on_all_networks() -> None:
    words = ["--rows", "diloco", "streaming_diloco/int4", "x: sync.method=edit sync.schedule.kind=overlapped"]
    words += ["sync.wire=int8"]
    with pytest.raises(ValueError, match=r"^row 'sync.wire=int8': expected METHOD, METHOD/WIRE or 'NAME: KEY=VALUE"):
        network.cells_of(options(*words))
    words[-2:] = ["mine: sync.method=diloco sync.schedule.kind=overlapped sync.wire=int8"]
    found = network.cells_of(options(*words, "--every", "20", "30", "--mbit", "100", "--latency-ms", "0", "5"))
    assert [(one.method, one.wire) for one in found[::4]] == [
        ("diloco", "fp32"),
        ("streaming_diloco", "int4"),
        ("mine", ""),
    ]
    assert len(found) == 12 and [one.network for one in found[:4]] == [(100, 0), (100, 5)] * 2
    sync = found[-1].sync()
    assert (sync.method, sync.period.every, sync.warmup_steps, sync.wire.kind) == ("diloco", 30, 0, "int8")
    assert isinstance(sync.schedule, OverlappedSection)
    assert [len(group) for group in network.clusters_of(found)] == [6, 6]


@pytest.mark.parametrize("row", ["dilico", "diloco/int3", "x: ", "x: sync.method"])
def test_rows_that_are_none_are_refused(row: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        cells.row_of(row)


def test_a_cells_section_is_the_methods_with_its_wire_and_round() -> None:
    sync = Cell("edit_blocking", "int4", 20, 100.0, 0.0).sync()
    assert (sync.method, sync.schedule.kind, sync.wire.kind, sync.period.every) == ("edit", "blocking", "int4", 20)
    assert sync.reduction.kind == "edit_penalty" and sync.warmup_steps == 0
    synchronous = Cell("synchronous", "int8", 20, 100.0, 0.0).sync()
    assert synchronous.wire.gradients and synchronous.period.averages_gradients
    every = Cell("mine", "fp32", 20, 100.0, 0.0, ("sync.method=diloco", "sync.period.every=7")).sync()
    assert every.period.every == 7
    timed = cells.row_of(
        "timed: sync.method=a_edit sync.period.kind=seconds sync.period.min_steps=0 sync.period.every=30"
    )
    cell = Cell(**timed, every=20, mbit=100.0, latency_ms=0.0)
    assert cell.sync().period.is_timed and cell.sync().warmup_steps == 0
    found = network.prediction(cell, options())
    assert 30.0 <= found.compute + found.exposed < 30.0 + options().step_ms / 1000


@pytest.fixture
def clock() -> SimpleNamespace:
    """Provide a clock: the time `now`, and the factor `late` by which sleeps take longer than asked for."""
    return SimpleNamespace(now=100.0, late=1.1)


def test_what_a_span_takes_too_long_is_taken_off_the_next(clock: SimpleNamespace) -> None:
    def sleep(seconds: float) -> None:
        clock.now += clock.late * seconds

    pace = loops.Pace(lambda: clock.now, sleep)
    for step in range(50):
        pace.resume()
        pace.run(0.2)
        clock.now += 0.1  # the update
        pace.run(0.4)
        pace.pause()
        assert clock.now == pytest.approx(100.0 + 0.6 * (step + 1) + 3.0 * step + pace.debt)
        assert 0 < pace.debt < 0.06
        clock.now += 3.0  # a message, which does not count as computation


def test_computation_that_takes_longer_than_its_span_is_owed(clock: SimpleNamespace) -> None:
    pace = loops.Pace(lambda: clock.now, lambda seconds: None)
    pace.resume()
    clock.now += 1.0
    pace.run(0.6)
    pace.pause()
    assert pace.debt == pytest.approx(0.4)


def test_jitter_is_drawn_alike_everywhere_and_has_a_mean_of_one() -> None:
    worth = ranks_of_network.steps_worth
    drawn = [worth(0.1, 0, 1, step) for step in range(2000)]
    assert drawn == [worth(0.1, 0, 1, step) for step in range(2000)]
    assert sum(drawn) / 2000 == pytest.approx(1, abs=0.01) and min(drawn) > 0.5
    assert worth(0.0, 0, 1, 7) == 1.0 and worth(0.1, 0, 1, 7) != worth(0.1, 0, 2, 7)


def test_a_cells_row() -> None:
    cell = {"method": "diloco", "wire": "fp32", "every": 20, "mbit": 100.0, "latency_ms": 0.0, "keys": []}
    rank = {"alone": 0.6, "steps": [20, 20, 20], "seconds": [13.5, 13.6, 15.0], "waited": [1.4, 1.5, 2.9], "debt": 0.0}
    rank["sent"] = [16e6, 16.5e6, 17e6]
    row, named = network.table_row({"cell": cell, "ranks": [rank, rank]}, options())
    # 15 MB take 1.25 s at 95.6 Mbit/s, in addition to 12 s of computation.
    expected = ("diloco", "fp32", "20", "100", "0", "88.2 %", "80.0 to 88.9", "90.5 %", "-2.3")
    assert row == (*expected, "1.60", "1.50", "1.25", "16.50", "+10.0 %") and named is None
    assert len(row) == len(network.COLUMNS)
    slow = rank | {"seconds": [15.0] * 3}
    _, named = network.table_row({"cell": cell, "ranks": [slow, slow]}, options())
    assert named == "diloco fp32 20 100 0 (-10.5, 50% of the exposed time not waiting for messages)"


def test_cells_of_a_network_that_failed_are_on_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = {"alone": 0.6, "steps": [20], "seconds": [13.5], "waited": [1.4], "debt": 0.0, "sent": [16e6]}

    def measured(group: list[object], options: Namespace) -> tuple[list[dict[str, object]], dict[str, float]]:
        if group[0].mbit == 30:
            raise network.RowFailed("network.py: rank 1 failed;", "its last lines:\nwhy it fails")
        return [{"cell": vars(cell), "ranks": [rank] * 4} for cell in group], {}

    said: list[str] = []
    monkeypatch.setattr(network, "measured", measured)
    monkeypatch.setattr(network, "finish", lambda rows, far, sentences, options: said.extend(sentences))
    words = ["--rows", "diloco", "edit/int8", "--every", "20", "--mbit", "30", "100", "--latency-ms", "0"]
    monkeypatch.setattr(sys, "argv", ["network.py", *words])
    network.main()
    assert said[-1] == "Not measured: diloco fp32 20, edit int8 20 at 30 Mbit/s and 0 ms (network.py: rank 1 failed)."
    assert "why it fails" in capsys.readouterr().out


def _measure(overrides: tuple[str, ...]) -> dict[str, object]:
    comms = Comms(dist.group.WORLD)
    mesh = SimpleNamespace(
        replica_comms=comms, shard_comms=Comms(None, axis="shard"), all_ranks=comms, store=meeting_store(), is_main=True
    )
    task = {"step_seconds": 0.006, "alone_steps": 2, "rounds": 2, "gradient_rounds": 3, "jitter": 0.0, "values": 300}
    sync = Cell("any", "fp32", 5, 100.0, 0.0, ("sync.warmup_steps=0", *overrides)).sync()
    return ranks_of_network.measure_cell(sync, mesh, 0, task | {"interface": "lo"})


ROWS = [
    ("sync.method=edit", "sync.period.kind=steps"),
    *(
        pytest.param(keys, marks=pytest.mark.deep)
        for keys in (
            ("sync.method=synchronous", "sync.wire.kind=int8", "sync.wire.gradients=true"),
            ("sync.method=streaming_diloco", "sync.period.kind=steps", "sync.wire.kind=int4"),
            ("sync.method=co2", "sync.period.kind=steps"),
            ("sync.method=wagma", "sync.period.kind=steps"),
        )
    ),
]


@pytest.mark.parametrize("overrides", ROWS)
def test_rounds_are_measured_over_the_stand_in(overrides: tuple[str, ...], ranks: RankPool) -> None:
    averages = "sync.method=synchronous" in overrides
    for found in ranks.run(_measure, overrides, timeout=60):
        assert found["steps"] == ([1] * 3 if averages else [5] * 2)
        assert found["alone"] >= 0.0059  # longer on a busy machine
        assert all(seconds > 0.004 * steps for seconds, steps in zip(found["seconds"], found["steps"], strict=True))
        assert len(found["seconds"]) == len(found["sent"]) == len(found["waited"])


def test_ranks_that_fail_or_take_too_long_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"shards": 1, "keep_window": False}
    with loopback_cluster(2) as hosts:
        script = tmp_path / "script.py"
        monkeypatch.setattr(network, "__file__", str(script))
        script.write_text("import os; print('why it fails'); raise SystemExit(int(os.environ['RANK']))")
        with pytest.raises(network.RowFailed, match=r"(?s)rank 1 failed; its last lines:\nwhy it fails$"):
            network.run_ranks(hosts, task, tmp_path, 60.0)
        script.write_text("import time; time.sleep(60)")
        with pytest.raises(network.RowFailed, match="took longer than 0 s"):
            network.run_ranks(hosts, task, tmp_path, 0.2)


def test_the_page_says_what_its_steps_took() -> None:
    [text] = network.resolution([600.01, 600.2], [0.1, 0.25], [], options())
    assert text.startswith("A step alone took 600.010 to 600.200 ms where 600 ms were asked for;")
    counters = {
        "forwarded": 1000,
        "late_seconds": 0.5,
        "latest_seconds": 0.02,
        "lost": 3,
        "dropped": 1,
        "cpu_seconds": 9.0,
    }
    [_, switch] = network.resolution([600.0], [0.0], [counters], options())
    assert "1,000 frames, on average 0.50 ms later" in switch and "lost 3 and dropped 1" in switch
