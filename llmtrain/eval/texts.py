"""Losses on text files, and generation of text by the model.

Protocol of losses: documents are tokenized without special tokens and joined, with the tokenizer's begin-of-sequence token
(or end-of-sequence, if it has none) before each. The stream is cut into windows without overlap. Every position of
a window predicts the next token; the last position predicts the first token of the next window. Every token but the
very first is therefore predicted once. The loss of a document covers its own tokens and the token that follows
them. Documents of more than a million characters are tokenized in pieces, as for training.

A model that was trained on separate documents has never seen two in one context. For such a model, each document is cut into
windows by itself, after the token that begins the next document is appended. These losses have another context, so they are not
tested against those of other models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from llmtrain.data.bytes_read import BytesRead
from llmtrain.data.local_files import open_text, split_text
from llmtrain.data.tokenizer import read_tokenizer
from llmtrain.data.tokenizing import groups
from llmtrain.errors import DataError, ModelError, UserError, reason
from llmtrain.eval.evaluated_checkpoint import find_checkpoints
from llmtrain.eval.scores import SEPARATE, Entry, bits_per_byte, ratio_of_sums
from llmtrain.export.folder import recorded
from llmtrain.export.parity import without_progress_bars
from llmtrain.export.request import Step
from llmtrain.model import learned_positions
from llmtrain.suites import SamplesSection, TextSection

PROTOCOL = 3
"""Version of the protocol; increase it when losses change."""
LONGEST_WINDOW = 2048
LOGITS_AT_ONCE = 2**28
"""Maximum number of logits per batch (1 GiB in fp32); a batch has at least one window."""


@dataclass(frozen=True)
class Loaded:
    """Model and tokenizer, ready for inference."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    trained_length: int | None = None
    """Tokens per training sequence, or None if unknown."""
    trained_positions: int | None = None
    """Number of learned positions that training has reached, or None if all positions are usable or this is unknown."""
    separate_documents: bool = False
    """True if training never put two documents in one context."""

    @property
    def window(self) -> int:
        """Return the default number of tokens per window: LONGEST_WINDOW, or fewer if the model has fewer positions or was trained on
        shorter sequences."""
        positions = getattr(self.model.config, "max_position_embeddings", None)
        return min(limit for limit in (positions, self.trained_length, LONGEST_WINDOW) if limit is not None)

    @property
    def room(self) -> int | None:
        """Return the maximum number of tokens that the model can read: its number of positions or, if they are learned, the number
        that training has reached. None means no limit."""
        limits = (getattr(self.model.config, "max_position_embeddings", None), self.trained_positions)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def positions(self) -> int | None:
        """Return `room` if the model's positions are learned, or None if they are computed or unlimited."""
        return None if learned_positions(self.model) is None else self.room

    @property
    def first_token(self) -> int:
        """Return the token that begins a text. Raises ModelError if the tokenizer has neither bos nor eos."""
        ids = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        found = next((one for one in ids if one is not None), None)
        if found is None:
            raise ModelError(
                f"{self.tokenizer.name_or_path}: the tokenizer has neither a bos nor an eos token, one of which must begin a text"
            )
        return found


def check_device(device: str | None) -> None:
    """Raise UserError if this machine has no such device, because lm-evaluation-harness would use another one instead."""
    kind, _, index = (device or "cpu").partition(":")
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    found = torch.accelerator.device_count() if here is not None and here.type == kind else 0
    if kind != "cpu" and int(index or 0) >= found:
        raise UserError(
            f"--device {device}: torch finds {found} such devices on this machine; give cpu or one of those"
        )


def load_model_and_tokenizer(folder: Path, device: str | None = None) -> Loaded:
    """Load the tokenizer, and the model in the precision of its files, to `device` (by default a GPU, if there is one).

    Raises ModelError unless the folder has what transformers needs, and all of the model's weights.
    """

    def unreadable(why: str) -> ModelError:
        return ModelError(f"{folder} can't be loaded by transformers ({why}); export the model again")

    try:
        with without_progress_bars():
            model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    except Exception as error:  # transformers and safetensors raise many kinds of errors for damage
        raise unreadable(reason(error)) from error
    tokenizer = read_tokenizer(folder, unreadable, try_out=True)
    check_weights(folder, loading)
    model = model.eval().to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    known = recorded(folder)
    if known is None:
        return Loaded(model, tokenizer)
    return Loaded(model, tokenizer, known.sequence_length, known.trained_positions, known.separate_documents)


