"""Tests of the tokenizer in an export: special tokens, settings and chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from llmtrain.errors import DataError, TrainingError
from llmtrain.export import parity
from llmtrain.export.folder import copy_tokenizer, written_files
from tests.unit.test_export import byte_tokenizer


def test_a_text_begins_with_eos_as_in_training(tmp_path: Path) -> None:
    """An export replaces the tokenizer's own bos token, which was never in training."""
    trained_with = byte_tokenizer(bos_token="<s>")
    trained_with.save_pretrained(tmp_path / "of training")
    assert AutoTokenizer.from_pretrained(tmp_path / "of training").bos_token == "<s>"
    (tmp_path / "exported").mkdir()
    copy_tokenizer(trained_with, tmp_path / "of training", tmp_path / "exported")
    parity.check_tokenizer(trained_with, tmp_path / "exported")
    exported = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert (exported.bos_token, exported.bos_token_id) == ("<|endoftext|>", 256)
    assert exported.encode("<s>", add_special_tokens=False) == [ord(one) - 33 for one in "<s>"]


@pytest.mark.parametrize("is_byte_level", [False, True])
def test_no_special_tokens_are_added_by_default(tmp_path: Path, is_byte_level: bool) -> None:
    """An exported tokenizer encodes as in training, without its own template, even by default, as lm-evaluation-harness calls it."""
    trained_with = byte_tokenizer(bos_token="<s>")
    ids = {token: trained_with.convert_tokens_to_ids(token) for token in ("<s>", "<|endoftext|>")}
    template = processors.TemplateProcessing(single="<s> $A <|endoftext|>", special_tokens=list(ids.items()))
    both = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    trained_with.backend_tokenizer.post_processor = both if is_byte_level else template
    trained_with.save_pretrained(tmp_path / "of training")
    assert AutoTokenizer.from_pretrained(tmp_path / "of training")("a")["input_ids"] == [257, ord("a") - 33, 256]
    (tmp_path / "exported").mkdir()
    copy_tokenizer(trained_with, tmp_path / "of training", tmp_path / "exported")
    parity.check_tokenizer(trained_with, tmp_path / "exported")
    assert AutoTokenizer.from_pretrained(tmp_path / "exported")("a")["input_ids"] == [ord("a") - 33]
    with pytest.raises(TrainingError, match="the exported tokenizer differs from the training tokenizer"):
        parity.check_tokenizer(trained_with, tmp_path / "of training")


def test_settings_have_names_that_transformers_4_knows(tmp_path: Path) -> None:
    """The class and the other special tokens are written as transformers 4 reads them, and transformers 5 reads them back."""
    trained_with = byte_tokenizer(additional_special_tokens=["<x>", "<y>"])
    trained_with.save_pretrained(tmp_path / "of training")
    (tmp_path / "exported").mkdir()
    copy_tokenizer(trained_with, tmp_path / "of training", tmp_path / "exported")
    settings = json.loads((tmp_path / "exported/tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["<x>", "<y>"] and "extra_special_tokens" not in settings
    parity.check_tokenizer(trained_with, tmp_path / "exported")
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").extra_special_tokens == ["<x>", "<y>"]


def test_several_chat_templates_are_kept_in_an_export(tmp_path: Path) -> None:
    """The library transformers saves all templates but the default one in a folder, and an export has no folders."""
    trained_with, exported = byte_tokenizer(), tmp_path / "exported"
    trained_with.chat_template = {"default": "a", "tool_use": "b"}
    trained_with.save_pretrained(tmp_path / "of training")
    exported.mkdir()
    copy_tokenizer(AutoTokenizer.from_pretrained(tmp_path / "of training"), tmp_path / "of training", exported)
    parity.check_tokenizer(trained_with, exported)
    assert AutoTokenizer.from_pretrained(exported).chat_template == trained_with.chat_template
    assert all((exported / name).is_file() for name in written_files(exported))


def test_other_tools_put_no_space_before_a_text_either(tmp_path: Path) -> None:
    """An export has a key for llama.cpp, which does not read in tokenizer.model whether a space is added."""
    from sentencepiece import sentencepiece_model_pb2

    trained_with, files, model = byte_tokenizer(), tmp_path / "of training", sentencepiece_model_pb2.ModelProto()
    trained_with.save_pretrained(files)
    for adds_space in (False, True):
        model.normalizer_spec.add_dummy_prefix = adds_space
        (files / "tokenizer.model").write_bytes(model.SerializeToString())
        (tmp_path / f"exported {adds_space}").mkdir()
        copy_tokenizer(trained_with, files, tmp_path / f"exported {adds_space}")
        parity.check_tokenizer(trained_with, tmp_path / f"exported {adds_space}")
        settings = json.loads((tmp_path / f"exported {adds_space}/tokenizer_config.json").read_text())
        assert settings.get("add_prefix_space") is (None if adds_space else False)
    (files / "tokenizer.model").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"tokenizer\.model: not a SentencePiece model, or damaged; copy it again"):
        copy_tokenizer(trained_with, files, tmp_path / "exported True")
