"""Coverage that `make coverage` and `make coverage-deep` measured, by package and line, for tests/COVERAGE.md, which git ignores."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "COVERAGE.md"
FAST, BOTH = ROOT / ".coverage_fast", ROOT / ".coverage_both"
"""Coverage data of the fast tests, and of the fast and deep tests together."""

Sums = dict[str, collections.Counter[str]]


def main() -> None:
    """Write the table of packages and the list of lines that no test reaches, and print the table."""
    fast = measured(FAST)
    both = measured(BOTH) if BOTH.exists() else None
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    by = "`make coverage`" if both is None else "`make coverage coverage-deep`"
    who = "no fast test reaches" if both is None else "no test reaches, fast or deep"
    text = f"# Coverage of llmtrain\n\nBy {by} at {commit.strip()}.\n\n{table(sums_of(fast), both and sums_of(both))}\n"
    FILE.write_text(f"{text}\n## Lines and branches that {who}\n\n" + "\n".join(missing(both or fast)) + "\n")
    print(text)


def measured(data: Path) -> dict[str, Any]:
    """Return coverage's report on each file."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "coverage", "json", "--quiet", f"--data-file={data}", "-o", report.name]
        subprocess.run(command, cwd=ROOT, check=True)
        return json.loads(Path(report.name).read_text())["files"]


def sums_of(files: dict[str, Any]) -> Sums:
    """Return the sums of each package, and of all packages."""
    packages: Sums = collections.defaultdict(collections.Counter)
    for name, file in files.items():
        package = "/".join(Path(name).parts[:2]) if len(Path(name).parts) > 2 else "llmtrain"
        packages[package].update({key: value for key, value in file["summary"].items() if isinstance(value, int)})
    return dict(sorted(packages.items())) | {"all": sum(packages.values(), collections.Counter())}


def table(fast: Sums, both: Sums | None) -> str:
    """Return the table of packages. With `both`, its last columns are those of the fast and deep tests together."""
    columns = ["lines", "branches", "% of branches"]
    head = ["package", *columns, *(f"{column}, with deep tests" for column in columns if both)]
    lines = [f"| {' | '.join(head)} |", f"|---{'|---:' * (len(head) - 1)}|"]
    for package in fast:
        cells = [*_cells(fast[package]), *(_cells(both[package]) if both else ())]
        lines.append(f"| {package} | {' | '.join(cells)} |")
    return "\n".join(lines)


def missing(files: dict[str, Any]) -> list[str]:
    """Return one line per file, with the lines and branches that no test reached."""
    lines = []
    for name, file in sorted(files.items()):
        branches = [f"{start}→{end if end > 0 else 'end'}" for start, end in file["missing_branches"]]
        if places := [*map(str, file["missing_lines"]), *branches]:
            lines.append(f"- `{name}`: {', '.join(places)}")
    return lines


def _cells(sums: collections.Counter[str]) -> tuple[str, str, str]:
    lines = f"{sums['covered_lines']}/{sums['num_statements']}"
    branches = f"{sums['covered_branches']}/{sums['num_branches']}"
    return (
        lines,
        branches,
        f"{100 * sums['covered_branches'] / sums['num_branches']:.1f}" if sums["num_branches"] else "",
    )


if __name__ == "__main__":
    main()
