"""Mistakes in what is timed, and by whose clock."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DEVICE_TIME = ("tests/unit/test_device_time.py",)

MUTANTS = [
    Mutant(
        "times: the host's clock on a GPU",
        "llmtrain/parallel/device_time.py",
        'self._on_gpu = device is not None and device.type == "cuda"',
        "self._on_gpu = False",
        DEVICE_TIME,
    ),
    Mutant(
        "times: the host waits for the end of each section",
        "llmtrain/parallel/device_time.py",
        "        if len(self._pending) > MAX_PENDING:\n",
        "        if self._pending:\n",
        DEVICE_TIME,
    ),
    Mutant(
        "times: no limit of events that have not been read",
        "llmtrain/parallel/device_time.py",
        "            self._pending[0][1].synchronize()",
        "            pass",
        DEVICE_TIME,
    ),
    Mutant(
        "times: events are not used again",
        "llmtrain/parallel/device_time.py",
        "            self._spare += start, end\n",
        "",
        DEVICE_TIME,
    ),
    Mutant(
        "times: sections before a checkpoint was loaded are counted",
        "llmtrain/parallel/device_time.py",
        "        self._pending.clear()\n",
        "",
        DEVICE_TIME,
    ),
    Mutant(
        "times: synchronization is timed on the host",
        "llmtrain/sync/block_sync.py",
        "SyncStats(replica_comms.training_device)",
        "SyncStats()",
        DEVICE_TIME,
    ),
    Mutant(
        "times: the averaging of gradients is timed on the host",
        "llmtrain/parallel/torch_engine.py",
        "self.gradient_wait = DeviceTimer(mesh.device)",
        "self.gradient_wait = DeviceTimer()",
        ("tests/emulated_gpu/test_training.py",),
        deep="an engine on a GPU needs the emulation, which is built for a minute",
    ),
    Mutant(
        "times: messages are timed on the device that sends them",
        "llmtrain/parallel/comms.py",
        "self.traffic = Traffic(self.training_device)",
        "self.traffic = Traffic(self.device)",
        DEVICE_TIME,
    ),
    Mutant(
        "times: a message of NCCL ends when it is enqueued",
        "llmtrain/parallel/comms.py",
        'return trace.message(what, sent, self.device.type == "cuda")',
        "return trace.message(what, sent)",
        DEVICE_TIME,
    ),
    Mutant(
        "times: a message of gloo begins when the stream has done its work",
        "llmtrain/parallel/comms.py",
        'return trace.message(what, sent, self.device.type == "cuda")',
        'return trace.message(what, sent, self.training_device.type == "cuda")',
        DEVICE_TIME,
    ),
    Mutant(
        "times: a timeline's origin waits for training",
        "llmtrain/parallel/device_time.py",
        "origin.record(torch.cuda.Stream())",
        "origin.record()",
        DEVICE_TIME,
    ),
    Mutant(
        "times: a span of the device is not written before the end",
        "llmtrain/trace.py",
        "        _recording.step = step\n        _recording.write_known()\n",
        "        _recording.step = step\n",
        DEVICE_TIME,
    ),
    Mutant(
        "time: gradients after backward are all sent at once",
        "llmtrain/plan/network_time.py",
        "    if not backward_share:",
        "    if False:",
        ("tests/unit/test_network_time.py",),
    ),
]
