"""Random changes to values, files and folders, and the check that a command ends well on them."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.in_process import error_lines, run_here

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 0.5, -0.0, 1e308, 10**30, "", "x", "nan", "inf", "1e9", "null", "auto", "~nobody", "a: b",
    "\u2028", "ü" * 300, "${run.name}", "${oc.env:HOME}", "!!python/object:os.system", [], [1, [2]], {}, {"kind": "x"}, {"": 1},
    "\u00b2", "../..", "/", float("nan"), [[]], "1,2", "-", "--", "=",
)  # fmt: skip
OF_A_LIBRARY = re.compile(
    r"NoneType|object has no attribute|unexpected keyword|not subscriptable|enforce fail|<class '|unhashable type|must be real number|"
    r"object is not|unsupported operand|TypeError|KeyError|INTERNAL:"
)
"""Words that occur in messages of the interpreter or of a library, and in none of llmtrain's."""


class Finding(AssertionError):
    """An input on which a command ended badly."""


def ends_well(arguments: list[str] | Callable[[], object], what: str) -> int:
    """Run a command, or a function as if it were one, in this process, and return the exit code.

    Raises Finding for a traceback, a hang, an unknown exit code, a failure without exactly one error line, or a
    library's message.
    """
    code, output = run_here(arguments)
    if problem := problem_of(code, output):
        raise Finding(f"{problem} (exit code {code}): {what}\n{output[-3000:]}")
    return code


def problem_of(code: int | None, output: str) -> str | None:
    """Return the name of what is wrong with a command's exit code or output, or None."""
    said = error_lines(output)
    is_so = {
        "hang": code is None,
        "traceback": "Traceback" in output,
        "exit code": code not in (0, 1, 2, 3),
        "silence": bool(code) and len(said) != 1 and not output.lstrip().startswith("Usage: "),
        "library's message": any(OF_A_LIBRARY.search(line) for line in said),
    }
    return next((name for name, is_true in is_so.items() if is_true), None)


def mutate(value: Any, draw: random.Random) -> Any:
    """Return a copy of nested values with one value changed, removed or renamed."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        inner = dict(value)
        match draw.randrange(12):
            case 0:
                del inner[key]
            case 1:
                inner[draw.choice(["", "kind", f"{key}s", str(key)[:-1]])] = inner.pop(key)
            case _:
                inner[key] = mutate(value[key], draw)
        return inner
    if isinstance(value, list) and value and draw.random() < 0.6:
        index = draw.randrange(len(value))
        return [*value[:index], mutate(value[index], draw), *value[index + 1 :]]
    return draw.choice(ODD)


def damage(path: Path, draw: random.Random) -> None:
    """Truncate a file, change or insert bytes, or replace all bytes. In JSON, a value may be changed instead."""
    content = bytearray(path.read_bytes())
    if path.suffix in (".json", ".jsonl") and draw.random() < 0.5:
        path.write_text(_other_json(content.decode(errors="replace"), path.suffix == ".jsonl", draw))
        return
    at = draw.randrange(len(content) + 1)
    match draw.randrange(5):
        case 0:
            del content[at:]
        case 1:
            content[at : at + draw.randrange(1, 9)] = draw.randbytes(draw.randrange(9))
        case 2:
            content[at:at] = draw.choice([b"{", b"]", b'"', b"\x00", b"\xff\xfe", b"\n\n", b"NaN", b"1e999"])
        case 3:
            content = bytearray(draw.randbytes(40))
        case 4:
            if content:
                content[at % len(content)] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _other_json(text: str, has_lines: bool, draw: random.Random) -> str:
    lines = text.splitlines() if has_lines else [text]
    at = draw.randrange(len(lines) or 1)
    with contextlib.suppress(ValueError, IndexError):
        lines[at] = json.dumps(mutate(json.loads(lines[at]), draw))
    return "\n".join(lines) + "\n" * has_lines


def spoil(folder: Path, draw: random.Random) -> str:
    """Damage or remove a file in a folder, or replace it by a folder, a dangling link or another file. Return which."""
    files = [
        path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".lock" and path.stat().st_size
    ]
    path = draw.choice(files)
    kind = draw.choice(["damaged"] * 6 + ["removed", "empty", "a folder", "a dangling link", "swapped"])
    if kind == "damaged":
        damage(path, draw)
    elif kind == "swapped":
        other = draw.choice(files)
        path.write_bytes(other.read_bytes() if other != path else b"")
        kind += f" with {other.name}"
    else:
        path.unlink()
    if kind == "empty":
        path.touch()
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a dangling link":
        path.symlink_to(folder / "nowhere")
    return f"{path.relative_to(folder)} is {kind}"
