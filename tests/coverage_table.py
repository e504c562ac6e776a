"""Write what `make coverage` measured, by package and line, to tests/COVERAGE.md."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "COVERAGE.md"


def main() -> None:
    """Turn coverage's own data into a table and a list."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        subprocess.run([sys.executable, "-m", "coverage", "json", "--quiet", "-o", report.name], cwd=ROOT, check=True)
        files = json.loads(Path(report.name).read_text())["files"]
    packages: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    missing = []
    for name, file in sorted(files.items()):
        package = "/".join(Path(name).parts[:2]) if len(Path(name).parts) > 2 else "llmtrain"
        packages[package].update({key: value for key, value in file["summary"].items() if isinstance(value, int)})
        branches = [f"{start}→{end if end > 0 else 'end'}" for start, end in file["missing_branches"]]
        if places := [*map(str, file["missing_lines"]), *branches]:
            missing.append(f"- `{name}`: {', '.join(places)}")
    rows = [
        f"| {package} | {sums['covered_lines']}/{sums['num_statements']} | {sums['covered_branches']}/{sums['num_branches']} "
        f"| {_percent(sums['covered_branches'], sums['num_branches'])} |"
        for package, sums in [*sorted(packages.items()), ("all", sum(packages.values(), collections.Counter()))]
    ]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout
    FILE.write_text(
        f"# Coverage of llmtrain by `make test`\n\nBy `make coverage` at {commit.strip()}.\n\n"
        "| package | lines | branches | % of branches |\n|---|---:|---:|---:|\n" + "\n".join(rows) + "\n\n"
        "## Lines and branches that no fast test reaches\n\n" + "\n".join(missing) + "\n"
    )
    print(FILE.read_text().split("\n## ")[0])


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else ""


if __name__ == "__main__":
    main()
