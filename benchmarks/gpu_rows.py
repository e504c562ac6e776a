"""Rows of `gpu_day.py`: the measurements of each phase, the most valuable first, and the one-line text of each result."""

from __future__ import annotations

import os
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_run import ALONE, IN_PROCESS, SHARE
from table import ROOT
from throughput import BARE, FLOAT8, GATHERED, PLAIN, TITAN_MODEL

SAMPLE = ROOT / ".gpu"
"""Folder that `gpu_pack.py` fills with text, a tokenizer and torchao."""
ONE_DEVICE = "llmtrain"
"""Name in rows of the engine for replicas on one device, which does not use FSDP2. The bare loop and torchtitan's model run FSDP2
with one rank."""
RECOMPUTED = {"no": (), "selective": ("selective",), "yes": ("recompute",)}
"""Words in a row's name, by which activations are recomputed."""
ROW_SECONDS = 120.0


@dataclass(frozen=True)
class DayRow:
    """One measurement, made by a benchmark script in a process of its own."""

    name: str
    script: str
    task: Mapping[str, Any]
    line: Callable[[Any], str]
    expected: float
    """Expected seconds on an H100, estimated until rows.jsonl has measured `seconds`."""
    limit: float = ROW_SECONDS
    """Seconds after which the measurement counts as failed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    empties: Path | None = None
    """Folder of compiled kernels that is emptied first, or None."""


@dataclass(frozen=True)
class Day:
    """Sizes of the rows: full size on a GPU, or small ones for a rehearsal of the same rows."""

    rehearse: bool
    gpu: bool

    @property
    def text(self) -> list[str]:
        """Overrides that select the text in SAMPLE. Empty if that folder does not exist; recipes then read their own text."""
        if not SAMPLE.exists():
            return []
        source = [f"data.source={SAMPLE / 'train.txt'}", f"data.validation={SAMPLE / 'valid.txt'}"]
        return [*source, f"data.tokenizer={SAMPLE / 'gpt2'}"]

    def model(self, size: str) -> tuple[str, list[str]]:
        """Return the key of `throughput.SIZES` to measure for `size`, which is a small one in a rehearsal, and its overrides."""
        if not self.rehearse:
            return size, []
        return "6M", ["train.sequence_length=64", *(["model.config.vocab_size=50304"] if self.text else [])]


def kernels_of(engine: str) -> Path:
    """Return the folder in which all rows of an engine, in this call and later ones, keep their compiled kernels. Its name has no
    special characters, because Inductor does not quote it when it calls a compiler."""
    common = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or Path(tempfile.gettempdir()) / f"inductor-{os.getuid()}"
    return Path(common) / "gpu_day" / re.sub(r"\W+", "-", engine)


def machine(day: Day) -> DayRow:
    """Return the row that describes the machine."""
    return DayRow("machine", "preflight.py", {"what": "machine", "quick": day.rehearse}, str, 15.0)


def preflight(day: Day) -> list[DayRow]:
    """Return the rows about the machine itself. They do not include `machine`, which `gpu_day.py` measures before all phases."""
    _, small = day.model("1B")
    vocabulary = [key for key in small if "vocab" in key]
    return [
        DayRow("attention", "preflight.py", {"what": "attention", "quick": day.rehearse}, str, 12.0),
        DayRow("tokens", "preflight.py", {"what": "tokens", "override": [*day.text, *vocabulary]}, str, 15.0),
    ]


def throughput(day: Day) -> list[DayRow]:
    """Return the rows of one replica's speed, compared with a bare loop and torchtitan's model."""

    def row(
        size: str,
        engine: str,
        compiled: bool = True,
        checkpoint: str = "no",
        *keys: str,
        cold: bool = False,
        again: bool = False,
        expected: float = 55.0,
        **more: Any,
    ) -> DayRow:
        """Return a row. The rows of an engine share compiled kernels, which saves minutes. The first of them is `cold`: it empties
        the folder, compiles everything, and shows its first step. A row is measured `again` to show how much two processes
        differ."""
        chosen, changes = day.model(size)
        how = [*(["compile"] if compiled else []), *RECOMPUTED[checkpoint]]
        named = [f"{key}={value}" for key, value in more.items()]
        task = {"engine": engine, "size": chosen, "compile": compiled, "checkpoint": checkpoint, "shard": 1, **more}
        task |= {"turns": 1, "steps": 1, "quick": True} if day.rehearse else {"turns": 3, "steps": 10}
        task |= {"precision": "bf16" if day.gpu else "fp32", "override": [*day.text, *changes, *keys]}
        environment = {"PYTHONPATH": _path_with_float8()} if engine == FLOAT8 else {}
        label = ONE_DEVICE if engine == "fsdp2" else engine
        kernels = kernels_of(label)
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(kernels)
        name = " ".join([size, label, *how, *keys, *named]) + (", again" if again else "")
        return DayRow(
            name,
            "throughput.py",
            task,
            _speed_and_start if cold else _speed,
            expected,
            max(ROW_SECONDS, 2 * expected),
            environment,
            kernels if cold else None,
        )

    return [
        row("1B", "fsdp2", cold=True),
        row("1B", TITAN_MODEL, cold=True),
        row("1B", BARE, cold=True),
        row("7B-layers", "fsdp2"),
        row("1B", "fsdp2", False),
        row("1B", PLAIN, False),
        row("7B-layers", FLOAT8),
        row("1B", PLAIN, cold=True, expected=100.0),  # compiles all layers as one graph
        row("1B", "fsdp2", again=True),
        row("1B", "fsdp2", True, "selective"),
        row("1B", "fsdp2", True, "yes"),
        row("1B", BARE, False),
        row("1B", "fsdp2", micro_batches=4),
        row("7B-layers", TITAN_MODEL),
        row("1B", "fsdp2", True, "no", "parallel.loss_kernel=liger"),
        row("1B", "fsdp2", True, "no", "parallel.loss_chunk=4096"),
        row("160M", "fsdp2"),
        row("1B-2048", "fsdp2"),
        row("1B-2048", TITAN_MODEL),
        row("7B-layers", BARE),
        row("1B", GATHERED),
    ]


def _path_with_float8() -> str:
    """Return the PYTHONPATH of the float8 row, the only row that may import `gpu_pack.FLOAT8`."""
    return os.pathsep.join(filter(None, (str(SAMPLE / "float8"), str(ROOT), os.environ.get("PYTHONPATH"))))


def parts(day: Day) -> list[DayRow]:
    """Return the rows of the parts of a step's time."""
    size, changes = day.model("1B")
    task = {"size": size, "compile": True, "checkpoint": "no", "shard": 1, "override": [*day.text, *changes]}
    task |= {"steps": 3, "profiled": 2, "precision": "bf16" if day.gpu else "fp32"}
    return [
        DayRow(
            f"1B {label}",
            "step_parts.py",
            {**task, "engine": engine},
            _parts,
            35.0,
            environment={"TORCHINDUCTOR_CACHE_DIR": str(kernels_of(label))},
        )
        for label, engine in ((ONE_DEVICE, "fsdp2"), (BARE, BARE))
    ]


