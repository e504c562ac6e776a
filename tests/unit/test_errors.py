"""How a command ends that has failed."""

from __future__ import annotations

import pytest

from tests.mother import session
from tests.unit import processes


def ended(message: str, on_gpu: bool) -> tuple[int, str]:
    """Return the exit code and the output of a process that fails."""
    process = session().fork(processes.fail, message, on_gpu, capture=True)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


@pytest.mark.parametrize(
    ("message", "code", "said"),
    [
        ("no peer", 1, "error: no peer\n"),
        ("no file", 2, "error: no file\n"),
        ("CUDA out of memory", 1, "Traceback"),
    ],
)
def test_a_rank_that_fails_alone_says_why_and_does_not_wait_for_its_gpu(message: str, code: int, said: str) -> None:
    """The interpreter would wait for the thread, which never ends."""
    found, output = ended(message, on_gpu=True)
    assert found == code and output.startswith(said)


def test_without_a_gpu_the_interpreter_ends_in_order() -> None:
    code, output = ended("CUDA out of memory", on_gpu=False)
    assert code == 1
    assert "RuntimeError: CUDA out of memory" in output and output.endswith("the thread has ended\n")
    assert "it went on" not in output
