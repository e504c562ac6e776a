"""Mistakes in reading and writing token files of other tools, and in SentencePiece models."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

READY_MADE = ("tests/unit/test_data_ready_made.py",)
WRONG = ("tests/unit/test_wrong_tokens.py",)
SENTENCEPIECE = ("tests/unit/test_data_sentencepiece.py",)

MUTANTS = [
    Mutant(
        "token files: the header is read as tokens",
        "llmtrain/data/token_files.py",
        'return TokenFile(path, "llm.c", dtype, 4 * HEADER_INTS, tokens, size)',
        'return TokenFile(path, "llm.c", dtype, 0, tokens, size)',
        READY_MADE,
    ),
    Mutant(
        "token files: a validation part begins where its file does",
        "llmtrain/data/ready_made.py",
        "offset = (shard.offset or 0) + low * np.dtype(shard.dtype).itemsize",
        "offset = shard.offset or 0",
        READY_MADE,
    ),
    Mutant(
        "token files: validation begins within a document",
        "llmtrain/data/ready_made.py",
        "            return start + int(found[0]) + 1",
        "            return start + int(found[0])",
        READY_MADE,
    ),
    Mutant(
        "token files: negative ids are tokens",
        "llmtrain/data/token_ids.py",
        "(ids.max() < self.size and ids.min() >= 0)",
        "ids.max() < self.size",
        WRONG,
    ),
    Mutant(
        "token files: the id after the last is a token",
        "llmtrain/data/token_ids.py",
        "ids.max() < self.size and",
        "ids.max() <= self.size and",
        READY_MADE,
    ),
    Mutant(
        "token files: the scan reads the first tokens alone",
        "llmtrain/data/token_ids.py",
        "for first in range(0, tokens, len(buffer)):",
        "for first in range(0, min(tokens, len(buffer)), len(buffer)):",
        READY_MADE,
    ),
    Mutant(
        "token files: the bytes of a shorter validation are kept",
        "llmtrain/data/ready_made.py",
        'return ready_made is None or len(prepared.tokens("validation")) in ready_made.validation_bytes',
        "return ready_made is None or bool(ready_made.validation_bytes)",
        READY_MADE,
    ),
    Mutant(
        "token files: a character that is cut off counts",
        "llmtrain/data/ready_made.py",
        "for cut in range(4):",
        "for cut in range(1):",
        READY_MADE,
    ),
    Mutant(
        "token files: an index may have gaps",
        "llmtrain/data/token_files.py",
        "if (lengths < 0).any() or not np.array_equal(begins, pointers[start : start + CHUNK]):",
        "if (lengths < 0).any():",
        WRONG,
    ),
    Mutant(
        "token files: text is read as tokens",
        "llmtrain/data/token_files.py",
        "    if len(text) >= 2 and all(",
        "    if len(text) >= 1e9 and all(",
        WRONG,
    ),
    Mutant(
        "token files: files of the validation text are trained on",
        "llmtrain/data/local_files.py",
        "if path.resolve() not in validated]",
        "if path not in validated or True]",
        (*READY_MADE, "tests/unit/test_data_sources.py"),
    ),
    Mutant(
        "token files: changed files are the same source",
        "llmtrain/data/local_files.py",
        "path.stat().st_size, path.stat().st_mtime_ns) for path in files]",
        "0, 0) for path in files]",
        READY_MADE,
    ),
    Mutant(
        "token export: a document that spans two parts is cut",
        "llmtrain/export/token_export.py",
        "lengths = np.diff(ends, prepend=-self._open)",
        "lengths = np.diff(ends, prepend=0)",
        READY_MADE,
    ),
    Mutant(
        "token export: large ids are wrapped around",
        "llmtrain/export/token_export.py",
        'if kind == "nanogpt" and vocab_size > LARGEST_UINT16:',
        'if kind == "nanogpt" and vocab_size > 2 * LARGEST_UINT16:',
        READY_MADE,
    ),
    Mutant(
        "sentencepiece: no space before a text that begins with one",
        "llmtrain/data/sentencepiece_model.py",
        "steps.append(normalizers.Prepend(SPACE))",
        'steps.append(normalizers.Replace(Regex(f"^(?!{SPACE})"), SPACE))',
        SENTENCEPIECE,
    ),
    Mutant(
        "sentencepiece: merges in the order of ids",
        "llmtrain/data/sentencepiece_model.py",
        "for piece in sorted(score, key=lambda piece: -score[piece])",
        "for piece in sorted(score)",
        SENTENCEPIECE,
    ),
    Mutant(
        "sentencepiece: a special piece is found in a text",
        "llmtrain/data/sentencepiece_model.py",
        "    if not is_bpe:\n",
        "    if not special:\n",
        SENTENCEPIECE,
    ),
    Mutant(
        "tokenizer: the model is not kept",
        "llmtrain/data/tokenizer.py",
        "if new.model is not None:",
        "if new.model is None:",
        SENTENCEPIECE,
    ),
    Mutant(
        "tokenizer: no text shows that its settings are of the right kinds",
        "llmtrain/data/tokenizer.py",
        "            if try_out:",
        "            if False:",
        ("tests/unit/test_wrong_files.py",),
    ),
    Mutant(
        "tokenizer: a damaged one is described in Python's words",
        "llmtrain/data/tokenizer.py",
        "raise error(reason(caught)) from None",
        "raise error(first_line(caught)) from None",
        ("tests/unit/test_pretrained.py",),
    ),
    Mutant(
        "tokenizer: a larger sample is the same tokenizer",
        "llmtrain/data/prepare.py",
        'identity["tokenizer_sample_bytes"] = sample',
        "pass",
        SENTENCEPIECE,
    ),
    Mutant(
        "token files: which of them are held out is not part of a folder's name",
        "llmtrain/data/prepare.py",
        '        identity["validation_files"] = len(ready_made.validation)',
        "        pass",
        ("tests/unit/test_data_ready_made.py",),
    ),
]
