#!/usr/bin/env bash
""":"
# Two programs in one file. Read by bash, as in
#     bash launch/train.sh recipes/quickstart.yaml run.name=mine
# it starts torchrun with one process per GPU (on a CPU: as many as the recipe's mesh needs; NPROC_PER_NODE overrides
# both). On several nodes, start it once on each, with NNODES, NODE_RANK and MASTER_ADDR (and MASTER_PORT, else 29400), or
# by srun --ntasks-per-node=1, which needs none of these. Read by Python, as DeepSpeed's launcher does in
#     deepspeed launch/train.sh recipes/edit_1b.yaml
# it is one rank, and this part is a string.
root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
python=python3
if [ -x "$root/.venv/bin/python" ] && [ -z "$VIRTUAL_ENV" ]; then python="$root/.venv/bin/python"; fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m llmtrain launch "$@"
":"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from llmtrain.cli import main

main(["train", *sys.argv[1:]])
