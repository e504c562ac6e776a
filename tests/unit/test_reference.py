"""Pages and tables that `make docs` generates, which must be up to date and complete, and tables written by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import reference
from docs.reference import (
    COMPOSITION_BEGIN,
    METHODS_BEGIN,
    METHODS_PAGE,
    PAGE,
    README,
    SCHEMA,
    methods_page_with_composition,
    recipe_reference,
)
from llmtrain.config import Recipe, SyncSection
from llmtrain.recipe_schema import schema_text
from llmtrain.sync.compatibility import CHOICES, RULES, conflict_between
from llmtrain.sync.methods import METHODS


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == recipe_reference(), "run: make docs"


def test_the_schema_is_up_to_date() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == schema_text(), "run: make docs"


def test_the_page_of_methods_is_up_to_date() -> None:
    page = METHODS_PAGE.read_text(encoding="utf-8")
    assert page == methods_page_with_composition(page), "run: make docs"
    for name in METHODS:
        assert f"`{name}`" in page


def test_make_docs_writes_the_pages_and_leaves_the_rest_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "SCHEMA", tmp_path / "schema.json")
    for name in ("PAGE", "README", "METHODS_PAGE"):
        page = getattr(reference, name)
        copy = tmp_path / page.name
        text = page.read_text(encoding="utf-8")
        begin = next(mark for mark in (METHODS_BEGIN, COMPOSITION_BEGIN, "# Recipes\n") if mark in text)
        copy.write_text(text.replace(begin, f"{begin}\nA row of last year.\n"), encoding="utf-8")
        monkeypatch.setattr(reference, name, copy)
    reference.main()
    for page in (PAGE, README, METHODS_PAGE, SCHEMA):
        assert (tmp_path / page.name).read_text(encoding="utf-8") == page.read_text(encoding="utf-8")


def test_rules_name_kinds_that_exist_and_hold_both_ways() -> None:
    for rule in RULES:
        assert rule.kind in CHOICES[rule.choice] and rule.excludes
        for other, kinds in rule.excludes.items():
            assert set(kinds) < set(CHOICES[other]), "an alternative is left"
            for kind in kinds:
                assert conflict_between(other, kind, rule.choice, rule.kind) is rule


def test_every_section_and_key_is_there() -> None:
    page = recipe_reference()
    for name, section in Recipe.model_fields.items():
        part = page.split(f"\n## `{name}`\n")[1].split("\n## ")[0]
        for key in section.annotation.model_fields:
            assert f"\n| `{key}` | " in part, f"{name}.{key}"


def test_every_kind_of_a_mapping_has_a_table() -> None:
    page = recipe_reference()
    for kind in (
        "period: {kind: steps}",
        "outer: {kind: nesterov}",
        "schedule: {kind: layerwise}",
        "reduction: {kind: edit_penalty}",
    ):
        assert f"### `sync.{kind}`" in page
    assert "| `momentum` | number ≥ 0 and < 1 | `0.9` | Outer momentum. |" in page


def test_every_methods_preset_is_there() -> None:
    page = recipe_reference()
    for name, method in METHODS.items():
        line = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert method.PAPER in line
        assert 0 < len(method.CHOOSE_WHEN.split()) <= 8


def test_tables_send_numbers_that_are_not_finite_to_the_key_that_skips_them() -> None:
    """No method recovers from them by itself, because the moments of an excluded replica stay NaN."""
    pages = [README, METHODS_PAGE, README.parent / "docs/choosing.md"]
    lines = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    rows = [line for line in lines if line.startswith("|") and "finite" in line]
    assert rows and all("`optim.nonfinite" in row for row in rows)


def test_choosing_names_what_offload_leaves_on_the_device() -> None:
    text = (README.parent / "docs/choosing.md").read_text(encoding="utf-8")
    [row] = [line for line in text.splitlines() if "`sync.offload=true`" in line]
    presets = {
        name: SyncSection.model_validate({"method": name, **method.PRESET})
        for name, method in METHODS.items()
        if name != "qsr"  # its preset has no alpha, and it leaves nothing on the device
    }
    left = {
        name
        for name, sync in presets.items()
        if sync.wire.error_feedback or sync.schedule.parameters_in_flight([1] * 8, sync.period) == 8
    }
    assert left == set(re.findall(r"`(\w+)`", row.partition("but not")[2]))


def test_tables_are_whole() -> None:
    """Each row has as many cells as its header. A `|` inside a cell is escaped."""
    for table in re.findall(r"(?:^\|.*\n)+", recipe_reference(), flags=re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table
