"""Tests of launch/tunnel.sh, which joins hosts at public addresses by WireGuard: a run sends only encrypted packets."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain.compare.cluster.hosts import VirtualHost, virtual_cluster
from llmtrain.compare.cluster.limits import HostLimits
from llmtrain.compare.cluster.processes import CommandError, run
from tests.end_to_end.runs import Runs, exact_lines
from tests.mother import run_llmtrain
from tests.multi_node import only_meet
from tests.multi_node.runs import arguments, ends, errors, needs_hosts, start, start_rank
from tests.multi_node.sites import PUBLIC, add_rule, hide, inside, needs_nft, set_address
from tests.multi_node.ssh import ssh_between

CARD, PORT = "wg-llmtrain", "51820"
BOTH = [f"root@{address}" for address in PUBLIC]


def why_no_wireguard() -> str | None:
    """Return why this machine can't have a WireGuard network, or None if it can."""
    if missing := [name for name in ("wg", "wg-quick", "ssh", "sshd", "ssh-keygen") if shutil.which(name) is None]:
        return f"{', '.join(missing)} not installed (packages wireguard-tools, openssh-server)"
    try:
        run("ip", "link", "add", "wg-trial", "type", "wireguard")
        run("ip", "link", "delete", "wg-trial")
    except CommandError:
        if shutil.which("wireguard-go") is None or not Path("/dev/net/tun").exists():
            return "no WireGuard in the kernel, and no wireguard-go (package wireguard-go) or no /dev/net/tun"
    return None


pytestmark = [
    needs_hosts,
    needs_nft,
    pytest.mark.deep,
    pytest.mark.skipif((reason := why_no_wireguard()) is not None, reason=reason or ""),
]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[list[VirtualHost], Path]]:
    """Provide two hosts at public addresses with separate WireGuard folders, and the folder of an `ssh` between them."""
    with virtual_cluster([HostLimits()] * 2) as made:
        for host, address in zip(made, PUBLIC, strict=False):
            set_address(host, address)
        with ssh_between(made, tmp_path) as tools:
            separate_folders(made)
            yield made, tools


def separate_folders(made: list[VirtualHost]) -> None:
    """Give each host's sshd and its processes their own WireGuard folders, which virtual hosts otherwise share."""
    own = "for folder in /etc/wireguard /run/wireguard; do mkdir -p $folder; mount -t tmpfs own $folder; done"
    for host in made:
        [server] = [pid for pid in host.pids() if "sshd" in Path(f"/proc/{pid}/cmdline").read_text()]
        run("nsenter", "-t", str(server), "-m", "sh", "-c", own)


def tunnel(host: VirtualHost, tools: Path, action: str, *targets: str, **variables: str) -> tuple[int, str]:
    """Run the script on a host, and return the exit code and the output."""
    command = ["bash", "launch/tunnel.sh", action, *(targets or BOTH)]
    return ends([start(host, command, PATH=f"{tools}:{os.environ['PATH']}", **variables)], 120)[0]


def counted(host: VirtualHost) -> dict[str, int]:
    """Return the number of packets that a host has sent to the others so far, by the comment of the counting rule."""
    words = [line.split() for line in inside(host, "nft", "list", "ruleset").splitlines() if "comment" in line]
    return {line[-1].strip('"'): int(line[line.index("packets") + 1]) for line in words}


def test_a_run_over_the_tunnel_sends_nothing_but_its_encrypted_packets(runs: Runs, two):
    made, tools = two
    code, output = tunnel(made[0], tools, "up")
    assert code == 0, output
    assert "NODE_RANK=1 MASTER_ADDR=10.98.0.1" in output
    for host in made:
        for what, comment in ((f"udp dport {PORT}", "tunnel"), ("meta l4proto tcp", "plain")):
            add_rule(host, f'oifname "eth0" {what} counter comment "{comment}"', hook="output")
    run_arguments = arguments(runs, "tunnel", "parallel.replicas=2", "parallel.shards=1")
    started = [start_rank(made[rank], rank, 2, "10.98.0.1", run_llmtrain, "train", *run_arguments) for rank in (0, 1)]
    ended = ends(started, 240)
    assert [code for code, _ in ended] == [0, 0], ended
    assert not any("public network" in out for _, out in ended)
    assert runs.exact("tunnel") == exact_lines(runs.reference(2, 1))
    for host in made:
        assert counted(host)["tunnel"] > 100 and counted(host)["plain"] == 0

    assert tunnel(made[0], tools, "down")[0] == 0
    for host in made:
        assert CARD not in inside(host, "ip", "link")


def test_a_port_that_is_not_open_is_named(two):
    made, tools = two
    add_rule(made[1], f"udp dport {PORT} drop", hook="input")
    add_rule(made[0], f"udp dport {PORT} drop", hook="input")
    code, output = tunnel(made[0], tools, "up", TUNNEL_WAIT="3")
    assert code == 1
    assert errors(output) == [
        f"error: root@{PUBLIC[a]} hears nothing from root@{PUBLIC[b]}; open UDP port {PORT} between them, in both directions"
        for a, b in ((0, 1), (1, 0))
    ]


def test_a_host_that_ssh_does_not_reach_is_named(two):
    made, tools = two
    code, output = tunnel(made[0], tools, "up", BOTH[0], "root@203.0.113.99")
    assert code == 1
    assert errors(output) == ["error: root@203.0.113.99: public key failed, see the line above"], output


def test_a_host_behind_nat_trains_over_the_tunnel(tmp_path: Path):
    """Without the tunnel, the run is refused (test_two_sites.py)."""
    with virtual_cluster([HostLimits()] * 3, networks=2) as (first, router, hidden):
        hide(first, router, hidden)
        with ssh_between([first, hidden], tmp_path) as tools:
            separate_folders([first, hidden])
            code, output = tunnel(hidden, tools, "up", BOTH[0], f"root@{hidden.addresses[1]}=")
            assert code == 0, output
            both = enumerate((first, hidden))
            started = [start_rank(host, rank, 2, "10.98.0.1", only_meet.main, "20") for rank, host in both]
            assert [(code, f"of 2 over {CARD}" in out) for code, out in ends(started, 60)] == [(0, True)] * 2


def test_it_says_how_to_call_it():
    done = subprocess.run(["bash", "launch/tunnel.sh", "up", "one"], capture_output=True, text=True)
    assert done.returncode == 2 and "up|down [USER@]HOST[=ADDRESS] ... with 2 to 254 hosts" in done.stderr
