"""Fixtures for runs whose ranks are on several hosts."""

from __future__ import annotations

import pytest

from tests.end_to_end.runs import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("hosts"))
    made.reference(2, 1)  # the run that most tests compare with
    return made
