"""Tests of the Makefile and the scripts in launch/, with stand-ins for the programs that they call."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/sh
echo "python $*" >> calls
[ "$1" = -m ] || exit 0
for folder in "$@"; do :; done
mkdir -p "$folder/bin"
printf '#!/bin/sh\\n' | tee "$folder/bin/python" > "$folder/bin/pip"
chmod +x "$folder/bin/python" "$folder/bin/pip"
"""
"""Stand-in for Python that records its arguments and makes environments."""


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("venv", [".venv", ".venv-peers"])
def test_an_environment_that_was_left_without_pip_is_made_again(tmp_path: Path, venv: str) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("requirements.txt", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).touch()
    write_program(tmp_path / "stand-in", PYTHON)
    write_program(tmp_path / venv / "bin/python", "#!/bin/sh\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    for _ in range(2):
        command = ["make", "PYTHON=./stand-in", f"{venv}/.ready"]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        (tmp_path / venv / ".ready").unlink()
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call for call in calls if " -m " in call] == [f"python -m venv --clear {venv}"], (
        "a complete environment is kept"
    )


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_clean_keeps_runs_tokens_and_texts(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for kept in ("runs/a", "data/tokens"):
        (tmp_path / kept).mkdir(parents=True)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    subprocess.run(["make", "clean"], cwd=tmp_path, env=environ, capture_output=True, check=True, timeout=60)
    assert {path.name for path in tmp_path.iterdir()} == {"Makefile", "runs", "data"}
    assert (tmp_path / "data/tokens").is_dir()


def test_a_host_that_fails_does_not_keep_the_tunnel_on_the_others(tmp_path: Path) -> None:
    write_program(tmp_path / "ssh", f'#!/bin/sh\necho "$5" >> {tmp_path}/calls\n[ "$5" != root@b ]\n')
    for hosts, code in ((["root@a", "root@b", "root@c=1.2.3.4"], 1), (["root@a"], 0)):
        (tmp_path / "calls").unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", str(ROOT / "launch/tunnel.sh"), "down", *hosts],
            env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (tmp_path / "calls").read_text().split() == [host.partition("=")[0] for host in hosts]
        assert (done.returncode, done.stdout) == (code, "")
        assert done.stderr == ("error: root@b: stop network failed, see the line above\n" if code else "")


def test_the_tunnels_remote_commands_suit_any_login_shell_and_its_packets_any_path(tmp_path: Path) -> None:
    """The login shell, to which ssh gives the command, may not know bash's $'...'. WireGuard's packets must fit into the
    smallest MTU between two sites."""
    if (bash := shutil.which("bash")) is None:
        pytest.skip("bash is not installed")
    write_program(tmp_path / "ssh", f'#!/bin/sh\nprintf \'%s\\n\' "$6" >> {tmp_path}/calls\nexec sh -c "$6"\n')
    # This stand-in for the host's bash runs the outer script, and records the inner one and its standard input.
    inner = f'[ "$3" = tunnel ] || exec {bash} "$@"\nprintf %s "$2" > {tmp_path}/program\ncat >> {tmp_path}/stdin\n'
    write_program(tmp_path / "bash", f'#!/bin/sh\n{inner}case "$2" in *genkey*) echo "$4 key" ;; esac\n')
    write_program(tmp_path / "sudo", '#!/bin/sh\nshift\nexec "$@"\n')
    for variables, mtu in (({}, 1380), ({"TUNNEL_MTU": "1280"}, 1280)):
        (tmp_path / "stdin").unlink(missing_ok=True)
        done = subprocess.run(
            [bash, str(ROOT / "launch/tunnel.sh"), "up", "root@a", "root@b"],
            env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables},
            capture_output=True,
            text=True,
            timeout=60,
        )
        sections = (tmp_path / "stdin").read_text().split("[Interface]\n")[1:]
        assert [f"MTU = {mtu}" in section.partition("[Peer]")[0].splitlines() for section in sections] == [True, True]
        assert "PublicKey = wg-llmtrain key" in sections[0] and done.returncode == 0, done.stderr
    program = (ROOT / "launch/tunnel.sh").read_text().partition('unheard() {\n  on "$1" \'')[2].partition("'")[0]
    assert program and (tmp_path / "program").read_text() == program
    commands = (tmp_path / "calls").read_text()
    assert "$'" not in commands and commands.count("bash -c 'if [") == 12


def test_train_sh_finds_its_repository_whatever_cdpath_is(tmp_path: Path) -> None:
    write_program(tmp_path / "bin/python3", '#!/bin/sh\necho "$PYTHONPATH"\n')
    write_program(tmp_path / "mine/launch/train.sh", (ROOT / "launch/train.sh").read_text())
    (tmp_path / "others/launch").mkdir(parents=True)
    environ = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "CDPATH": f"{tmp_path}/others"}
    command = ["bash", "launch/train.sh", "recipe.yaml"]
    done = subprocess.run(command, cwd=tmp_path / "mine", env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/mine\n"), done.stderr
