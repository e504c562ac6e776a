"""Python runs this first: with EMULATED_GPU set to what `build` made, this process has GPUs."""

import os

if "EMULATED_GPU" in os.environ:
    from tests.emulated_gpu import as_cuda

    as_cuda.install()
