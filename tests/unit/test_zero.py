"""Test of the ZeRO engine where DeepSpeed is not installed."""

from __future__ import annotations

import importlib
import sys

import pytest

from llmtrain.errors import RecipeError


def test_zero_without_deepspeed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.delitem(sys.modules, "llmtrain.parallel.zero", raising=False)
    with pytest.raises(
        RecipeError, match=r"^parallel.engine=zero needs DeepSpeed, .*: pip install -c constraints.txt -e '.\[zero\]'$"
    ):
        importlib.import_module("llmtrain.parallel.zero")
