"""Runs on one host, that those on several are held against."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.end_to_end.runs import Runs
from tests.multi_node.runs import SHORT, measured


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("hosts"))


@pytest.fixture(scope="session")
def on_one_host(runs: Runs) -> Callable[[int, int], list[dict]]:
    """What a short run of so many replicas x shards logs on this machine; trained once each."""
    known: dict[tuple[int, int], list[dict]] = {}

    def logged(replicas: int, shard: int) -> list[dict]:
        if (replicas, shard) not in known:
            name = f"one-host-{replicas}x{shard}"
            code, output = runs.run(name, *SHORT, f"parallel.replicas={replicas}", f"parallel.shard={shard}")
            assert code == 0, output
            known[replicas, shard] = measured(runs, name)
        return known[replicas, shard]

    return logged
