"""The parts around the loop: learning rate, stop requests, metrics, checkpoint names."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from llmtrain.config import BlockingSection, LRScheduleSection
from llmtrain.errors import FAILED, CheckpointError, TrainingError
from llmtrain.lr import LRSchedule
from llmtrain.plan.cards import CARDS
from llmtrain.quantities import format_si
from llmtrain.run_files import complete_checkpoints
from llmtrain.sync.method import Method
from llmtrain.train import devices, metric_gather, signals
from llmtrain.train.checkpoint_files import FORMAT, read_state
from llmtrain.train.devices import enable_determinism, peak_flops
from llmtrain.train.loggers import JsonlLogger
from llmtrain.train.metric_gather import GatheredMetrics, MetricReducer
from llmtrain.train.signals import stop_requests


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_learning_rate_warms_up_and_ends_where_it_should(kind):
    schedule = LRScheduleSection(kind=kind, warmup_steps=10, final_ratio=0.1)
    rates = [LRSchedule(2.0, 110, schedule).at(step) for step in range(1, 111)]
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[-1] == pytest.approx(2.0 if kind == "constant" else 0.2)
    assert all(later <= earlier for earlier, later in pairwise(rates[9:]))
    halfway = {"cosine": 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.5)), "linear": 0.55, "constant": 1.0}[kind]
    assert rates[59] == pytest.approx(2.0 * halfway)


def test_learning_rate_without_warm_up_starts_at_the_peak():
    assert LRSchedule(3.0, 10**6, LRScheduleSection(kind="cosine")).at(1) == pytest.approx(3.0)


def test_a_step_schedule_drops_after_its_shares_of_the_run():
    schedule = LRScheduleSection(kind="step", warmup_steps=2, decay_at=(0.5, 0.75), decay_factor=0.1)
    rates = [LRSchedule(2.0, 8, schedule).at(step) for step in range(1, 9)]
    assert rates == pytest.approx([1.0, 2.0, 2.0, 2.0, 0.2, 0.2, 0.02, 0.02])


def test_a_signal_sets_a_flag_and_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with stop_requests() as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGUSR1)
        assert stop.requested
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("under_nohup", [True, False])
def test_a_hangup_stops_a_run_unless_nohup_ignores_it(under_nohup: bool):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if under_nohup else signal.SIG_DFL)
    try:
        with stop_requests() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.requested != under_nohup
        assert signal.getsignal(signal.SIGHUP) is (signal.SIG_IGN if under_nohup else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_a_rank_stops_when_torchrun_is_gone(monkeypatch, by_torchrun: bool):
    parents, sent = iter([7, 7, 1, 1]), threading.Event()
    monkeypatch.setattr(signals.os, "getppid", lambda: next(parents))
    monkeypatch.setattr(signals.os, "kill", lambda process, number: sent.set() if number == signal.SIGTERM else None)
    monkeypatch.setattr(signals, "WATCH_SECONDS", 0.0)
    monkeypatch.delenv(signals.TORCHRUN, raising=False)
    if by_torchrun:
        monkeypatch.setenv(signals.TORCHRUN, "a run")
    signals.stop_without_torchrun()
    assert sent.wait(20) if by_torchrun else next(parents) == 7


def test_signals_together_are_one_and_a_later_one_of_the_same_kind_ends_at_once(monkeypatch, capfd):
    def leave(code: int):
        raise SystemExit(code)

    monkeypatch.setattr(signals.os, "_exit", leave)
    with stop_requests() as stop:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        monkeypatch.setattr(signals, "SAME_REQUEST_SECONDS", -1.0)
        signal.raise_signal(signal.SIGTERM)  # Slurm's order: the checkpoint that SIGUSR1 asked for goes on
        assert stop.requested
        with pytest.raises(SystemExit, match=str(FAILED)):
            signal.raise_signal(signal.SIGTERM)
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("SIGUSR1: stopping within two log lines, with a checkpoint; another SIGUSR1 ends")
    assert second == "a second SIGTERM: stopped at once; the last complete checkpoint stays"


MESH = SimpleNamespace(
    replicas=2,
    shard_comms=SimpleNamespace(size=2),
    world=SimpleNamespace(size=4),
    device=SimpleNamespace(type="cpu"),
    all_ranks=SimpleNamespace(shares_memory=False),
)


def line(step: int = 10, **changed: list[float]) -> GatheredMetrics:
    """What four ranks handed in; `changed` gives a column."""
    columns = {
        "steps": [5.0] * 4,
        "loss_sum": [100.0, 120.0, 140.0, 160.0],
        "tokens_total": [step * 25.0] * 4,
        "steps_total": [10.0, 10.0, 12.0, 12.0],
        "gradients": [4.0] * 4,
        "gradients_total": [8.0, 8.0, 9.0, 9.0],
        "late_total": [0.0, 0.0, 3.0, 3.0],
        "skipped_total": [0.0, 0.0, 2.0, 2.0],
        "skipped_in_a_row": [0.0] * 4,
        "predicted_tokens": [50.0] * 4,
        "padding": [0.0] * 4,
        "grad_norm_sum": [4.0, 4.0, 12.0, 12.0],
        "step_seconds": [2.0, 2.0, 2.0, 2.5],
        "data_seconds": [0.1] * 4,
        "peak_memory": [2.0**30] * 4,
        "reserved_memory": [0.0] * 4,
        "bytes_total": [1e6] * 4,
        "other_bytes_total": [1e3] * 4,
        "comm_seconds": [0.5] * 4,
        "exposed_seconds": [0.6] * 4,
        "wait_seconds": [0.1] * 4,
        "mean_squared": [2.0] * 4,
        "spread_squared": [1.0, 1.0, 2.0, 4.0],
        "stop": [0.0] * 4,
        "virtual_seconds": [0.0] * 4,
        "unwritten": [0.0] * 4,
        "fingerprint": [0.0] * 4,
        **changed,
    }
    gathered = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    return GatheredMetrics(step=step, seconds=1.0, common={"train/lr": 1e-3}, columns=gathered)


def test_tags_are_reduced_over_ranks():
    tags = MetricReducer(MESH, flops_per_token=1e9, peak=1e12).tags(line())
    assert tags["train/loss"] == pytest.approx(520 / 200)
    assert tags["train/grad_norm"] == pytest.approx(2.0)
    assert tags["perf/tokens_per_second"] == pytest.approx(200 / 2.5)
    assert tags["perf/step_seconds"] == pytest.approx(0.5)
    assert tags["perf/mfu"] == pytest.approx(80 * 1e9 / (1e12 * 4))
    assert tags["comm/bytes_total"] == 4e6 and tags["comm/other_bytes_total"] == 4e3
    # ||D||^2 is spread over the shards and the same in every replica; ||D_n - D||^2 is averaged over replicas.
    assert tags["sync/pseudo_grad_norm"] == pytest.approx(math.sqrt(4.0))
    assert tags["sync/divergence"] == pytest.approx(math.sqrt(8 / 2))
    assert "perf/mfu" not in MetricReducer(MESH, 1e9, peak=None).tags(line())
    in_turns = SimpleNamespace(**vars(MESH) | {"all_ranks": SimpleNamespace(shares_memory=True)})
    tags = MetricReducer(in_turns, flops_per_token=1e9, peak=1e12).tags(line())
    assert tags["perf/tokens_per_second"] == pytest.approx(200 / 8.5)
    assert tags["perf/step_seconds"] == pytest.approx(0.5)
    assert tags["perf/mfu"] == pytest.approx(200 / 8.5 * 1e9 / 1e12), "of one device"
    # Shards count for their replica once.
    assert (tags["train/steps"], tags["train/gradient_steps"], tags["sync/late"]) == (11.0, 8.5, 3.0)
    assert line(7).tokens == 700


def test_gpus_that_ranks_share_count_once(monkeypatch):
    monkeypatch.setattr(metric_gather, "ranks_per_device", lambda world: 2)
    mesh = SimpleNamespace(**vars(MESH) | {"device": SimpleNamespace(type="cuda")})
    tags = MetricReducer(mesh, flops_per_token=1e9, peak=1e12).tags(line())
    assert tags["perf/mfu"] == pytest.approx(80 * 1e9 / (1e12 * 2))


def test_reserved_memory_is_that_of_the_fullest_gpu():
    summarizer = MetricReducer(MESH, 1e9, None)
    assert "perf/reserved_memory_gib" not in summarizer.tags(line()), "a CPU's"
    assert "perf/virtual_seconds" not in summarizer.tags(line())
    assert summarizer.tags(line(virtual_seconds=[4.0, 4.0, 5.0, 4.0]))["perf/virtual_seconds"] == 5.0
    tags = summarizer.tags(line(reserved_memory=[2.0**30, 3.0 * 2**30, 2.0**30, 0.0]))
    assert (tags["perf/reserved_memory_gib"], tags["perf/peak_memory_gib"]) == (3.0, 1.0)


def test_padding_is_its_share_of_all_positions():
    summarizer = MetricReducer(MESH, 1e9, None)
    assert "data/padding" not in summarizer.tags(line())
    tags = summarizer.tags(line(padding=[0.0, 10.0, 30.0, 10.0]))
    assert tags["data/padding"] == 50 / 250 and tags["train/loss"] == summarizer.tags(line())["train/loss"]


def test_an_interval_without_a_gradient_has_no_loss():
    tags = MetricReducer(MESH, 1e9, None).tags(line(loss_sum=[0.0] * 4, predicted_tokens=[0.0] * 4))
    assert math.isnan(tags["train/loss"]) and tags["perf/tokens_per_second"] == 0


def test_a_loss_that_is_not_finite_names_rank_and_replica():
    summarizer = MetricReducer(MESH, 1e9, None)
    bad = line(loss_sum=[100.0, 120.0, math.nan, 160.0])
    assert summarizer.tags(bad)["health/nonfinite"] == 1
    with pytest.raises(TrainingError, match=r"rank 2 \(replica 1\) at step 10"):
        summarizer.check(bad)
    summarizer.check(line())


def test_a_gradient_that_is_not_finite_ends_the_run_too():
    """DeepSpeed leaves such a step out without a word."""
    with pytest.raises(TrainingError, match=r"the norm of the gradient is inf on rank 3 \(replica 1\) at step 10"):
        MetricReducer(MESH, 1e9, None).check(line(grad_norm_sum=[1.0, 1.0, 1.0, math.inf]))


def test_the_peak_is_that_of_this_very_card(monkeypatch):
    """A name that begins like another's is not mistaken for it."""
    names = {
        "NVIDIA H100 80GB HBM3": "H100",
        "NVIDIA H100 PCIe": "H100 PCIe",
        "NVIDIA GH200 480GB": "GH200",
        "NVIDIA GB200": "GB200",
        "NVIDIA A100-SXM4-80GB": "A100",
        "NVIDIA RTX A1000": None,
        "NVIDIA L40": "L40",
        "NVIDIA L4": "L4",
        "NVIDIA A10G": None,
    }
    peaks = {card.name: card.peak_flops for card in CARDS}
    for name, card in names.items():
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device, name=name: name)
        assert peak_flops(torch.device("cuda", 0)) == peaks.get(card), name
    assert peaks["H100"] == 989e12


