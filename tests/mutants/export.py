"""Mistakes in llmtrain/export."""

TABLES = {
    "llmtrain/export/card.py": r"""
    seen by unit/test_export.py
        export: a card shows the scores of any step
          - if content.get("checkpoint_step") == step:
          + if True:
        export: the card of one replica has the scores of the mean
          - is_default = (manifest.weights, manifest.dtype) == ("mean", "fp32")
          + is_default = True
        card: scores on a limited number of documents are for leaderboards
          - content.get("limit") is not None
          + False
    seen by unit/test_export_folder.py
        card: scores of older weights are listed
          -  or content.get("digest") not in (None, digest):
          + :
        card: scores on a limited number of documents replace those on all
          - rank = (not is_limited, str(
          + rank = (True, str(
        card: the oldest of several scores is listed
          - max(reversed(scores),
          + min(reversed(scores),
        card: standard errors are listed as scores
          - if not (metric.endswith("_stderr") or key.endswith("_stderr") or key in COUNTS):
          + if not (metric.endswith("_stderr") or key in COUNTS):
    """,
    "llmtrain/export/export.py": r"""
    seen by unit/test_eval_texts.py
        export: a run with a document mask counts as one without
          - train.document_mask or source.recipe.data.packing == "none"
          + source.recipe.data.packing == "none"
        export: positions of a run's initial weights count as random
          - learned > length and is_fresh else None
          + learned > length else None
    seen by unit/test_export.py
        export: the results in the folder are deleted
          -                 keep_others(final, folder)
          -
    seen by distributed/test_export.py
        export: the digests of a checkpoint are not checked
          -     source.check_digests()
          -
        export: a checkpoint of another recipe with the same model is exported
          -     source.check_recipe()
          -
        export: the card is written after the folder has its final name
          -                 (folder / CARD).write_text(model_card(source, manifest), encoding="utf-8")
          -                 keep_others(final, folder)
          +                 keep_others(final, folder)
          +             (final / CARD).write_text(model_card(source, manifest), encoding="utf-8")
    """,
    "llmtrain/export/folder.py": r"""
    seen by unit/test_export.py, distributed/test_export.py
        export: the tokenizer takes a spelled special token for that token
          - "split_special_tokens": True}
          + "split_special_tokens": False}
    seen by unit/test_export.py
        export: results of other weights count as this model's
          - and not before.has_weights_of(now) and
          + and False and
    seen by unit/test_export_folder.py
        export: the old folder is deleted before the new one has its final name
          -         if retired.exists() and not final.exists():
          -             with suppress
          +         if retired.exists() and final.exists():
          +             with suppress
        export: shards of the old export are kept
          - path.is_dir() if written is None else path.name not in written
          + True
        export: the rotary base is missing for readers of older configs
          - for key in ("rope_theta", "partial_rotary_factor") if key in rope}
          + for key in ("partial_rotary_factor",) if key in rope}
    seen by unit/test_export_folder.py, distributed/test_export.py
        export: a damaged export is reused
          - return None if manifest is None or find_corruption(folder, manifest.files) is not None else manifest
          + return manifest
    seen by unit/test_export.py
        export: a bos token that was never seen begins a text
          -         settings["bos_token"] = tokenizer.eos_token
          +         pass
    seen by unit/test_export_tokenizer.py
        export: a tokenizer with several chat templates keeps the default one
          - (folder / DEFAULT_TEMPLATE).unlink(missing_ok=True)
          + pass
        export: the tokenizer adds its own special tokens
          -             content["post_processor"] = _without_templates(content.get("post_processor"))
          -
        export: the tokenizer's class is unknown to transformers before 5
          -         settings["tokenizer_class"] = "PreTrainedTokenizerFast"
          +         pass
        export: llama.cpp puts a space before each text
          -         settings["add_prefix_space"] = False
          +         pass
    """,
    "llmtrain/export/parity.py": r"""
    seen by unit/test_export.py
        export: the parity of tokenizers is checked without special tokens
          - zip((*TEXTS, spelled), encode(trained_with, [*TEXTS, spelled]), strict=True)
          + zip(TEXTS, encode(trained_with, TEXTS), strict=True)
    seen by unit/test_export.py, distributed/test_export.py
        export: the tolerance of logits is absolute
          - parity.difference <= TOLERANCE * parity.scale
          + parity.difference <= TOLERANCE
    """,
    "llmtrain/export/request.py": r"""
    seen by unit/test_export.py, distributed/test_export.py
        export: an export in another dtype is reused
          - (manifest.weights, manifest.dtype) == (str(self.weights), self.dtype)
          + manifest.weights == str(self.weights)
    """,
    "llmtrain/export/separators.py": r"""
    seen by unit/test_data_ready_made.py
        card: token files without eos are described as ending with eos
          - return _Separators.EOS if ready_made.has_eos else _Separators.NONE
          + return _Separators.EOS
    """,
    "llmtrain/export/token_export.py": r"""
    seen by unit/test_data_ready_made.py
        token export: a document that spans two parts is cut
          - lengths = np.diff(ends, prepend=-self._open)
          + lengths = np.diff(ends, prepend=0)
        token export: large ids are wrapped around
          - if kind == "nanogpt" and vocab_size > LARGEST_UINT16:
          + if kind == "nanogpt" and vocab_size > 2 * LARGEST_UINT16:
    """,
}
