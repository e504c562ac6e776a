"""Mother: one process per test session that has imported torch, transformers, DeepSpeed and llmtrain, and forks others.

`Mother.fork` runs a function in a fork with its own environment, folder and standard streams. It returns a `Process`,
which is used like a subprocess.Popen. The mother does nothing but fork, so it has one thread, and forking it is safe.
What a forked command starts with multiprocessing (the launcher's rank server) is forked, too.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.util
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil

from tests.emulated_gpu.as_cuda import FOLDER

ROOT = Path(__file__).resolve().parents[1]
ADDRESS = "LLMTRAIN_TEST_MOTHER"
"""Environment variable with the path of the socket of the session's mother."""
START_SECONDS = 280.0
LOST = -signal.SIGKILL

FORKABLE = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # for pyarrow, which pandas imports
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # to look for GPUs without starting CUDA, because forks could not use it then
}
"""Environment variables that keep imports from starting threads or CUDA, so that the process can be forked."""
LARGEST_REQUEST = 1 << 17
IMPORTED = (
    "llmtrain.cli",
    "llmtrain.launch",
    "llmtrain.launch.torchrun",
    "llmtrain.train.run",
    "PIL.PngImagePlugin",
    "deepspeed.compile.init_z3",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "pytest",
    "tokenizers",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.profiler",
    "torch.utils.serialization",
    "torch.utils.tensorboard",
    "transformers.generation.utils",
    "transformers.models.gpt_neo.modeling_gpt_neo",
    "transformers.models.llama.modeling_llama",
)
"""Modules that ranks and commands use, including those that each of them would import only when it first needs them."""


# What tests call


class Process:
    """A process forked by the mother, with the part of subprocess.Popen's interface that tests use."""

    def __init__(self, connection: socket.socket, stdout: IO[str] | None) -> None:
        self._connection, self.stdout, self.returncode = connection, stdout, None
        self._cpu_seconds = 0.0
        self.pid: int = self._receive()

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self._end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end, and return its exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self._end()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Read standard output to its end, and wait for the process. Raises subprocess.TimeoutExpired."""
        deadline, output = time.monotonic() + (timeout or 1e9), b""
        descriptor = self.stdout.fileno()
        while True:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0, output=output)
            if not (part := os.read(descriptor, 1 << 16)):
                break
            output += part
        self.wait(max(0.0, deadline - time.monotonic()))
        self.stdout.close()
        return output.decode(), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    @property
    def cpu_seconds(self) -> float:
        """Return the user and system time so far, of the process and of the children that it has waited for."""
        if self.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = psutil.Process(self.pid).cpu_times()
                self._cpu_seconds = times.user + times.system + times.children_user + times.children_system
        return self._cpu_seconds

    def _receive(self) -> Any:
        data = self._connection.recv(1 << 10)
        return pickle.loads(data) if data else None

    def _end(self) -> None:
        self.returncode, self._cpu_seconds = self._receive() or (LOST, self._cpu_seconds)
        self._connection.close()


class Mother:
    """Client of the session's mother, or of a mother with `changes` to the environment, which this process starts."""

    def __init__(self, changes: Mapping[str, str] | None = None) -> None:
        self._given = None if changes else os.environ.get(ADDRESS)
        self._changes = dict(changes or {})
        self.processes: list[Process] = []
        connections.append(self)

    def fork(
        self,
        fn: Callable[..., Any],
        *args: Any,
        environment: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        descriptors: Sequence[int] = (),
        capture: bool = False,
    ) -> Process:
        """Fork a process that calls `fn(*numbers, *args)` in a new session and exits with the result, as sys.exit
        would. The numbers are those of `descriptors` in the new process.

        The process gets this process's environment with the mother's changes and, on top of them, those of
        `environment`. CUDA, for example, reads variables when it starts, which never happens in the mother. With
        `capture`, standard output and error go to `Process.stdout`, otherwise to those of this process.
        """
        connection = self._connect()
        call = pickle.dumps((fn, args))
        variables = {**os.environ, **self._changes, **(environment or {})}
        request = pickle.dumps((call, variables, str(cwd), list(sys.path)))
        assert len(request) <= LARGEST_REQUEST, f"{len(request)} bytes of arguments and environment are too many"
        reader, writer = os.pipe() if capture else (None, None)
        with open(os.devnull) as nothing:
            streams = [nothing.fileno(), *((writer, writer) if capture else (1, 2))]
            socket.send_fds(connection, [request], [*streams, *descriptors])
        if capture:
            os.close(writer)
        process = Process(connection, open(reader) if capture else None)  # noqa: SIM115  closed by communicate
        self.processes.append(process)
        return process

    @functools.cached_property
    def address(self) -> str:
        """Return the path of the mother's socket. Starts a mother if there is none."""
        return self._given or start(self._changes)

    def cpu_seconds(self) -> float:
        """Return the CPU time that all processes forked from here have used so far."""
        return sum(process.cpu_seconds for process in self.processes)

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                connection.connect(self.address)
                return connection
            except (FileNotFoundError, ConnectionRefusedError):
                process = started.get(self.address)
                assert process is None or process.poll() is None, (
                    "the mother of processes has ended; see what it printed"
                )
                assert time.monotonic() < deadline, f"no mother of processes at {self.address} in {START_SECONDS:g} s"
                time.sleep(0.05)


connections: list[Mother] = []
"""All clients of mothers in this process."""
started: dict[str, subprocess.Popen[bytes]] = {}
"""Mothers that this process has started, by address."""


