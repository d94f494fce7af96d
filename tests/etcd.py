"""Real etcd members on loopback, started from Debian's package, for tests and benches."""

from __future__ import annotations

import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_START_S = 60.0


class Member:
    """One etcd process; it keeps its data when it is killed and started again."""

    def __init__(self, folder: Path, name: str, ports: tuple[int, int], cluster: str) -> None:
        self.url = f"http://127.0.0.1:{ports[0]}"
        peer = f"http://127.0.0.1:{ports[1]}"
        self.log = folder / f"{name}.log"
        self._argv = [
            *("etcd", "--name", name, "--data-dir", str(folder / name)),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", cluster, "--initial-cluster-token", str(folder)),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it unless it runs; `Cluster.wait` waits until it serves."""
        if self._process is not None:
            return
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._argv, stdout=log, stderr=log)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process: SIGSTOP and SIGCONT pause it."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait()

    def serves(self) -> bool:
        """Return whether it answers and knows a leader."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1) as answer:
                return b"true" in answer.read()
        except OSError:
            return False


class Cluster:
    """Members that know one another."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members

    @property
    def urls(self) -> list[str]:
        """Return the client URL of each member."""
        return [member.url for member in self.members]

    def wait(self) -> None:
        """Return once every member serves; fail after a minute with the end of a log."""
        deadline = time.monotonic() + _START_S
        for member in self.members:
            while not member.serves():
                if time.monotonic() > deadline:
                    end = member.log.read_text()[-2000:]
                    raise AssertionError(f"etcd at {member.url} does not serve: {end}")
                time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@contextmanager
def etcd_cluster(size: int = 1, parent: Path | None = None) -> Iterator[Cluster]:
    """Run a fresh cluster of `size` members; their data is in a new folder of `parent`."""
    with (
        tempfile.TemporaryDirectory(prefix="twine-etcd-", dir=parent) as folder,
        ExitStack() as stack,
    ):
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2 * size)
        ]
        ports = [s.getsockname()[1] for s in sockets]
        for s in sockets:
            s.close()
        pairs = list(zip(ports[::2], ports[1::2], strict=True))
        cluster = ",".join(f"m{n}=http://127.0.0.1:{peer}" for n, (_, peer) in enumerate(pairs))
        members = [Member(Path(folder), f"m{n}", pair, cluster) for n, pair in enumerate(pairs)]
        for member in members:
            stack.callback(member.kill)
            member.start()
        found = Cluster(members)
        found.wait()
        yield found
