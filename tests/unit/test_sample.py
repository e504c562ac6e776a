"""Tests of texts that the model generates during training: they change nothing in it, and the run continues if they fail."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from llmtrain.config import Recipe
from llmtrain.train.sample import Sampler
from llmtrain.train.validation import Validation, ValidationSet, Validator


def sampler(size: int = 1000, is_main: bool = True, **keys: object) -> tuple[Sampler, list[str]]:
    """Return a sampler and the list of the lines that it prints."""
    said: list[str] = []
    recipe = Recipe.model_validate({"run": {"name": "a"}, "eval": {"sample_prompt": "x", "sample_tokens": 100} | keys})
    mesh = SimpleNamespace(is_main=is_main, broadcast_from_main=lambda ask: ask())
    console = SimpleNamespace(print=said.append, progress=lambda label: torch.no_grad())
    return Sampler(recipe, SimpleNamespace(full_weights=dict), mesh, None, console, size), said


@pytest.mark.parametrize(
    ("size", "prompt", "is_cheap"), [(50_000_000, "x", True), (50_000_001, "x", False), (1000, None, False)]
)
def test_only_small_models_write_at_each_validation(size: int, prompt: str | None, is_cheap: bool) -> None:
    made, _ = sampler(size, sample_prompt=prompt)
    assert (made.is_wanted, made.is_cheap) == (prompt is not None, is_cheap)


def test_a_text_leaves_the_random_numbers_of_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = sampler()
    monkeypatch.setattr(Sampler, "_continue_prompt", lambda self, weights: str(torch.manual_seed(3) and torch.rand(2)))
    before = torch.get_rng_state()
    assert made.generate_in_step().startswith("tensor") and torch.equal(torch.get_rng_state(), before)


def test_a_text_that_cannot_be_generated_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    made, said = sampler()
    monkeypatch.setattr(Sampler, "_continue_prompt", lambda self, weights: {}["no such weight"])
    assert made.generate_in_step() is None
    assert said == ["warning: no sample could be generated ('no such weight')"]


def test_other_ranks_generate_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "_continue_prompt", lambda self, weights: pytest.fail("on another rank"))
    assert sampler(is_main=False)[0].generate() is None


@pytest.mark.parametrize(("asked", "is_cheap"), [(True, True), (True, False), (False, True)])
def test_a_validation_has_a_text_if_it_is_asked_for_and_cheap(monkeypatch, asked: bool, is_cheap: bool) -> None:
    totals: list[int | None] = []
    monkeypatch.setattr(
        "llmtrain.train.validation.validate", lambda *given: given[-1]() or given[-1]() or [Validation(4.0, 9)]
    )
    made = SimpleNamespace(is_cheap=is_cheap, generate_in_step=lambda: "text")
    validator = Validator(None, SimpleNamespace(replicas=1), [ValidationSet("", list, 3.0)], made, Bars(totals))
    found, text = validator.run(True, with_sample=asked)
    assert found[0][1].loss == 4.0 and text == ("text" if asked and is_cheap else None)
    validator.run(True, with_sample=False)
    assert totals == [None, 2], "the number of batches is known from the second validation on"


class Bars:
    """Progress bars that record their totals."""

    def __init__(self, totals: list[int | None]):
        self.totals = totals

    def progress(self, label: str, total: int | None = None) -> Bars:
        self.totals.append(total)
        return self

    def __enter__(self):
        return lambda: None

    def __exit__(self, *error: object) -> None:
        pass
