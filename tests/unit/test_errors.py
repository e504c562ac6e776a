"""Tests of the end of a failed command: its exit code, and which rank prints the error."""

from __future__ import annotations

import pytest

from llmtrain.errors import DataError, TrainingError, UnavailableError, exit_with_status
from tests.mother import session
from tests.unit import processes


def ended(message: str, on_gpu: bool) -> tuple[int, str]:
    """Return the exit code and the output of a process that fails, or that ends if `message` is empty."""
    process = session().fork(processes.end, message, on_gpu, capture=True)
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
    """At a normal exit, the interpreter would wait for a thread that never ends."""
    found, output = ended(message, on_gpu=True)
    assert found == code and output.startswith(said)


def test_a_complete_run_does_not_wait_for_its_gpu() -> None:
    assert ended("", on_gpu=True) == (0, "complete\n")


def test_without_a_gpu_the_interpreter_ends_in_order() -> None:
    code, output = ended("CUDA out of memory", on_gpu=False)
    assert code == 1
    assert "RuntimeError: CUDA out of memory" in output and output.endswith("the thread has ended\n")
    assert "it went on" not in output


@pytest.mark.parametrize(("error", "code"), [(DataError, 2), (UnavailableError, 1), (TrainingError, 1)])
def test_what_may_work_later_ends_with_the_code_that_is_tried_again(error: type[Exception], code: int) -> None:
    def fail() -> None:
        raise error("no text")

    with pytest.raises(SystemExit) as left:
        exit_with_status(fail)
    assert left.value.code == code


@pytest.mark.parametrize(
    ("variables", "speaks"),
    [
        ({}, True),
        ({"SLURM_LOCALID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, True),
        ({"SLURM_LOCALID": "1", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, False),
    ],
)
def test_a_rank_speaks_for_its_host_if_it_is_the_first_by_all_launchers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, variables: dict[str, str], speaks: bool
) -> None:
    for name in ("RANK", "LOCAL_RANK", "SLURM_LOCALID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"LOCAL_RANK": "0", **variables}.items():
        monkeypatch.setenv(name, value)

    def fail() -> None:
        raise DataError("no data")

    with pytest.raises(SystemExit) as left:
        exit_with_status(fail)
    assert left.value.code == 2
    assert capsys.readouterr().err == ("error: no data\n" if speaks else "")
