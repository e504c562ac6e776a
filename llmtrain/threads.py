"""Background threads that use the GPU of the thread that starts them."""

from __future__ import annotations

from collections.abc import Callable

import torch


def with_current_device(work: Callable[[], None]) -> Callable[[], None]:
    """Return `work` bound to the current GPU, for execution in another thread.

    A new thread defaults to GPU 0, where its first CUDA call would take several hundred megabytes for each local rank.
    """
    if not torch.cuda.is_available():
        return work
    device = torch.cuda.current_device()

    def there() -> None:
        torch.cuda.set_device(device)
        work()

    return there
