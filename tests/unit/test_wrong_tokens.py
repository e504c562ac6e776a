"""Tests of wrong token files and SentencePiece models: each is named in one line, with exit code 2."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.in_process import run_here
from tests.unit.test_wrong_files import assert_refused
from tests.unit.token_file_writers import EOS, write_llm_c, write_megatron, write_tokenizer

IDS = np.tile(np.r_[0, 1, 2, 3, EOS], 400)
Files = dict[str, bytes]


def tokens(dtype: str = "<u2", ids: np.ndarray = IDS) -> bytes:
    return ids.astype(dtype).tobytes()


def llm_c(**header: int) -> Callable[[Path], None]:
    return lambda path: write_llm_c(path, IDS, **header)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def changed_index(start: int, raw: bytes) -> Callable[[Path], None]:
    """Return a function that writes a Megatron dataset and replaces bytes of its `.idx`."""

    def write(path: Path) -> None:
        write_megatron(path, IDS, "<u2")
        index = path.with_suffix(".idx")
        old = index.read_bytes()
        index.write_bytes(old[:start] + raw + old[start + len(raw) :])

    return write


def cut(ending: str, count: int) -> Callable[[Path], None]:
    """Return a function that writes a Megatron dataset and cuts bytes off one of its files."""

    def write(path: Path) -> None:
        write_megatron(path, IDS, "<u2")
        path.with_suffix(ending).write_bytes(path.with_suffix(ending).read_bytes()[:-count])

    return write


SIZES = 34
POINTERS = SIZES + 4 * 400
READY_MADE: list[tuple[str, bytes | Callable[[Path], None], str]] = [
    ("a.bin", b"", "a.bin: an empty file; expected tokens"),
    ("a.bin", tokens()[:-1], "a.bin: 3,999 bytes, an odd number; uint16 tokens take 2 bytes each"),
    (
        "a.bin",
        b"Once upon a time there was a text.\n" * 99,
        "a.bin: text, expected tokens; give it a name that ends in .txt",
    ),
    ("a.bin", "Ein böser Text. ".encode() * 999, "a.bin: text, expected tokens"),
    ("a.bin", tokens(ids=IDS * 9), r"a.bin: token 1 is 9, but data.tokenizer=\S+ has 7 tokens; name the tokenizer"),
    ("a.bin", tokens(ids=IDS % 6), "no eos token where validation documents could begin; give data.validation"),
    ("a.bin", tokens(ids=IDS[:5]), "no eos token where validation documents could begin"),
    ("a.bin", llm_c(magic=20240521), "a.bin: a header with the magic number 20240521; expected 20240520 or 20240801"),
    ("a.bin", llm_c(magic=20240522), "a.bin: llm.c's questions and answers"),
    ("a.bin", llm_c(version=2), r"a.bin: llm.c's version 2 .magic 20240520.; expected version 1"),
    ("a.bin", llm_c(tokens=2001), "a.bin: 5,024 bytes found, 5,026 expected for the 2,001 tokens in its header"),
    ("a.bin", llm_c(tokens=-1), "a.bin: 5,024 bytes found, .* expected for the -1 tokens"),
    (
        "a.bin",
        cut(".idx", 1),
        "a.idx: 8,041 bytes found, 8,042 expected for 400 sequences and 401 document borders; copy",
    ),
    ("a.bin", cut(".idx", 8020), "a.idx: truncated, 22 bytes found; copy a.idx and a.bin again"),
    ("a.bin", cut(".idx", 8042), "a.idx: not an index of Megatron, which begins with MMIDIDX"),
    ("a.bin", cut(".bin", 2), "a.bin: 3,998 bytes found, 4,000 expected by a.idx; copy a.idx and a.bin again"),
    ("a.bin", cut(".bin", 4000), "a.bin: no tokens"),
    ("a.bin", changed_index(0, b"TNTIDX"), "a.idx: not an index of Megatron"),
    ("a.bin", changed_index(9, struct.pack("<Q", 2)), "a.idx: Megatron's version 2; expected version 1"),
    ("a.bin", changed_index(17, b"\7"), "a.idx: dtype code 7, which is not an integer type"),
    ("a.bin", changed_index(17, b"\4"), "a.idx: its sequences do not follow one another"),
    ("a.bin", changed_index(SIZES, struct.pack("<i", 6)), "a.idx: its sequences do not follow one another"),
    ("a.bin", changed_index(SIZES, struct.pack("<i", -5)), "a.idx: its sequences do not follow one another"),
    ("a.bin", changed_index(POINTERS + 8, struct.pack("<q", 11)), "a.idx: its sequences do not follow one another"),
    ("a.bin", changed_index(8034, struct.pack("<q", 399)), "a.idx: its documents do not span its 400 sequences"),
    ("a.idx", b"MMIDIDX\0\0", "a.bin: can't be read .No such file or directory"),
    ("a.npy", b"", "a.npy: not an .npy file"),
    ("a.npy", b"text" * 99, "a.npy: not an .npy file"),
    ("a.npy", npy(IDS)[:-8], "a.npy: not an .npy file"),
    ("a.npy", npy(IDS.reshape(2, -1)), "a.npy: an array of int64 with 2 dimensions; expected one dimension of uint16"),
    ("a.npy", npy(IDS.astype(float)), "a.npy: an array of float64 with 1 dimensions; expected one dimension of uint16"),
    ("a.npy", npy(IDS[:0]), "a.npy: an array without elements"),
    ("a.npy", npy(np.r_[IDS, -1]), "a.npy: token 2,000 is -1, but data.tokenizer="),
    ("a.npy", npy(np.array(["a"], dtype=object)), "a.npy: not an .npy file"),
    ("*.bin", b"", r"\*.bin: no file matches this pattern"),
]
"""Cases: a file's name, its content or a function that writes it, and a pattern of the message."""

