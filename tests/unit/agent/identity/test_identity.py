"""The host's identity on disk and in time; joining over TLS is in tests/integration."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.identity.identity import RENEW_FROM, RENEW_TO, HostIdentity, Identity, renewal_time
from wire import durable, tls
from wire.errors import ConfigError, ProtocolError, TwineError, Unauthenticated, Unreachable
from wire.tls import Credential

DAY_S = 86_400.0


def a_credential(**fields: object) -> Credential:
    held = Credential(
        name="vm1",
        url="https://cp:7440",
        key_pem="",
        certificate_pem="",
        ca_pem="",
        issued_at=0.0,
        not_after=DAY_S,
    )
    return msgspec.structs.replace(held, **fields)


@pytest.mark.behaviour("BUG-AG5")
@given(st.floats(0, 2e9), st.floats(60, 1e8), st.floats(RENEW_FROM, RENEW_TO))
def test_a_certificate_is_renewed_while_a_third_of_its_life_is_left(
    issued_at: float, life_s: float, share: float
) -> None:
    """It is also renewed each day, so that a long validity remains for a long outage."""
    due = renewal_time(issued_at, issued_at + life_s, share)
    within = min(life_s, DAY_S)
    assert issued_at + 0.49 * within <= due <= issued_at + 0.67 * within


def test_a_host_that_never_joined_has_no_identity(tmp_path: Path) -> None:
    assert HostIdentity(tmp_path / "none").find() is None


def test_an_identity_is_read_back(tmp_path: Path) -> None:
    tls.save(a_credential(), tmp_path / "identity.json")
    assert HostIdentity(tmp_path).find() == Identity("vm1", "https://cp:7440", DAY_S)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"name":"vm1"}', b"\xff"])
def test_a_damaged_identity_is_reported_and_kept(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "identity.json"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"identity\.json"):
        HostIdentity(tmp_path).find()
    assert file.read_bytes() == data


def test_an_invalid_certificate_never_replaces_a_valid_one(tmp_path: Path) -> None:
    host = HostIdentity(tmp_path)
    tls.save(a_credential(), tmp_path / "identity.json")
    with pytest.raises((ProtocolError, ConfigError)):
        host._save(a_credential(certificate_pem="nonsense", name="evil"))
    found = host.find()
    assert found is not None
    assert found.machine == "vm1"


@pytest.mark.behaviour("BUG-HT5")
@pytest.mark.parametrize(
    "error",
    [
        Unreachable("the control plane is away"),
        Unauthenticated("the certificate of vm1 was revoked"),
    ],
)
def test_a_failed_renewal_is_tried_again_until_it_works(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: TwineError,
) -> None:
    """A host whose identity was revoked reports this, and continues after it has joined again."""
    now = 0.0
    attempts: list[float] = []
    real_sleep = asyncio.sleep
    tls.save(a_credential(), tmp_path / "identity.json")
    host = HostIdentity(tmp_path, lambda: now)

    async def sleep(delay: float) -> None:
        nonlocal now
        now += delay
        await real_sleep(0)

    async def renew() -> Identity:
        attempts.append(now)
        if len(attempts) < 3:
            raise error
        tls.save(a_credential(issued_at=now, not_after=now + DAY_S), tmp_path / "identity.json")
        return Identity("vm1", "", now + DAY_S)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(host, "renew", renew)

    async def scenario() -> None:
        task = asyncio.ensure_future(host.renew_forever())
        while len(attempts) < 4 and not task.done():
            await real_sleep(0)
        task.cancel()

    asyncio.run(scenario())
    assert RENEW_FROM * DAY_S <= attempts[0] <= (RENEW_TO + 0.01) * DAY_S
    assert attempts[2] - attempts[0] < 0.1 * DAY_S, "it must not wait for the next due time"
    assert [getattr(x, "reason", "") for x in caplog.records] == [str(error)] * 2
    assert attempts[3] - attempts[2] >= 0.49 * DAY_S


def test_a_file_is_old_or_new_and_for_its_owner_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "deep" / "file"
    durable.write(file, b"old")
    assert file.stat().st_mode & 0o777 == 0o600

    def no_space(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        durable.write(file, b"new")
    assert file.read_bytes() == b"old"
    assert [p.name for p in file.parent.iterdir()] == ["file"]
