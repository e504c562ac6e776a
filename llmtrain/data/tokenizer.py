"""Tokenizers loaded by name, folder or file, or trained on the source, always with an eos token."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmtrain.config import DataSection
from llmtrain.data.hub import require_on_hub
from llmtrain.data.sentencepiece_model import MODEL_FILE, hiding, load_sentencepiece
from llmtrain.data.sources import documents
from llmtrain.data.tokenizing import encode_without_threads
from llmtrain.data.trained_tokenizer import EOS, TRAIN, TrainedOn, train_tokenizer
from llmtrain.errors import DataError, UserError, first_line, panics_as_errors, reason
from llmtrain.files import local_path
from llmtrain.waiting import announced

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INSTEAD_OF_HUB = "a folder that has its tokenizer.json, or train:SIZE"
KNOWN_EOS = (EOS, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
"""Usual names of the special token that ends a text, tried in order if a local tokenizer does not name its eos token."""
TRAINED_ON = "trained_on.json"
"""File in the folder of a trained tokenizer that describes the training text."""


def load_tokenizer(data: DataSection, cache: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer saved in the folder `cache`. If the folder has none, first save the tokenizer that `data.tokenizer`
    names. Raises DataError if the tokenizer can't be loaded or trained, or has no usable eos token."""
    if not (cache / "tokenizer_config.json").exists():
        new = _new_tokenizer(data)
        is_changed = _hide_eos(new.tokenizer, data)
        new.tokenizer.save_pretrained(cache)
        if is_changed:
            _record_general_class(cache)
        if new.model is not None:
            (cache / MODEL_FILE).write_bytes(new.model)
        if new.trained_on is not None:
            (cache / TRAINED_ON).write_text(json.dumps(new.trained_on.as_json(), indent=2) + "\n", encoding="utf-8")
    remedy = "copy the tokenizer again, and delete that folder"
    return read_tokenizer(
        cache,
        lambda why: DataError(f"data.tokenizer: {data.tokenizer}: its copy {cache} can't be read ({why}); {remedy}"),
    )


def read_tokenizer(
    path: Path, error: Callable[[str], UserError], *, try_out: bool = False, **settings: Any
) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a folder or in a tokenizer.json. If it can't be read, raise the error that `error(reason)` returns.

    With `try_out`, the tokenizer also encodes a text, which fails for settings of the wrong kind. Encoding starts threads, so a
    process that forks later must not set `try_out`.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        with panics_as_errors():
            tokenizer = (
                PreTrainedTokenizerFast(tokenizer_file=str(path))
                if path.is_file()
                else AutoTokenizer.from_pretrained(path, **settings)
            )
            if try_out:
                tokenizer("a")
    except Exception as caught:  # tokenizers raises plain Exceptions
        raise error(reason(caught)) from None
    return tokenizer


def tokenizer_files(name: str) -> list[Path]:
    """Return the files of a local tokenizer, or an empty list for a hub name or `train:SIZE`."""
    path = local_path(name)
    if path is not None and path.is_dir():
        found = [file for pattern in ("*token*", "vocab*", "merges*", "*.model") for file in path.glob(pattern)]
        return sorted(file for file in found if file.suffix or not file.is_dir())  # a folder may be called `tokenizer`
    return [path] if path is not None and path.is_file() else []


def vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest token id plus one, including added tokens."""
    return max(tokenizer.get_vocab().values()) + 1


def trained_size(name: str) -> int | None:
    """Return SIZE of `train:SIZE`, or None for the name of a tokenizer that exists. Raises DataError if SIZE is not a
    positive whole number."""
    if not name.startswith(TRAIN):
        return None
    size = name.removeprefix(TRAIN)
    if not size.isdecimal() or int(size) == 0:
        raise DataError(f"data.tokenizer: {name}: expected train:SIZE with a whole number, like train:4096")
    return int(size)


def check_tokenizer_exists(data: DataSection) -> None:
    """Raise DataError if `load_tokenizer` would fail to load `data.tokenizer`. This check trains and downloads nothing."""
    if (tokenizer := existing_tokenizer(data)) is not None:
        _hide_eos(tokenizer, data)
    elif trained_size(data.tokenizer) is None:
        require_on_hub(data.tokenizer, "model", key="data.tokenizer", instead=INSTEAD_OF_HUB)


def existing_tokenizer(data: DataSection) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that `data.tokenizer` names if it is on this machine, or None if it has to be trained or
    downloaded. Raises DataError if a local tokenizer can't be read."""
    if trained_size(data.tokenizer) is not None:
        return None
    path = local_path(data.tokenizer)
    return _downloaded(data.tokenizer) if path is None else _load_local(path)


