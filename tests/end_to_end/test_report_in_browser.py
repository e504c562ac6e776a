"""Tests of a report in headless Chromium, as wide as on a desktop and on a phone."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from llmtrain.compare.measures import gather
from llmtrain.compare.report import write_report
from llmtrain.compare.results import load_trials
from tests.unit.written_trials import write_comparison

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SECONDS = 120
NARROWEST_WINDOW = 500
"""Minimum width of Chromium's windows. A frame inside can be narrower."""


WATCH = """
<script>
  window.faults = [];
  addEventListener("error", event => faults.push(event.message || `${event.target.tagName} did not load`), true);
</script>
"""
MEASURE = """
<script>
  addEventListener("load", () => {
    const box = element => element.getBoundingClientRect();
    const page = document.documentElement;
    const result = {
      faults: window.faults,
      width: page.clientWidth,
      needs: Math.max(page.scrollWidth, document.body.scrollWidth),
      images: [...document.images].map(image => [image.naturalWidth, Math.round(box(image).width)]),
      tables: [...document.querySelectorAll("table")].map(table => ({
        rows: table.rows.length,
        scrolls: getComputedStyle(table.parentElement).overflowX,
        boxRight: box(table.parentElement).right,
        letters: Math.min(...[...table.querySelectorAll("td, td .range")].map(cell => parseFloat(getComputedStyle(cell).fontSize))),
        cutNumbers: [...table.querySelectorAll(".main, .range")].filter(part => box(part).height > 30).length,
      })),
    };
    parent.postMessage(JSON.stringify(result), "*");
  });
</script>
"""
FRAME = """<!DOCTYPE html>
<body style="margin: 0">
<script>addEventListener("message", event => { document.getElementById("result").textContent = event.data; });</script>
<iframe src="report.html" style="width: %dpx; height: 900px; border: 0"></iframe>
<pre id="result"></pre>
</body>
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a report of eight runs, and return its path."""
    if CHROMIUM is None:
        pytest.skip("needs chromium (the Debian package of that name)")
    folder = tmp_path_factory.mktemp("report")
    planned = write_comparison(folder, conditions=("100mbit",), seeds=(1, 2))
    return write_report(gather(load_trials([folder]), planned=planned), folder)


def seen(report: Path, folder: Path, width: int) -> dict[str, Any]:
    """Return what Chromium finds in a report that is shown `width` CSS pixels wide."""
    assert CHROMIUM is not None
    page = report.read_text()
    assert page.count("<head>") == page.count("</body>") == 1
    watched = page.replace("<head>", f"<head>{WATCH}").replace("</body>", f"{MEASURE}</body>")
    (folder / "report.html").write_text(watched)
    (folder / "frame.html").write_text(FRAME % width)
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    command = [
        *(CHROMIUM, "--headless", *root, "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
        *(f"--user-data-dir={folder / 'profile'}", f"--window-size={max(width, NARROWEST_WINDOW)},900"),
        *("--virtual-time-budget=20000", "--dump-dom", (folder / "frame.html").as_uri()),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        pytest.fail(f"chromium did not show the report within {SECONDS} s")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    found = re.search(r'<pre id="result">(\{.*\})</pre>', output, re.DOTALL)
    assert found, f"the page never finished loading: {errors[-2000:]}"
    return json.loads(unescape(found[1]))


@pytest.mark.parametrize("width", [pytest.param(1400, marks=pytest.mark.deep), 420])
def test_a_report_is_readable_in_a_browser(report: Path, tmp_path: Path, width: int) -> None:
    result = seen(report, tmp_path, width)
    assert result["faults"] == []
    assert result["width"] == width
    assert result["needs"] <= width, "the page itself scrolls sideways"
    assert len(result["images"]) == 5 and all(natural > 0 for natural, _ in result["images"])
    assert all(shown >= min(350, 0.9 * width) for _, shown in result["images"]), "pictures are too small to read"
    assert [table["rows"] for table in result["tables"]] == [9, 8, 9]  # no trial of wagma has finished
    for table in result["tables"]:
        assert table["scrolls"] == "auto" and table["boxRight"] <= width
        assert table["letters"] >= 12 and table["cutNumbers"] == 0


def test_faults_would_be_seen(report: Path, tmp_path: Path) -> None:
    """The page has a picture that does not load, a script that throws, and a block that is too wide."""
    broken = report.read_text().replace("data:image/png;base64,", "data:image/png;base64,x", 1)
    wide = '<div style="width: 3000px">x</div><script>missing()</script></body>'
    page = tmp_path / "broken.html"
    page.write_text(broken.replace("</body>", wide))
    result = seen(page, tmp_path, 1400)
    assert sorted(result["faults"]) == ["IMG did not load", "Uncaught ReferenceError: missing is not defined"]
    assert result["needs"] >= 3000
    assert sum(natural == 0 for natural, _ in result["images"]) == 1
