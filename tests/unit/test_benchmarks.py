"""The benchmarks' arithmetic and tables, on runs that were never made. What they measure is not a test's business."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from llmtrain.parallel.comms import Comms
from llmtrain.recipe import differences, load_recipe
from llmtrain.recipe_check import check
from llmtrain.sync.methods import METHODS
from tests.distributed.fake_engine import meeting_store
from tests.distributed.pool import RankPool

ROOT = Path(__file__).parents[2]
SHARED = ("loops", "peaks", "table", "titan")
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in SHARED)

sys.path.append(str(ROOT / "benchmarks"))  # where a script finds the others
data, loops, methods, peaks = map(importlib.import_module, ("data", "loops", "methods", "peaks"))
rounding, step_overhead, stragglers = map(importlib.import_module, ("rounding", "step_overhead", "stragglers"))
loss, step_parts = map(importlib.import_module, ("loss", "step_parts"))
sync_cost, table, throughput, wires = map(importlib.import_module, ("sync_cost", "table", "throughput", "wires"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A DiLoCo run of 4 replicas: 50 synchronous steps of 600 bytes and 13 rounds of 1000, of all ranks."""
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
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "recipe.yaml").write_text("run: {name: run}\n")
    return folder


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help(script: Path) -> None:
    shown = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True).stdout
    assert f"python benchmarks/{script.name}" in shown


def test_a_methods_row(run: Path) -> None:
    row = methods.row(run)
    assert row == ("diloco", "2.0000", "7.39", "13", "0.00 GB", "300", "241", "1.23 M")
    assert len(row) == len(methods.COLUMNS)


def test_bytes_per_round_are_without_the_synchronous_steps(run: Path) -> None:
    assert wires.bytes_per_round(run) == 1000 / 4


def test_a_wires_row(run: Path) -> None:
    parameters = 100  # 2 x 3/4 x 100 x (1/2 + 4/128) = 79.6875 bytes
    row = wires.row("int4+feedback", run, parameters, fp32_loss=1.6)
    assert row == ("int4+feedback", "2.0000", "+25.00 %", "250", "80", "+213.73 %", "13")
    assert len(row) == len(wires.COLUMNS)


@pytest.mark.parametrize(("kind", "of_one"), [("fp32", 4), ("bf16", 2), ("int8", 1.03125), ("int4", 0.53125)])
def test_theory(kind: str, of_one: float) -> None:
    assert wires.theory(1000, 4, kind) == 1500 * of_one


def test_the_lowest_number_is_bold() -> None:
    rows = [("a", "3.5"), ("b", "3.4"), ("c", "10.0")]
    assert table.lowest_in_bold(rows, 1) == [("a", "3.5"), ("b", "**3.4**"), ("c", "10.0")]


def test_markdown() -> None:
    assert table.markdown(("x", "y"), [("a", "1")]) == "| x | y |\n| --- | ---: |\n| a | 1 |"


def test_pages_name_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = tmp_path / "train.txt"
    text.touch()
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks/methods.py"), "--source", str(text), f"--set=a={text}"])
    table.write_page(tmp_path / "page", "Title", ["Text."])
    page = (tmp_path / "page" / "README.md").read_text()
    assert page.startswith("# Title\n\n`python benchmarks/methods.py --source ../") and page.endswith("\n\nText.\n")
    assert f" {tmp_path}" not in page and f"={tmp_path}" not in page
    assert table.run_overrides(Namespace(source=str(text), validation=None))[-1] == "data.validation=null"