def loss(day: Day) -> list[DayRow]:
    """Return the rows of the cost of head and loss, for the 1B model and Llama 3 8B."""
    cases = {"1B": ("bf16", 16384, 2048, 50304), "Llama 3 8B": ("bf16", 8192, 4096, 128256)}
    cases = {"1B": ("fp32", 256, 64, 512)} if day.rehearse else cases
    counts = {"turns": 1, "times": 1} if day.rehearse else {"turns": 5, "times": 3}
    return [
        DayRow(f"{name}, chunks of {chunk}", "loss.py", {"case": case, "chunk": chunk, **counts}, _losses, 20.0)
        for name, case in cases.items()
        for chunk in (1024, 4096)
    ]


def rounding(day: Day) -> list[DayRow]:
    """Return the rows of the cost of rounding a message of 0.5 GB."""
    values, turns = (2**14, 1) if day.rehearse else (2**27, 5)
    return [
        DayRow(
            kind,
            "rounding.py",
            {"kind": kind, "values": values, "turns": turns, "times": 3, "threads": 1},
            _rounding,
            20.0,
        )
        for kind in ("int8", "int4", "bf16")
    ]


def sync(day: Day) -> list[DayRow]:
    """Return the rows of the cost of a synchronization with one replica: its arithmetic, and the copies of offload."""
    size, changes = day.model("1B")
    task = {"size": size, "replicas": 1, "shard": 1, "wires": ["fp32"], "turns": 1 if day.rehearse else 3, "rounds": 2}
    task["override"] = [*day.text, *changes, f"parallel.precision={'bf16' if day.gpu else 'fp32'}"]
    return [
        DayRow(
            f"1B {choice}{', offloaded' if offload else ''}",
            "sync_cost.py",
            {**task, "choice": choice, "offload": offload},
            _sync,
            35.0,
        )
        for choice, offload in (
            ("edit", False),
            ("edit", True),
            ("edit, blocking", False),
            ("edit, blocking", True),
            ("diloco", False),
            ("diloco", True),
        )
    ]


