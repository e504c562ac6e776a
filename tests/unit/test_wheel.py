"""What is installed from a wheel is all that the package needs, outside a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LISTS_SUITES = """
import llmtrain.suites.suite as suites
assert suites.__file__.startswith(__import__("os").getcwd()), suites.__file__
for name in suites.suite_names():
    _, _, folders = suites.load_suite(name)
    assert all(any(folder.iterdir()) for folder in folders)
    print(name)
"""


@pytest.mark.fresh
def test_a_wheel_holds_suites_tasks_and_templates(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(ROOT / "llmtrain", source / "llmtrain", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*build, "--wheel-dir", str(tmp_path)], cwd=source, check=True, timeout=120)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    installed, expected = (
        {path.relative_to(folder).as_posix() for path in (folder / "llmtrain").rglob("*") if path.is_file()}
        for folder in (site, source)
    )
    assert expected == installed
    environment = {**os.environ, "PYTHONPATH": str(site)}
    listed = subprocess.run(
        [sys.executable, "-c", LISTS_SUITES], cwd=site, env=environment, capture_output=True, text=True, timeout=120
    )
    assert listed.stdout.split() == ["edit_paper", "offline", "small", "tinystories"], listed.stderr
