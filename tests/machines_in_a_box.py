"""Machines on one machine: Linux namespaces with an address, a host name, processes, `/dev/shm` and `/tmp/ray` of their
own, and a cable between them that can be cut.

It needs root, `unshare`, `nsenter` and `ip`. Two machines are joined by a pair of virtual network devices.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

NAMES = ("boxa", "boxb")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_BEGIN = """set -e
hostname {name}
mount --make-rprivate /
mount -t tmpfs tmpfs /dev/shm
mkdir -p /tmp/ray
mount -t tmpfs tmpfs /tmp/ray
mount --bind {hosts} /etc/hosts
ip link set lo up
exec sleep infinity
"""


def missing() -> str:
    """Why there can be no such machines here; empty = there can."""
    tools = [tool for tool in ("setpriv", "unshare", "nsenter", "ip", "mount") if shutil.which(tool) is None]
    if tools:
        return f"{', '.join(tools)} not installed"
    if os.geteuid():
        return "namespaces of networks need root"
    tried = subprocess.run(["unshare", "-n", "-m", "-u", "-p", "--fork", "true"], capture_output=True, text=True)
    return f"unshare: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass
class Machine:
    """One of them."""

    name: str
    address: str
    device: str
    """Its end of the cable."""
    hosts: Path
    """What it has as /etc/hosts."""
    process: subprocess.Popen[bytes] = field(init=False)
    pid: int = field(init=False)
    """Of its first process, here. With it all others end."""

    def __post_init__(self) -> None:
        begin = _BEGIN.format(name=self.name, hosts=self.hosts)
        # Both end with this process, however that ends.
        words = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            "-n",
            "-m",
            "-u",
            "-p",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            begin,
        ]
        with self.hosts.with_name(f"{self.name}.log").open("wb") as log:
            self.process = subprocess.Popen(words, start_new_session=True, stderr=log)
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while not (found := children.read_text().split()):
            time.sleep(0.01)
        self.pid = int(found[0])
        while Path(f"/proc/{self.pid}/comm").read_text().strip() != "sleep":
            assert self.process.poll() is None, f"{self.name} did not start"
            time.sleep(0.01)

    def words(self, *command: str) -> list[str]:
        """The command line that runs a command there."""
        return ["nsenter", "-t", str(self.pid), "-n", "-m", "-u", "-p", "--", *command]

    def run(self, *command: str) -> str:
        """Run a command there, to its end."""
        return subprocess.run(self.words(*command), check=True, capture_output=True, text=True).stdout

    def start(self, *command: str, log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Begin a command there."""
        with log.open("ab") as output:
            return subprocess.Popen(
                self.words(*command),
                stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=os.environ | environment,
            )  # fmt: skip

    def cable(self, state: str) -> None:
        """Cut it (`down`) or join it (`up`), at this machine's end."""
        self.run("ip", "link", "set", self.device, state)

    def end(self) -> None:
        """Everything that runs there, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def two_machines(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines that reach each other, and nothing else.

    Args:
        folder: for their /etc/hosts.
    """
    hosts = folder / "hosts"
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in zip(NAMES, ADDRESSES))]
    hosts.write_text("\n".join(lines) + "\n")
    devices = (f"va{os.getpid() % 100000}", f"vb{os.getpid() % 100000}")
    with contextlib.ExitStack() as stack:
        machines = []
        for name, address, device in zip(NAMES, ADDRESSES, devices):
            machines.append(machine := Machine(name, address, device, hosts))
            stack.callback(machine.end)
        ends = ["netns", str(machines[1].pid)]
        words = ["ip", "link", "add", devices[0], "netns", str(machines[0].pid), "type", "veth"]
        subprocess.run([*words, "peer", "name", devices[1], *ends], check=True)
        for machine in machines:
            machine.run("ip", "addr", "add", f"{machine.address}/24", "dev", machine.device)
            machine.cable("up")
        yield machines[0], machines[1]
