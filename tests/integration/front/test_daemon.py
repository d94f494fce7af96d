"""`twine-control-plane` as a process: how it starts, how it ends, what it says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.wire import tls
from control_plane.client import ControlPlaneClient

START_S = 60


class Daemon:
    """One process on a state folder of its own."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.state, self.socket = folder / "state", folder / "cp.sock"
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path = folder / f"notify-{len(list(folder.iterdir()))}"
        self._notified.bind(str(path))
        self._notified.settimeout(START_S)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "control_plane.daemon", "serve"),
                *("--state", str(self.state), "--listen", "127.0.0.1:0"),
                *("--socket", str(self.socket), *more),
            ],
            env=os.environ | {"NOTIFY_SOCKET": str(path)},
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> str:
        """Return what systemd is told."""
        return self._notified.recv(4096).decode()

    def end(self) -> tuple[int, str]:
        """Return exit code and what was said, after SIGTERM if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """Return exit code and what was said."""
        said = self.process.communicate(timeout=START_S)[1]
        self._notified.close()
        return self.process.returncode, said


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    running = Daemon(tmp_path)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
        with contextlib.suppress(ValueError):
            running.wait()


def test_it_serves_until_it_is_told_to_stop(daemon: Daemon, tmp_path: Path) -> None:
    assert "READY=1\nSTATUS=serving at https://127.0.0.1:" in daemon.wait_ready()

    async def ask() -> bool:
        async with ControlPlaneClient(f"unix:{daemon.socket}") as client:
            return (await client.readyz()).ok

    assert asyncio.run(ask())
    assert daemon.socket.stat().st_mode & 0o777 == 0o600
    assert daemon.state.stat().st_mode & 0o777 == 0o700

    second = Daemon(tmp_path)
    code, said = second.wait()
    assert code == 75
    assert "Traceback" not in said
    assert asyncio.run(ask()), "the second one must not disturb the first"

    other_state = tmp_path / "other"
    other_state.mkdir()
    third = Daemon(other_state, "--socket", str(daemon.socket))
    code, said = third.wait()
    assert (code, "another process answers there" in said) == (78, True)

    code, said = daemon.end()
    assert code == 0, said
    assert "Traceback" not in said
    assert not daemon.socket.exists()


def test_a_user_gets_a_credential_that_works(daemon: Daemon, tmp_path: Path) -> None:
    url = daemon.wait_ready().rpartition(" ")[2].strip()
    out = tmp_path / "ada.json"
    command = [sys.executable, "-m", "control_plane.daemon", "user", "add", "ada"]
    command += ["--out", str(out), "--state", str(daemon.state), "--url", url]
    made = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert made.returncode == 0, made.stderr
    assert out.stat().st_mode & 0o777 == 0o600

    async def ask() -> int:
        held = tls.load(out)
        context = tls.client_context(held, tls.CONTROL_PLANE)
        async with ControlPlaneClient(held.url, context) as client:
            return len((await client.list_jobs()).jobs)

    assert asyncio.run(ask()) == 0


def test_a_killed_daemon_leaves_nothing_in_the_way_of_the_next(
    daemon: Daemon, tmp_path: Path
) -> None:
    daemon.wait_ready()
    daemon.process.kill()
    daemon.wait()
    assert daemon.socket.exists()
    again = Daemon(tmp_path)
    assert "READY=1" in again.wait_ready()
    assert again.end()[0] == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--listen", "nowhere"), "not HOST:PORT"),
        (("--listen", "192.0.2.1:7440"), "cannot listen on 192.0.2.1:7440"),
        (("--listen", "127.0.0.1:1x"), "not HOST:PORT"),
        (("--cluster", "Not A Name"), "cluster: Expected"),
        (("--config", "/nonexistent.toml"), "cannot read the configuration"),
        (("--socket", "/proc/x/cp.sock"), "cannot listen on /proc/x"),
        (("--state", "/proc/x"), "cannot use the state folder"),
        (("--down-after-s", "-1"), "--down-after-s"),
    ],
)
def test_what_cannot_be_used_is_said(tmp_path: Path, options: tuple[str, ...], reason: str) -> None:
    code, said = Daemon(tmp_path, *options).wait()
    assert (code, reason in said, "Traceback" in said) == (78, True, False), said


def test_a_user_needs_a_control_plane_first(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "control_plane.daemon", "user", "add", "ada"]
    command += ["--out", str(tmp_path / "x"), "--state", str(tmp_path / "none")]
    made = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert made.returncode == 78
    assert "there is no authority" in made.stderr


def test_a_credential_that_cannot_be_written_is_said(daemon: Daemon, tmp_path: Path) -> None:
    daemon.wait_ready()
    command = [sys.executable, "-m", "control_plane.daemon", "user", "add", "ada"]
    command += ["--out", "/proc/x/ada.json", "--state", str(daemon.state)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert made.returncode == 78
    assert "Traceback" not in made.stderr


def test_help_loads_nothing_heavy() -> None:
    """Start time: `twinectl --help` answers in well under 300 ms on an idle machine."""
    program = (
        "import sys; from control_plane.cli import main\n"
        "try: main(['job', 'apply', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'aiohttp', 'rich', 'cryptography', 'yaml', 'prometheus_client'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stderr.strip() == "[]"
