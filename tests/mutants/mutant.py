"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCENARIOS = (
    "tests/distributed/test_sync_oracle.py",
    "tests/distributed/test_methods_oracle.py",
    "tests/distributed/test_sync_equivalences.py",
    "tests/distributed/test_methods_equivalences.py",
)
"""Methods on made-up gradients, beside an oracle in fp64 and beside one another."""
RESUMED = ("tests/distributed/test_methods_resume.py", "tests/distributed/test_sync_oracle.py")
"""A resumed run beside an undisturbed one."""
WIRE = ("tests/unit/test_wire.py", "tests/distributed/test_comms_wire.py")
"""Messages that are rounded."""


@dataclass(frozen=True)
class Mutant:
    """A mistake that somebody could make, and tests that should see it."""

    name: str
    file: str
    old: str
    """What it changes; occurs once in the file."""
    new: str
    tests: tuple[str, ...]
    """Files or node ids, the quickest first."""
    equivalent: str = ""
    """Why no test can see it, where none can."""
    deep: str = ""
    """Why only tests marked `deep` see it, where that is so."""

    @property
    def area(self) -> str:
        """The part of llmtrain that it is in (`sync`, `train`, ...), or a module beside the parts."""
        return Path(self.file).with_suffix("").parts[1]
