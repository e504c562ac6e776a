"""Tests of devices: garbage collection at fixed steps, profiles, out-of-memory errors, peak FLOP/s, determinism and malloc."""

from __future__ import annotations

import gc
import gzip
import json
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch

from llmtrain.config import ProfileSection
from llmtrain.errors import TrainingError
from llmtrain.plan.cards import CARDS, card_of
from llmtrain.train import devices
from llmtrain.train.devices import (
    collect_garbage_every,
    enable_determinism,
    explain_out_of_memory,
    peak_flops,
    profile_steps,
    use_expandable_segments,
)


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A10G", None),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_the_card_and_its_peak_are_those_of_this_very_device(
    monkeypatch: pytest.MonkeyPatch, device: str, card: str | None
) -> None:
    """A card whose name begins like another card's is not mistaken for that card, nor is a part or a variant of a card."""
    found = card_of(device)
    assert (found and found.name) == card
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device_index: device)
    peaks = {one.name: one.peak_flops for one in CARDS}
    assert peak_flops(torch.device("cuda", 0)) == peaks.get(card)
    assert peaks["H100"] == 989e12


def test_garbage_goes_at_fixed_steps_and_at_no_other() -> None:
    assert gc.isenabled()
    with collect_garbage_every(3) as after_step:
        assert not gc.isenabled()
        gone = weakref.ref(Cycle())
        after_step(1)
        after_step(2)
        assert gone() is not None
        after_step(3)
        assert gone() is None
    assert gc.isenabled()
    with collect_garbage_every(None) as after_step:
        assert gc.isenabled()
        after_step(3)


def steps_in(path: Path) -> list[str]:
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return sorted(event["name"] for event in events if event.get("name", "").startswith("step "))


def profiled(section: ProfileSection, rank: int, folder: Path, steps: range) -> list[str]:
    """Run the steps with a profile of `section`, and return the messages."""
    said: list[str] = []
    with profile_steps(section, rank, folder, said.append) as after_step:
        for step in steps:
            with torch.profiler.record_function(f"step {step}"):
                torch.ones(3).sum()
            after_step(step)
    return said


@pytest.mark.parametrize(
    ("steps", "recorded"),
    [
        (range(1, 9), ["step 4", "step 5"]),
        (range(3, 9), ["step 5"]),  # continued after step 2: step 4 warms up
        (range(6, 9), None),
        (range(1, 5), ["step 4"]),  # asked to stop
    ],
    ids=["whole", "resumed", "resumed later", "stopped"],
)
def test_the_profile_is_of_its_steps(tmp_path: Path, steps: range, recorded: list[str] | None) -> None:
    said = profiled(ProfileSection(first=4, steps=2), 0, tmp_path / "profile", steps)
    path = tmp_path / "profile/rank-00000.json.gz"
    assert path.exists() == (recorded is not None)
    if recorded is not None:
        assert steps_in(path) == recorded and said[0].startswith(f"profile of steps 4 to 5: {path} ")


def test_a_rank_that_is_not_asked_records_nothing(tmp_path: Path) -> None:
    assert profiled(ProfileSection(first=3, steps=1, ranks=[1]), 0, tmp_path / "profile", range(1, 6)) == []
    assert not (tmp_path / "profile").exists()


def test_a_profile_that_cannot_be_written_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file in the way")
    [line] = profiled(ProfileSection(first=3, steps=1), 0, tmp_path / "profile", range(1, 6))
    assert line.startswith("the profile could not be written to ")


def test_out_of_memory_is_one_line_and_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_summary", lambda device: "a table")
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"address": 1}])
    folder = tmp_path / "out_of_memory"
    said = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB.\nMore"
    with pytest.raises(TrainingError) as caught, explain_out_of_memory(3, torch.device("cuda:0"), folder):
        raise torch.OutOfMemoryError(said)
    assert str(caught.value) == (
        "rank 3 has no memory left on cuda:0 (CUDA out of memory. Tried to allocate 2.00 GiB); use a smaller train.micro_batch, "
        "parallel.activation_checkpointing=true, sync.offload=true or more parallel.shards; what was allocated is in "
        f"{folder}/rank-00003.txt"
    )
    assert (folder / "rank-00003.txt").read_text() == "a table"
    assert pickle.loads((folder / "rank-00003.pickle").read_bytes())["segments"] == [{"address": 1}]


def test_pinned_memory_that_runs_out_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught, explain_out_of_memory(1, torch.device("cuda:0"), tmp_path):
        raise torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be ...")
    assert str(caught.value).startswith("rank 1: this host has no pinned memory left (CUDA error: out of memory); use ")
    with pytest.raises(torch.AcceleratorError), explain_out_of_memory(1, torch.device("cuda:0"), tmp_path):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^other$"), explain_out_of_memory(0, torch.device("cpu"), tmp_path):
        raise RuntimeError("other")


VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@pytest.mark.parametrize("given", [None, *VARIABLES])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_segments_expand_on_gpus_unless_the_user_has_chosen(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool, given: str | None
) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that monkeypatch undoes what is set below
        monkeypatch.delenv(name)
    chosen = {} if given is None else {given: "max_split_size_mb:512"}
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    use_expandable_segments()
    ours = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if on_gpu and given is None else chosen
    assert {name: os.environ[name] for name in VARIABLES if name in os.environ} == ours


@pytest.mark.parametrize(("device", "asked"), [("cpu", (None, [])), ("cuda", (":4096:8", [True]))])
def test_gpus_are_asked_for_the_same_bits(monkeypatch, device: str, asked: tuple):
    """Determinism needs a fixed workspace of cuBLAS."""
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
    """The test starts a new process, whose main thread has malloc's main arena. In a forked process it may have another."""
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
