"""Tests of a wheel: it installs all that the package needs outside a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LISTS_SUITES = """
from llmtrain import suites
assert suites.__file__.startswith(__import__("os").getcwd()), suites.__file__
for name in suites.suite_names():
    _, _, folders = suites.load_suite(name)
    assert all(any(folder.iterdir()) for folder in folders)
    print(name)
"""
FEW_STEPS = [
    *("train.steps=4", "schedule.warmup_steps=1", "sync.warmup_steps=2", "sync.period.every=2", "checkpoint.every=2"),
    *("eval.tokens=2000", "eval.sample_tokens=8", "log.every=2"),
]


def copied(folder: Path) -> Path:
    """Copy what .dockerignore lets into an image to `folder`, and return it. llmtrain/recipes stays a link."""
    folder.mkdir()
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            path, ignored = ROOT / line.removeprefix("!"), shutil.ignore_patterns("__pycache__")
            if path.is_dir():
                shutil.copytree(path, folder / path.name, symlinks=True, ignore=ignored)
            else:
                shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel, and return a folder with its content, as an installation unpacks it."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--quiet"]
    source = copied(folder / "source")
    subprocess.run([*build, "--wheel-dir", str(folder)], cwd=source, check=True, timeout=120)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(site: Path, *command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.mark.fresh
def test_a_wheel_holds_suites_tasks_templates_recipes_and_stories(site: Path) -> None:
    source = site.parent / "source"
    expected = {path.relative_to(source).as_posix() for path in (source / "llmtrain").rglob("*") if path.is_file()}
    expected |= {f"llmtrain/{path.relative_to(source)}" for path in (source / "recipes").rglob("*") if path.is_file()}
    installed = {path.relative_to(site).as_posix() for path in (site / "llmtrain").rglob("*") if path.is_file()}
    assert installed == expected
    assert {"llmtrain/recipes/quickstart.yaml", "llmtrain/recipes/base/llama_quickstart.yaml"} <= installed
    assert {f"llmtrain/data/tinystories/{name}" for name in ("stories.txt.gz", "CDLA-Sharing-1.0.txt")} <= installed
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0 AND CDLA-Sharing-1.0"
    licenses = {path.name for path in site.glob("*.dist-info/licenses/**/*")}
    assert {"LICENSE", "CDLA-Sharing-1.0.txt"} <= licenses
    listed = run(site, "-c", LISTS_SUITES, folder=site)
    assert listed.stdout.split() == ["edit_paper", "offline", "small", "tinystories"], listed.stderr


def lines_of(path: Path) -> set[str]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return {line for line in lines if line}


@pytest.mark.fresh
def test_an_installation_has_deepspeed_only_with_the_extra_zero(site: Path) -> None:
    """`make`, the Dockerfile and launch/skypilot.yaml install requirements.txt, and so also the extra."""
    [installation] = site.glob("*.dist-info")
    needs = [Requirement(line) for line in Distribution.at(installation).requires or ()]
    plain = {str(need) for need in needs if need.marker is None}
    zero = {f"{need.name}{need.specifier}" for need in needs if need.marker and need.marker.evaluate({"extra": "zero"})}
    assert zero == {"deepspeed>=0.19.8"}
    assert plain | zero == lines_of(ROOT / "requirements.txt") and not plain & zero
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines_of(ROOT / "constraints.txt")}
    assert {canonicalize_name(Requirement(line).name) for line in plain | zero} <= pinned


@pytest.mark.deep
def test_the_quickstart_runs_from_an_empty_folder(site: Path, tmp_path: Path) -> None:
    done = run(site, "-m", "llmtrain", "launch", "quickstart", *FEW_STEPS, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 replicas x 2 shards with edit: 1 synchronization" in done.stdout
    assert "The model writes" in done.stdout and "Once upon a time" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "runs"]
    written = {path.name for path in (tmp_path / "runs" / "quickstart").iterdir()}
    assert {"checkpoints", "loss.png", "recipe.yaml", "samples.txt"} <= written
