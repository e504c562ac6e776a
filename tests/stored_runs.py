"""Whether a redesign has left training as it was: the same runs by two commits, compared to the last bit.

    python -m tests.stored_runs --against COMMIT          runs of that commit and of this tree, and how they differ
    python -m tests.stored_runs --store FOLDER            only this tree's runs
    python -m tests.stored_runs --compare BEFORE AFTER    two folders that were stored

Every method under both engines, stopped halfway and resumed; A-EDiT on a clock that counts steps, WAGMA with a replica that is
late when it is planned to be. Compared are the lines of metrics.jsonl, state.json and every tensor of every checkpoint, but no
seconds. What has another name since is in tests/renamed.json: for each kind a list of [regular expression, replacement], which
are applied to the older names, as `values` the words that recipes have in place of others, and as `added` what only the newer
runs have. Numbers depend on the machine, so both commits run on the same one.
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
"""Names of what may differ: times, digests of files that hold times, the runs' own folders, and the number of the format."""


def values_of(run: Path) -> Iterator[tuple[str, str, Any]]:
    """Yield (kind, name, value) of everything that a run has left: kind is `metrics`, `state` or `tensors`."""
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
    """Return a line for each value of one run that is not in the other, or not the same to the last bit."""
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
            return None  # nothing keeps it any more
        name = re.sub(pattern, replacement or "", name)
    return name


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        bits = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    return type(one) is type(other) and repr(one) == repr(other)  # NaN is NaN


def _short(value: Any) -> str:
    text = (
        f"{list(value.shape)} {value.dtype}, {value.flatten()[:3].tolist()}"
        if isinstance(value, torch.Tensor)
        else repr(value)
    )
    return text[:100]


def compare(before: Path, after: Path) -> int:
    """Print how stored runs differ; 1 if they do."""
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
    """Store the runs of another commit and of this tree, and compare them."""
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
    """Do what the command line says."""
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