def _hide_eos(tokenizer: PreTrainedTokenizerBase, data: DataSection) -> bool:
    """Change the tokenizer, if necessary, so that it does not encode a quoted eos token as eos, because a document would seem to end
    there. Return whether the tokenizer was changed. Unigram and word-level models find the token if it is in their vocabulary. Raises
    DataError if the tokenizer has no eos token, or if the token can't be hidden."""
    from tokenizers import pre_tokenizers

    if tokenizer.eos_token_id is None:
        raise DataError(f"data.tokenizer: {data.tokenizer} has no eos token; it has to separate documents")
    if not _finds_eos(tokenizer):
        return False
    eos, backend = tokenizer.eos_token, getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and len(eos) > 1:
        steps = [] if backend.pre_tokenizer is None else [backend.pre_tokenizer]
        backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, hiding([eos])])
        if not _finds_eos(tokenizer):
            return True
    raise DataError(
        f"data.tokenizer: {data.tokenizer} finds its eos token {eos!r} in ordinary text, where documents would seem to end; give it "
        "another eos token, which does not occur in text"
    )


def _finds_eos(tokenizer: PreTrainedTokenizerBase) -> bool:
    eos = tokenizer.eos_token
    texts = [eos, f"{eos}{eos}", f"a{eos}b", f"a {eos} b", f"<{eos}>", f"\n{eos}\n"]
    return any(tokenizer.eos_token_id in ids for ids in encode_without_threads(tokenizer, texts))


def _record_general_class(folder: Path) -> None:
    """Replace the class of a saved tokenizer by a general one, which reads tokenizer.json as it is. The classes of some models would
    build the tokenizer anew from its vocabulary, without the step that `_hide_eos` added."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _NewTokenizer:
    """Tokenizer that is not saved in a prepared folder yet."""

    tokenizer: PreTrainedTokenizerBase
    model: bytes | None = None
    """SentencePiece model that encodes as the tokenizer does, if there is one."""
    trained_on: TrainedOn | None = None


def _new_tokenizer(data: DataSection) -> _NewTokenizer:
    name, size = data.tokenizer, trained_size(data.tokenizer)
    if size is not None:
        new = train_tokenizer(documents(data, "train"), size, data.tokenizer_sample_bytes, data.source)
        return _NewTokenizer(new.tokenizer, new.model, new.trained_on)
    path = local_path(name)
    if path is None:
        return _NewTokenizer(_load_hub(name))
    model = _model_file(path)
    return _NewTokenizer(_load_local(path), None if model is None else model.read_bytes())


def _model_file(path: Path) -> Path | None:
    """Return the path of a SentencePiece model: `path` itself, or the model in a folder without a tokenizer.json. None if
    there is no such model."""
    if path.is_file():
        return path if path.suffix == ".model" else None
    return path / MODEL_FILE if (path / MODEL_FILE).is_file() and not (path / "tokenizer.json").exists() else None


def _load_local(path: Path) -> PreTrainedTokenizerBase:
    if (model := _model_file(path)) is not None:
        return load_sentencepiece(model)
    if path.is_dir() and not tokenizer_files(str(path)):
        raise DataError(f"data.tokenizer: {path}: a folder without a tokenizer.json; give that of a tokenizer")
    expected = "expected a tokenizer.json or its folder, or a tokenizer.model"
    tokenizer = read_tokenizer(
        path, lambda why: DataError(f"data.tokenizer: {path}: not a tokenizer ({why}); {expected}")
    )
    if tokenizer.eos_token is None:
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        tokenizer.eos_token = next((token for token in KNOWN_EOS if token in special), None)
    return tokenizer


def _downloaded(name: str) -> PreTrainedTokenizerBase | None:
    """Return a tokenizer of the hub that an earlier download left on this machine, or None. Needs no network."""
    from transformers import AutoTokenizer

    try:
        with panics_as_errors():
            return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception:  # missing or damaged; the hub may have it
        return None


def _load_hub(name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    if (tokenizer := _downloaded(name)) is not None:
        return tokenizer
    require_on_hub(name, "model", key="data.tokenizer", instead=INSTEAD_OF_HUB)
    try:
        with announced(f"the Hugging Face hub to send the tokenizer {name}"), panics_as_errors():
            return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise DataError(f"data.tokenizer: {name}: {first_line(error)}") from None
    except Exception as error:
        raise DataError(f"data.tokenizer: {name}: can't be loaded ({reason(error)})") from None
