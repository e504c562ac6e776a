"""Comparison of the same runs by two commits, to the last bit, which shows whether a redesign has changed training.

    python -m tests.stored_runs --against COMMIT          run that commit and this tree, and compare them
    python -m tests.stored_runs --store FOLDER            only run this tree, and store its runs
    python -m tests.stored_runs --compare BEFORE AFTER    compare two stored folders

The runs train with every method under both engines, stop halfway and resume. A-EDiT's clock counts steps, and WAGMA's replicas
are late at planned iterations, so that every number is reproducible. The lines of metrics.jsonl, state.json and every tensor of
every checkpoint are compared, except for durations. Numbers depend on the machine, so both commits run on the same one.

tests/renamed.json lists intended differences. For each kind (`metrics`, `state`, `tensors`) it has a list of [regular
expression, replacement] to apply to the older names; null as a replacement means that newer runs lack the value. `values` maps
older words in recipes to newer ones, and `added` has regular expressions for names that only newer runs have.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.distributed.stored_runs import store

ROOT = Path(__file__).resolve().parents[1]
RENAMED = ROOT / "tests" / "renamed.json"
FOLDERS = "recipe/run/out_dir|recipe/data/source|recipe/data/validation|recipe/data/cache_dir"
CLOCKS = re.compile(rf"seconds|slowest|digest|(^|/)(perf|files)/|^(format|sha256|{FOLDERS}) ")
"""Names of values that may differ: times, digests of files that contain times, the folders of a run, and the format number."""


def values_of(run: Path) -> Iterator[tuple[str, str, Any]]:
    """Yield (kind, name, value) for everything that a run has written. The kind is `metrics`, `state` or `tensors`."""
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        for tag, value in line.items():
            yield "metrics", f"{tag} at {line['step']}", value
    for checkpoint in sorted((run / "checkpoints").glob("step-*")):
        for name, value in _leaves(json.loads((checkpoint / "state.json").read_text())):
            yield "state", f"{name} at {checkpoint.name}", value
        with tempfile.TemporaryDirectory() as scratch:
            dcp_to_torch_save(checkpoint, f"{scratch}/all")
            for name, value in _leaves(torch.load(f"{scratch}/all", weights_only=False)):
                yield "tensors", f"{name} at {checkpoint.name}", value


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}/{key}" if path else str(key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{path}/{number}")
    else:
        yield path, value


def differences(before: Path, after: Path, renamed: dict[str, Any]) -> list[str]:
    """Return a line for each value that only one of the runs has, or that differs in any bit."""
    values = renamed.get("values", {})
    old = {
        (kind, now): values.get(value, value) if isinstance(value, str) else value
        for kind, name, value in values_of(before)
        if not CLOCKS.search(name) and (now := _renamed(name, renamed.get(kind, ()))) is not None
    }
    new = {(kind, name): value for kind, name, value in values_of(after) if not CLOCKS.search(name)}
    found = [f"{kind}: {name} is gone" for kind, name in old.keys() - new.keys()]
    added = re.compile("|".join(renamed.get("added", ())) or "(?!)")
    found += [f"{kind}: {name} is new" for kind, name in new.keys() - old.keys() if not added.search(name)]
    found += [
        f"{kind}: {name} was {_short(old[kind, name])}, is {_short(new[kind, name])}"
        for kind, name in old.keys() & new.keys()
        if not _same(old[kind, name], new[kind, name])
    ]
    return sorted(found)


def _renamed(name: str, rules: Sequence[Sequence[str | None]]) -> str | None:
    for pattern, replacement in rules:
        if replacement is None and re.search(pattern, name):
            return None  # newer runs lack this value
        name = re.sub(pattern, replacement or "", name)
    return name


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        bits = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    return type(one) is type(other) and repr(one) == repr(other)  # unlike ==, repr treats NaN as equal to NaN


def _short(value: Any) -> str:
    text = (
        f"{list(value.shape)} {value.dtype}, {value.flatten()[:3].tolist()}"
        if isinstance(value, torch.Tensor)
        else repr(value)
    )
    return text[:100]


def compare(before: Path, after: Path) -> int:
    """Print the differences between stored runs. Return 1 if there are any, else 0."""
    renamed = json.loads(RENAMED.read_text())
    names = sorted({run.name for folder in (before, after) for run in (folder / "runs").iterdir()})
    bad, counted = 0, 0
    for name in names:
        found = differences(before / "runs" / name, after / "runs" / name, renamed)
        counted += sum(1 for _ in values_of(after / "runs" / name))
        bad += bool(found)
        for line in found[:20]:
            print(f"{name}: {line}")
        if len(found) > 20:
            print(f"{name}: and {len(found) - 20} more")
    print(f"{len(names) - bad} of {len(names)} runs are the same, in {counted:,} values")
    return int(bad > 0)


def against(commit: str) -> int:
    """Store the runs of another commit and of this tree, and return the result of `compare`."""
    with tempfile.TemporaryDirectory() as scratch:
        tree, before, after = (Path(scratch) / name for name in ("tree", "before", "after"))
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            for root, folder in ((tree, before), (ROOT, after)):
                print(f"runs of {commit if root is tree else 'this tree'}", flush=True)
                command = [sys.executable, "-m", "tests.stored_runs", "--store", str(folder)]
                subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=True)
            return compare(before, after)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def main() -> int:
    """Store or compare runs as the command line asks. Return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.stored_runs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--against", metavar="COMMIT")
    chosen.add_argument("--store", type=Path, metavar="FOLDER")
    chosen.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    asked = parser.parse_args()
    if asked.store is not None:
        store(asked.store.resolve())
        return 0
    return against(asked.against) if asked.against else compare(*asked.compare)


if __name__ == "__main__":
    sys.exit(main())
