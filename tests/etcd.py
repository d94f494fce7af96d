"""Real etcd members from Debian's package on loopback, and control planes that use them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_START_S = 60.0
PATIENCE_S = 120


class Member:
    """One etcd process. Its data survives a kill and a restart."""

    def __init__(
        self, folder: Path, name: str, ports: tuple[int, int], cluster: str, *options: str
    ) -> None:
        self.url = f"http://127.0.0.1:{ports[0]}"
        peer = f"http://127.0.0.1:{ports[1]}"
        self.log = folder / f"{name}.log"
        self._argv = [
            *("etcd", "--name", name, "--data-dir", str(folder / name)),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", cluster, "--initial-cluster-token", str(folder)),
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process unless it runs. `Cluster.wait` waits until it serves."""
        if self._process is not None:
            return
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._argv, stdout=log, stderr=log)

    def running(self) -> bool:
        """Return whether the process was started and has not exited."""
        return self._process is not None and self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process: SIGSTOP and SIGCONT pause it."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process at once."""
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait()

    def serves(self) -> bool:
        """Return whether the member answers and knows a leader."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1) as answer:
                return b"true" in answer.read()
        except OSError:
            return False


class Cluster:
    """An etcd cluster of several members."""

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


@contextmanager
def etcd_cluster(size: int = 1, parent: Path | None = None, *options: str) -> Iterator[Cluster]:
    """Run a new cluster of `size` members. Their data is in a new folder of `parent`."""
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
        members = [
            Member(Path(folder), f"m{n}", pair, cluster, *options) for n, pair in enumerate(pairs)
        ]
        for member in members:
            stack.callback(member.kill)
            member.start()
        found = Cluster(members)
        found.wait()
        yield found


class Replica:
    """One `twine-control-plane serve` with its own state folder, and the messages that it sends to
    systemd."""

    def __init__(
        self,
        folder: Path,
        name: str,
        urls: list[str],
        ttl_s: int = 12,
        prefix: str = "/t",
        state: str = "",
    ) -> None:
        """Start the process. `state` is a folder that replicas share, for authority and images."""
        self.state, self.socket = folder / (state or name), folder / f"{name}.sock"
        self.state.mkdir(exist_ok=True)
        listed = ", ".join(f'"{url}"' for url in urls)
        config = folder / f"{name}.toml"
        config.write_text(f'[etcd]\nendpoints = [{listed}]\nprefix = "{prefix}"\nttl_s = {ttl_s}\n')
        notified = folder / f"{name}.notify"
        notified.unlink(missing_ok=True)
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(notified))
        self._notify.settimeout(PATIENCE_S)
        argv = ("-m", "control_plane.daemon", "serve", "--config", str(config))
        where = ("--state", str(self.state), "--listen", "127.0.0.1:0", "--socket", self.socket)
        with (folder / f"{name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *argv, *where],
                env=os.environ | {"NOTIFY_SOCKET": str(notified)},
                stderr=log,
            )

    def until(self, text: str) -> None:
        """Return once the process has sent this to systemd. Raise `TimeoutError` if it sends
        nothing more."""
        while text not in self._notify.recv(4096).decode():
            pass

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(PATIENCE_S)
        self._notify.close()
        return code