@pytest.mark.parametrize(("device", "asked"), [("cpu", (None, [])), ("cuda", (":4096:8", [True]))])
def test_gpus_are_asked_for_the_same_bits(monkeypatch, device: str, asked: tuple):
    """cuBLAS needs a workspace of its own for that."""
    calls = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", calls.append)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    enable_determinism(torch.device(device))
    assert (os.environ.get("CUBLAS_WORKSPACE_CONFIG"), calls) == asked


NEW_PAGES = """
import resource, torch
from llmtrain.train.devices import keep_freed_memory
keep_freed_memory()
torch.ones(2**24), torch.ones(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.ones(2**24)
made = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(made * resource.getpagesize() / (4 * 4 * 2**24))
"""


def test_freed_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, whose main thread has malloc's main arena; a forked one may not."""
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    part = subprocess.run([sys.executable, "-c", NEW_PAGES], capture_output=True, text=True, check=True).stdout
    assert float(part) < 0.5


def test_a_users_configuration_of_malloc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    libc = mock.Mock()
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: libc)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    devices.keep_freed_memory()
    devices.share_freed_memory()
    assert not libc.mallopt.called
    monkeypatch.delenv("MALLOC_ARENA_MAX")
    devices.keep_freed_memory()
    assert libc.mallopt.called
    libc.mallopt.reset_mock()
    devices.share_freed_memory()
    libc.mallopt.assert_called_once_with(-8, 1)


