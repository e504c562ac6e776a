"""The groups of deep tests: every deep test is in one, and they guard what their tests are about."""

from __future__ import annotations

import re
from pathlib import Path

from tests.deep import COMMON, FILE, GROUPS, ROOT, recorded, table

DEEP = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.deep" in path.read_text()]
PACKAGES = sorted(path.parent.name for path in (ROOT / "llmtrain").glob("*/__init__.py"))


def is_below(path: Path, *places: str) -> bool:
    return any(path.is_relative_to(ROOT / place) for place in places)


def test_every_deep_test_is_in_a_group_and_every_guard_exists() -> None:
    assert [path.name for path in DEEP if not is_below(path, *(group.tests for group in GROUPS))] == []
    named = {place for group in GROUPS for place in (group.tests, *group.guards)} | {*COMMON}
    assert [place for place in sorted(named) if not (ROOT / place).exists()] == []
    assert FILE.read_text() == table(recorded()), "write tests/DEEP.md anew: table(recorded())"


def test_deep_tests_named_after_a_package_guard_it() -> None:
    """`tests/unit/test_data_stream.py`, for example, is due when something in `llmtrain/data` has changed."""
    for path in DEEP:
        [group] = [group for group in GROUPS if is_below(path, group.tests)]
        about = [package for package in PACKAGES if re.match(rf"test_{package}[_.]", path.name)]
        unguarded = [name for name in about if not is_below(ROOT / "llmtrain" / name, *group.guards, *COMMON)]
        assert not unguarded, f"{path.name} is in {group.tests}, which does not guard {unguarded}"


def test_ci_installs_what_tests_skip_without() -> None:
    """A reason for skipping names the packages that are missing."""
    installed = re.search(r'packages="([^"]*)"', (ROOT / ".ci/run").read_text())[1].split()
    reasons = "".join(path.read_text() for path in (ROOT / "tests/multi_node").glob("*.py"))
    asked = {name for names in re.findall(r"\(packages? ([^)]*)\)", reasons) for name in names.split(", ")}
    assert {"nftables", "wireguard-tools"} <= asked <= set(installed)
