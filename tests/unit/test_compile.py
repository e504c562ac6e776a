"""Tests of torch.compile: a model's layers have graphs without breaks, compiled once per shape; stop signals do not reach the
compiler's processes."""

from __future__ import annotations

import signal
from functools import partial

import pytest
import torch

from llmtrain.compiling import compiled
from llmtrain.config import ModelSection, ParallelSection
from llmtrain.model import blocks_of, build, initialize, model_config
from llmtrain.parallel.wrapping import wrap_layers
from llmtrain.stop_signals import STOP_SIGNALS
from tests.distributed.real_engine import GPT_NEO, LLAMA, SEED, VOCABULARY
from tests.inside_torch import compilations, forget_compilations


@pytest.mark.parametrize(
    ("section", "graphs", "checkpointing"),
    [
        pytest.param(LLAMA, 1, False, id="llama"),
        pytest.param(LLAMA, 1, True, id="llama-checkpointed", marks=pytest.mark.deep),
        pytest.param(LLAMA, 1, "selective", id="llama-selective", marks=pytest.mark.deep),
        pytest.param(GPT_NEO, 2, False, id="gpt_neo", marks=pytest.mark.deep),
        pytest.param(GPT_NEO, 2, True, id="gpt_neo-checkpointed"),
        pytest.param(GPT_NEO, 2, "selective", id="gpt_neo-selective"),
    ],
)
def test_layers_are_compiled_complete_and_static(
    monkeypatch: pytest.MonkeyPatch, section: ModelSection, graphs: int, checkpointing: bool | str
) -> None:
    """One static graph is compiled per kind of layer and shape. The backend generates no code, because that takes seconds."""
    dynamic: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> torch.fx.GraphModule:
        dynamic.extend(given for given in inputs if isinstance(given, torch.SymInt))
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    model = build(model_config(section, VOCABULARY), loss_chunk=11)
    blocks = blocks_of(model)
    parallel = ParallelSection(compile=True, precision="fp32", activation_checkpointing=checkpointing)
    wrap_layers(blocks, parallel)
    for block in blocks:
        initialize(model, block, SEED, torch.device("cpu"), torch.float32)
    forget_compilations()
    for shapes, length in enumerate((8, 12, 16), start=1):
        for _ in range(2):
            tokens = torch.randint(0, VOCABULARY, (2, length))
            model.hidden(tokens).sum().backward()
        assert compilations().graphs == graphs * shapes
    assert not compilations().breaks and not dynamic


@pytest.mark.parametrize("section", [LLAMA, pytest.param(GPT_NEO, marks=pytest.mark.deep)], ids=["llama", "gpt_neo"])
def test_layers_for_all_lengths_are_compiled_before_torch_gives_up(
    monkeypatch: pytest.MonkeyPatch, section: ModelSection
) -> None:
    """This also holds for GPT-Neo, whose layers differ, and whose local attention takes another path if a sequence fits
    into the window."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = build(model_config(section, VOCABULARY), loss_chunk=11)
    blocks = blocks_of(model)
    wrap_layers(blocks, ParallelSection(compile=True, precision="fp32"), lengths_vary=True)
    for block in blocks:
        initialize(model, block, SEED, torch.device("cpu"), torch.float32)
    forget_compilations()
    graphs = []
    for length in (8, 3, 16, 12, 5, 20, 9, 4, 24):
        tokens = torch.randint(0, VOCABULARY, (2, length))
        model.hidden(tokens).sum().backward()
        with torch.no_grad():
            model.hidden(tokens)
        graphs.append(compilations().graphs)
    assert graphs[-1] == graphs[2] < 8 and not compilations().breaks


def test_stop_signals_are_blocked_while_the_first_call_starts_processes() -> None:
    """A child process inherits the blocked signals."""
    blocked: list[set[int]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> torch.fx.GraphModule:
        blocked.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        return graph

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    double = compiled(lambda numbers: 2 * numbers, backend=backend)
    assert double(torch.ones(3)).tolist() == [2.0] * 3
    assert blocked == [before | {*STOP_SIGNALS}] and before.isdisjoint(STOP_SIGNALS)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
