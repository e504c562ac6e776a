"""Files for a GPU machine without a network: wheels in .whl/; text, a tokenizer, the commit and torchao in .gpu/.

    python benchmarks/gpu_pack.py --text train.txt --validation valid.txt --tokenizer gpt2
    make gpu-kit ARGS="--text train.txt --validation valid.txt --tokenizer gpt2"

The machine has torch 2.11 and transformers 5.17 with their requirements, but lacks some of llmtrain's. Git ignores both folders.
The script fails if the folders and the tree are together larger than `--limit`. `GPU_DAY.md` says how to use them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

from table import ROOT, commit, parser

WHEELS = (
    "pydantic==2.14.3",
    "pydantic_core==2.50.4",
    "annotated-types==0.8.0",
    "typing-inspection==0.4.5",
    "typing-extensions==4.16.0",
    "omegaconf==2.4.0",
    "liger-kernel==0.8.5",  # parallel.loss_kernel=liger
    "torchtitan==0.2.2",  # its model; later releases need torch 2.12
)
FLOAT8 = ("torchao==0.17.0",)
"""Package for the float8 row, built for torch 2.11. It is unpacked for that row alone: if it were installed, transformers would
import it, which starts CUDA, and forked processes could then not use the GPU."""
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux1")
MEBIBYTE = 2**20


def fetch(python: str, machine: str, wheels: Path, unpacked: Path) -> None:
    """Fill `wheels` with wheels for the given Python version and processor, and `unpacked` with the contents of FLOAT8's wheels.
    Raises SystemExit if a wheel cannot be downloaded."""
    platforms = [option for name in PLATFORMS for option in ("--platform", f"{name}_{machine}")]
    common = [
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        python,
        "--implementation",
        "cp",
        *platforms,
    ]
    for command, folder, names in (
        (["download", "-d", str(wheels)], wheels, WHEELS),
        (["install", "--no-compile", "--target", str(unpacked)], unpacked, FLOAT8),
    ):
        shutil.rmtree(folder, ignore_errors=True)
        if subprocess.run([sys.executable, "-m", "pip", *command, *common, *names]).returncode:
            raise SystemExit("not all wheels could be downloaded; see above")


def copy_text(options: Namespace, folder: Path) -> None:
    """Copy the texts and the tokenizer to the folder, under the names that `gpu_rows.py` expects."""
    (folder / "gpt2").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(options.text, folder / "train.txt")
    shutil.copyfile(options.validation, folder / "valid.txt")
    shutil.copyfile(options.tokenizer / "tokenizer.json", folder / "gpt2" / "tokenizer.json")


def tree() -> list[Path]:
    """Return the files that git tracks or does not ignore."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name]


def mebibytes(files: Iterable[Path]) -> float:
    """Return the total size of the files in MiB. Paths that are not files do not count."""
    return sum(file.stat().st_size for file in files if file.is_file()) / MEBIBYTE


def main() -> None:
    """Download and copy all files, and check their total size."""
    arguments = parser(__doc__)
    arguments.add_argument("--text", type=Path, required=True, help="training text, documents apart by <|endoftext|>")
    arguments.add_argument("--validation", type=Path, required=True, help="validation text")
    arguments.add_argument("--tokenizer", type=Path, required=True, help="folder with GPT-2's tokenizer.json")
    arguments.add_argument("--python", default="3.12", help="version of the other machine's Python")
    arguments.add_argument("--machine", default="x86_64", help="its processor")
    arguments.add_argument("--limit", type=float, default=64.0, help="MiB of the tree and both folders")
    options = arguments.parse_args()
    wheels, text = ROOT / ".whl", ROOT / ".gpu"
    fetch(options.python, options.machine, wheels, text / "float8")
    copy_text(options, text)
    (text / "commit").write_text(commit())
    sizes = {"tree": mebibytes(tree()), ".whl": mebibytes(wheels.iterdir()), ".gpu": mebibytes(text.rglob("*"))}
    print(", ".join(f"{name} {size:.1f} MiB" for name, size in sizes.items()))
    if sum(sizes.values()) > options.limit:
        raise SystemExit(f"together {sum(sizes.values()):.1f} MiB, but --limit is {options.limit:g}; give less text")


if __name__ == "__main__":
    main()
