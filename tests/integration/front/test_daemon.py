"""`twine-control-plane` as a process: its start, its end, its output."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.client import ControlPlaneClient
from control_plane.store.sqlite import SqliteStore
from wire import tls

START_S = 60
_NUMBERS = itertools.count()


class Daemon:
    """One process with a separate state folder."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.state, self.socket = folder / "state", folder / "cp.sock"
        self._notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path = folder / f"notify-{next(_NUMBERS)}"
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
        """Return the messages that systemd receives."""
        return self._notified.recv(4096).decode()

    def end(self) -> tuple[int, str]:
        """Return exit code and output, after SIGTERM if the process still runs."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """Return exit code and output."""
        output = self.process.communicate(timeout=START_S)[1]
        self._notified.close()
        return self.process.returncode, output


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


def test_it_serves_until_it_is_stopped(daemon: Daemon, tmp_path: Path) -> None:
    assert "READY=1\nSTATUS=serving at https://127.0.0.1:" in daemon.wait_ready()

    async def ask() -> bool:
        async with ControlPlaneClient(f"unix:{daemon.socket}") as client:
            return (await client.readyz()).ok

    assert asyncio.run(ask())
    assert daemon.socket.stat().st_mode & 0o777 == 0o600
    assert daemon.state.stat().st_mode & 0o777 == 0o700

    second = Daemon(tmp_path)
    code, output = second.wait()
    assert code == 75
    assert "Traceback" not in output
    assert asyncio.run(ask()), "the second one must not disturb the first"

    other_state = tmp_path / "other"
    other_state.mkdir()
    third = Daemon(other_state, "--socket", str(daemon.socket))
    code, output = third.wait()
    assert (code, "another process answers there" in output) == (78, True)

    code, output = daemon.end()
    assert code == 0, output
    assert "Traceback" not in output
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


def test_a_daemon_starts_after_another_was_killed(daemon: Daemon, tmp_path: Path) -> None:
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
        (("--cluster", "Not A Name"), "cluster: 'Not A Name' is not valid; expected"),
        (("--config", "/nonexistent.toml"), "cannot read /"),
        (("--socket", "/proc/x/cp.sock"), "cannot listen on /proc/x"),
        (("--state", "/proc/x"), "cannot use the state folder"),
        (("--down-after", "-1"), "--down-after: '-1' is not a duration"),
        (("--down-after-s", "0"), "--down-after 0: 0s is not valid"),
    ],
)
def test_unusable_input_is_reported(tmp_path: Path, options: tuple[str, ...], reason: str) -> None:
    code, output = Daemon(tmp_path, *options).wait()
    assert (code, reason in output, "Traceback" in output) == (78, True, False), output


def test_a_user_needs_a_control_plane_first(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "control_plane.daemon", "user", "add", "ada"]
    command += ["--out", str(tmp_path / "x"), "--state", str(tmp_path / "none")]
    made = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert made.returncode == 78
    assert "there is no authority" in made.stderr


def test_an_unwritable_credential_is_reported(daemon: Daemon, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("/proc/x", "cannot use the folder of broker_stores.dc1, /proc/x"),
        ("dc1", "broker_stores.dc1: 'dc1' is not an absolute path"),
    ],
)
def test_an_unusable_folder_is_reported(tmp_path: Path, folder: str, reason: str) -> None:
    file = tmp_path / "cp.toml"
    file.write_text(f'[broker_stores]\ndc1 = "{folder}"\n')
    code, output = Daemon(tmp_path, "--config", str(file)).wait()
    assert (code, reason in output, "Traceback" in output) == (78, True, False), output


def inventory(*datacenters: str) -> bytes:
    head = "machine,datacenter,msb,row,rack,machine_type"
    lines = [f"{dc}-m{n},{dc},msb1,row1,rack1,web" for dc in datacenters for n in range(2)]
    return "\n".join([head, *lines, ""]).encode()


@pytest.mark.behaviour("RB9")
def test_a_data_center_keeps_its_machines_in_a_separate_store(tmp_path: Path) -> None:
    own, file = tmp_path / "disk" / "dc2", tmp_path / "cp.toml"
    configured = f'[broker_stores]\ndc2 = "{own}"\n'
    file.write_text(configured)

    def started() -> Daemon:
        daemon = Daemon(tmp_path, "--config", str(file))
        assert "READY=1" in daemon.wait_ready()
        return daemon

    async def machines(daemon: Daemon, *more: str) -> list[str]:
        async with ControlPlaneClient(f"unix:{daemon.socket}") as client:
            if more:
                await client.import_machines(inventory(*more))
            return [view.record.machine for view in (await client.list_machines()).machines]

    first = started()
    all_machines = ["dc1-m0", "dc1-m1", "dc2-m0", "dc2-m1"]
    assert asyncio.run(machines(first, "dc1", "dc2")) == all_machines
    first.process.kill()
    first.wait()

    async def stored(folder: Path) -> list[str]:
        async with SqliteStore(folder) as store:  # both are closed and released
            keys = [entry.key for entry in (await store.list_prefix("machines/")).entries]
        return [key.rpartition("/")[2] for key in keys]

    assert asyncio.run(stored(tmp_path / "state" / "store")) == all_machines[:2]
    assert asyncio.run(stored(own)) == all_machines[2:]

    second = started()
    assert asyncio.run(machines(second)) == all_machines
    assert second.end()[0] == 0

    file.write_text("")  # the line was taken out
    code, output = Daemon(tmp_path, "--config", str(file)).wait()
    assert (code, "Traceback" in output) == (78, False)
    assert f"are in a separate store, last at {own}" in output
    assert "forget-store" in output

    file.write_text(f'{configured}dc1 = "{tmp_path}/disk/dc1"\n')  # it has machines elsewhere
    code, output = Daemon(tmp_path, "--config", str(file)).wait()
    assert (code, "there are machines of dc1 in the main store" in output) == (78, True), output

    file.write_text(configured)
    third = started()
    assert asyncio.run(machines(third)) == all_machines
    assert third.end()[0] == 0

    forget = [sys.executable, "-m", "control_plane.daemon", "forget-store", "dc2", "--yes"]
    forget += ["--state", str(tmp_path / "state")]
    outcomes = [
        subprocess.run(forget, capture_output=True, text=True, timeout=START_S, check=False)
        for _ in range(2)
    ]
    assert [outcome.returncode for outcome in outcomes] == [0, 3]
    assert f"last at {own}" in outcomes[0].stdout
    file.write_text("")
    fourth = started()
    assert asyncio.run(machines(fourth)) == all_machines[:2]
    assert fourth.end()[0] == 0
