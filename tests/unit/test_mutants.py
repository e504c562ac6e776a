from __future__ import annotations

from pathlib import Path

from tests.mutants import MUTANTS

ROOT = Path(__file__).parents[2]


def test_every_mutant_applies_exactly_once() -> None:
    counts = {mutant.name: (ROOT / mutant.file).read_text().count(mutant.old) for mutant in MUTANTS}
    assert not {name: count for name, count in counts.items() if count != 1}
    assert not [mutant.name for mutant in MUTANTS if mutant.old == mutant.new]


def test_mutants_have_names_of_their_own_and_tests_that_exist() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 200
    tests = {test.partition("::")[0] for mutant in MUTANTS for test in mutant.tests}
    assert not [test for test in tests if not (ROOT / test).is_file()]
    assert all(mutant.tests for mutant in MUTANTS)
