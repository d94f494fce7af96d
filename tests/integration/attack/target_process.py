"""One program with an HTTP API, as a process, and the actions of an attacker and of a user."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import psutil

from control_plane.identity.authority import CertificateSubject, open_authority
from wire import tls
from wire.client import WireClient
from wire.routes import Route

DESCRIPTORS = 1024
"""Limit of open descriptors: the default of a program without a setting."""
START_S = 90
USER, ATTACKER = "127.0.0.1", "127.0.0.2"
"""Two addresses of the loopback: a listening socket sees two hosts."""
SETTLES_S = 90
READY = Route("readyz", "GET", "/readyz")


class Target:
    """A control plane or an agent."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.socket = kind, folder, folder / "cp.sock"
        self.authority = open_authority(folder / "state/authority.pem", "twine")
        here = Path(__file__).parent
        if kind == "agent":
            held = self.authority.credential(
                CertificateSubject("host", "vm1", (USER,)), "https://x"
            )
            tls.save(held, folder / "state/identity/identity.json")
            program = [str(here / "agent_process.py"), str(folder), f"{USER}:0"]
            self.name = "/host/vm1"
        else:
            program = ["-m", "control_plane.daemon", "serve", "--state", str(folder / "state")]
            program += ["--listen", f"{USER}:0", "--socket", str(self.socket)]
            self.name = tls.CONTROL_PLANE
        self._attackers: dict[str, ssl.SSLContext] = {}
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program],
                cwd=here.parents[2],
                env=os.environ | {"PYTHONPATH": str(here.parents[2])},
                stderr=log,
                preexec_fn=_few_descriptors,
            )
        listening = self.until(lambda: re.search(r"127\.0\.0\.1:(\d{2,5})\b", self.log.read_text()))
        self.port = int(listening[1])
        self.until(self.socket.exists)
        asyncio.run(self.ask("local"))

    def end(self) -> None:
        """Kill the program: its shutdown is not under test here."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    # -- as a user

    def context(self, role: str = "", name: str = "ann") -> ssl.SSLContext:
        """Return a client's context: with the role that may call, or without a certificate."""
        if role == "anyone":
            return tls.pinned_context(self.authority.ca_pem, self.name)
        role = role or ("component" if self.kind == "agent" else "user")
        return tls.client_context(
            self.authority.credential(CertificateSubject(role, name), ""), self.name
        )

    async def ask(self, role: str = "", timeout_s: float = SETTLES_S) -> None:
        """Make one call on a new connection, over TLS or on the unix socket."""
        at = f"unix:{self.socket}" if role == "local" else f"https://{USER}:{self.port}"
        context = None if role == "local" else self.context(role)
        async with WireClient(at, context, timeout_s=timeout_s) as client:
            await client.call(READY)

    # -- as an attacker

    def connect(self, address: str = ATTACKER) -> socket.socket:
        """Open a connection from an address of the loopback."""
        sock = socket.socket()
        sock.settimeout(SETTLES_S)
        sock.bind((address, 0))
        sock.connect((USER, self.port))
        return sock

    def secured(self, role: str = "", address: str = ATTACKER) -> ssl.SSLSocket:
        """Open a connection with TLS."""
        if role not in self._attackers:
            context = self._attackers[role] = tls.unverified_context()
            if role != "anyone":
                kind = role or ("component" if self.kind == "agent" else "user")
                tls.install(context, self.authority.credential(CertificateSubject(kind, "eve"), ""))
        return self._attackers[role].wrap_socket(self.connect(address))

    # -- costs

    def memory(self) -> int:
        """Return resident bytes."""
        return psutil.Process(self.process.pid).memory_info().rss

    def descriptors(self) -> int:
        """Return the number of open descriptors."""
        return psutil.Process(self.process.pid).num_fds()

    def tasks(self) -> int:
        """Return the number of tasks of its event loop, without that of the answer."""
        text = asyncio.run(self._metrics())
        found = re.search(rb"^twine_loop_tasks (\d+)", text, re.MULTILINE)
        assert found is not None
        return int(found[1])

    async def _metrics(self) -> bytes:
        here = aiohttp.UnixConnector(str(self.socket))
        async with aiohttp.ClientSession(connector=here) as http, http.get("http://x/metrics") as a:
            return await a.read()

    def until(self, holds: Callable[[], object], why: str = "") -> object:
        """Wait for a condition, up to the time that a slow machine may take."""
        deadline = time.monotonic() + START_S
        while not (found := holds()):
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, (why, self.log.read_text()[-4000:])
            time.sleep(0.05)
        return found


@contextmanager
def running(kind: str, folder: Path) -> Iterator[Target]:
    """Run a program during the block."""
    (folder / "state").mkdir(parents=True)
    target = Target(kind, folder)
    try:
        yield target
    finally:
        target.end()


def _few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