def test_a_spike_is_counted_and_does_not_move_the_mean():
    summarizer = MetricReducer(MESH, 1e9, None)
    counts = []
    for step in range(40):
        factor = 5.0 if step in (25, 30) else 1.0 + 0.01 * (step % 3)
        sums = [factor * value for value in (100.0, 120.0, 140.0, 160.0)]
        counts.append(summarizer.tags(line(step, loss_sum=sums))["health/loss_spikes"])
    assert (counts[24], counts[25], counts[29], counts[-1]) == (0, 1, 1, 2)


def test_a_stop_asked_of_one_rank_is_seen_in_the_line():
    assert line(stop=[0.0, 0.0, 1.0, 0.0]).stop_requested
    assert not line().stop_requested
    assert line(unwritten=[0.0, 1.0, 0.0, 0.0]).checkpoint_failed
    assert not line().checkpoint_failed


def test_replicas_whose_anchors_differ_are_named():
    summarizer = MetricReducer(MESH, 1.0, None)
    summarizer.check(line(fingerprint=[5.0, 7.0, 5.0, 7.0]))  # of shards 0 and 1: each has its own
    with pytest.raises(TrainingError, match="the anchors of the 2 replicas differ, found at step 10"):
        summarizer.check(line(fingerprint=[5.0, 7.0, 5.0, 8.0]))
    mesh = SimpleNamespace(**vars(MESH) | {"replicas": 4, "shard_comms": SimpleNamespace(size=1)})
    four = MetricReducer(mesh, 1.0, None)
    with pytest.raises(TrainingError, match="the anchor of replica 2 is not that of the others"):
        four.check(line(fingerprint=[5.0, 5.0, 6.0, 5.0]))


