"""`llmtrain launch` with ranks one of which breaks: PHASE SIGNAL RANK FILE RECIPE KEY=VALUE... (`broken_rank`)."""

from __future__ import annotations

import sys
from pathlib import Path

from llmtrain.errors import leave_with_code
from llmtrain.launch import torchrun

if __name__ == "__main__":
    torchrun.PROGRAM = ("-m", "tests.chaos.broken_rank", *sys.argv[1:5])
    leave_with_code(lambda: sys.exit(torchrun.launch_torchrun(Path(sys.argv[5]), sys.argv[6:])))