def checkpoint(day: Day) -> list[DayRow]:
    """Return the rows of the time for which training stands still for a checkpoint of GPT-Neo 125M."""
    small = ["model.config.hidden_size=64", "model.config.num_heads=4"] if day.rehearse else []
    # On a GPU, 50 steps take longer than a write, so that no checkpoint waits for the one before it.
    long = ["train.sequence_length=1024", "train.micro_batch=16", "train.global_batch=16"]
    long += ["train.steps=160", "checkpoint.every=50"]
    keys = [*day.text, f"parallel.precision={'bf16' if day.gpu else 'fp32'}", *small]
    keys += long if day.gpu and not day.rehearse else []
    return [
        DayRow(
            f"GPT-Neo 125M, {'in the background' if background else 'waiting'}",
            "checkpoints.py",
            {"background": background, "override": keys},
            _checkpoint,
            60.0,
        )
        for background in (True, False)
    ]


def run(day: Day) -> list[DayRow]:
    """Return the rows of real runs: one that is stopped and continued, four replicas in one process, two that share the GPU."""
    size, changes = day.model("160M")
    override = [*day.text, *changes, *(["eval.tokens=2000"] if day.rehearse else [])]
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(kernels_of(ONE_DEVICE))}

    def row(name: str, how: str, steps: int, sequences: int, expected: float) -> DayRow:
        task = {"size": size, "how": how, "steps": steps, "global_batch": sequences, "override": override}
        return DayRow(f"160M, {name}", "gpu_run.py", task, _run, expected, max(ROW_SECONDS, 2 * expected), environment)

    steps, micro_batch = (80, 4) if day.rehearse else (120, 16)
    return [
        row("stopped and continued", ALONE, steps, 2 * micro_batch, 110.0),
        row("EDiT, four replicas in one process", IN_PROCESS, steps // 2, 4 * micro_batch, 45.0),
        row("EDiT, two replicas on this GPU", SHARE, steps // 2, 2 * micro_batch, 60.0),
    ]


PHASES: dict[str, Callable[[Day], list[DayRow]]] = {
    made.__name__: made for made in (preflight, throughput, parts, loss, rounding, sync, checkpoint, run)
}


def _speed(found: Mapping[str, Any]) -> str:
    rates = sorted(found["tokens"] / seconds for seconds in found["seconds"])
    rate, peak = statistics.median(rates), found["peak_flops"]
    mfu = f", MFU {100 * rate * found['flops'] / (peak * found['ranks']):.1f} %" if peak else ""
    memory = ""
    if found["peak"] and found["predicted"]:
        off = 100 * (found["predicted"] / found["peak"] - 1)
        memory = f", peak {found['peak'] / 1e9:.1f} GB, predicted {found['predicted'] / 1e9:.1f} ({off:+.1f} %)"
    elif found["peak"]:
        memory = f", peak {found['peak'] / 1e9:.1f} GB"
    spread = f"{rates[0]:,.0f} to {rates[-1]:,.0f}"
    return f"{rate:,.0f} tokens/s ({spread}){mfu}{memory}"


def _speed_and_start(found: Mapping[str, Any]) -> str:
    return f"{_speed(found)}, first step {found['first']:.1f} s"


def _parts(found: Mapping[str, float]) -> str:
    largest = sorted(found.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in largest)


def _losses(found: Mapping[str, Mapping[str, Any]]) -> str:
    each = ((name, 1e3 * statistics.median(one["seconds"]), one["peak"] / 1e6) for name, one in found.items())
    return ", ".join(f"{name} {milliseconds:.1f} ms {peak:,.0f} MB" for name, milliseconds, peak in each)


def _rounding(found: Mapping[str, Any]) -> str:
    middle = {name: 1e3 * statistics.median(seconds) for name, seconds in found["seconds"].items()}
    return ", ".join(f"{name} {milliseconds:.2f} ms" for name, milliseconds in middle.items())


def _sync(found: Mapping[str, Any]) -> str:
    turns = {name: [turn["seconds"] for turn in series] for name, series in found["turns"].items()}
    local = turns.pop("local")
    added = {name: statistics.median(a - b for a, b in zip(mine, local, strict=True)) for name, mine in turns.items()}
    costs = ", ".join(f"{name} adds {1e3 * seconds:.1f} ms a round" for name, seconds in added.items())
    return f"{costs}; a local step {1e3 * statistics.median(local):.1f} ms, {found['values']:,} values"


def _checkpoint(found: Mapping[str, Any]) -> str:
    stood, written = (", ".join(f"{one:.2f}" for one in found[key]) for key in ("stood_still", "written"))
    return f"stood still {stood} s, on the disk after {written} s, {found['bytes'] / 1e9:.2f} GB"


def _run(found: Mapping[str, Any]) -> str:
    (_, first), (_, last) = found["losses"][0], found["losses"][-1]
    speed = f"{found['tokens_per_second']:,.0f} tokens/s" + (f", MFU {found['mfu']:.3f}" if found["mfu"] else "")
    stops = f"stopped at {found['stopped_at']}, " if found["stopped_at"] else f"{found['rounds']} rounds, "
    return f"exit codes {found['exit_codes']}, {stops}{len(found['continued'])} x continued, loss {first:.2f} to {last:.2f}, {speed}"
