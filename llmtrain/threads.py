"""What a thread beside training needs from the one that starts it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def with_current_device(work: Callable[[], None]) -> Callable[[], None]:
    """`work` for another thread, with this one's GPU. A new thread's is GPU 0, on which the first call of CUDA would take
    some hundred megabytes, once for every rank of the machine."""
    if not torch.cuda.is_available():
        return work
    device = torch.cuda.current_device()

    def there() -> None:
        torch.cuda.set_device(device)
        work()

    return there
