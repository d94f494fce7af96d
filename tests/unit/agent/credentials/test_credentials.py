"""Credentials are held in memory, passed to systemd for the right unit, and never displayed."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from builders import FakeHost, a_spec, running, unit, until

from agent import api
from agent.credentials.core import credential_properties, requested_credential
from agent.credentials.credentials import CREDENTIAL_MAX_BYTES
from agent.machine import memory_file
from agent.machine.memory_file import MemoryFile
from agent.runtime.core.records import key_of
from wire.errors import HostError, InvalidInput, NotFound

VALUE = b"correct horse\n\0battery"


def _read_credential(host: FakeHost, unit: str, name: str) -> bytes:
    """Send systemd's request, from a socket address that names the unit and the credential."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.bind(b"\0%s/unit/%s/%s" % (secrets.token_hex(8).encode(), unit.encode(), name.encode()))
        s.connect(str(Path(host.config.run_dir) / "credentials.sock"))
        found = b""
        while chunk := s.recv(4096):
            found += chunk
        return found


async def _given(host: FakeHost, unit: str, name: str) -> bytes:
    return await asyncio.to_thread(_read_credential, host, unit, name)


@pytest.mark.behaviour("AG10")
async def test_a_task_gets_its_credential_through_systemd_alone(
    host: FakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    """The value is in no status, event, log, unit or file; only the task's units get it."""
    caplog.set_level(logging.DEBUG)
    host.fake.processes.answers[("systemctl", "show")] = [b"LoadState=loaded\n"]
    async with host.agent() as client:
        await client.put_credential("local", "db-password", VALUE)
        await client.put_credential("other", "db-password", b"not yours")
        await client.put_task("web", a_spec(credentials={"db": "db-password"}))
        await client.put_task("nosy", a_spec())
        status = await running(client, "web")
        given = await _given(host, unit("web"), "db")
        step = await _given(host, "twine-step-web.service", "db")
        inside = await _given(host, "twine-in-web.x1.service", "db")
        refused = [
            await _given(host, unit("nosy"), "db"),
            await _given(host, unit("web"), "db-password"),
            await _given(host, "cron.service", "db"),
            await _given(host, unit("web") + "x", "db"),
        ]
        shown = [
            status,
            await client.get_events(0),
            await client.list_credentials(),
            await client.get_unit("web"),
            host.fake.systemd.properties(unit("web")),
        ]

    assert given == step == inside == VALUE
    assert refused == [b""] * 4
    seen = msgspec.json.encode(shown).decode() + caplog.text
    seen += "".join(p.read_text(errors="replace") for p in _files(host.state))
    assert "horse" not in seen
    socket_path = f"{host.config.run_dir}/credentials.sock"
    assert host.fake.systemd.properties(unit("web"))["LoadCredential"] == [f"db:{socket_path}"]


def _files(folder: Path) -> Iterator[Path]:
    return (p for p in folder.rglob("*") if p.is_file())


async def test_a_task_waits_for_a_credential_that_its_host_has_not(host: FakeHost) -> None:
    async with host.agent() as client:
        restart = api.RestartPolicy(backoff_s=0.05, backoff_max_s=0.05)
        await client.put_task("web", a_spec(credentials={"db": "db-password"}, restart=restart))
        waiting = await until(client, "web", lambda s: s.state is api.TaskState.BACKOFF)
        await client.put_credential("local", "db-password", VALUE)
        await running(client, "web")

    assert "holds no credential db-password of entitlement local" in waiting.reason


async def test_a_credential_is_taken_away_and_refused_in_one_line(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_credential("local", "key", VALUE)
        await client.delete_credential("local", "key")
        held = (await client.list_credentials()).credentials
        with pytest.raises(NotFound, match="holds no credential key"):
            await client.delete_credential("local", "key")
        with pytest.raises(InvalidInput, match="is not a valid name"):
            await client.put_credential("local", "A b", VALUE)
        for wrong in (b"", b"x" * (CREDENTIAL_MAX_BYTES + 1)):
            with pytest.raises(InvalidInput, match="bytes, not 1 to"):
                await client.put_credential("local", "key", wrong)
    assert held == []


async def test_the_next_agent_holds_what_the_last_one_did(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd keeps the memory between two agents; the values are never in a file system."""
    kept: list[int] = []
    monkeypatch.setattr(memory_file, "store_descriptor", lambda _, fd: kept.append(os.dup(fd)))
    monkeypatch.setattr(memory_file, "stored_descriptors", lambda _: [os.dup(fd) for fd in kept])
    async with host.agent() as client:
        await client.put_credential("local", "key", VALUE)
    async with host.agent() as client:
        [held] = (await client.list_credentials()).credentials
    mode = Path(host.config.run_dir, "credentials.sock").exists()
    os.close(kept[0])

    assert (held.entitlement, held.name, held.size_bytes) == ("local", "key", len(VALUE))
    assert mode is False


def test_an_interrupted_write_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_file, "stored_descriptors", lambda _: [])
    file = MemoryFile("test")
    assert file.read() == b""
    file.write(b"first")
    file.write(b"second")
    write = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, at: write(fd, data[:-1], at) if len(data) > 1 else 1
    )
    file.write(b"third")
    assert file.read() == b"second"
    with pytest.raises(HostError, match="do not fit"):
        file.write(b"x" * (memory_file.SLOT_BYTES + 1))
    file.close()


@pytest.mark.parametrize(
    ("address", "found"),
    [
        (b"\0ab12/unit/twine-task-web-0.service/db", ("web-0", "db")),
        (b"\0ab12/unit/twine-in-web-0.pre-stop.service/db", ("web-0", "db")),
        (b"\0ab12/unit/twine-task-web.service.d/db", None),
        (b"\0ab12/unit/other.service/db", None),
        (b"/run/somewhere", None),
        (b"", None),
    ],
)
def test_the_requesting_unit_follows_from_the_address(
    address: bytes, found: tuple[str, str] | None
) -> None:
    assert requested_credential(address) == found


@pytest.mark.behaviour("JC14")
def test_a_configuration_is_in_the_unit_next_to_its_credentials() -> None:
    """systemd makes a file of each text; another text needs another process."""
    spec = a_spec(credentials={"db": "key"}, configuration={"app.toml": "größe = 1\n"})
    assert credential_properties(spec, "/run/s") == {
        "LoadCredential": ["db:/run/s"],
        "SetCredential": {"app.toml": "größe = 1\n".encode()},
    }
    other = a_spec(credentials={"db": "key"}, configuration={"app.toml": "größe = 2\n"})
    assert len({key_of(spec), key_of(other), key_of(a_spec(credentials={"db": "key"}))}) == 3


def test_other_credentials_are_another_process_and_none_are_as_before() -> None:
    plain, with_one = a_spec(), a_spec(credentials={"db": "key"})
    assert key_of(plain) != key_of(with_one)
    assert key_of(with_one) != key_of(a_spec(credentials={"db": "other"}))
