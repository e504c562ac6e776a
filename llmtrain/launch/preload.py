"""Imports of the process from which ranks are forked (`rank_server`). They run when this module is imported."""

import signal

from llmtrain.startup import imports_without_gc

# A scheduler signals every process of a job. Ranks and the launcher handle it; this process must outlive them.
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)

with imports_without_gc():
    import torch.utils.tensorboard  # noqa: F401

    import llmtrain.train.run  # noqa: F401
