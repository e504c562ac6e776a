"""Compilation of the emulation, once per state of its sources and per version of Python and torch."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
HOOKS, MODULE = "libemulated_hooks.so", "emulated.so"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-DUSE_DISTRIBUTED", "-DTORCH_EXTENSION_NAME=emulated", "-w")


def why_not() -> str | None:
    """Return the reason why the emulation can't be built here, or None."""
    if shutil.which("g++") is None:
        return "there is no g++"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python's headers are not installed"
    if (_torch() / "lib/libtorch_cuda.so").exists():
        return "this torch is built for real ones"
    return None


def build() -> Path:
    """Return the folder with both libraries. Takes a minute if it does not exist yet."""
    sources = b"".join(path.read_bytes() for path in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h"), Path(__file__)]))
    which = hashlib.sha256(sources + f"{sys.version} {version('torch')}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"emulated-gpu-{which}"
    if folder.exists():
        return folder
    building = Path(tempfile.mkdtemp(prefix="emulated-gpu-building-"))
    torch = _torch()
    include = (torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include"))
    places = [*(f"-I{path}" for path in include), f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", f"-L{building}"]

    def compiled(output: str, *arguments: str) -> None:
        subprocess.run(["g++", *FLAGS, *places, *arguments, "-o", building / output], cwd=HERE, check=True)

    with ThreadPoolExecutor() as pool:
        hooks = pool.submit(compiled, HOOKS, "hooks.cpp", "-ltorch_cpu", "-lc10")
        groups = pool.submit(compiled, "groups.o", "-c", "groups.cpp")
        device = pool.submit(compiled, "device.o", "-c", "device.cpp")
        for one in (hooks, groups, device):
            one.result()
    objects = (str(building / "device.o"), str(building / "groups.o"))
    libraries = ("-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10", "-lemulated_hooks", "-Wl,-rpath,$ORIGIN")
    compiled(MODULE, *objects, *libraries)
    try:
        building.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(building)
    return folder


def _torch() -> Path:
    """Return the folder of torch without importing torch, because the caller may be about to give the process GPUs."""
    return Path(find_spec("torch").origin).parent
