"""Speed of GPT-Neo with fused attention, and cost of document masks.

    python benchmarks/attention.py              # five minutes on two cores

Runs forward and backward of a GPT-Neo with four layers, alternately global and local: with transformers' attention, with
llmtrain's, and with llmtrain's and `train.document_mask`. The three take turns. With `--write`, the table goes to
benchmarks/results/attention/.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from loops import on_gpu, quartiles, take_turns
from peaks import allocator_peak
from table import RESULTS, Row, markdown, parser, show, write_page

if TYPE_CHECKING:
    import torch

TOKENS, VOCABULARY, DOCUMENT = 4096, 1000, 200
LAYERS = {"hidden_size": 512, "num_heads": 8, "num_layers": 4, "attention_types": [[["global", "local"], 2]]}
WINDOW = 256
THEIRS, OURS, MASKED = "transformers", "ours", "ours, document masks"
COLUMNS = ("tokens in a sequence", "attention", "ms", "its quartiles", "of transformers'", "peak, MB")
NOTES = f"""\
Forward and backward of {TOKENS} tokens in all, {LAYERS["hidden_size"]} hidden, four layers, windows of {WINDOW} in two of them; median
over the turns. *Of transformers'*: the median ratio within a turn. *Peak* (CPU): the most that torch's allocator handed out at a
time in one pass, as its profiler counts. Documents have about {DOCUMENT} tokens. All compute the same function, but for the
documents (tests/unit/test_attention.py)."""


def passes(length: int) -> dict[str, Callable[[], object]]:
    """Return, for each kind of attention, a function that runs one forward and backward pass. All have the same weights."""
    import torch
    from transformers import AutoModelForCausalLM

    from llmtrain.config import ModelSection
    from llmtrain.model import LanguageModel, model_config

    device = "cuda" if on_gpu() else "cpu"
    config = {**LAYERS, "window_size": WINDOW, "max_position_embeddings": length}
    torch.manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (TOKENS // length, length + 1), device=device)
    ids[torch.rand(ids.shape, device=device) < 1 / DOCUMENT] = 0
    theirs = AutoModelForCausalLM.from_config(model_config(ModelSection(type="gpt_neo", config=config), VOCABULARY))
    theirs = theirs.to(device, torch.bfloat16 if on_gpu() else torch.float32)

    def run(hidden: Callable[[torch.Tensor], torch.Tensor]) -> None:
        hidden(ids[:, :-1]).sum().backward()
        if on_gpu():
            torch.cuda.synchronize()

    ours, masked = (LanguageModel(copy.deepcopy(theirs), 1024, separator) for separator in (None, 0))
    return {
        THEIRS: lambda: run(lambda inputs: theirs.base_model(input_ids=inputs, use_cache=False).last_hidden_state),
        OURS: lambda: run(ours.hidden),
        MASKED: lambda: run(masked.hidden),
    }


def seconds_of(once: Callable[[], object]) -> float:
    """Run one pass, and return its seconds."""
    began = time.perf_counter()
    once()
    return time.perf_counter() - began


def main() -> None:
    """Measure one sequence length after another, print the table, and write the page if `--write` is given."""
    arguments = parser(__doc__)
    arguments.add_argument("--lengths", nargs="+", type=int, default=[256, 512, 1024, 2048])
    arguments.add_argument("--turns", type=int, default=9)
    options = arguments.parse_args()
    rows: list[Row] = []
    for length in options.lengths:
        kinds = passes(length)
        seconds = take_turns({kind: partial(seconds_of, once) for kind, once in kinds.items()}, options.turns)
        for kind, once in kinds.items():
            low, middle, high = quartiles([1e3 * one for one in seconds[kind]])
            ratios = [a / b for a, b in zip(seconds[kind], seconds[THEIRS], strict=True)]
            rows.append(
                (
                    f"{length:,}",
                    kind,
                    f"{middle:.0f}",
                    f"{low:.0f} to {high:.0f}",
                    "" if kind == THEIRS else f"{statistics.median(ratios):.2f}",
                    "" if on_gpu() else f"{allocator_peak(once) / 1e6:,.0f}",
                )
            )
    where = "a GPU in bf16" if on_gpu() else "a CPU in fp32"
    title = f"GPT-Neo's attention on {where}, {options.turns} turns"
    show(title, COLUMNS, rows, words=2)
    if options.write:
        parts = [f"{title}.", markdown(COLUMNS, rows, words=2), NOTES]
        write_page(RESULTS / "attention", "GPT-Neo's attention", parts)


if __name__ == "__main__":
    main()
