"""Module that Python imports first. It gives the process GPUs if EMULATED_GPU is the folder that `build` has made."""

import os

if "EMULATED_GPU" in os.environ:
    from tests.emulated_gpu import as_cuda

    as_cuda.install()
