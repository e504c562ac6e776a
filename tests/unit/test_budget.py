"""Tests of the CPU budget: seconds are counted wherever a test spends them, and too many of them fail the run."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import budget
from tests.mother import ADDRESS, session

BURNS = """
import time
import pytest
from tests.mother import session

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def test_here():
    burn({seconds})

def test_on_a_rank(ranks):
    ranks.run(burn, {seconds}, world_size=1)

def test_in_a_command():
    session().fork(burn, {seconds}).wait()

@pytest.mark.deep
def test_deep():
    burn({seconds})
"""


def run_pytest(*arguments: str) -> int:
    return pytest.main(list(arguments))


def outcome(folder: Path, seconds: float, *options: str) -> tuple[int, str]:
    """Run tests that take `seconds` of CPU time each. Return (exit code, output)."""
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    (folder / "test_burns.py").write_text(BURNS.format(seconds=seconds))
    options = ("-p", "no:cacheprovider", "-c", "pyproject.toml", f"--rootdir={folder}", *options, str(folder))
    process = session().fork(run_pytest, *options, environment={ADDRESS: session().address}, capture=True)
    output, _ = process.communicate(timeout=250)
    return process.returncode, output


def test_a_test_over_its_limit_fails_the_run_wherever_it_computes(tmp_path: Path) -> None:
    code, output = outcome(tmp_path, 1.0, "--cpu-limit-test=0.45", "-m", "")  # 0.9 on a very slow machine
    assert code == 1, output
    assert "4 passed" in output
    excesses = [line for line in output.splitlines() if line.startswith("ERROR: ")]
    assert len(excesses) == 3, output
    for line, name in zip(excesses, ("test_here", "test_on_a_rank", "test_in_a_command"), strict=True):
        assert re.search(rf"::{name} uses \d\.\d CPU seconds; a test outside `deep` may use 0\.[4-9]", line)


@pytest.mark.parametrize(("limit", "expected"), [(0.05, 1), (60, 0)])
def test_all_tests_together_have_a_limit(tmp_path: Path, limit: float, expected: int) -> None:
    code, output = outcome(tmp_path, 0.0, f"--cpu-limit-all={limit}")
    assert code == expected, output
    assert ("all outside `deep` together may use" in output) == (expected == 1)


@pytest.mark.parametrize(("seconds", "slowness"), [([], 1.0), ([0.04, 0.06], 1.0), ([0.07, 0.098], 1.44), ([0.3], 2.0)])
def test_limits_are_longer_on_a_slow_machine_within_bounds(seconds: list[float], slowness: float) -> None:
    judge = budget.Budget(SimpleNamespace(getoption={"--cpu-limit-all": 1e9}.get))
    judge.loops = seconds
    judge.tests = {"under": (9.9 * slowness, 10.0), "over": (10.1 * slowness, 10.0)}
    [line] = judge.excesses()
    assert line.startswith(f"over uses {10.1 * slowness:.1f} CPU seconds")
