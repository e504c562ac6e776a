"""Tests of the groups of deep tests: every deep test is in a group, and a group guards the modules that its tests are about."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests import deep
from tests.deep import COMMON, FILE, GROUPS, ROOT, recorded, table

DEEP = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.deep" in path.read_text()]
PACKAGES = sorted(path.parent.name for path in (ROOT / "llmtrain").glob("*/__init__.py"))


def is_below(path: Path, *places: str) -> bool:
    return any(path.is_relative_to(found) for place in places for found in ROOT.glob(place))


def test_every_deep_test_is_in_a_group_and_every_guard_exists() -> None:
    assert [path.name for path in DEEP if not is_below(path, *(group.tests for group in GROUPS))] == []
    named = {place for group in GROUPS for place in (group.tests, *group.guards)} | {*COMMON}
    assert [place for place in sorted(named) if not list(ROOT.glob(place))] == []
    assert FILE.read_text() == table(recorded()), "tests/DEEP.md is out of date; write table(recorded()) to it"


def test_deep_tests_named_after_a_package_guard_it() -> None:
    """`tests/unit/test_data_stream.py`, for example, is due when something in `llmtrain/data` has changed."""
    for path in DEEP:
        [group] = [group for group in GROUPS if is_below(path, group.tests)]
        about = [package for package in PACKAGES if re.match(rf"test_{package}[_.]", path.name)]
        unguarded = [name for name in about if not is_below(ROOT / "llmtrain" / name, *group.guards, *COMMON)]
        assert not unguarded, f"{path.name} is in {group.tests}, which does not guard {unguarded}"


def test_every_module_is_guarded() -> None:
    """Each module is guarded by a group or, as part of COMMON, by all groups."""
    guarded = {found for group in GROUPS for place in (*group.guards, *COMMON) for found in ROOT.glob(place)}
    modules = (ROOT / "llmtrain").rglob("*.py")
    assert [module.name for module in modules if guarded.isdisjoint((module, *module.parents))] == []


def test_a_group_is_due_once_a_module_that_it_guards_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guard of the modules directly in llmtrain does not cover those in its folders. The test has a git repository of its own."""
    monkeypatch.setattr(deep, "ROOT", tmp_path)
    for name in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "a@b")

    def commit(path: str) -> str:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
        for command in (("init", "-q"), ("add", path), ("commit", "-q", "-m", path), ("rev-parse", "HEAD")):
            head = subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
        return head.strip()

    def due() -> set[str]:
        return {group.tests for group in GROUPS if deep.is_due(group, deep.Record(passed))}

    passed = commit("README.md")
    assert due() == set()
    commit("llmtrain/reshard.py")
    assert due() == {"tests/end_to_end", "tests/distributed"}
    passed = commit("llmtrain/plan/memory.py")
    commit("llmtrain/plan/memory_of_blocks.py")
    assert due() == {"tests/unit"}


def test_ci_installs_what_tests_skip_without() -> None:
    """The reasons for which tests are skipped name the packages that are missing."""
    installed = re.search(r'packages="([^"]*)"', (ROOT / ".ci/run").read_text())[1].split()
    reasons = "".join(path.read_text() for path in (ROOT / "tests/multi_node").glob("*.py"))
    asked = {name for names in re.findall(r"\(packages? ([^)]*)\)", reasons) for name in names.split(", ")}
    assert {"nftables", "wireguard-tools"} <= asked <= set(installed)
