"""What README says must exist: files, recipes and keys that its commands name, and its table of methods."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from docs.reference import README, ROOT, readme_with_methods
from llmtrain.cli import app, main
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
        overrides = [word for word in shlex.split(without_options(found[2])) if word not in ("RECIPE",)]
        check(load_recipe(ROOT / found[1], overrides), None)


def without_options(words: str) -> str:
    """Return a command's words without its options, which have no dot, and their values."""
    return re.sub(r"--[a-z-]+(?= |$)( [^-=\s]+(?= |$))?", "", words)


def known_commands() -> dict[str, set[str]]:
    """Return the options of each command, such as `recipe show`."""

    def below(group: TyperGroup, before: str) -> Iterator[tuple[str, set[str]]]:
        for name, command in group.commands.items():
            if isinstance(command, TyperGroup):
                yield from below(command, f"{before}{name} ")
            else:
                yield before + name, {word for parameter in command.params for word in parameter.opts}

    return dict(below(get_command(app), ""))


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "launch" / "README.md", ROOT / "eval" / "README.md"], ids=lambda page: page.name
)
def test_commands_and_options_exist_and_are_those_of_the_console_script(page: Path):
    text = page.read_text(encoding="utf-8")
    assert "python -m llmtrain " not in text, "write llmtrain, which the virtual environment has"
    commands = known_commands()
    code = re.findall(r"^    (.+)$", text, flags=re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
    for line in code:
        for words in re.findall(r"(?<![\w/.-])llmtrain ((?:recipe )?[a-z]+)(?= |$)(.*?)(?:  +#.*)?$", line):
            name, rest = words
            assert name in commands, f"{page.name}: {line}"
            options = {word for word in re.findall(r"(?<=\s)--[\w-]+(?= |$)", rest)}
            assert options <= commands[name], f"{page.name}: {line}"


def test_the_console_script_is_the_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"llmtrain": f"{main.__module__}:{main.__name__}"}


def test_readme_has_commands_to_test():
    assert len(commands(README)) >= 4
