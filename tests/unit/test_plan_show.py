"""Output of `recipe show` for every recipe of the repository, and its figures compared with counts by hand."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.filesize import decimal

from llmtrain.errors import RecipeError, UserError
from llmtrain.parallel.muon import orthogonalization_flops
from llmtrain.parallel.sparse_format import SparseFormat
from llmtrain.plan import time_estimate
from llmtrain.plan.cards import GPU_EFFICIENCY
from llmtrain.plan.hardware import Hardware, hardware_of
from llmtrain.plan.model_size import size_of
from llmtrain.plan.show import show_plan
from llmtrain.plan.time_estimate import HardwareRates, estimate_time, pull_share, rate_here
from llmtrain.quantities import format_duration
from llmtrain.recipe_loader import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
STDLIB = RECIPES / "edit_llama_stdlib.yaml"


RATES = HardwareRates(flops=1e10, mbit=100.0)
CPU = Hardware(RATES, "each rank on this CPU", "measured here", on_gpu=False, is_this_cpu=True)
GPUS = Hardware(RATES, "each rank", "--tflops", on_gpu=True)


def shown(path: Path, *overrides: str, width: int = 100, hardware: Hardware = CPU) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show_plan(load_recipe(path, overrides), console, hardware)
    return console.file.getvalue()


def row(text: str, name: str) -> list[str]:
    """Return the words after `name` in the last line that starts with it: a row of a table or a figure."""
    line = next(line for line in reversed(text.splitlines()) if line.strip().startswith(name))
    return line.strip().removeprefix(name).split()


def is_like_others(path: Path) -> bool:
    """Return whether other recipes show this method and this model, too. Each method has a recipe with the 8M model."""
    return path.stem.endswith(("_1b", "_gpt_neo_125m")) and not path.stem.startswith("a_edit")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.deep if is_like_others(path) else (), id=path.stem)
        for path in sorted(RECIPES.glob("*.yaml"))
        if "in_process: true" not in path.read_text()  # such a recipe needs its own number of replicas
    ],
)
def test_every_recipe_shows_within_100_columns(path: Path) -> None:
    text = shown(path, "parallel.replicas=auto", "parallel.shards=auto", hardware=GPUS)
    assert f"name: {path.stem}" in text
    assert "…" not in text
    tables = text[text.index("\nparameters") :]
    assert max(len(line) for line in tables.splitlines()) <= 100
    totals = [float(cell.replace(",", "")) for cell in row(text, "total")]
    assert min(totals[0], totals[2]) > totals[1] >= totals[3] > 0


def test_the_recipes_own_mesh_is_shown() -> None:
    def meshes(*overrides: str, hardware: Hardware = CPU) -> list[str]:
        text = shown(STDLIB, *overrides, hardware=hardware)
        estimates = text[text.index("Estimated") :]
        return re.findall(r"\d+ x \d+", estimates[: estimates.index("weights")])

    for hardware in (CPU, GPUS):
        assert meshes("parallel.replicas=4", "parallel.shards=1", hardware=hardware) == ["4 x 1"]
    assert meshes() == ["2 x 2"]
    assert meshes("parallel.on_cpu=null") == meshes(hardware=GPUS) == ["1 x 1", "1 x 8", "8 x 1", "8 x 8"]
    assert meshes("parallel.replicas=2", hardware=GPUS) == ["2 x 1", "2 x 8"]
    assert "from each of 2 replicas" in shown(STDLIB)


def test_a_cpu_is_no_gpu_and_its_time_is_told_only_for_what_it_holds() -> None:
    text = shown(STDLIB)
    assert "MiB on each rank on this CPU, by" in text and "Estimated time with each rank on this CPU, by" in text
    assert "GPU" not in text[text.index("\nparameters") :]
    offloaded = shown(STDLIB, "sync.offload=true")
    assert row(offloaded, "total") == row(text, "total"), "on a CPU, offloaded anchors are in the same memory"
    text = shown(RECIPES / "edit_1b.yaml")
    assert len(row(text, "total")) == 4
    assert row(text, "run") == [
        "more",
        "than",
        "a",
        "year",
        "on",
        "this",
        "machine;",
        "give",
        "--gpu",
        "or",
        "--tflops",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.00321, "3.2 ms"),
        (0.5, "500 ms"),
        (1, "1 second"),
        (85.4, "85 seconds"),
        (95, "1.6 minutes"),
        (5399, "90 minutes"),
        (3 * 3600, "3 hours"),
        (100 * 3600, "4.2 days"),
        (364 * 86400, "364 days"),
        (366 * 86400, "more than a year"),
        (1.2e13, "more than a year"),
        (0, "0 seconds"),
        (1.2, "1.2 seconds"),
    ],
)
def test_durations_have_units_that_people_read(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


def test_a_card_gives_rate_and_memory() -> None:
    recipe = load_recipe(RECIPES / "edit_7b.yaml")
    hardware = hardware_of(recipe, "H100", None, 1000.0)
    assert hardware.rates.flops == GPU_EFFICIENCY * 989e12 and hardware.on_gpu
    text = shown(RECIPES / "edit_7b.yaml", hardware=hardware)
    assert row(text, "fits in 80 GB")[0] == "no" and row(text, "fits in 80 GB")[-1] == "yes"
    assert "GiB on each H100, by" in text
    assert max(map(float, row(text, "not all at once"))) <= 0 and "non_coincident" not in text
    assert f"with {GPU_EFFICIENCY * 989:.3g} TFLOP/s of each H100 (40% of the peak in bf16; --tflops)" in text
    assert hardware_of(recipe, "h100", 500.0, 1.0).rates.flops == 500e12
    with pytest.raises(UserError, match=r"--gpu h1000 is not a known card; did you mean h100\?"):
        hardware_of(recipe, "h1000", None, 1.0)
    with pytest.raises(RecipeError, match=r"parallel\.precision is fp32"):
        hardware_of(load_recipe(STDLIB), "h100", None, 1.0)


def test_traffic_by_hand() -> None:
    mesh = ["parallel.replicas=4", "parallel.shards=1", "sync.period.every=2", "train.steps=300"]
    text = shown(STDLIB, *mesh, "sync.warmup_steps=0")
    parameters = int(row(text, "parameters")[0].strip(",").replace(",", ""))
    per_round = 2 * 3 / 4 * 4 * parameters
    assert f"{per_round / 1e6:.1f} MB from each of 4 replicas per round, 150 rounds of about 2 steps" in text
    assert f": {per_round / 2 / 1e6:.1f} MB per step" in text
    assert f"{per_round / 1e6:.1f} MB per step when synchronous" in text
    assert "as in the first" not in text
    assert "as in the first 40 steps" in shown(STDLIB, *mesh, "sync.warmup_steps=40")


def test_traffic_of_wires_groups_and_seconds_by_hand() -> None:
    mesh = ["parallel.replicas=4", "parallel.shards=1", "sync.warmup_steps=0", "train.steps=300"]
    blocks = size_of(load_recipe(STDLIB)).block_parameters
    parameters = sum(blocks)
    int4 = 2 * 3 / 4 * (0.5 + 4 / 128) * parameters
    assert f"{int4 / 1e6:.1f} MB from each of 4 replicas per round" in shown(STDLIB, *mesh, "sync.wire=int4")
    largest = decimal(3 * sum(map(SparseFormat(64, "2bit").size, blocks)))
    assert f"{largest} from each of 4 replicas per round" in shown(STDLIB, *mesh, "sync.method=sparseloco")
    text = shown(STDLIB, *mesh, "sync.method=wagma", "sync.period.every=10")
    in_group, of_all = (2 * (n - 1) / n * 4 * parameters for n in (2, 4))
    assert f"{in_group / 1e6:.1f} MB of it per step among 2" in text
    assert f": {(9 * in_group + of_all) / 10 / 1e6:.1f} MB per step" in text
    text = shown(STDLIB, *mesh, "sync.method=a_edit", width=120)
    assert "a round every 600 s, of at least 100 steps of all replicas\n" in text
    assert "a round every 600 s\n" in shown(STDLIB, *mesh, "sync.method=a_edit", "sync.period.min_steps=0")


def test_sizes_that_are_kept_are_not_those_of_another_recipe() -> None:
    keys = ("model.config.vocab_size=5000", "model.config.num_hidden_layers=1", "train.sequence_length=48")
    first, *others = (size_of(load_recipe(STDLIB, key)) for key in ([], *([key] for key in keys)))
    assert all(other != first for other in others) and size_of(load_recipe(STDLIB)) == first


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_traffic_of_averaged_moments_by_hand(kind: str) -> None:
    keys = ["parallel.replicas=4", "parallel.shards=1", "sync.warmup_steps=0", "train.steps=300", f"optim.kind={kind}"]
    size = size_of(load_recipe(STDLIB))
    matrices = size.layers * sum(rows * columns for rows, columns in size.layer_matrices)
    second = size.parameters - (matrices if kind == "muon" else 0)
    values = size.parameters + size.parameters / 3 + second / 6
    text = shown(STDLIB, *keys, "sync.method=des_loc")
    assert f"{decimal(int(2 * 3 / 4 * 4 * values))} from each of 4 replicas per round" in text


def test_traffic_without_rounds_or_replicas() -> None:
    assert "gradients in every step" in shown(STDLIB, "sync.method=synchronous")
    assert "none between replicas" in shown(STDLIB, "parallel.replicas=1", "parallel.shards=4")


def test_offloaded_anchors_have_a_row() -> None:
    alone = ["checkpoint.background=false", "parallel.replicas=1"]
    assert "in CPU memory" not in shown(STDLIB, *alone, hardware=GPUS)
    assert "in CPU memory" in shown(STDLIB, *alone, "sync.offload=true", hardware=GPUS)


def test_models_in_cpu_memory_have_a_row() -> None:
    wagma = ["sync.method=wagma", "parallel.replicas=2", "parallel.shards=1", "checkpoint.background=false"]
    newest = 2 * 4 * int(row(shown(STDLIB), "parameters")[0].strip(",").replace(",", "")) / 2**20
    on_cpu, on_gpus = (shown(STDLIB, *wagma, hardware=hardware) for hardware in (CPU, GPUS))
    assert float(row(on_cpu, "newest models")[0]) == round(newest, 2)
    own = newest / 2  # a copy of the replica's parameters while the replicas' mean is validated
    assert float(row(on_gpus, "in CPU memory")[0]) == pytest.approx(newest + own, abs=0.02)
    assert "newest models" not in shown(STDLIB)
    assert float(row(on_cpu, "total")[0]) - float(row(on_gpus, "total")[0]) == pytest.approx(newest, abs=0.02)


def test_micro_batches_of_each_mesh() -> None:
    keys = ["train.global_batch=128", "train.micro_batch=8"]
    assert row(shown(STDLIB, *keys), "micro-batches per step") == ["4"]
    assert row(shown(STDLIB, *keys, hardware=GPUS), "micro-batches per step") == ["16", "2", "2", "uneven"]


def test_a_model_from_a_folder_needs_no_download(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=2048, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    ).save_pretrained(tmp_path / "config")
    recipe = tmp_path / "folder.yaml"
    recipe.write_text(
        f"model: {{from_config: {tmp_path / 'config'}}}\ntrain: {{steps: 10}}\nsync: {{method: local_sgd}}\n"
    )
    assert row(shown(recipe), "parameters")[0] == f"{2 * 2048 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 64) + 32:,},"


def test_an_impossible_recipe_is_refused() -> None:
    with pytest.raises(RecipeError, match="global_batch"):
        shown(STDLIB, "train.global_batch=30", "parallel.replicas=2", "parallel.shards=2")


def after_hiding(blocks: Iterable[int], computing: float, at_once: int = 1) -> float:
    """Return the seconds for which 4 replicas wait for the messages of blocks at 100 Mbit/s. All blocks compute for
    `computing` seconds, and those before a block hide its message. Messages of `at_once` blocks arrive together."""
    seconds = [8 * 2 * 3 / 4 * 4 * block / 100e6 for block in blocks]
    one = computing / len(seconds)
    return max(sum(seconds[: r + at_once - 1]) - (r - 1) * one for r in range(1, len(seconds) + 1))


def test_time_by_hand() -> None:
    keys = ["sync.method=diloco", "sync.warmup_steps=10", "sync.period.every=10", "train.steps=50"]
    recipe = load_recipe(STDLIB, keys)
    size = size_of(recipe)
    message = 8 * 2 * 3 / 4 * 4 * size.parameters / 100e6
    found = estimate_time(recipe, size, 4, 1, RATES)
    gradients = after_hiding(size.block_parameters, 2 / 3 * found.step)
    assert 0 < gradients < message
    assert found.step == pytest.approx(size.flops_per_token * recipe.train.tokens_per_step / 4e10)
    assert found.message == pytest.approx(message)
    assert found.run == pytest.approx(50 * found.step + 10 * gradients + 4 * message)
    assert found.waiting == pytest.approx((10 * gradients + 4 * message) / 50)
    assert found.computing == pytest.approx(50 * found.step / found.run)
    assert estimate_time(recipe, size, 1, 1, RATES).waiting == 0
    fp64 = estimate_time(
        load_recipe(STDLIB, [*keys, "sync.warmup_steps=0", "parallel.precision=fp64"]), size, 4, 1, RATES
    )
    assert (fp64.message, fp64.waiting) == (pytest.approx(2 * message), pytest.approx(2 * message / 10))
    again = load_recipe(STDLIB, [*keys, "parallel.activation_checkpointing=true"])
    assert estimate_time(again, size, 4, 1, RATES).step == pytest.approx(4 / 3 * found.step)
    muon = estimate_time(load_recipe(STDLIB, [*keys, "optim.kind=muon"]), size, 4, 1, RATES)
    products = size.layers * sum(orthogonalization_flops(*shape, 5) for shape in size.layer_matrices)
    assert muon.step - found.step == pytest.approx(products / 1e10)


def test_time_between_checkpoints_and_log_lines() -> None:
    keys = ["parallel.replicas=4", "parallel.shards=1", "train.steps=50", "sync.warmup_steps=10", "log.every=5"]

    def seconds(name: str, *more: str) -> float:
        number, unit = row(shown(STDLIB, *keys, *more), name)
        return float(number) * {"seconds": 1, "minutes": 60}[unit]

    run = seconds("run")
    assert seconds("between checkpoints", "checkpoint.every=25") == pytest.approx(run / 2, rel=0.05)
    assert seconds("between log lines") == pytest.approx(run / 10, rel=0.05)
    assert seconds("between checkpoints", "checkpoint.every=1000") == run, "the only checkpoint is at the end"
    assert seconds("between checkpoints", "checkpoint.every=null") == run


@pytest.mark.parametrize(("batch", "taken"), [("keep", 0.75), ("drop", 1.0)])
def test_pulls_compute_nothing(batch: str, taken: float) -> None:
    """Half of the local steps are pulls, and 50 of 100 steps are local."""
    keys = ["sync.method=palsgd", "sync.period.every=10", "train.steps=100", "sync.warmup_steps=50"]
    keys += ["sync.pull.probability=0.5", f"sync.pull.batch={batch}"]
    pulling, plain = (load_recipe(STDLIB, [*keys, *more]) for more in ([], ["sync.pull=null"]))
    size = size_of(plain)
    assert (pull_share(pulling), pull_share(plain)) == (0.25, 0)
    assert pull_share(load_recipe(STDLIB, [*keys, "sync.warmup_steps=200"])) == 0, "no step is local"
    for keys_of_mesh, replicas in (([], 4), ([], 1), (["parallel.in_process=true", "parallel.replicas=4"], 4)):
        some, all_of_them = (
            estimate_time(load_recipe(STDLIB, [*keys, *more, *keys_of_mesh]), size, replicas, 1, RATES)
            for more in ([], ["sync.pull=null"])
        )
        assert some.step == pytest.approx(0.75 * all_of_them.step)
        assert some.waiting == pytest.approx(all_of_them.waiting), "the messages are the same"
        assert some.run == pytest.approx(100 * (some.step + some.waiting))
    text = shown(STDLIB, *keys)
    flops = size.flops_per_token * plain.train.tokens_per_step * 100
    assert f"{0.75 * flops:.2e} in all" in text
    tokens = taken * plain.train.tokens_per_step * 100
    assert float(row(text, "tokens")[0].rstrip("k:")) == pytest.approx(tokens / 1e3, rel=0.01)
    assert ("none in pulls (about 25% of steps)" in text) is (batch == "keep")


def test_what_a_schedule_hides_is_less_where_some_steps_are_pulls() -> None:
    keys = ["sync.warmup_steps=0", "train.steps=50", "sync.period.every=10", "sync.method=palsgd"]
    keys += ["sync.schedule={kind: overlapped, steps: 1, fragments: 2}", "sync.pull.probability=0.25"]
    pulling, plain = (load_recipe(STDLIB, [*keys, *more]) for more in ([], ["sync.pull=null"]))
    size = size_of(plain)
    some, all_of_them = (estimate_time(recipe, size, 4, 1, replace(RATES, mbit=20)) for recipe in (pulling, plain))
    assert some.waiting - all_of_them.waiting == pytest.approx(0.25 * 2 * all_of_them.step / 10)


def test_what_a_schedule_hides() -> None:
    keys = ["sync.warmup_steps=0", "train.steps=50"]

    def waiting(*more: str, every: str = "sync.period.every=10") -> float:
        recipe = load_recipe(STDLIB, [*keys, *more, *([every] if every else [])])
        return estimate_time(recipe, size_of(recipe), 4, 1, RATES).waiting

    blocking = waiting("sync.method=diloco")
    recipe = load_recipe(STDLIB, keys)
    size = size_of(recipe)
    step = estimate_time(recipe, size, 4, 1, RATES).step
    layerwise = after_hiding(size.block_parameters, step / 3, at_once=2) / 10
    assert waiting("sync.method=edit") == pytest.approx(layerwise) and layerwise < blocking
    overlapped = ["sync.method=streaming_diloco", "sync.wire=fp32", "sync.schedule.fragments=2"]
    assert waiting(*overlapped, "sync.schedule.steps=1") == pytest.approx(max(0, blocking - 2 * step / 10))
    weighed = [*overlapped, "sync.reduction=edit_penalty", "sync.schedule.steps=3"]  # sent after one step
    assert waiting(*weighed) == pytest.approx(max(0, blocking - 4 * step / 10))
    assert waiting("sync.method=co2") == pytest.approx(max(0, blocking - step))
    gradients = after_hiding(size.block_parameters, 2 / 3 * step)
    assert waiting("sync.method=synchronous", every="") == pytest.approx(gradients)
    assert gradients < 10 * blocking
    zero = ["parallel.engine=zero", "parallel.precision=bf16"]
    for stage, hides in ((1, False), (3, True)):
        of_stage = waiting("sync.method=edit", *zero, f"parallel.zero_stage={stage}")
        assert of_stage == pytest.approx(layerwise if hides else blocking)
    assert waiting("sync.method=synchronous", *zero, every="") == pytest.approx(10 * blocking)


@pytest.mark.parametrize(("connections", "at_once"), [(1, 2), ("auto", 3)])
def test_latency_is_waited_for_hop_by_hop(connections: int | str, at_once: int) -> None:
    keys = ["sync.method=diloco", "sync.warmup_steps=0", "sync.period.every=10", "train.steps=50"]
    recipe = load_recipe(STDLIB, [*keys, f"parallel.connections={connections}"])
    size = size_of(recipe)
    near, far = (estimate_time(recipe, size, 4, 1, replace(RATES, mbit=1e9, latency_ms=ms)) for ms in (0, 250))
    blocks = len(size.block_parameters)
    # The agreement takes 3 hops and each block 6, with several blocks at a time. Slow start adds a few round trips.
    least = 0.5 * (3 + 6 * -(-blocks // at_once)) / 10
    assert near.waiting < 1e-3 and least < far.waiting < least + 0.5 * 10 / 10
    assert far.message == near.message and far.run - near.run == pytest.approx(50 * (far.waiting - near.waiting))
    assert "100 Mbit/s between replicas (--mbit),\n  0 ms apart, one way (--latency-ms)" in shown(STDLIB)


def test_a_rate_is_found_here() -> None:
    assert 1e8 < rate_here(load_recipe(STDLIB, [])) < 1e16


def test_ranks_of_other_nodes_do_not_share_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_estimate.time, "perf_counter", itertools.count().__next__)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(time_estimate, "usable_cores", lambda: 4)
    monkeypatch.setitem(time_estimate.MATMUL_SIZE, "cpu", 8)
    recipe = load_recipe(STDLIB, ["parallel.replicas=2", "parallel.shards=2"])
    alone = rate_here(recipe, 1)
    assert rate_here(recipe, 2) == alone / 2, "two of the four ranks are on another node"
    assert rate_here(recipe) == alone / 4
    together = load_recipe(STDLIB, ["parallel.replicas=4", "parallel.shards=1", "parallel.in_process=true"])
    assert rate_here(together, 4) == alone, "replicas of one process take turns"


def test_a_rate_is_that_of_random_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU takes less power, and so runs faster, if all values are equal."""
    multiplied: list[torch.Tensor] = []
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda one, other: multiplied.extend((one, other)) or product(one, other))
    before = torch.get_rng_state()
    rate_here(load_recipe(STDLIB, []))
    assert multiplied and all(len(matrix.unique()) > matrix.numel() / 2 for matrix in multiplied[:2])
    assert torch.equal(torch.get_rng_state(), before), "a run that follows must draw the same numbers"


@pytest.mark.parametrize(("schedule", "is_hidden"), [("blocking", 0), ("delayed", 1), ("wait_avoiding", 0)])
def test_what_hides_a_message(schedule: str, is_hidden: int) -> None:
    """Steps are long enough to hide messages, but with `wait_avoiding` a replica waits for its group's sum in each."""
    recipe = load_recipe(STDLIB, ["sync.method=wagma", f"sync.schedule={schedule}", "sync.warmup_steps=0"])
    found = estimate_time(recipe, size_of(recipe), 4, 1, replace(RATES, mbit=1e5))
    every = recipe.sync.period.every
    assert 0 < found.message < every * found.step
    assert found.waiting == pytest.approx((1 - is_hidden) * found.message / every)
