"""Tests of the benchmarks' arithmetic and of the runs that they start. Their measurements are not tested."""

from __future__ import annotations

import importlib
import json
import math
import runpy
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from llmtrain.config import SyncSection
from llmtrain.parallel.comms import Comms
from llmtrain.recipe_check import check
from llmtrain.recipe_diff import differences
from llmtrain.recipe_loader import load_recipe
from llmtrain.sync.methods import METHODS
from tests import ROOT
from tests.distributed.fake_engine import meeting_store
from tests.distributed.pool import RankPool

SHARED = (
    *("emulated_model", "gpu_rows", "hosts", "local_hub", "loops", "network_ceiling", "network_cells", "network_page"),
    "network_ranks",
    *("peaks", "peer_loops", "peer_measure", "table", "titan", "titan_model"),
)
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in SHARED)

sys.path.append(str(ROOT / "benchmarks"))  # scripts import each other from there
exo_gym, in_process = map(importlib.import_module, ("exo_gym", "in_process"))
loops, loss, methods, peaks = map(importlib.import_module, ("loops", "loss", "methods", "peaks"))
step_parts, stragglers, sync_cost = map(importlib.import_module, ("step_parts", "stragglers", "sync_cost"))
table, throughput, wires = map(importlib.import_module, ("table", "throughput", "wires"))


