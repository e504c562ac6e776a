"""How a command ends that has failed."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

FAILING = """
import os, sys, threading, time
sys.path.insert(0, {root!r})
from llmtrain.errors import DataError, TrainingError, leave_with_code
import torch
torch.cuda.is_initialized = lambda: {on_gpu}

def wait_for_others():  # as an interpreter does that ends while its GPU is in a collective
    time.sleep({waits})

def fail():
    threading.Thread(target=wait_for_others).start()
    raise {error}

leave_with_code(fail)
"""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("TrainingError('no peer')", 1, "error: no peer"),
        ("DataError('no file')", 2, "error: no file"),
        ("RuntimeError('CUDA out of memory')", 1, "Traceback"),
    ],
)
def test_a_rank_that_fails_alone_says_why_and_does_not_wait_for_its_gpu(request, error, code, said):
    """The interpreter would wait for the thread, for longer than the test may take."""
    script = textwrap.dedent(FAILING).format(root=str(request.config.rootpath), on_gpu=True, waits=600, error=error)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    assert said in done.stderr


def test_without_a_gpu_the_interpreter_ends_in_order(request):
    error = "RuntimeError('anything')"
    script = textwrap.dedent(FAILING).format(root=str(request.config.rootpath), on_gpu=False, waits=0.1, error=error)
    script += "\nraise AssertionError"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "RuntimeError: anything" in done.stderr and "AssertionError" not in done.stderr
