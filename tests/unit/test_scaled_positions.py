"""Tests of weights whose rotary positions are scaled by their number: a model with another number of positions is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from llmtrain.config import ModelSection
from llmtrain.errors import ModelError
from llmtrain.pretrained import Pretrained, check_architecture


def check(positions: int, **rope: Any) -> None:
    here, there = (
        LlamaConfig(max_position_embeddings=number, rope_parameters={"rope_theta": 1e4, **rope})
        for number in (positions, 2048)
    )
    check_architecture(ModelSection(type="llama"), here, there, Pretrained("weights", Path("weights")))


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0}])
def test_the_number_of_positions_counts_where_they_are_scaled_by_it(rope: dict[str, Any]) -> None:
    check(2048, **rope)
    with pytest.raises(ModelError, match="has max_position_embeddings 2048, but the recipe's model has 4096"):
        check(4096, **rope)


def test_the_number_of_positions_does_not_count_otherwise() -> None:
    check(4096, rope_type="default")
    check(4096, rope_type="linear", factor=2.0)
