"""Pinned packages of `data.source: python`. Write them with `python -m docs.python_packages` after constraints.txt has changed,
in an environment with its versions and torch for CPUs.

They are llmtrain's direct and indirect requirements on a CPU. llmtrain itself and packages that only torch's CUDA version needs
are not among them.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from llmtrain.data.python_files import LIBRARY, PINNED, package_named

REQUIREMENTS = Path(__file__).parents[1] / "requirements.txt"
CUDA = ("nvidia-", "cuda-", "triton")
"""Prefixes of the names of packages that are not needed on a CPU."""
HEADER = """\
# Packages of `data.source: python`, written by `python -m docs.python_packages`: version, files, bytes, and a
# digest of the files' names, sizes and recorded digests. `python` is the standard library.
"""


def required_packages() -> list[str]:
    """Return the sorted names of the installed packages that requirements.txt needs, directly or indirectly."""
    lines = [line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines()]
    missing = [Requirement(line) for line in lines if line]
    wanted: dict[str, set[str]] = {}
    while missing:
        requirement = missing.pop()
        name, extras = canonicalize_name(requirement.name), requirement.extras
        if name.startswith(CUDA) or (name in wanted and extras <= wanted[name]):
            continue
        try:
            further = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:
            continue
        wanted[name] = wanted.get(name, set()) | extras
        missing += [
            other
            for other in further
            if other.marker is None or any(other.marker.evaluate({"extra": extra}) for extra in ("", *extras))
        ]
    return sorted(wanted)


def write() -> None:
    """Write the list from the packages that are installed here."""
    found = [package_named(name) for name in sorted([*required_packages(), LIBRARY])]
    lines = [str(package.record) for package in found if package is not None and package.files]
    PINNED.write_text(HEADER + "\n".join(lines) + "\n")


if __name__ == "__main__":
    write()