BIN = {"a.bin": tokens()}
COMBINED: list[tuple[str, Files, str]] = [
    ("data.source={f}", BIN | {"b.npy": npy(IDS)}, "a.bin is of the kind nanogpt and b.npy of the kind npy"),
    ("data.source={f}/a.bin data.tokenizer=train:300", BIN, "is tokens already; name the tokenizer that made them"),
    (
        "data.sources=[{{source: {f}/b.txt}},{{source: {f}/a.bin}}] data.tokenizer=train:300",
        BIN | {"b.txt": b" ".join(b"word %d<|endoftext|>" % n for n in range(2000))},
        r"data.sources\[1\].source=\S+a.bin is tokens already; name the tokenizer that made them",
    ),
    (
        "data.source={f}/a.bin data.validation={f}/b.txt",
        BIN | {"b.txt": b"b"},
        "b.txt: not token files, but data.source",
    ),
    ("data.source={f}/b.txt data.validation={f}/a.bin", BIN | {"b.txt": b"b"}, "a.bin: token files, but data.source"),
    ("data.source=stories data.validation={f}/a.bin", BIN, "token files, but data.source=stories is text"),
    (
        "data.source={f}/a.bin data.validation={f}/b.bin",
        BIN | {"b.bin": b""},
        "data.validation: .*b.bin: an empty file",
    ),
    ("data.source={f}/a.bin data.tokenizer={f}/none", BIN, "none' is neither a file or folder here"),
    ("data.source={f}/a.bin eval.sets={{x: {f}/b.bin}}", BIN | {"b.bin": b"a\0\0"}, "b.bin: 3 bytes, an odd number"),
    (
        "data.source={f}/a.npy train.document_mask=true data.validation={f}/b.npy",
        {"a.npy": npy(IDS % 6), "b.npy": npy(IDS % 6)},
        "train.document_mask: .*a.npy: documents are not separated: the eos token <eos>",
    ),
    ("data.source={f}/a.bin data.tokenizer={f}/m.model", BIN | {"m.model": b"junk" * 99}, "not a SentencePiece model"),
    (
        "data.source={f}/a.bin data.tokenizer={f}/m.model",
        BIN | {"m.model": b""},
        "not a SentencePiece model, or damaged",
    ),
]
"""Cases: keys, the files that they name, and a pattern of the message."""


def prepare(folder: Path, *keys: str) -> list[str]:
    write_tokenizer(folder / "given")
    given = [
        f"data.cache_dir={folder / 'data'}",
        f"data.tokenizer={folder / 'given'}",
        "train.sequence_length=64",
        "eval.tokens=64",
    ]
    return ["prepare", "quickstart", *given, "data.validation_fraction=0.1", *keys]


@pytest.mark.parametrize(
    ("name", "content", "pattern"), READY_MADE, ids=lambda value: str(value)[:30].replace("\0", "0")
)
def test_a_wrong_token_file_is_refused(
    tmp_path: Path, name: str, content: bytes | Callable[[Path], None], pattern: str
) -> None:
    path = tmp_path / name
    if callable(content):
        content(path)
    elif "*" not in name:
        path.write_bytes(content)
    assert_refused(prepare(tmp_path, f"data.source={path}"), pattern)
    assert not list((tmp_path / "data").glob("*/index.json")), "a folder that can't be used is left"


@pytest.mark.parametrize(("keys", "files", "pattern"), COMBINED, ids=lambda value: str(value)[:60].replace("\0", "0"))
def test_a_wrong_combination_is_refused(tmp_path: Path, keys: str, files: Files, pattern: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    words = keys.format(f=tmp_path).replace(": ", ":\x1f").split(" ")
    assert_refused(prepare(tmp_path, *(word.replace("\x1f", " ") for word in words)), pattern)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ("--export {f}/out", "--format is missing, expected nanogpt, llm.c, megatron or npy"),
        ("--export {f}/out --format bin", "--format is bin, expected nanogpt, llm.c, megatron or npy"),
        ("--format npy", "--format is for --export; add --export FOLDER"),
        ("--export {f}/a.bin --format npy", "a.bin exists and is not exported tokens; choose another folder"),
        ("--export {f} --format npy", "exists and is not exported tokens; choose another folder"),
        ("--export {f}/data --format npy", "/data contains data.cache_dir=.*; choose another folder for one of them"),
    ],
)
def test_a_wrong_export_is_refused(tmp_path: Path, options: str, pattern: str) -> None:
    (tmp_path / "a.bin").write_bytes(tokens())
    command = [*prepare(tmp_path, f"data.source={tmp_path / 'a.bin'}"), *options.format(f=tmp_path).split()]
    assert_refused(command, pattern)
    assert (tmp_path / "a.bin").read_bytes() == tokens() and not (tmp_path / "out").exists()


def test_tokens_are_exported_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.bin").write_bytes(tokens())
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    code, output = run_here(
        [*prepare(tmp_path, f"data.source={tmp_path / 'a.bin'}"), "--export", ".", "--format", "npy"]
    )
    assert code == 0 and f"{tmp_path}/here is a new folder" in output, output
    assert {path.name for path in (tmp_path / "here").iterdir()} >= {"train.npy", "tokens.json"}