def test_metrics_continue_without_lines_after_the_checkpoint(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlLogger(path, resumed_step=0)
    for step in (1, 10, 20):
        writer.log(step, step, 0.5, {"train/loss": math.nan if step == 20 else 1.0})
    writer.close()
    with path.open("a") as file:
        file.write('{"step": 30, "tok')  # cut off by a crash
    writer = JsonlLogger(path, resumed_step=10)
    writer.log(20, 20, 0.6, {"train/loss": 2.0})
    writer.close()
    assert [json.loads(text)["step"] for text in path.read_text().splitlines()] == [1, 10, 20]


def test_a_run_that_begins_again_leaves_no_line_of_the_first_time(tmp_path: Path):
    """Killed after the validation before its first step, with no checkpoint yet."""
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        writer = JsonlLogger(path, resumed_step=0)
        writer.log(0, 0, 0.0, {"eval/loss": 7.0})
        writer.close()
    assert len(path.read_text().splitlines()) == 1


def test_metrics_write_null_for_what_is_not_finite(tmp_path: Path):
    writer = JsonlLogger(tmp_path / "metrics.jsonl", resumed_step=0)
    writer.log(1, 1, 0.1, {"train/loss": math.nan})
    writer.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["train/loss"] is None


def test_only_complete_checkpoints_count(tmp_path: Path):
    for name, whole in (("step-00000020", True), ("step-00000010", True), ("step-00000030", False)):
        (tmp_path / name).mkdir()
        if whole:
            (tmp_path / name / "state.json").write_text("{}")
    (tmp_path / "step-00000040.tmp").mkdir()
    assert list(complete_checkpoints(tmp_path)) == [10, 20]
    assert not complete_checkpoints(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "message"), [("{", "can't be read"), ('{"format": 99}', f"format 99, this version reads {FORMAT}")]
)
def test_a_damaged_or_foreign_checkpoint_is_named(tmp_path: Path, text: str, message: str):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_state(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_numbers_for_people():
    numbers = {0: "0", 999: "999", 41_200: "41.2k", 3.03e9: "3.03G", 2e15: "2e+03T"}
    assert {number: format_si(number) for number in numbers} == numbers
    assert format_si(999.4) == "999" and format_si(999_600) == "1M" and format_si(1015) == "1.02k"


def test_lines_that_are_no_lines_of_metrics_are_left_out(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n3\n["step"]\n{"tokens": 7}\n{"step": 2}\n{"step": 3, "tra')
    JsonlLogger(path, 2).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("is_synchronous", [True, False])
def test_a_roll_back_leaves_a_synchronous_phase_alone(is_synchronous: bool):
    returned = []
    block_sync = SimpleNamespace(reset_to_anchor=lambda: returned.append("to the anchor"), ensure_anchor=lambda: None)
    schedule = SimpleNamespace(
        section=BlockingSection(), block_sync=block_sync, begin_step=lambda: None, forget_tokens=lambda: None
    )
    period = SimpleNamespace(is_synchronous=lambda step: is_synchronous)
    method = Method(SimpleNamespace(register_block_hook=lambda hook: None), period, schedule, None)
    method.begin_step(1, 0.1)
    method.roll_back()
    assert bool(returned) != is_synchronous
