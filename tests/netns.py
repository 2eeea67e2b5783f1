"""Two hosts on one machine: two network namespaces connected by a veth pair, and a launcher that starts ranks in both.

::

    namespace A, 10.77.x.1, hostname halox-a          namespace B, 10.77.x.2, hostname halox-b
      mpiexec, ranks 0 and 1  --------- veth ---------  daemon, ranks 2 and 3

The veth pair is the only connection of the namespaces. Open MPI takes every daemon for a host, so it uses shared memory
within a namespace and TCP between the namespaces. A token bucket filter can limit the rate of the pair.

For a link with a delay, a thread of the launching process takes the place of the pair. Each namespace then has a TAP
device, whose packets the thread passes on after the delay.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shlex
import shutil
import stat
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from halox.cli import launcher

LIMIT_S = 500
BURST_BYTES = 128 << 10
"""Bytes that a limited link sends at once after a pause: two packets of TCP."""

_TUN = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_TAP_OF_PACKETS = 0x0002 | 0x1000  # IFF_TAP, and IFF_NO_PI: nothing precedes a packet
_MOST_PACKET_BYTES = 1 << 16


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def _check(command: list[str]) -> None:
    done = _run(*command)
    if done.returncode:
        raise OSError(f"`{shlex.join(command)}` failed: {done.stderr.strip()}")


@cache
def why_none() -> str | None:
    """Return the reason why this machine cannot provide two hosts, or None."""
    if not sys.platform.startswith("linux"):
        return "no Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "unshare", "hostname"):
        if shutil.which(program) is None:
            return f"no program {program!r} on the PATH"
    family = launcher.find().family
    if family != "Open MPI":
        return f"the launcher is {family}, and only Open MPI's is told how to start ranks in a namespace"
    name = f"halox-try-{os.getpid()}"
    try:
        for command in (
            ["ip", "netns", "add", name],
            ["ip", "netns", "exec", name, "unshare", "--uts", "hostname", name],
            # A kernel may support namespaces without veth.
            ["ip", "-n", name, "link", "add", "one", "type", "veth", "peer", "name", "two"],
        ):
            done = _run(*command)
            if done.returncode:
                said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
                return f"`{shlex.join(command)}` failed: {said}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"network namespaces cannot be tried: {error}"
    finally:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            _run("ip", "netns", "del", name)
    return None


@cache
def why_no_rate() -> str | None:
    """Return the reason why this machine cannot limit the rate between two hosts, or None."""
    if shutil.which("tc") is None:
        return "no program 'tc' on the PATH"
    name = f"halox-try-{os.getpid()}"
    try:
        for command in (["ip", "netns", "add", name], _rate_command(name, "lo", 100)):
            done = _run(*command)
            if done.returncode:
                return f"`{shlex.join(command)}` failed: {done.stderr.strip()}"
    finally:
        _run("ip", "netns", "del", name)
    return None


def _rate_command(namespace: str, device: str, mbit: int) -> list[str]:
    """Command line that limits the rate at which a device sends."""
    limit = ["rate", f"{mbit}mbit", "burst", str(BURST_BYTES), "latency", "500ms"]
    return ["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limit]


@dataclass(frozen=True)
class TwoHosts:
    """Two network namespaces, created by `two_hosts`."""

    names: tuple[str, str]
    addresses: tuple[str, str]
    network: str
    agent: Path

    def command(self, ranks: int, python_arguments: list[str]) -> list[str]:
        """Command line that runs Python with half of the ranks in each namespace."""
        line = launcher.command(launcher.find(), ranks, python_arguments)
        hosts = ",".join(f"{address}:{ranks // 2}" for address in self.addresses)
        line[1:1] = ["--host", hosts]
        inside = f"hostname halox-a && exec {shlex.join(line)}"
        return ["ip", "netns", "exec", self.names[0], "unshare", "--uts", "sh", "-c", inside]

    def environment(self, ranks: int) -> dict[str, str]:
        """Environment for `command`. Open MPI 5 reads the PRTE_ variables, and Open MPI 4 reads the other ones."""
        base = launcher.environment(ranks)
        # Each host has one slot per rank. With oversubscription allowed the first host would get all ranks.
        for name in ("PRTE_MCA_rmaps_default_mapping_policy", "OMPI_MCA_rmaps_base_oversubscribe"):
            base.pop(name, None)
        return base | {
            "PRTE_MCA_plm_ssh_agent": str(self.agent),
            "PRTE_MCA_oob_tcp_if_include": self.network,
            "OMPI_MCA_plm_rsh_agent": str(self.agent),
            "OMPI_MCA_oob_tcp_if_include": self.network,
            "OMPI_MCA_btl_tcp_if_include": self.network,
            # Use TCP over the veth pair, even if the machine has a faster network.
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }

    def limit_rate(self, mbit: int) -> None:
        """Limit each direction of the link to ``mbit`` Mbit/s."""
        for name in self.names:
            _check(_rate_command(name, name, mbit))
            # TCP sends a whole message at once. Else acknowledgements, which wait behind the data of the opposite
            # direction, halve the rate of an exchange.
            window = ["initcwnd", "10000", "initrwnd", "10000"]
            route = ["replace", self.network, "dev", name, "scope", "link", *window]
            _check(["ip", "-n", name, "route", *route])

    def bytes_sent(self) -> int:
        """Bytes that namespace A has sent to B so far."""
        found = _run(
            *("ip", "netns", "exec", self.names[0]),
            *("cat", f"/sys/class/net/{self.names[0]}/statistics/tx_bytes"),
        )
        return int(found.stdout)


def why_no_delay() -> str | None:
    """Return the reason why this machine cannot delay packets between two hosts, or None."""
    return None if os.path.exists(_TUN) else f"no {_TUN}"


class Delay:
    """Thread that passes Ethernet packets between two new TAP devices, each ``delay_s`` seconds after its arrival."""

    def __init__(self, names: tuple[str, str], delay_s: float) -> None:
        self._delay_s, self._ended = delay_s, False
        self._taps = [os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC) for _ in names]
        for tap, name in zip(self._taps, names, strict=True):
            fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_OF_PACKETS))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        opposite = dict(zip(self._taps, reversed(self._taps), strict=True))
        packets: deque[tuple[float, int, bytes]] = deque()
        while not self._ended:
            wait_s = packets[0][0] - time.monotonic() if packets else 0.1
            for tap in select.select(self._taps, [], [], max(wait_s, 0.0))[0]:
                with contextlib.suppress(OSError):
                    packet = os.read(tap, _MOST_PACKET_BYTES)
                    packets.append((time.monotonic() + self._delay_s, opposite[tap], packet))
            while packets and packets[0][0] <= time.monotonic():
                _, tap, packet = packets.popleft()
                with contextlib.suppress(OSError):  # the other device is not up yet
                    os.write(tap, packet)

    def close(self) -> None:
        """End the thread, and remove the devices."""
        self._ended = True
        self._thread.join()
        for tap in self._taps:
            os.close(tap)


@contextlib.contextmanager
def two_hosts(folder: Path, delay_ms: float = 0.0) -> Iterator[TwoHosts]:
    """Context manager: two network namespaces connected by a veth pair, or by a link with a delay.

    Parameters
    ----------
    folder : Path
        Receives the script that starts Open MPI's daemon in the second namespace.
    delay_ms : float
        Least time of a packet from one namespace to the other.
    """
    number = os.getpid() % 65000
    names = (f"hxa{number}", f"hxb{number}")  # of the namespaces and their veth devices
    network = f"10.77.{number % 250}."
    addresses = (f"{network}1", f"{network}2")
    commands = [["ip", "netns", "add", name] for name in names]
    if delay_ms:
        commands += [["ip", "link", "set", name, "netns", name] for name in names]
    else:
        ends = [["type", "veth"], ["peer", "name", names[1], "netns", names[1]]]
        commands.append(["ip", "link", "add", names[0], "netns", names[0], *ends[0], *ends[1]])
    for name, address in zip(names, addresses, strict=True):
        commands.append(["ip", "-n", name, "addr", "add", f"{address}/24", "dev", name])
        commands += [["ip", "-n", name, "link", "set", device, "up"] for device in ("lo", name)]
    agent = folder / "agent.sh"
    # Open MPI calls the agent like ssh: a host name, which can only be the second host, and words of a shell command.
    agent.write_text(
        "#!/bin/sh\nshift\n"
        f'exec ip netns exec {names[1]} unshare --uts sh -c "hostname halox-b; $*"\n'
    )
    agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
    with contextlib.ExitStack() as stack:
        if delay_ms:
            stack.callback(Delay(names, delay_ms / 1e3).close)
        for name in names:
            stack.callback(_run, "ip", "netns", "del", name)
        for command in commands:
            _check(command)
        yield TwoHosts(names, addresses, f"{network}0/24", agent)
