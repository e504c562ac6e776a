"""Fuzzing for a given time: `python -m tests.fuzz --minutes 60`.

All kinds of input get equal time. Each case has its own seed, so `--kinds KIND --seed N --minutes 0` repeats case N.
Every finding is printed at once, and a table at the end. The exit code is 1 if there is a finding.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before any import of torch, as in tests/conftest.py
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from tests.fuzz.draws import Finding
from tests.fuzz.kinds import KINDS


def main() -> int:
    """Try cases until the time is over, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument(
        "--seed", type=int, default=int(time.time()) * 1000, help="of the first case; from the clock by default"
    )
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas; all by default")
    asked = parser.parse_args()
    tried, findings, seconds = collections.Counter(), collections.Counter(), collections.Counter()
    codes = collections.defaultdict(collections.Counter)
    with tempfile.TemporaryDirectory() as scratch:
        cases = {}
        for name in asked.kinds.split(","):
            (folder := Path(scratch, name)).mkdir()
            cases[name] = KINDS[name](folder)
        end, seed = time.monotonic() + 60 * asked.minutes, asked.seed
        while True:
            name = min(cases, key=lambda kind: seconds[kind])  # equal time for all
            began = time.monotonic()
            try:
                codes[name][cases[name](random.Random(seed))] += 1
            except Finding as finding:
                findings[name] += 1
                print(f"{name}, seed {seed}: {finding}\n", flush=True)
            except Exception as error:
                findings[name] += 1
                print(f"{name}, seed {seed}: the case itself: {type(error).__name__}: {error}\n", flush=True)
            tried[name] += 1
            seconds[name] += time.monotonic() - began
            seed += 1
            if time.monotonic() >= end:
                break
    for name in cases:
        ends = ", ".join(f"{count} x {code}" for code, count in sorted(codes[name].items()))
        print(f"{name}: {tried[name]} cases in {seconds[name]:.0f} s, {findings[name]} findings, exit codes {ends}")
    print(f"all: {sum(tried.values())} cases, {sum(findings.values())} findings, seeds from {asked.seed}")
    return int(sum(findings.values()) > 0)


if __name__ == "__main__":
    sys.exit(main())
