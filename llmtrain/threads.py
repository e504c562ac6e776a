"""Setup of background threads with the GPU of the thread that starts them."""

from __future__ import annotations

from collections.abc import Callable

import torch


def with_current_device(work: Callable[[], None]) -> Callable[[], None]:
    """Return `work` for another thread, bound to the current GPU.

    A new thread uses GPU 0, where the first CUDA call would take some hundred megabytes for every local rank.
    """
    if not torch.cuda.is_available():
        return work
    device = torch.cuda.current_device()

    def there() -> None:
        torch.cuda.set_device(device)
        work()

    return there
