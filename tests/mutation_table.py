"""The table of mutants: tests/MUTANTS.md, which git ignores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.mutants import Mutant

TOP = """# Mutants

Deliberate mistakes in llmtrain (`tests/mutants/`), and the test that detects each first. Made by `make mutants` at commit {commit}.

{summary}
"""


def write_table(mutants: Sequence[Mutant], rows: Mapping[str, Mapping[str, Any]], target: Path) -> None:
    """Write the results: first equivalent mutants, survivors and mutants that only deep tests detect, then a table of all."""
    by_name = {key.rpartition(" ")[0]: row for key, row in rows.items() if "verdict" in row}
    known = [(mutant, by_name.get(mutant.name, {"verdict": "not tried"})) for mutant in mutants]
    commits = sorted({row["commit"] for _, row in known if "commit" in row})
    verdicts = ["equivalent" if mutant.equivalent else row["verdict"] for mutant, row in known]
    summary = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(sorted(verdicts)))
    parts = [TOP.format(commit=", ".join(commits) or "unknown", summary=f"{len(known)} mutants: {summary}.")]
    parts += _section("Equivalent", [(m.name, m.equivalent) for m, _ in known if m.equivalent])
    survivors = [m for m, row in known if row["verdict"] == "survived" and not m.equivalent]
    parts += _section("Survivors", [(m.name, f"`{m.file}`") for m in survivors])
    deep = [m for m, row in known if row["verdict"] == "deep"]
    parts += _section("Seen by deep tests only", [(m.name, m.deep or "no reason given") for m in deep])
    parts.append("## All\n\n| mutant | file | seen by | seconds |\n| --- | --- | --- | ---: |")
    for mutant, row in known:
        by = {"survived": "**nobody**", "not tried": "not tried"}.get(row["verdict"], f"`{row.get('by', '')}`")
        if row["verdict"] == "timeout":
            by += " (hangs)"
        by = "equivalent" if mutant.equivalent else by
        cells = (mutant.name, f"`{mutant.file.removeprefix('llmtrain/')}`", by, f"{row.get('seconds', 0):.1f}")
        parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    target.write_text("\n".join(parts) + "\n")


def _section(title: str, lines: Sequence[tuple[str, str]]) -> list[str]:
    return [f"## {title}\n", *(f"- {name}: {text}" for name, text in lines), ""] if lines else []
