"""What README says must exist: files, recipes and keys that its commands name, and its table of methods."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from llmtrain.plan.reference import README, ROOT, readme_with_methods
from llmtrain.recipe_check import check
from llmtrain.recipe_loader import load_recipe

PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPE_COMMAND = re.compile(r"^(?:\w+=\S+ )*.*?(recipes/\S+\.yaml)(.*?)(?:  +#.*)?$")


def commands(page: Path) -> list[str]:
    """Indented lines and `code` that name a recipe, continued lines joined."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    code = re.findall(r"^    (.+)$", text, flags=re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
    return [line for line in code if re.search(r"recipes/\w+\.yaml", line) and "…" not in line]


def test_the_table_of_methods_is_up_to_date():
    text = README.read_text(encoding="utf-8")
    assert text == readme_with_methods(text), "run: make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path):
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_name_recipes_and_keys_that_exist(page: Path):
    for command in commands(page):
        found = RECIPE_COMMAND.match(command)
        assert found, command
        overrides = [word for word in shlex.split(found[2]) if word not in ("RECIPE",)]
        check(load_recipe(ROOT / found[1], overrides), None)


def test_readme_has_commands_to_test():
    assert len(commands(README)) >= 4
