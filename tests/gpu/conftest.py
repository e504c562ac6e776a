"""Marks of all tests in this folder, and skips of what an emulated GPU can't show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.on_gpu import IS_EMULATED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        item.add_marker(pytest.mark.gpu)
        if IS_EMULATED and item.get_closest_marker("real_gpu"):
            item.add_marker(pytest.mark.skip(reason="an emulated GPU can't show it"))
