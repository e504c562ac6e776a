"""Python files as text: those of the standard library (`stdlib`), or those and the pinned packages' (`python`).

`python_packages.txt` pins the direct and indirect requirements of `llmtrain`, with the tested version and a digest of each
package. Every installation of llmtrain has these packages, and other installed packages do not change the text. A package
in another version than the pinned one is read as well; `PythonText.line` and the record in the folder of the tokens name
it. Tests are left out, in packages as in the standard library. docs/python_packages.py writes the list.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from llmtrain.errors import DataError

STDLIB, PYTHON = "stdlib", "python"
"""Values of `data.source`."""
PINNED = Path(__file__).with_name("python_packages.txt")
"""File that names the pinned packages, in the format of `PythonText.record`."""
LIBRARY = "python"
"""Name of the standard library in the list of packages."""
TESTS = {"test", "tests", "idle_test"}
"""Names of folders to skip: tests."""
NOT_STDLIB = {*TESTS, "site-packages", "dist-packages", "__pycache__"}
"""Names of folders to skip in the standard library: also third-party packages and bytecode caches."""


class PackageRecord(NamedTuple):
    """A line of a record, which identifies the Python files of one package."""

    name: str
    version: str
    files: int
    bytes: int
    digest: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version} {self.files} {self.bytes} {self.digest}"

    @classmethod
    def parse(cls, line: str) -> PackageRecord:
        """Return the record that a line holds."""
        package, files, size, digest = line.split()
        name, _, version = package.partition("==")
        return cls(name, version, int(files), int(size), digest)


class PythonFile(NamedTuple):
    """A file of a package, with the digest that the installer recorded."""

    name: str
    """Path inside the package's folder, the same on every machine."""
    path: Path
    bytes: int
    recorded: str
    """Digest of the content that the installer recorded; empty if it recorded none."""


@dataclass(frozen=True)
class Package:
    """An installed package and its Python files without tests."""

    name: str
    version: str
    files: tuple[PythonFile, ...]

    @property
    def record(self) -> PackageRecord:
        """Return the size and digest of the files. The digest covers names, sizes and recorded digests, so that no file
        is read. It does not change with an edit in place that keeps a file's size."""
        lines = "\n".join(f"{file.name} {file.bytes} {file.recorded}" for file in self.files)
        digest = hashlib.blake2b(lines.encode(), digest_size=8).hexdigest()
        return PackageRecord(self.name, self.version, len(self.files), sum(file.bytes for file in self.files), digest)


class PythonText:
    """Text of `data.source: python`: the files of those pinned packages that are installed on this machine."""

    def __init__(self, pinned: Path = PINNED) -> None:
        lines = pinned.read_text(encoding="utf-8").splitlines()
        self.pinned = [PackageRecord.parse(line) for line in lines if not line.startswith("#")]
        found = [package_named(record.name) for record in self.pinned]
        self.packages = [package for package in found if package is not None and package.files]

    @cached_property
    def records(self) -> list[PackageRecord]:
        """Return the records of the packages that are read, in the order of their names."""
        return [package.record for package in self.packages]

    @property
    def record(self) -> str:
        """Return the packages that are read: one per line, with version, number of files, bytes and digest."""
        return "\n".join(map(str, self.records)) + "\n"

    def line(self, fraction: float) -> str:
        """Return one line that says which text this is, how it differs from the pinned one, and what is held out."""
        digest = hashlib.blake2b(self.record.encode(), digest_size=4).hexdigest()
        here = {record.name: record for record in self.records}
        differences = [
            f"{pin.name} {difference}" for pin in self.pinned if (difference := _difference(here.get(pin.name), pin))
        ]
        validation = self.validation_packages(fraction)
        return (
            f"python: {sum(record.files for record in self.records):,} files of {len(self.records)} packages, "
            f"{sum(record.bytes for record in self.records) / 1e6:.1f} MB, digest {digest}; "
            f"{'not as pinned: ' + ', '.join(differences) if differences else 'as pinned'}; "
            f"validation: {', '.join(sorted(validation & here.keys())) or 'none'}"
        )

    def validation_packages(self, fraction: float) -> set[str]:
        """Return the names of the packages held out for validation. The packages are considered in the order of a hash
        of their names, and each one that still fits into `fraction` of the pinned bytes is chosen. Installed versions
        do not matter, so that every machine holds out the same packages."""
        room = fraction * sum(pin.bytes for pin in self.pinned)
        chosen = set()
        for pin in sorted(self.pinned, key=lambda pin: _name_hash(pin.name)):
            if pin.bytes <= room:
                chosen.add(pin.name)
                room -= pin.bytes
        return chosen

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield (package name, text) of each file, in an order that mixes the packages. Files that are blank, not UTF-8 or
        equal to an earlier one are left out. Raises DataError if no package is installed or a file can't be read."""
        if not self.packages:
            raise DataError(f"data.source: {PYTHON}: no package of {PINNED.name} is installed; use data.source=stories")
        files = [(package.name, file) for package in self.packages for file in package.files]
        seen: set[bytes] = set()
        for name, file in sorted(files, key=lambda pair: _name_hash(f"{pair[0]}/{pair[1].name}")):
            text = _text(file.path)
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if text and digest not in seen:
                seen.add(digest)
                yield name, text


@cache
def python_text() -> PythonText:
    """Return the text of `python`, looked up once per process."""
    return PythonText()


def package_named(name: str) -> Package | None:
    """Return an installed package, or the standard library for `LIBRARY`; None if it is not installed."""
    if name == LIBRARY:
        root = stdlib_root()
        files = (
            PythonFile(path.relative_to(root).as_posix(), path, path.stat().st_size, "") for path in stdlib_files()
        )
        return Package(name, platform.python_version(), tuple(files))
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    return Package(name, found.version, tuple(sorted(_files_of(found))))


def stdlib_root() -> Path:
    """Return the folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_files() -> list[Path]:
    """Return the standard library's Python files without tests, sorted."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(stdlib_root()):
        subfolders[:] = [name for name in subfolders if name not in NOT_STDLIB]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found)


def read_stdlib() -> Iterator[str]:
    """Yield the text of each file of the standard library. Files that are blank or not UTF-8 are left out. Raises DataError if
    there are no files or one can't be read."""
    files = stdlib_files()
    if not files:
        raise DataError(f"data.source: {STDLIB}: no .py files in {stdlib_root()}; use data.source=/path/to/files")
    for path in files:
        if text := _text(path):
            yield text


def _files_of(found: Distribution) -> Iterator[PythonFile]:
    for file in found.files or ():
        # a script that pip installed (`../../bin`) is not the package's source, and a recorded file may be deleted
        if file.suffix == ".py" and not {"..", *TESTS} & set(file.parts) and os.path.isfile(path := file.locate()):
            recorded = f"{file.hash.mode}={file.hash.value}" if file.hash else ""
            yield PythonFile(file.as_posix(), Path(path), os.path.getsize(path), recorded)


def _text(path: Path) -> str:
    """Return a file's text, or an empty one if the file is blank or not UTF-8. A few files declare another encoding."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror}); look at its permissions and its disk") from None
    return "" if text.isspace() else text


def _name_hash(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()


def _difference(here: PackageRecord | None, pinned: PackageRecord) -> str:
    if here is None:
        return "is missing"
    if here.version != pinned.version:
        return f"{here.version} instead of {pinned.version}"
    return "" if here.digest == pinned.digest else f"{here.version} with other files"
