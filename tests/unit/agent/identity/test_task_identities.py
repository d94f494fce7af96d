"""A task has its own key while it should run, and no other component has the key."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from builders import FakeHost, a_spec, gone, running, unit, until
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from agent.api import RestartPolicy, RestartWhen, TaskSpec, TaskState
from agent.api.task_identity import TaskCertificate
from agent.identity.identity import HostIdentity
from agent.identity.task_identities import TaskIdentities
from agent.runtime.core.records import TaskRecord, key_of
from agent.runtime.events import HostEvents
from agent.runtime.offload import Lanes
from control_plane.identity.authority import (
    TASK_LIFE_S,
    CertificateAuthority,
    TaskSubject,
    open_authority,
    public_key_of,
)
from wire.errors import Forbidden, HostError, Unreachable

WEB = a_spec(entitlement="shop", job="web", identity=True)
QUICK = RestartPolicy(backoff_s=0.05, backoff_max_s=0.05)


class Certifier:
    """A control plane that can be unavailable or refuse."""

    def __init__(self, authority: CertificateAuthority) -> None:
        self.authority, self.bundle = authority, authority.ca_pem
        self.trouble: Exception | None = None
        self.requests: list[str] = []

    async def certify_task(self, task_id: str, csr_pem: str) -> TaskCertificate:
        self.requests.append(task_id)
        if self.trouble is not None:
            raise self.trouble
        subject = TaskSubject("shop", "web", task_id)
        leaf = self.authority.issue(public_key_of(csr_pem), subject, TASK_LIFE_S)
        identity = self.authority.identity_of(subject)
        return TaskCertificate(
            identity=identity, certificate_pem=leaf.pem, not_after=leaf.not_after
        )

    def trusted(self) -> str:
        return self.bundle


@pytest.fixture
def certifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Certifier:
    made = Certifier(open_authority(tmp_path / "authority.pem", "twine"))
    monkeypatch.setattr(HostIdentity, "certify_task", lambda _, *given: made.certify_task(*given))
    monkeypatch.setattr(HostIdentity, "trusted", lambda _: made.trusted())
    return made


def record(task_id: str, spec: TaskSpec) -> TaskRecord:
    return TaskRecord(task_id=task_id, spec=spec)


class Setup:
    """Identities in a folder, with a clock that tests set; it starts at the real time."""

    def __init__(self, folder: Path, certifier: Certifier) -> None:
        self.now, self.events, self.lanes = time.time(), HostEvents("boot"), Lanes()
        self._begun = self.events._latest
        self.folder, self.tasks = folder / "identities", {"web-0": WEB}
        self.service = TaskIdentities(
            self.folder, certifier, self.lanes, self.events, lambda: self.now
        )

    async def messages(self) -> list[str]:
        """Return the messages of all events until now."""
        return [e.message for e in (await self.events.after(self._begun, 0)).events]

    async def check_certificates(self) -> None:
        def wanted() -> Mapping[str, TaskSpec]:
            return self.tasks

        await self.service.maintain(wanted)

    def leaf(self, task: str = "web-0") -> x509.Certificate:
        """Return the certificate that a task finds; check that the key next to it matches."""
        text = (self.folder / task / "identity.pem").read_bytes()
        key, found = serialization.load_pem_private_key(text, None), x509.load_pem_x509_certificate
        leaf = found(text[text.index(b"-----BEGIN CERT") :])
        assert key.public_key() == leaf.public_key()
        return leaf


@pytest.fixture
def service(tmp_path: Path, certifier: Certifier) -> Setup:
    return Setup(tmp_path, certifier)


@pytest.mark.behaviour("AG10")
async def test_a_task_has_its_identity_and_no_other_unit_has_it(
    host: FakeHost, certifier: Certifier, caplog: pytest.LogCaptureFixture
) -> None:
    """The key is only in the host's memory; no unit, status, event, log or record contains it."""
    caplog.set_level(logging.DEBUG)
    host.fake.processes.answers[("systemctl", "show")] = [b"LoadState=loaded\n"]
    folder = Path(host.config.run_dir) / "identities"
    async with host.agent() as client:
        await client.put_task("web-0", WEB)
        await client.put_task("plain", a_spec())
        await running(client, "plain")
        shown = [
            await running(client, "web-0"),
            await client.get_events(0),
            await client.get_unit("web-0"),
            host.fake.systemd.properties(unit("web-0")),
        ]
        pem = (folder / "web-0" / "identity.pem").read_text()
        modes = [oct(p.stat().st_mode & 0o777) for p in (folder, *sorted(folder.rglob("*")))]
        properties = host.fake.systemd.properties(unit("web-0"))
        others = host.fake.systemd.properties(unit("plain"))
        await client.delete_task("web-0")
        await gone(client, "web-0")

    assert properties["BindReadOnlyPaths"] == [f"{folder}/web-0:/run/twine-identity"]
    assert "TWINE_IDENTITY=/run/twine-identity" in properties["Environment"]
    assert "BindReadOnlyPaths" not in others
    assert modes == ["0o700", "0o755", "0o444", "0o444", "0o600"]
    assert list(folder.iterdir()) == []
    assert certifier.requests == ["web-0"]
    seen = msgspec.json.encode(shown).decode() + caplog.text
    seen += "".join(p.read_text(errors="replace") for p in host.state.rglob("*") if p.is_file())
    secret = pem.splitlines()[1]
    assert pem.startswith("-----BEGIN PRIVATE KEY-----")
    assert secret not in seen


