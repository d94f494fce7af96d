"""The operator is warned, by the clock, a week before a host's identity ends without renewal."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from pathlib import Path

import pytest

from control_plane.identity.authority import (
    CertificateAuthority,
    CertificateSubject,
    OwnIdentity,
    open_authority,
)
from wire import tls
from wire.tls import Credential

pytestmark = pytest.mark.behaviour("BUG-HT5")

DAY_S = 86_400.0
HOST = "10.77.0.11"


class Clock:
    """The real time, moved forward by the test. TLS itself uses the real time."""

    def __init__(self) -> None:
        self.passed_s = 0.0
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return time.time() + self.passed_s


def issued(authority: CertificateAuthority, life_s: float) -> Credential:
    """Return a host's credential with this lifetime."""
    return authority.credential(CertificateSubject("host", "vm1", (HOST,)), "https://x", life_s)


def called(own: OwnIdentity, held: Credential) -> None:
    """Call the host that holds this credential, with a handshake in memory."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    token = tls.EXPECTED_SERVER.set("/host/vm1")
    try:
        client = own.agents_context().wrap_bio(back, there, server_hostname=HOST)
    finally:
        tls.EXPECTED_SERVER.reset(token)
    context = tls.server_context(held, require_client=True)
    server = context.wrap_bio(there, back, server_side=True)
    open_ends = [client, server]
    while open_ends:
        for end in list(open_ends):
            try:
                end.do_handshake()
                open_ends.remove(end)
            except ssl.SSLWantReadError:
                pass


@pytest.mark.behaviour("BUG-HT5")
def test_the_end_of_an_identity_is_warned_of_a_week_ahead_and_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Formerly there was no warning before the host had to join again."""
    clock = Clock()
    authority = open_authority(tmp_path / "authority.pem", "twine")
    own = OwnIdentity(authority, ["127.0.0.1"], clock)

    def warned() -> list[str]:
        return [getattr(x, "machine", "") for x in caplog.records if "ends soon" in x.message]

    caplog.set_level(logging.WARNING)
    held = issued(authority, 8 * DAY_S)
    called(own, held)
    assert own.ending() == warned() == []
    assert own.ends["vm1"] == pytest.approx(held.not_after, abs=1)

    clock.passed_s += 1.5 * DAY_S
    assert own.ending() == ["vm1"], "no call is needed for that"
    called(own, issued(authority, 8 * DAY_S - 60))
    assert own.ending() == warned() == ["vm1"]
    called(own, again := issued(authority, 8 * DAY_S - 120))
    called(own, again)
    assert warned() == ["vm1", "vm1"], "once for each certificate"

    called(own, issued(authority, 45 * DAY_S))
    assert own.ending() == []


@pytest.mark.behaviour("BUG-HT5")
def test_connections_to_an_agent_end_with_its_certificate(tmp_path: Path) -> None:
    """An attacker with a host's key would never close a connection on which it is trusted."""
    clock = Clock()
    authority = open_authority(tmp_path / "authority.pem", "twine")
    own = OwnIdentity(authority, ["127.0.0.1"], clock)
    called(own, issued(authority, 2 * DAY_S))
    ended: list[str] = []

    async def check_twice() -> None:
        async def disconnect(machine: str) -> None:
            ended.append(machine)

        reads_before = clock.reads
        checking = asyncio.ensure_future(own.end_connections_forever(disconnect, 0.0))
        while clock.reads < reads_before + 2:
            await asyncio.sleep(0)
        checking.cancel()

    clock.passed_s += DAY_S
    asyncio.run(check_twice())
    assert ended == []
    clock.passed_s += 2 * DAY_S
    asyncio.run(check_twice())
    assert set(ended) == {"vm1"}