def test_written_results(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(methods, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(wires, "RESULTS", tmp_path / "results")
    methods.write([methods.row(run)], dict.fromkeys(METHODS, run))
    wires.write([wires.row("fp32", run, 100, 2.0)], {"fp32": run})
    written = {path.relative_to(tmp_path / "results").as_posix() for path in (tmp_path / "results").rglob("*.*")}
    logs = ("metrics.jsonl", "recipe.yaml", "summary.json")
    folders = [f"methods/{method}" for method in METHODS] + ["wires/fp32"]
    pages = {"methods/README.md", f"methods/{methods.PLOT}", "wires/README.md"}
    assert written == {f"{folder}/{name}" for folder in folders for name in logs} | pages
    assert "| diloco | **2.0000** |" in (tmp_path / "results/methods/README.md").read_text()


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
    ours = ("run.name", "sync", "train.steps")
    assert all(not differences(first, recipe, ignore=ours) for recipe in recipes.values())
    periods = {method: recipe.sync.period for method, recipe in recipes.items()}
    fixed = {method: period.every for method, period in periods.items() if period.kind == "steps"}
    assert fixed == dict.fromkeys(fixed, 20) | {"wagma": 10} and len(fixed) == 9
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
    kinds = {wire: (recipe.sync.wire.kind, recipe.sync.wire.feedback) for wire, recipe in recipes.items()}
    assert kinds == {
        **{kind: (kind, False) for kind in ("fp32", "bf16", "int8", "int4")},
        "int4+feedback": ("int4", True),
    }
    for recipe in recipes.values():
        check(recipe, 4)
        assert not differences(recipes["fp32"], recipe, ignore=("sync.wire",))


def test_a_script_asks_its_own_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    start = f"import sys; sys.path.append({str(ROOT / 'benchmarks')!r}); from loops import is_asked\n"
    script.write_text(start + "assert is_asked(lambda task: {'twice': 2 * task['number']})\n")
    assert loops.ask(str(script), 1, {"number": 21}) == {"twice": 42}
    script.write_text(start + "is_asked(lambda task: None)\n")
    with pytest.raises(SystemExit, match=r"script\.py: measuring {'number': 21} failed"):
        loops.ask(str(script), 1, {"number": 21})
    assert not loops.is_asked(lambda task: pytest.fail("nobody asked"))


def test_the_first_turn_warms_up_and_every_other_is_backwards() -> None:
    calls = iter(range(100))
    found = loops.take_turns({"a": lambda: next(calls), "b": lambda: next(calls)}, turns=2)
    assert found == {"a": [2, 5], "b": [3, 4]}


def test_the_overheads_rows() -> None:
    seconds = {step_overhead.BARE: [1.0] * 3, step_overhead.LOCAL: [1.0, 1.1, 1.2], "trainer, sync": [2.38] * 3}
    rows = step_overhead.rows_of(seconds)
    assert rows[1] == (step_overhead.LOCAL, "1100.0", "1.100", "1.000 to 1.200", "")
    assert rows[2][-1] == "+0.91 %"  # 1.28 / 128 of 1.1
    assert all(len(row) == len(step_overhead.COLUMNS) for row in rows)


def test_a_synchronisations_rows() -> None:
    local = [{"seconds": 0.1}] * 3
    turns = [
        {"seconds": 0.2 + added, "exposed": 0.04, "messages": 0.03, "bytes": 2e6, "alone": 0.02}
        for added in (0.04, 0.05, 0.06)
    ]
    (row,) = sync_cost.rows_of("co2", 2, {sync_cost.LOCAL: local, "int8": turns})
    assert row == ("co2", "int8", "2", "50.0", "40.0 to 60.0", "40.0", "30.0", "2.00", "20.0", "2.50")
    assert len(row) == len(sync_cost.COLUMNS)


def test_every_method_with_rounds_is_measured_once() -> None:
    measured = {choice.method for choice in sync_cost.CHOICES.values()}
    assert measured | set(sync_cost.SAME) == set(METHODS) - {"synchronous"} and not measured & set(sync_cost.SAME)
    for method, like in sync_cost.SAME.items():
        kinds = [
            {key: METHODS[name].PRESET.get(key) for key in ("group", "penalty", "schedule", "wire")}
            | {"outer": METHODS[name].PRESET["outer"]["kind"]}
            for name in (method, like)
        ]
        assert kinds[0] == kinds[1]


@pytest.mark.parametrize("name", sync_cost.CHOICES)
def test_a_synchronisations_loops_differ_in_sync_alone(name: str) -> None:
    task = {"choice": name, "offload": True, "wires": sync_cost.WIRES, "replicas": 2, "shard": 1, "override": []}
    recipes = {loop: sync_cost.recipe_of(task, keys) for loop, keys in sync_cost.loops_of(task).items()}
    assert recipes.pop(sync_cost.LOCAL).sync.period.every > 10**6
    assert [recipe.sync.wire.kind for recipe in recipes.values()] == list(sync_cost.WIRES)
    for recipe in recipes.values():
        check(recipe, 2)
        assert recipe.sync.method == sync_cost.CHOICES[name].method and recipe.sync.offload
        assert recipe.sync.period.kind == "seconds" or recipe.sync.period.every == sync_cost.CHOICES[name].every
        assert not differences(recipes["fp32"], recipe, ignore=("sync.wire",))


def _row_of(engine: str, **changes: object) -> dict[str, object]:
    task = {"size": "6M", "engine": engine, "compile": False, "checkpoint": "yes", "shard": 2, "precision": "fp32"}
    return {**task, "override": [], **changes}


def test_which_rows_a_throughput_has() -> None:
    for engine in throughput.ENGINES:
        for size in throughput.SIZES:
            assert throughput.is_possible(_row_of(engine, size=size))
        assert throughput.is_possible(_row_of(engine, compile=True)) == (engine != "zero3")
    recipe = throughput.recipe_of(_row_of("zero2"), throughput.TINY)
    assert (recipe.parallel.engine, recipe.parallel.zero_stage, recipe.train.global_batch) == ("zero", 2, 4)
    assert recipe.parallel.activation_checkpointing and not recipe.parallel.compile


def test_a_throughputs_row() -> None:
    found = {"tokens": 1000, "seconds": [0.5, 0.4, 0.6], "first": 9.0, "flops": 1e6, "peak_flops": 1e10, "ranks": 2}
    found |= {"peak": 100e6, "predicted": 110e6, "predicted_seconds": 0.4, "grown": None}
    row = throughput.row(_row_of("fsdp2"), found, {"seconds": [0.45]})
    rates = ("2,000", "1,667 to 2,500", "0.900", "2,500", "10.0 %", "9.0")
    assert row == ("6M", "fsdp2", "checkpoint", *rates, "100", "110", "+10.0 %", "")
    bare = throughput.row(_row_of(throughput.BARE), {**found, "peak_flops": None, "grown": 5e6}, None)
    assert bare[5:] == ("", "", "", "9.0", "100", "", "", "5")
    uncounted = throughput.row(_row_of("fsdp2"), {**found, "peak": None}, None)
    selective = throughput.row(_row_of("fsdp2", compile=True, checkpoint="selective"), found, None)
    assert selective[2] == "compile+selective"
    assert uncounted[-4:] == ("", "110", "", "")
    assert len(row) == len(bare) == len(throughput.COLUMNS)


def test_the_allocators_peak_is_of_what_is_there_at_a_time() -> None:
    def work() -> None:
        torch.ones(3_000_000)  # gone at once
        kept = torch.ones(1_000_000)
        del kept

    def both() -> None:
        first = torch.ones(3_000_000)
        second = torch.ones(1_000_000)
        del first, second

    assert (peaks.allocator_peak(work), peaks.allocator_peak(both)) == (12_000_000, 16_000_000)
    kept: list[torch.Tensor] = []
    assert peaks.allocator_peak(lambda: kept.append(torch.ones(500_000))) == 2_000_000
    kept.clear()  # unseen: the profiler's own total stays where it is
    assert peaks.allocator_peak(both) == 16_000_000


def test_texts_rows() -> None:
    library = [{"seconds": 2.0, "cpu": 4.0, "thread": 1.0, "tokens": 6_000_000}]
    found = {data.PLAIN: library, data.READ: [{"seconds": 0.5, "cpu": 0.5, "thread": 0.5, "tokens": 0}]}
    rows = data.rows_of(found, text_bytes=20_000_000)
    assert rows[0] == (data.PLAIN, "2.00", "2.00 to 2.00", "10.0", "3.00", "1.00", "4.00", "1.00")
    assert rows[1] == (data.READ, "0.50", "0.50 to 0.50", "40.0", "", "", "0.50", "0.50")
    row = data.loader_row((8, 128), {"batches": [1e-4, 2e-4, 3e-4], "steps": [(0.5, 0.001)] * 3})
    assert row == ("8 x 128", "200", "100 to 300", "5.1", "500", "0.200 %")
    assert len(rows[0]) == len(data.COLUMNS) and len(row) == len(data.LOADER_COLUMNS)
    assert list(map(len, data.batched(["x" * 750_000] * 5))) == [2, 2, 1]


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


def test_a_stragglers_row() -> None:
    def speeds(fast: float, slow: float, between: float) -> list[list[float]]:
        """Steps in 10 s, of a fast replica and of one that is twice as slow, and a fast one's between global averages."""
        one = [fast, 10.0, fast, between, 10.0, between, 0.25]
        return [one, one, [slow, 10.0, 2 * slow, slow, 10.0, 2 * slow, 0.75]]

    alone = [0.1, 0.1, 0.1]  # seconds: 100 steps in 10 s, the slow one 50
    nobody, one = {"factor": 1.0, "slow": None}, {"factor": 2.0, "slow": 2}
    results = [
        {"scenario": nobody, "method": "wagma_10", "alone": alone, "rows": [[90, 10, 90, 90, 10, 90, 0]] * 3},
        {"scenario": one, "method": "wagma_10", "alone": alone, "rows": speeds(60, 40, 81)},
        {"scenario": one, "method": "edit", "alone": alone, "rows": speeds(60, 40, 81)},
    ]
    results.insert(0, results[0] | {"method": "edit"})
    rows = {(row[0], row[1]): row[2:] for row in stragglers.rows_of(results)}
    assert rows["none", "edit"] == ("9.0", "", "90.0 %", "90.0 to 90.0", "", "", "", "")
    # (2 x 6 + 4) steps/s over (2 x 10 + 5)
    start = ("6.0", "4.0", "64.0 %", "64.0 to 64.0")
    assert rows["one, 2x", "edit"] == (*start, "", "", "", "")
    assert rows["one, 2x", "wagma_10"] == (*start, "81.0 %", "81.0 to 81.0", "90.0 %", "42 %")
    assert all(len(row) + 2 == len(stragglers.COLUMNS) for row in rows.values())


def _measure(name: str, settings: object) -> object:
    sync = stragglers.choices(settings.step_seconds)[name]
    return stragglers.measure(sync, stragglers.Scenario(3, slow=3), Comms(dist.group.WORLD), meeting_store(), settings)


@pytest.mark.parametrize("name", ["synchronous", "edit", "a_edit", "wagma_10"])
def test_every_method_runs_over_the_stand_in(name: str, ranks: RankPool) -> None:
    settings = stragglers.Settings(step_seconds=0.001, seconds=0.001, values=300)
    found = ranks.run(_measure, name, settings, timeout=60)
    assert all(one.steps > 0 and one.seconds > 0 for one in found)
    if name != "a_edit":
        every = 10 if name == "wagma_10" else stragglers.ROUND
        assert [one.steps for one in found] == [2 * every] * 4
        assert [one.worth for one in found] == [2 * every] * 3 + [6 * every]
        assert [one.between_steps for one in found] == [2 * (every - 1)] * 4


def test_rows_of_rounding_compare_with_plain_turn_by_turn() -> None:
    seconds = {"plain encode": [0.010, 0.020, 0.030], "plain decode": [0.004] * 3}
    seconds |= {"compiled encode": [0.005, 0.010, 0.030], "compiled decode": [0.001] * 3}
    plain, compiled = rounding.rows_of("int4", seconds, 12.34)
    assert plain == ("int4", "plain", "20.00", "10.00 to 30.00", "", "4.00", "4.00 to 4.00", "", "")
    assert compiled == ("int4", "compiled", "10.00", "5.00 to 30.00", "0.50", "1.00", "1.00 to 1.00", "0.25", "12.3")
    assert len(plain) == len(compiled) == len(rounding.COLUMNS)


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


def test_rows_of_a_steps_parts_end_with_the_whole_and_the_ideal() -> None:
    loop = {
        **step_parts.parts_of([("aten::mm", 0.5), ("aten::copy_", 0.25)], wall=1.0),
        "a step": 1.0,
        step_parts.IDEAL: 0.4,
    }
    rows = step_parts.rows_of({"fsdp2": loop, "zero3": loop})
    assert rows[:2] == [("matrix products", *2 * ["500.0 (50 %)"]), ("copies", *2 * ["250.0 (25 %)"])]
    assert [name for name, *_ in rows[-4:-1]] == [step_parts.IDLE, step_parts.WALL, step_parts.IDEAL]
    assert rows[-2][1] == "400.0 (40 %)" and rows[-1] == (step_parts.OVER, "2.00", "2.00")
    assert len(rows) == len(step_parts.GROUPS) + 5


def test_losses_that_can_be_measured_anywhere() -> None:
    measured = loss.losses(chunk=8)
    assert list(measured)[:3] == [loss.ALL_AT_ONCE, loss.PLAIN, loss.COMPILED]
    shaped = ((4, 8), (6, 8))
    hidden, weight = (torch.randn(s, generator=torch.Generator().manual_seed(0)) for s in shaped)
    labels = torch.tensor([1, 5, -100, 0])
    first, second = (measured[name](hidden, weight, None, labels) for name in (loss.ALL_AT_ONCE, loss.PLAIN))
    torch.testing.assert_close(first, second)
