"""Emulation of CUDA for machines without a GPU: tensors that torch takes for a GPU's, in this machine's memory.

With it, tests run code that otherwise runs only on CUDA: branches on the device, streams and events, offloading, and process
groups for tensors of both devices. Results must be those of the CPU to the last bit, because the kernels are the CPU's own.

- `hooks.cpp`    makes torch believe that there are GPUs
- `device.cpp`   memory and operations of tensors on GPUs. A CPU tensor among an operation's tensors is an error, as on a GPU
- `groups.cpp`   NCCL and gloo as they are with GPUs: NCCL takes no CPU tensors, and gloo has few collectives for GPU tensors
- `as_cuda.py`   the names in `torch.cuda`
- `streams.py`   streams and events. They order nothing, but know when they would be done, and report to listeners
- `races.py`     torch's search for data races, as a listener of the streams
- `build.py`     compiles the emulation
- `path/`        gives GPUs to every Python process that has it first in PYTHONPATH

The emulation cannot show speed, memory that is really scarce, kernels of CUDA and Triton, and NCCL's own failures.
"""
