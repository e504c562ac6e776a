"""CUDA for machines without a GPU: tensors that torch takes for a GPU's, in this machine's memory.

What runs on CUDA, and nowhere else, is so run by tests: branches on the device, streams and events, offloading, process
groups for tensors of two kinds. Results must be those of the CPU to the last bit, since kernels are the CPU's own.

- `hooks.cpp`    lets torch believe that there are GPUs
- `device.cpp`   memory and operations of tensors on them. A tensor of the CPU among an operation's is an error, as it is there
- `groups.cpp`   NCCL and gloo as they are with GPUs: the one takes nothing of the CPU's, the other little of a GPU's
- `as_cuda.py`   the names of `torch.cuda`
- `streams.py`   its streams and events, which order nothing, but know when they would be done and can be listened to
- `build.py`     compiles all that
- `path/`        put in front of PYTHONPATH, it makes any Python process one with GPUs

What it can't show: speed, memory that is really scarce, kernels of CUDA and Triton, NCCL's own failures.
"""