async def test_a_task_waits_for_its_identity_and_reports_why(
    host: FakeHost, certifier: Certifier
) -> None:
    certifier.trouble = Forbidden("m1 may not have the identity of task web-0")
    async with host.agent() as client:
        await client.put_task("web-0", msgspec.structs.replace(WEB, restart=QUICK))
        waiting = await until(client, "web-0", lambda s: s.state is TaskState.BACKOFF)
        certifier.trouble = None
        await running(client, "web-0")
    assert "has no identity: m1 may not have" in waiting.reason


async def test_on_a_host_that_joined_nothing_such_a_task_is_not_started(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web-0", msgspec.structs.replace(WEB, restart=QUICK))
        waiting = await until(client, "web-0", lambda s: s.state is TaskState.BACKOFF)
    assert "has not joined a control plane" in waiting.reason
    assert host.units() == []


async def test_the_next_agent_and_the_next_start_reuse_existing_objects(
    host: FakeHost, certifier: Certifier
) -> None:
    async with host.agent() as client:
        await client.put_task("web-0", WEB)
        await running(client, "web-0")
    certifier.trouble = Unreachable("away")
    async with host.agent() as client:
        before = host.invocation("web-0")
        await client.restart_task("web-0")
        await until(
            client,
            "web-0",
            lambda s: s.state is TaskState.RUNNING and s.invocation_id != before,
        )
    assert certifier.requests == ["web-0"]


async def test_it_is_renewed_with_a_new_key_while_the_task_runs(
    service: Setup, certifier: Certifier
) -> None:
    await service.service.ensure(record("web-0", WEB))
    first, folder = service.leaf(), os.stat(service.folder / "web-0").st_ino
    [uri] = first.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert uri.value == "spiffe://twine/entitlement/shop/job/web/task/web-0"

    service.now += TASK_LIFE_S * 0.09
    await service.check_certificates()
    assert service.leaf() == first, "most of its life is left"
    service.now += TASK_LIFE_S * 0.07
    await service.check_certificates()
    second = service.leaf()
    assert second.serial_number != first.serial_number
    assert second.public_key() != first.public_key()
    assert os.stat(service.folder / "web-0").st_ino == folder, "a mounted folder is never replaced"
    assert sorted(p.name for p in (service.folder / "web-0").iterdir()) == [
        "bundle.pem",
        "identity.pem",
    ]
    assert certifier.requests == ["web-0", "web-0"]


async def test_tasks_get_the_trust_bundle_of_their_host_at_once(
    service: Setup, certifier: Certifier
) -> None:
    await service.service.ensure(record("web-0", WEB))
    certifier.bundle += "# and the next root\n"
    await service.check_certificates()
    assert (service.folder / "web-0" / "bundle.pem").read_text() == certifier.bundle
    assert len(certifier.requests) == 1


@pytest.mark.behaviour("BUG-AG75")
async def test_a_damaged_trust_bundle_is_replaced(service: Setup, certifier: Certifier) -> None:
    await service.service.ensure(record("web-0", WEB))
    bundle = service.folder / "web-0" / "bundle.pem"
    bundle.chmod(0o644)
    bundle.write_bytes(b"\xff\xfe damaged")
    await service.check_certificates()
    assert bundle.read_text() == certifier.bundle


async def test_a_control_plane_that_is_away_costs_nothing_until_the_identity_ends(
    service: Setup, certifier: Certifier
) -> None:
    await service.service.ensure(record("web-0", WEB))
    first = service.leaf()
    certifier.trouble = Unreachable("away")
    service.now += TASK_LIFE_S * 0.3
    for _ in range(3):
        await service.check_certificates()
        await service.service.ensure(record("web-0", WEB))  # it may also be started again
    assert service.leaf() == first
    assert await service.messages() == []

    service.now += TASK_LIFE_S * 0.4
    for _ in range(3):
        await service.check_certificates()
        service.now += 120
    [message] = await service.messages()
    assert "its identity ends in 7." in message
    service.now += TASK_LIFE_S * 0.3
    with pytest.raises(HostError, match="has no identity: away"):
        await service.service.ensure(record("web-0", WEB))
    certifier.trouble = None
    await service.check_certificates()
    assert service.leaf() != first


async def test_a_refused_renewal_is_not_repeated_at_every_check_and_others_continue(
    service: Setup, certifier: Certifier
) -> None:
    service.tasks["web-1"] = WEB
    for task in service.tasks:
        await service.service.ensure(record(task, WEB))
    certifier.trouble = Forbidden("it the task was not placed on it")
    service.now += TASK_LIFE_S * 0.2
    await service.check_certificates()
    await service.check_certificates()
    assert certifier.requests == ["web-0", "web-1"] * 2


async def test_nothing_is_renewed_for_a_removed_task_and_its_key_is_removed(
    service: Setup, certifier: Certifier
) -> None:
    await service.service.ensure(record("web-0", WEB))
    del service.tasks["web-0"]
    service.now += TASK_LIFE_S
    await service.check_certificates()
    assert list(service.folder.iterdir()) == []
    assert len(certifier.requests) == 1


async def test_a_finished_task_has_no_identity(host: FakeHost, certifier: Certifier) -> None:
    never = RestartPolicy(when=RestartWhen.NEVER)
    async with host.serving() as (services, client):
        await client.put_task("web-0", msgspec.structs.replace(WEB, restart=never))
        await running(client, "web-0")
        assert set(services.tasks.active_specs()) == {"web-0"}
        host.fake.systemd.exit(unit("web-0"))
        await until(client, "web-0", lambda s: s.state is TaskState.STOPPED)
        assert services.tasks.active_specs() == {}


async def test_a_file_that_cannot_be_written_is_reported_in_one_line(
    service: Setup, certifier: Certifier
) -> None:
    await service.service.ensure(record("web-0", WEB))
    (service.folder / "web-0" / "bundle.pem").unlink()
    (service.folder / "web-0" / "bundle.pem").mkdir()
    for work in (service.service.ensure(record("web-0", WEB)), service.check_certificates()):
        with pytest.raises(HostError, match="cannot be stored: Is a directory"):
            await work


async def test_one_of_another_job_is_not_taken_for_its_own(
    service: Setup, certifier: Certifier
) -> None:
    await service.service.ensure(record("web-0", WEB))
    other = msgspec.structs.replace(WEB, entitlement="other")
    await service.service.ensure(record("web-0", other))
    assert len(certifier.requests) == 2
    certifier.trouble = Unreachable("away")
    with pytest.raises(HostError):
        await service.service.ensure(record("web-0", WEB))


def test_an_identity_is_another_process_and_none_is_as_before() -> None:
    assert key_of(a_spec()) != key_of(a_spec(identity=True))
    assert b"identity" not in msgspec.json.encode(a_spec())
