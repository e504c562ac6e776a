"""Test of the number of wrong inputs in tables of tests, by area.

python -m pytest tests/unit/test_wrong_inputs.py -s     prints the numbers
"""

from __future__ import annotations

from tests.unit import test_recipe_wrong, test_wrong_commands, test_wrong_files, test_wrong_tokens
from tests.unit.test_wrong_variables import WRONG_VARIABLES

FEWEST = 250
"""Minimum number of wrong inputs in tables that run in the fast tier. Each row is one input, its exit code and its one line."""


def areas() -> dict[str, int]:
    """Return the number of rows by area. Tests of single mistakes elsewhere and the fuzz tests are not counted."""
    commands = {f"commands: {area}": len(rows) for area, rows in test_wrong_commands.WRONG_COMMANDS.items()}
    files = {
        "recipes": test_wrong_files.RECIPES,
        "run directories": test_wrong_files.RUN_FILES,
        "checkpoints": test_wrong_files.CHECKPOINT_FILES,
        "suites and task files": test_wrong_files.SUITES,
        "texts": test_wrong_files.TEXTS,
        "token shards": test_wrong_files.TOKEN_FILES,
        "tokenizers": test_wrong_files.TOKENIZERS,
        "token files of other tools": test_wrong_tokens.READY_MADE,
        "token files beside other keys": test_wrong_tokens.COMBINED,
    }
    return {
        "keys and overrides": len(test_recipe_wrong.WRONG_OVERRIDES) + len(test_recipe_wrong.WRONG_FILES),
        **commands,
        "variables of the environment": len(WRONG_VARIABLES),
        **{f"files: {area}": len(rows) for area, rows in files.items()},
    }


def test_no_area_is_thin() -> None:
    found = areas()
    print("", *(f"{count:4} {area}" for area, count in found.items()), f"{sum(found.values()):4} in all", sep="\n")
    assert sum(found.values()) >= FEWEST and min(found.values()) >= 7
