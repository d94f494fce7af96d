"""One TLS context for all agents: each connection accepts exactly one machine."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from agent.routes import ROUTES
from control_plane.identity.authority import CertificateSubject, OwnIdentity, open_authority
from wire import tls
from wire.client import WireClient
from wire.errors import Unreachable

READY = next(route for route in ROUTES if route.name == "readyz")
BODY = '{"ok":true,"detail":""}'
HEAD = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"


@pytest.mark.behaviour("BUG-CP10")
def test_calls_to_many_machines_share_a_context_and_verify_each_machine(
    tmp_path: Path,
) -> None:
    """A context per machine took 2 s per 1,000 machines at each renewal."""
    authority = open_authority(tmp_path / "authority.pem", "twine")
    identity = OwnIdentity(authority, ["127.0.0.1"])
    context = identity.agents_context()

    def serving(machine: str) -> ssl.SSLContext:
        held = authority.credential(CertificateSubject("host", machine, ("127.0.0.1",)), "")
        return tls.server_context(held, require_client=True)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write((HEAD + BODY).encode())
        await writer.drain()
        writer.close()

    async def ask(port: int, expected: str) -> object:
        async with WireClient(f"https://127.0.0.1:{port}", context) as client:
            client.expected = expected
            return await client.call(READY)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            ports = {}
            for machine in ("vm1", "vm2"):
                server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=serving(machine))
                await stack.enter_async_context(server)
                ports[machine] = server.sockets[0].getsockname()[1]
            both = [ask(ports[machine], f"/host/{machine}") for machine in ports for _ in range(5)]
            assert all(getattr(ready, "ok", False) for ready in await asyncio.gather(*both))
            with pytest.raises(Unreachable, match="expected to reach /host/vm1, but /host/vm2"):
                await ask(ports["vm2"], "/host/vm1")
            identity.renew()
            assert await ask(ports["vm1"], "/host/vm1")

    async def forgetful() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=serving("vm1"))
        async with server:
            with pytest.raises(Unreachable, match="expected to reach no host"):
                await ask(server.sockets[0].getsockname()[1], "")

    asyncio.run(main())
    asyncio.run(forgetful())


@pytest.mark.behaviour("BUG-CP10")
def test_a_renewal_installs_one_certificate_however_many_machines_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the event loop was blocked meanwhile."""
    identity = OwnIdentity(open_authority(tmp_path / "authority.pem", "twine"), ["127.0.0.1"])
    held = [identity.server_context(), identity.agents_context()]
    installed: list[ssl.SSLContext] = []
    monkeypatch.setattr(tls, "install", lambda context, _: installed.append(context))
    identity.renew()
    assert len(installed) == len(held)
