"""Tests of the faults that ranks of a comparison inject: delays, and garbage in place of text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmtrain.compare import faults
from llmtrain.compare.faults import Faults, GarbageLoader, inject
from llmtrain.loss import IGNORE_INDEX


def test_delays_follow_seed_and_step_alone() -> None:
    one = Faults(seed=3, hosts=4, delays={"host": "random", "seconds": 0.5})
    for step in range(1, 50):
        assert sorted(one.delay(host, step) for host in range(4)) == [0, 0, 0, 0.5]
    victims = [next(host for host in range(4) if one.delay(host, step)) for step in range(1, 50)]
    assert set(victims) == {0, 1, 2, 3}
    again = Faults.model_validate_json(one.model_dump_json())
    assert victims == [next(host for host in range(4) if again.delay(host, step)) for step in range(1, 50)]
    always = Faults(seed=3, hosts=4, delays={"host": 2, "seconds": 0.5})
    assert [always.delay(host, 9) for host in range(4)] == [0, 0, 0.5, 0]


def test_garbage_is_of_one_host_and_its_steps() -> None:
    faults = Faults(seed=3, hosts=2, garbage={"host": 1, "first": 5, "last": 6})
    assert [step for step in range(1, 9) if faults.reads_garbage(1, step)] == [5, 6]
    assert not any(faults.reads_garbage(0, step) for step in range(1, 9))


def test_without_faults_nobody_sleeps_or_reads_garbage() -> None:
    faults = Faults(seed=1, hosts=2)
    assert faults.delay(0, 1) == 0.0 and not faults.reads_garbage(0, 1)


class Text:
    """A loader whose n-th batch is full of 1000 + n."""

    step = 0

    def next(self) -> list[torch.Tensor]:
        self.step += 1
        return [torch.full((2, 5), 1000 + self.step)]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def test_garbage_takes_the_place_of_text_and_uses_it_up() -> None:
    text = Text()
    loader = GarbageLoader(text, lambda: text.step == 2, seed=1)
    first, second, third = (loader.next()[0] for _ in range(3))
    assert (first == 1001).all() and (third == 1003).all()
    assert second.shape == (2, 5) and second.unique().numel() > 1 and second.min() >= 0 and second.max() <= 1002


def test_garbage_leaves_padding_where_it_is() -> None:
    text = Text()
    padded = torch.full((2, 5), 40)
    padded[1, 3:] = IGNORE_INDEX
    text.next = lambda: [padded]
    (garbage,) = GarbageLoader(text, lambda: True, seed=1).next()
    assert torch.equal(garbage == IGNORE_INDEX, padded == IGNORE_INDEX) and garbage.unique().numel() > 3


def injected(host: int, **asked: Any) -> tuple[SimpleNamespace, list[Any]]:
    """Inject faults into a trainer on a host. Return the trainer and the hooks that it calls before each block."""
    hooks: list[Any] = []
    trainer = SimpleNamespace(
        loader=Text(), engine=SimpleNamespace(register_block_hook=hooks.append), state=SimpleNamespace(step=0)
    )
    inject(trainer, Faults(seed=3, hosts=2, **asked), host)
    return trainer, hooks


def test_a_trainer_without_faults_is_as_it_was() -> None:
    trainer, hooks = injected(host=1)
    assert type(trainer.loader) is Text and not hooks


def test_a_trainer_reads_garbage_in_its_steps_and_goes_on_from_a_checkpoint() -> None:
    trainer, hooks = injected(host=1, garbage={"host": 1, "first": 2, "last": 2})
    batches = []
    for trainer.state.step in (1, 2, 3):
        batches += trainer.loader.next()
    assert [len(batch.unique()) > 1 for batch in batches] == [False, True, False] and not hooks
    assert trainer.loader.state_dict() == {"step": 3}
    trainer.loader.load_state_dict({"step": 7})
    assert (trainer.loader.next()[0] == 1008).all()


def test_a_host_sleeps_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(faults, "time", SimpleNamespace(sleep=slept.append))
    trainer, (before_block,) = injected(host=1, delays={"host": 1, "seconds": 0.3})
    for trainer.state.step in (1, 2):
        for block in (0, 1, 0, 1):  # two micro-batches
            before_block(block)
    assert slept == [0.3, 0.3] and type(trainer.loader) is Text