@functools.cache
def session() -> Mother:
    """Return this process's client of the session's mother."""
    return Mother()


def start(changes: Mapping[str, str] | None = None) -> str:
    """Start a mother that lives as long as this process, and return its address at once, while it still imports."""
    address = f"{tempfile.mkdtemp(prefix='llmtrain-mother-')}/socket"
    environment = {**os.environ, **FORKABLE, **(changes or {})}
    command = [sys.executable, "-m", "tests.mother", address, str(os.getpid())]
    # The mother has its own session, because a Ctrl-C is for pytest. It ends when pytest has ended.
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    started[address] = process
    return address


def run_llmtrain(*arguments: str) -> None:
    """Run `llmtrain ARGUMENTS` in this process, a fork of the mother."""
    from llmtrain.cli import main

    sys.argv = ["llmtrain", *arguments]
    main()


# The mother


_exit_codes: list[int] = []
"""Exit code of this process, if it is a fork that is ending; otherwise empty."""


def _leave_modules_alone() -> None:
    """End a fork after all other exit handlers. Tearing down its modules would copy pages, for 0.4 CPU seconds."""
    if _exit_codes:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(_exit_codes[0])


def serve(address: str, owner: int) -> None:
    """Import all modules, then fork for every client, until the process `owner` has ended."""
    atexit.register(_leave_modules_alone)  # registered first, so called last
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # else runs under nohup outlive their terminal
    try:
        owner_end = os.pidfd_open(owner)
    except ProcessLookupError:
        return
    _import_everything()
    folder = os.path.dirname(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address + ".new")
        listener.listen(64)
        os.rename(address + ".new", address)  # only now, so that clients that see it can connect
        _fork_for_all(listener, owner_end)
    with contextlib.suppress(OSError):
        os.unlink(address)
        os.rmdir(folder)


def _import_everything() -> None:
    from llmtrain.startup import imports_without_gc

    with imports_without_gc():
        for name in IMPORTED:
            if importlib.util.find_spec(name.partition(".")[0]):  # a machine for GPU tests lacks some
                importlib.import_module(name)
                check_forkable(name)
        if importlib.util.find_spec("deepspeed"):
            import deepspeed.utils.nvtx

            import llmtrain.parallel.zero  # imports much of DeepSpeed, which takes a second

            deepspeed.utils.nvtx.enable_nvtx = False  # profiler marks take a tenth of an engine's time
            check_forkable(llmtrain.parallel.zero.__name__)


def check_forkable(imported: str) -> None:
    """Raise AssertionError if the import of the module `imported` has made this process unsafe to fork."""
    import torch

    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{imported} started {threads - 1} threads when it was imported: forking is not safe"
    on_gpu = torch.cuda.is_initialized() and FOLDER not in os.environ
    assert not on_gpu, f"{imported} started CUDA when it was imported: a fork can't use GPUs"


def _fork_for_all(listener: socket.socket, owner_end: int) -> None:
    """Serve requests until the descriptor `owner_end` says that the owner has ended."""
    children: dict[int, tuple[int, socket.socket]] = {}  # pidfd -> pid, connection of the client
    while True:
        ready, _, _ = select.select([listener, owner_end, *children], [], [])
        if owner_end in ready:
            for pid, _ in children.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            return
        for descriptor in set(ready) & children.keys():
            pid, connection = children.pop(descriptor)
            _, status, usage = os.wait4(pid, 0)
            os.close(descriptor)
            with contextlib.suppress(OSError), connection:  # the client may be gone
                connection.send(pickle.dumps((os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)))
        if listener in ready:
            connection, _ = listener.accept()
            request, descriptors, _, _ = socket.recv_fds(connection, LARGEST_REQUEST, 16)
            if (pid := os.fork()) == 0:
                for one in (listener, connection, *(other for _, other in children.values())):
                    one.close()
                for one in (owner_end, *children):
                    os.close(one)
                _become(descriptors, *pickle.loads(request))
            for descriptor in descriptors:
                os.close(descriptor)
            connection.send(pickle.dumps(pid))
            children[os.pidfd_open(pid)] = (pid, connection)


def _become(descriptors: list[int], call: bytes, environment: Mapping[str, str], cwd: str, path: list[str]) -> NoReturn:
    """Make this fork the process that the client asked for, and exit."""
    os.setsid()
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:] = path
    _fork_instead_of_spawn()
    code = _code_of(call, descriptors[3:])
    _exit_codes.append(code)
    sys.exit(code)


def _code_of(call: bytes, descriptors: list[int]) -> int:
    """Call the pickled function, and return the exit code that sys.exit would make of the result."""
    try:
        fn, args = pickle.loads(call)
        sys.exit(fn(*descriptors, *args))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    return 1


def _fork_instead_of_spawn() -> None:
    """Let multiprocessing fork its helpers (forkserver, resource tracker), as long as this process has one thread."""
    from multiprocessing import util

    spawn = util.spawnv_passfds

    def fork_or_spawn(path: bytes, arguments: Sequence[str], passed: Sequence[int]) -> int:
        *_, option, code = arguments
        if option != "-c" or len(os.listdir("/proc/self/task")) > 1:
            return spawn(path, arguments, passed)
        if pid := os.fork():
            return pid
        try:
            keep = {0, 1, 2, *passed}
            for descriptor in set(map(int, os.listdir("/proc/self/fd"))) - keep:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
                if callable(signal.getsignal(number)):  # a spawned program would not have these handlers
                    signal.signal(number, signal.SIG_DFL)
            exec(code, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    util.spawnv_passfds = fork_or_spawn


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