def check_weights(folder: Path, loading: Mapping[str, Any]) -> None:
    """Raise ModelError if transformers, by its `loading` info, has drawn weights at random because the folder lacks them."""
    wrong = sorted(str(name) for kind in ("missing_keys", "mismatched_keys") for name in loading[kind])
    if wrong:
        raise ModelError(
            f"{folder} lacks weights of the model in its config.json, such as {wrong[0]}; export the model again"
        )


def read_documents(file: TextIO, separator: str, every: int, limit: int | None) -> list[str]:
    """Return every `every`-th document of a text, at most `limit` documents. The file is read no further than necessary.

    Surrounding whitespace is stripped, and empty documents are not counted.
    """
    return list(islice(islice(split_text(file, separator), 0, None, every), limit))


def evaluate_text(section: TextSection, path: Path, limit: int | None, loaded: Loaded, batch_size: int) -> Entry:
    """Return loss (nats per token), perplexity and bits per byte of a text file.

    Bits per byte are summed nats / ln 2 / UTF-8 bytes of the documents. Standard errors are over documents. Raises
    DataError if the file can't be read, is not UTF-8 or has no documents, and ModelError if the window has more tokens than the model has
    learned positions.
    """
    with open_text(path, BytesRead()) as file:
        texts = read_documents(file, section.separator, section.every, limit)
    if not texts:
        raise DataError(f"{path} has no text between its separators ({section.separator!r}); give another file")
    window = section.window or loaded.window
    if (positions := loaded.positions) is not None and window > positions:
        raise ModelError(
            f"{section.name}: window is {window}, but {loaded.model.name_or_path} has learned {positions} positions; give at most as "
            "many in the suite, or leave window out"
        )
    nll, tokens = losses(texts, loaded, window, batch_size)
    sizes = [len(text.encode()) for text in texts]
    loss, loss_error = ratio_of_sums(nll, tokens)
    bits, bits_error = bits_per_byte(nll, sizes)
    perplexity = math.exp(min(loss, 700.0))
    scores = {
        "loss": loss,
        "loss_stderr": loss_error,
        "perplexity": perplexity,
        "perplexity_stderr": None if loss_error is None else perplexity * loss_error,
        "bits_per_byte": bits,
        "bits_per_byte_stderr": bits_error,
        "n": len(texts),
        "tokens": sum(tokens),
        "bytes": sum(sizes),
    }
    about = {"version": PROTOCOL, "window": window, "members": [section.name]}
    return Entry(
        scores={section.name: scores},
        about={section.name: about | ({SEPARATE: True} if loaded.separate_documents else {})},
        shown=[section.name],
        answers={section.name: {"doc": list(range(len(texts))), "nll": nll, "tokens": tokens, "bytes": sizes}},
    )