def test_every_script_says_how_it_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(SCRIPTS) > 10
    for script in SCRIPTS:
        monkeypatch.setattr(sys, "argv", [str(script), "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
        assert not ended.value.code and f"python benchmarks/{script.name}" in capsys.readouterr().out


def test_a_step_of_exo_gym_ends_when_the_next_has_begun_on_every_node(tmp_path: Path) -> None:
    for node, began in enumerate([{2: 5.0, 11: 101.0, 41: 160.0}, {2: 6.0, 11: 91.0, 41: 161.0}]):
        (tmp_path / f"{node}.json").write_text(json.dumps({"began": began, "peak": (node + 1) * 2**30}))
    found = exo_gym.summary(exo_gym.options_of(["--nodes", "2"]), str(tmp_path))
    assert found["tokens_per_second"] == 30 * 16 * 128 * 2 / 60 and found["largest_gib"] == 2
    with pytest.raises(SystemExit, match="2 of 4 nodes"):
        exo_gym.summary(exo_gym.options_of([]), str(tmp_path))


def test_a_checkout_of_exo_gym_is_named_by_its_file_or_by_git(tmp_path: Path) -> None:
    assert in_process.source_of(tmp_path) == "exo-explore/gym at commit unknown"
    (tmp_path / "SOURCE").write_text("a copy\n")
    assert in_process.source_of(tmp_path) == "a copy"


def write_diloco_run(folder: Path) -> Path:
    """Write a DiLoCo run of 4 replicas: 50 synchronous steps of 600 bytes and 13 rounds of 1000 bytes, summed over ranks.
    Return its folder."""
    summary = {
        "method": "diloco",
        "replicas": 4,
        "steps": 300,
        "gradient_steps": 241.25,
        "tokens": 1_228_800,
        "train_seconds": 150.0,
        "final_eval_loss": 2.0,
        "bytes_sent": 43_000,
        "sync_count": 13,
        "exposed_sync_seconds": 3.25,
    }
    lines = [
        {"step": 10, "tokens": 1, "comm/bytes_total": 6_000, "sync/count": 0},
        {"step": 60, "tokens": 2, "comm/bytes_total": 30_000, "sync/count": 0},
        {"step": 60, "tokens": 2, "eval/loss": 3.0},
        {"step": 70, "tokens": 3, "comm/bytes_total": 31_000, "sync/count": 1},
        {"step": 300, "tokens": 4, "comm/bytes_total": 43_000, "sync/count": 13},
        {"step": 300, "tokens": 4, "eval/loss": 2.0},
    ]
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "recipe.yaml").write_text("run: {name: run}\n")
    return folder


def test_bytes_per_round_are_without_the_synchronous_steps(tmp_path: Path) -> None:
    assert wires.bytes_per_round(write_diloco_run(tmp_path / "run")) == 1000 / 4


def test_runs_name_the_commits_at_which_they_were_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs may also be continued at another commit, be complete, or have been started without a record of the commit."""
    started: list[list[str]] = []
    monkeypatch.setattr(table.subprocess, "run", lambda command, **_: started.append(command))
    summary = {"stopped": "done", "steps": 10**9, "final_eval_loss": 2.0}

    def train_at(commit: str, name: str) -> Path:
        monkeypatch.setenv(table.COMMIT, commit)
        return table.train(loops.RECIPE, [f"run.out_dir={tmp_path}", f"run.name={name}"])

    one = train_at("abc1", "one")
    assert one == tmp_path / "one" and table.commits_of(one) == ["abc1"] == table.commits_of(train_at("abc1", "one"))
    assert table.commits_of(train_at("def2", "one")) == ["abc1", "def2"]
    (one / "summary.json").write_text(json.dumps(summary))
    assert table.commits_of(train_at("eee3", "one")) == ["abc1", "def2"]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "recipe.yaml").touch()
    assert table.commits_of(tmp_path / "old") == ["unknown"]
    assert table.commits_of(train_at("eee3", "old")) == ["unknown", "eee3"]
    assert len(started) == 5 and all(command[1] == "launch/train.sh" for command in started)
    assert table.commits_sentence({"a": one, "b": one}) == "All runs were trained at commit abc1 and then def2."
    three = train_at("eee3", "three")
    assert table.commits_sentence({"a": one, "b": three, "c": one}) == (
        "Runs were trained at commit abc1 and then def2: a, c; commit eee3: b."
    )


def test_theory() -> None:
    of_one = {"fp32": 4, "bf16": 2, "int8": 1.03125, "int4": 0.53125}
    assert {kind: wires.theory(1000, 4, kind) for kind in of_one} == {kind: 1500 * n for kind, n in of_one.items()}


def test_small_runs_differ_in_their_method_alone() -> None:
    recipes = {}
    common = table.run_overrides(Namespace(source=None, validation=None))
    for method in METHODS:
        own = methods.own_overrides(method, common, round_seconds=10)
        recipes[method] = load_recipe(ROOT / methods.recipe_of(method), [*common, *own])
        check(recipes[method], 4)
    first = recipes["synchronous"]
    steps = {method: recipe.train.total_steps for method, recipe in recipes.items()}
    assert steps == dict.fromkeys(METHODS, 300) | {"palsgd": 50 + round(250 / 0.8)}
    ours = ("run.name", "sync", "train.steps", "optim.kind", "optim.muon")
    for method, recipe in recipes.items():
        mesh = ("parallel.replicas", "parallel.shards") if method in ("snoo", "gpa") else ()
        assert not differences(first, recipe, ignore=(*ours, *mesh))
        assert (recipe.parallel.replicas, recipe.parallel.shards) == ((1, 4) if mesh else (4, 1))
    periods = {method: recipe.sync.period for method, recipe in recipes.items()}
    fixed = {method: period.every for method, period in periods.items() if period.kind == "steps"}
    assert fixed == dict.fromkeys(fixed, 20) | {"wagma": 10, "gpa": 1} and len(fixed) == 14
    assert periods["qsr"].base == 10
    assert periods["qsr"].alpha == pytest.approx(first.optim.lr / 2 * math.sqrt(10), rel=1e-3)
    assert periods["a_edit"].every == 10
    with_warmup = {method for method, recipe in recipes.items() if recipe.sync.warmup_steps == 50}
    assert set(METHODS) - with_warmup == {"synchronous", "post_local_sgd"}


def test_wires_are_diloco_with_another_wire() -> None:
    common = table.run_overrides(Namespace(source=None, validation=None))
    own = methods.own_overrides(wires.METHOD, common, round_seconds=0)
    recipes = {
        wire: load_recipe(ROOT / methods.recipe_of(wires.METHOD), [*common, *own, *changes])
        for wire, changes in wires.WIRES.items()
    }
    kinds = {wire: (recipe.sync.wire.kind, recipe.sync.wire.error_feedback) for wire, recipe in recipes.items()}
    assert kinds == {
        **{kind: (kind, False) for kind in ("fp32", "bf16", "int8", "int4")},
        "fp4": ("fp4", False),
        "int4+feedback": ("int4", True),
        "2bit+feedback": ("2bit", True),
    }
    for recipe in recipes.values():
        check(recipe, 4)
        assert not differences(recipes["fp32"], recipe, ignore=("sync.wire",))


@pytest.mark.deep
def test_a_script_asks_its_own_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    start = f"import sys; sys.path.append({str(ROOT / 'benchmarks')!r}); from loops import is_asked\n"
    script.write_text(start + "assert is_asked(lambda task: {'twice': 2 * task['number']})\n")
    assert loops.ask(str(script), 1, {"number": 21}) == {"twice": 42}
    script.write_text(start + "is_asked(lambda task: None)\n")
    with pytest.raises(SystemExit, match=r"script\.py: measuring {'number': 21} failed"):
        loops.ask(str(script), 1, {"number": 21})
    script.write_text("import time; time.sleep(100)")
    with pytest.raises(loops.RowFailed, match=r"measuring {} took longer than 1 s"):
        loops.ask(str(script), 1, {}, patience=1)
    assert not loops.is_asked(lambda task: pytest.fail("nobody asked"))


def test_the_first_turn_warms_up_and_every_other_is_backwards() -> None:
    calls = iter(range(100))
    found = loops.take_turns({"a": lambda: next(calls), "b": lambda: next(calls)}, turns=2)
    assert found == {"a": [2, 5], "b": [3, 4]}


def test_as_many_messages_arrive_as_are_sent_while_a_turn_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The method waits for each message one round later. No message is in flight while the bytes are sent alone."""
    steps, sent, arrived, timed = 0, 0, 0, []

    def train_step() -> None:
        nonlocal steps, sent
        steps += 1
        if steps % 8 == 0:
            wait()
            sent += 1

    def wait() -> None:
        nonlocal arrived
        arrived = sent

    def run(step: Callable[[], None], count: int, _: object) -> float:
        before = sent, arrived
        for _ in range(count):
            step()
        timed.append((count, sent - before[0], arrived - before[1]))
        return 3.0

    def alone(_: object, size: float) -> float:
        assert arrived == sent and size == 100.0
        return 0.5

    sync = SimpleNamespace(schedule=SimpleNamespace(kind="delayed"), offload=True)
    trainer = SimpleNamespace(
        train_step=train_step, method=SimpleNamespace(shared_state=wait), recipe=SimpleNamespace(sync=sync)
    )
    monkeypatch.setattr(sync_cost, "timed", run)
    monkeypatch.setattr(sync_cost, "_counters", lambda _: (0.0, 0.0, 0.0, 100.0 * sent))
    monkeypatch.setattr(sync_cost, "_alone", alone)
    mesh = SimpleNamespace(broadcast_from_main=lambda found: found())
    for _ in range(2):
        turn = sync_cost.sync_turn(trainer, 8, 3, mesh)
        assert timed[-1] == (24, 3, 3) and (turn.seconds, turn.bytes, turn.alone) == (1.0, 100.0, 0.5)


def test_every_method_with_rounds_is_measured_once() -> None:
    measured = {choice.method for choice in sync_cost.CHOICES.values()}
    assert measured | set(sync_cost.SAME) == set(METHODS) - {"synchronous"} and not measured & set(sync_cost.SAME)
    period = {"kind": "steps", "every": 1}
    for method, like in sync_cost.SAME.items():
        kinds = [
            {key: getattr(sync, key) for key in ("reduction", "moments", "schedule", "wire")}
            | {"outer": sync.outer.kind}
            for sync in (
                SyncSection(**{**METHODS[name].PRESET, "method": name, "period": period}) for name in (method, like)
            )
        ]
        assert kinds[0] == kinds[1]


def test_a_synchronizations_loops_differ_in_sync_alone() -> None:
    for name, choice in sync_cost.CHOICES.items():
        task = {"choice": name, "offload": True, "wires": sync_cost.WIRES, "replicas": 2, "shard": 1, "override": []}
        recipes = {loop: sync_cost.recipe_of(task, keys) for loop, keys in sync_cost.loops_of(task).items()}
        assert recipes.pop(sync_cost.LOCAL).sync.period.every > 10**6
        wires = [choice.own_wire] if choice.own_wire else list(sync_cost.WIRES)
        assert [recipe.sync.wire.kind for recipe in recipes.values()] == wires
        for recipe in recipes.values():
            check(recipe, 2)
            assert recipe.sync.method == choice.method and recipe.sync.offload
            assert recipe.sync.period.kind == "seconds" or recipe.sync.period.every == choice.every
            assert not differences(recipes[wires[0]], recipe, ignore=("sync.wire",)), name


def row_of(engine: str, **changes: object) -> dict[str, object]:
    task = {"size": "6M", "engine": engine, "compile": False, "checkpoint": "yes", "shard": 2, "precision": "fp32"}
    return {**task, "override": [], **changes}


def test_which_rows_a_throughput_has() -> None:
    for engine in throughput.ENGINES:
        for size in throughput.SIZES:
            assert throughput.is_possible(row_of(engine, size=size, checkpoint="no", shard=1))
        may_compile = engine not in ("zero3", throughput.PLAIN)
        assert throughput.is_possible(row_of(engine, compile=True, checkpoint="no")) == may_compile
    recipe = throughput.recipe_of(row_of("zero2"), throughput.TINY)
    assert (recipe.parallel.engine, recipe.parallel.zero_stage, recipe.train.global_batch) == ("zero", 2, 4)
    assert recipe.parallel.activation_checkpointing and not recipe.parallel.compile


def test_the_allocators_peak_is_of_what_is_there_at_a_time() -> None:
    def work() -> None:
        torch.ones(3_000_000)  # freed at once
        kept = torch.ones(1_000_000)
        del kept

    def both() -> None:
        first = torch.ones(3_000_000)
        second = torch.ones(1_000_000)
        del first, second

    assert (peaks.allocator_peak(work), peaks.allocator_peak(both)) == (12_000_000, 16_000_000)
    kept: list[torch.Tensor] = []
    assert peaks.allocator_peak(lambda: kept.append(torch.ones(500_000))) == 2_000_000
    kept.clear()  # not profiled, so the profiler's own total still includes these bytes
    assert peaks.allocator_peak(both) == 16_000_000


def test_who_is_slow() -> None:
    one, random = stragglers.Scenario(3, slow=2), stragglers.Scenario(5)
    assert [one.steps_worth(replica, 1, 4) for replica in range(4)] == [1, 1, 3, 1]
    for step in range(1, 50):
        assert sorted(random.steps_worth(replica, step, 4) for replica in range(4)) == [1, 1, 1, 5]
    assert {random.steps_worth(0, step, 4) for step in range(1, 50)} == {1, 5}
    assert stragglers.Scenario().steps_worth(3, 1, 4) == 1
    assert (one.slowest(10, 4), random.slowest(1, 4), stragglers.Scenario().slowest(10, 4)) == (3, 5, 1)


def test_speed_leaves_out_the_first_round_and_the_last_step_of_each() -> None:
    ends = [0.0, 9.0, 10.0, 11.0, 15.0, 16.0, 18.0]  # rounds of 2 steps; the last step of each is longer
    found = stragglers.speed(ends, [2, 4, 6], worth=lambda step: step, late=3)
    assert found == stragglers.Speed(
        steps=4, seconds=8, worth=18, between_steps=2, between_seconds=2, between_worth=8, late=0.5
    )


def _measure(name: str, settings: object) -> object:
    sync = stragglers.choices(settings.step_seconds)[name]
    return stragglers.measure(sync, stragglers.Scenario(3, slow=3), Comms(dist.group.WORLD), meeting_store(), settings)


METHODS_OF_STRAGGLERS = [
    "edit",
    "wagma_10",
    *(pytest.param(name, marks=pytest.mark.deep) for name in ("synchronous", "a_edit")),
]


@pytest.mark.parametrize("name", METHODS_OF_STRAGGLERS)
def test_every_method_runs_over_the_stand_in(name: str, ranks: RankPool) -> None:
    settings = stragglers.Settings(step_seconds=0.001, seconds=0.001, values=300)
    found = ranks.run(_measure, name, settings, timeout=60)
    assert all(one.steps > 0 and one.seconds > 0 for one in found)
    if name != "a_edit":
        every = 10 if name == "wagma_10" else stragglers.ROUND
        assert [one.steps for one in found] == [2 * every] * 4
        assert [one.worth for one in found] == [2 * every] * 3 + [6 * every]
        assert [one.between_steps for one in found] == [2 * (every - 1)] * 4


def test_a_steps_time_is_shared_out_by_names() -> None:
    fitting = {
        "aten::mm": "matrix products",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
        "aten::_fused_adamw_": "optimizer",
        "FSDP::pre_forward (causal_lm.model.layers.0)": "communication",
        "triton_poi_fused_mul_silu_0": "compiled",
        "aten::copy_": "copies",
        "aten::fill_": "filling",
        "aten::mul": step_parts.REST,
        "aten::mm_backward": step_parts.REST,
    }
    assert {name: step_parts.group_of(name) for name in fitting} == fitting
    parts = step_parts.parts_of([("aten::mm", 0.5), ("aten::bmm", 0.25), ("aten::mul", 0.125)], wall=1.0)
    assert {name: share for name, share in parts.items() if share} == {
        "matrix products": 0.75,
        step_parts.REST: 0.125,
        step_parts.IDLE: 0.125,
    }


def test_losses_that_can_be_measured_anywhere() -> None:
    measured = loss.losses(chunk=8)
    assert list(measured)[:3] == [loss.ALL_AT_ONCE, loss.PLAIN, loss.COMPILED]
    shaped = ((4, 8), (6, 8))
    hidden, weight = (torch.randn(s, generator=torch.Generator().manual_seed(0)) for s in shaped)
    labels = torch.tensor([1, 5, -100, 0])
    first, second = (measured[name](hidden, weight, None, labels) for name in (loss.ALL_AT_ONCE, loss.PLAIN))
    torch.testing.assert_close(first, second)
