"""Files, recipes, keys, commands and options that README and other pages name, and README's table of methods."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from docs.reference import README, ROOT, readme_with_methods
from llmtrain import __version__
from llmtrain.cli import app, main
from llmtrain.recipe_check import check
from llmtrain.recipe_loader import load_recipe

PAGES = [
    *(README, ROOT / "CONTRIBUTING.md", ROOT / "eval" / "README.md"),
    *(page for folder in ("docs", "launch") for page in sorted((ROOT / folder).glob("*.md"))),
]
RECIPE_COMMAND = re.compile(r"^(?:\w+=\S+ )*.*?recipes/(\S+)\.yaml(.*?)(?: +#.*)?$")
NAME_COMMAND = re.compile(r"^llmtrain (?:launch|train|recipe (?:show|check)) ([a-z]\w*)(?!\S)(.*?)(?: +#.*)?$")

PATH = re.compile(
    r"(?<![\w./~-])(?:(?:llmtrain|tests)/[\w./*-]*[\w*]|(?:docs|recipes|launch|benchmarks|examples|eval)/[\w./*-]*\.\w+)"
)
"""Pattern of a path below a folder of the repository. Metrics such as eval/loss have no suffix."""
NOT_OURS = {"launch/hostfile", "tests/COVERAGE.md", "tests/MUTANTS.md"}
"""Files that users or commands write."""


def commands(page: Path) -> list[str]:
    """Return the indented lines and `code` that name a recipe by its file or its name, continued lines joined."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    paragraphs = "\n\n".join(" ".join(lines.split()) for lines in re.split(r"\n\n|^    .+$", text, flags=re.MULTILINE))
    code = re.findall(r"^    (.+)$", text, flags=re.MULTILINE) + re.findall(r"`([^`\n]+)`", paragraphs)
    found = (line for line in code if re.search(r"recipes/\w+\.yaml", line) or NAME_COMMAND.match(line))
    return [line for line in found if "…" not in line]


def test_the_table_of_methods_is_up_to_date():
    text = README.read_text(encoding="utf-8")
    assert text == readme_with_methods(text), "run: make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path):
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def all_pages() -> list[Path]:
    """Return all Markdown files of the repository."""
    others = {"runs", "data", "venv", "env", ".tox", ".venv", ".venv-peers", "node_modules"}
    return [page for page in ROOT.rglob("*.md") if not others & set(page.relative_to(ROOT).parts)]


def test_rows_of_tables_have_the_cells_of_their_headers():
    """A row that is wrapped or joined with another row is no longer shown as a row."""
    delimiter, found = re.compile(r"\|(?: ?:?-+:? ?\|)+"), 0
    for page in all_pages():
        cells, above = 0, ""
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            row = line.strip()
            if above.startswith("|") and not cells:
                assert delimiter.fullmatch(row), f"{page}:{number}: the row above is no header"
            if delimiter.fullmatch(row):
                found, cells = found + 1, row.count("|")
                assert unescaped_bars(above) == cells, f"{page}:{number}: the header has another number of cells"
            elif not row.startswith("|"):
                cells = 0
                assert not delimiter.search(row), f"{page}:{number}: a table within a line"
            elif cells:
                assert row.endswith("|") and unescaped_bars(row) == cells, f"{page}:{number}: another number of cells"
            above = row
    assert found > 100


def unescaped_bars(row: str) -> int:
    """Return the number of cell borders in a row of a table."""
    return len(re.findall(r"(?<!\\)\|", row))


def test_paths_in_pages_exist():
    """CHANGELOG.md is left out because it may name files that no longer exist."""
    found = [
        (page, path)
        for page in all_pages()
        if page.name != "CHANGELOG.md"
        for path in PATH.findall(page.read_text(encoding="utf-8"))
        if path not in NOT_OURS
    ]
    assert len(found) > 200
    lost = {
        f"{page.relative_to(ROOT)}: {path}"
        for page, path in found
        if not any(list(folder.glob(path.rstrip("/"))) for folder in (ROOT, page.parent, ROOT / "llmtrain"))
    }
    assert not lost


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_recipes_and_keys_that_exist(page: Path):
    for command in commands(page):
        found = RECIPE_COMMAND.match(command) or NAME_COMMAND.match(command)
        assert found, command
        check(load_recipe(ROOT / "recipes" / f"{found[1]}.yaml", shlex.split(without_options(found[2]))), None)


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
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


def test_the_citation_has_the_version_of_the_package():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == __version__ and f"version {__version__}, by the" in README.read_text(encoding="utf-8")


def test_readme_has_commands_to_test():
    assert len(commands(README)) >= 4


COVERED = {
    "source .venv/bin/activate": "by hand",
    "git clone … && cd llmtrain": "by hand",
    "make quickstart": "tests/unit/test_wheel.py::test_the_quickstart_runs_from_an_empty_folder",
    "bash launch/train.sh": "tests/end_to_end/test_training.py::test_a_run_leaves_everything_it_promises",
    "llmtrain recipe check": "tests/unit/test_recipe_files.py::test_every_command_takes_a_name",
    "llmtrain recipe list": "tests/unit/test_recipe_files.py::test_all_recipes_are_listed_with_what_they_do",
    "llmtrain recipe show": "tests/unit/test_plan_show.py::test_every_recipe_shows_within_100_columns",
    "llmtrain runs": "tests/unit/test_run_list.py::test_a_pipe_gets_plain_columns_and_json_all_values",
    "llmtrain compare runs/": "tests/unit/test_compare_runs.py::test_runs_are_listed_by_their_validation_loss_and_drawn",
    "llmtrain compare recipes/compare/": "tests/end_to_end/test_compare.py::test_two_hosts_one_run_that_fails_and_an_interruption",
    "llmtrain generate": "tests/distributed/test_export.py::test_generate_writes_the_same_from_a_run_and_from_its_export",
    "llmtrain eval": "tests/end_to_end/test_eval_of_runs.py::test_the_small_suites_tasks_from_local_files",
    "llmtrain launch": "tests/unit/test_wheel.py::test_the_quickstart_runs_from_an_empty_folder",
    "NNODES=2": "tests/multi_node/test_hosts.py::test_two_hosts_by_train_sh",
    "pip install '.[zero]'": "tests/unit/test_wheel.py::test_an_installation_has_deepspeed_only_with_the_extra_zero",
    "pip install .": "tests/unit/test_wheel.py::test_a_wheel_holds_suites_tasks_templates_recipes_and_stories",
    "make .venv/.ready": "by hand",
    "make test": "by hand",
    "make docs": "tests/unit/test_readme.py::test_the_table_of_methods_is_up_to_date",
}
"""Test of each command of README.md, by the command's beginning."""


def test_every_command_of_readme_has_a_test():
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"^    (\S.+)$", text, flags=re.MULTILINE)
    inline = [code for code in re.findall(r"`([^`\n]+)`", text) if re.match(r"(llmtrain|make|pip|bash) ", code)]
    found = {line: [start for start in COVERED if line.startswith(start)] for line in [*blocks, *inline]}
    assert len(blocks) >= 10 and len(inline) >= 3
    assert not [line for line, starts in found.items() if not starts], "name the command's test in COVERED"
    assert set(COVERED) == {start for starts in found.values() for start in starts}
    for test in set(COVERED.values()) - {"by hand"}:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), test