@torch.inference_mode()
def losses(texts: Sequence[str], loaded: Loaded, window: int, batch_size: int) -> tuple[list[float], list[int]]:
    """Return the summed loss in nats and the number of predicted tokens of each document."""
    encoded: list[torch.Tensor] = []
    begun = [torch.tensor([loaded.first_token], dtype=torch.int32)]
    for pieces in groups(("validation", text) for text in texts):
        found = loaded.tokenizer([piece for _, piece, _ in pieces], add_special_tokens=False, verbose=False)
        for ids, (_, _, is_last) in zip(found["input_ids"], pieces, strict=True):
            begun.append(torch.tensor(ids, dtype=torch.int32))
            if is_last:
                encoded.append(torch.cat(begun))
                del begun[1:]
    owner = torch.repeat_interleave(torch.tensor(list(map(len, encoded))))  # document of each predicting token
    if loaded.separate_documents:
        streams = [torch.cat((document, document[:1])) for document in encoded]
    else:
        streams, owner = [torch.cat(encoded)], owner[:-1]
    rows = [each[start : start + window + 1] for each in streams for start in range(0, len(each) - 1, window)]
    size = max(1, min(batch_size, LOGITS_AT_ONCE // (window * loaded.model.config.vocab_size)))
    costs = torch.cat([_costs(loaded.model, rows[start : start + size]) for start in range(0, len(rows), size)])
    if not costs.isfinite().all():
        raise ModelError(f"{loaded.model.name_or_path}: the model's losses are not finite; evaluate another checkpoint")
    nll = torch.zeros(len(encoded), dtype=torch.float64).index_add_(0, owner, costs)
    return nll.tolist(), torch.bincount(owner, minlength=len(encoded)).tolist()


def write_samples(section: SamplesSection, loaded: Loaded) -> Entry:
    """Generate a continuation of each prompt. Raises ModelError if a prompt has more tokens than the model has learned
    positions."""
    # Other keys of the folder's generation config would change what the suite asks for.
    loaded.model.generation_config = GenerationConfig()
    written = []
    for prompt in section.prompts:
        ids = [loaded.first_token, *loaded.tokenizer(prompt, add_special_tokens=False)["input_ids"]]
        if loaded.positions is not None and len(ids) >= loaded.positions:
            raise ModelError(
                f"samples: a prompt has {len(ids)} tokens, but {loaded.model.name_or_path} has learned {loaded.positions} positions, "
                "one of which a new token needs; shorten it in the suite"
            )
        room = (loaded.room or LONGEST_WINDOW) - len(ids)
        new = _continuation(
            loaded.model,
            ids,
            max(1, min(section.tokens, room)),
            section.seed,
            do_sample=True,
            temperature=section.temperature,
            top_k=section.top_k,
            eos_token_id=loaded.tokenizer.eos_token_id,
            pad_token_id=loaded.first_token,
        )
        text = loaded.tokenizer.decode([*ids[1:], *new], skip_special_tokens=True)
        written.append({"prompt": prompt, "text": text})
    return Entry(written=written)


def folder_to_load(run_or_export: Path, step: Step | None) -> Path:
    """Return a folder that transformers loads: the given folder, or an export of the given run. The export is made if necessary; an
    existing export suffices if its checkpoint is gone. Raises UserError if the path is neither such a folder nor a run."""
    return find_checkpoints(run_or_export, "", step, over_time=False)[-1].folder


def generate(
    run_or_export: Path,
    prompt: str,
    *,
    tokens: int = 120,
    temperature: float = 0.7,
    top_k: int = 40,
    seed: int = 0,
    step: Step | None = None,
) -> str:
    """Return `prompt` followed by the model's continuation of at most `tokens` tokens.

    The model is in a folder that transformers loads, or in a run, which is exported if necessary (after `step`, or
    at its newest checkpoint). A temperature of 0 is greedy decoding, and a `top_k` of 0 samples from all tokens. Raises
    UserError if the prompt does not fit or is not UTF-8, or if it is empty and the model has no begin-of-sequence token.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(f"--prompt is {prompt!r}, which is not UTF-8; type it in a terminal with UTF-8") from None
    loaded = load_model_and_tokenizer(folder_to_load(run_or_export, step))
    model, tokenizer, room = loaded.model, loaded.tokenizer, loaded.room
    # Of the folder's generation config, only the special tokens are used: other keys would change what the options ask for.
    model.generation_config = GenerationConfig(**_special_tokens(model, run_or_export))
    begin = model.generation_config.bos_token_id
    ids = [*([] if begin is None else [begin]), *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    if room is not None and len(ids) >= room:
        raise UserError(
            f"--prompt has {len(ids)} tokens, but the model has room for {room}, including one new token; shorten it"
        )
    if not ids:
        raise UserError("--prompt is empty and this model has no token that begins a text; give a word")
    how = {"temperature": temperature, "top_k": top_k} if temperature > 0 else {}
    new = _continuation(
        model, ids, tokens if room is None else min(tokens, room - len(ids)), seed, do_sample=temperature > 0, **how
    )
    # The continuation alone would lose its first space with tokenizers that strip one from the beginning of a text.
    before, whole = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids, [*ids, *new]))
    if whole.startswith(before):
        return prompt + whole[len(before) :]
    return prompt + tokenizer.decode(new, skip_special_tokens=True)


def _special_tokens(model: PreTrainedModel, folder: Path) -> dict[str, int | list[int] | None]:
    """Return the tokens of a model's generation_config.json. Raises ModelError if one is not a token of the model."""
    found = {name: getattr(model.generation_config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, given in found.items():
        is_list = name == "eos_token_id" and isinstance(given, list) and given
        for token in given if is_list else [given]:
            if token is not None and (type(token) is not int or not 0 <= token < model.config.vocab_size):
                raise ModelError(
                    f"{folder}: generation_config.json has {name}={given!r}, expected the number of a token; export it again"
                )
    return found


def _continuation(model: PreTrainedModel, ids: list[int], tokens: int, seed: int, **how: Any) -> list[int]:
    """Return at most `tokens` new tokens after `ids`."""
    inputs = torch.tensor([ids], device=model.device)
    torch.manual_seed(seed)
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, **how)
    return output[0, len(ids) :].tolist()


def _costs(model: PreTrainedModel, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the losses of all tokens except the first of each row, in order, in fp64 on the CPU."""
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).long().to(model.device)  # attention is causal
    logits = model(padded[:, :-1], use_cache=False).logits
    costs = [
        torch.nn.functional.cross_entropy(of_row[: len(row) - 1].float(), ids[1 : len(row)], reduction="none")
        for of_row, ids, row in zip(logits, padded, rows, strict=True)
    ]
    return torch.cat(costs).cpu().double()  # mps has no fp64
