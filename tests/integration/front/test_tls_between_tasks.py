"""Tasks prove their identities to each other over TLS, with the control plane's certificates."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from agent import api
from agent.api.joining import RenewRequest
from agent.identity import keys
from agent.identity.identity import CandidateIdentity, HostIdentity, Invitation
from agent.identity.task_identities import TaskIdentities
from agent.routes import JOIN_ROUTES
from agent.runtime.core import records
from agent.runtime.events import HostEvents
from agent.runtime.offload import Lanes
from control_plane.api.jobs import JobRecord, JobSpec, Placement, TaskRecord
from control_plane.api.machines import TokenRequest
from control_plane.api.routes import ROUTES
from wire import tls
from wire.client import WireClient
from wire.errors import Forbidden, HostError, TwineError, Unauthenticated

from .conftest import FACTS, Region

ROUTE = {r.name: r for r in JOIN_ROUTES}
PLACES = {"web": "vm1", "db": "vm2"}


async def joined(region: Region, folder: Path, machine: str) -> HostIdentity:
    made = region.registrar.create_token(TokenRequest(machine=machine))
    token = await asyncio.to_thread(region.run, made)
    host = HostIdentity(folder / machine)
    candidate = CandidateIdentity(machine, "127.0.0.1:7443", FACTS, api.Location(), "small")
    await host.join(Invitation(region.url, token.token, token.ca_hash), candidate)
    return host


def deploy(region: Region, job: str, machine: str, *, identity: bool = True) -> None:
    """Record in the control plane that task 0 of a job is on a machine."""
    spec = JobSpec(
        name=job,
        entitlement="shop",
        tasks=1,
        image="sha256:" + "1" * 64,
        command=["/bin/server"],
        identity=identity,
    )
    task = TaskRecord(index=0, version=1, generation=1, placement=Placement(machine=machine))
    table = region.control_plane.task_service._jobs

    async def put() -> None:
        record = JobRecord(name=job, spec=spec, version=1, specs={1: spec}, tasks=[task])
        async with table.lock(job):
            await table.commit(job, record)

    region.run(put())


def spec_of(job: str) -> api.TaskSpec:
    return api.TaskSpec(image="sha256:" + "1" * 64, entitlement="shop", job=job, identity=True)


class Task:
    """One peer: the files of a task, and a program's TLS contexts from them."""

    def __init__(self, folder: Path, host: HostIdentity, name: str) -> None:
        self.name, self.lanes = name, Lanes()
        self.run = folder / f"run-{name}"
        self.service = TaskIdentities(self.run, host, self.lanes, HostEvents("b"))
        self.folder = self.run / f"{name}-0"

    async def given(self) -> Task:
        record = records.TaskRecord(task_id=f"{self.name}-0", spec=spec_of(self.name))
        await self.service.ensure(record)
        return self

    def context(self, purpose: ssl.Purpose) -> ssl.SSLContext:
        context = ssl.create_default_context(purpose, cafile=str(self.folder / "bundle.pem"))
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.folder / "identity.pem")
        return context


def identity_of(writer: asyncio.StreamWriter) -> str:
    """Return the identity of the peer as a program reads it: the one URI in the certificate."""
    names = writer.get_extra_info("ssl_object").getpeercert()["subjectAltName"]
    assert len(names) == 1
    return str(names[0][1])


async def talk(server: Task, client: ssl.SSLContext) -> tuple[str, str]:
    """Return the identity that the client saw, and the one that the server saw."""
    met = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.set_result(identity_of(writer))
        writer.write(b"hello")
        writer.close()

    context = server.context(ssl.Purpose.CLIENT_AUTH)
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as listening:
        port = listening.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
        try:
            assert await reader.read() == b"hello"
            return identity_of(writer), await met
        finally:
            writer.close()


@pytest.mark.behaviour("AG10")
def test_two_tasks_verify_each_others_identities(region: Region, tmp_path: Path) -> None:
    """Mutual TLS uses only the files that each task finds."""
    for job, machine in PLACES.items():
        deploy(region, job, machine)

    async def scenario() -> None:
        hosts = {m: await joined(region, tmp_path, m) for m in PLACES.values()}
        web = await Task(tmp_path, hosts["vm1"], "web").given()
        db = await Task(tmp_path, hosts["vm2"], "db").given()
        names = [f"spiffe://twine/entitlement/shop/job/{j}/task/{j}-0" for j in ("db", "web")]
        assert list(await talk(db, web.context(ssl.Purpose.SERVER_AUTH))) == names
        await web.service._renew("web-0", spec_of("web"))
        assert list(await talk(db, web.context(ssl.Purpose.SERVER_AUTH))) == names
        anonymous_context = ssl.create_default_context(cafile=str(web.folder / "bundle.pem"))
        anonymous_context.check_hostname = False
        with pytest.raises((ssl.SSLError, ConnectionError, AssertionError)):
            await talk(db, anonymous_context)

    asyncio.run(scenario())


def test_a_host_gets_only_the_identities_of_its_tasks(region: Region, tmp_path: Path) -> None:
    for job, machine in PLACES.items():
        deploy(region, job, machine)
    deploy(region, "plain", "vm1", identity=False)

    async def scenario() -> None:
        host = await joined(region, tmp_path, "vm1")
        csr = keys.signing_request(keys.new_key(), "db-0")
        for task in ("db-0", "web-1", "web-00", "web", "nothing-0", "-0", "web-0x"):
            with pytest.raises(Forbidden, match="the task was not placed on it"):
                await host.certify_task(task, csr)
        with pytest.raises(Forbidden, match="has no identity"):
            await host.certify_task("plain-0", csr)
        with pytest.raises(TwineError, match="certificate request"):
            await host.certify_task("web-0", "no request")
        first = await host.certify_task("web-0", csr)
        assert first.identity.endswith("/job/web/task/web-0"), "for any name in the request"
        await asyncio.to_thread(deploy, region, "web", "vm2")
        with pytest.raises(Forbidden, match="the task was not placed on it"):
            await host.certify_task("web-0", csr)

    asyncio.run(scenario())


async def close_nothing(_: str) -> None:
    """Replaces the connections to agents, which this control plane does not have."""


def test_a_host_with_a_revoked_identity_gets_no_task_identities(
    region: Region, tmp_path: Path
) -> None:
    deploy(region, "web", "vm1")

    async def scenario() -> None:
        host = await joined(region, tmp_path, "vm1")
        task = await Task(tmp_path, host, "web").given()
        revoke = next(r for r in ROUTES if r.name == "revoke_machine_identity")
        region.control_plane.disconnect = close_nothing  # type: ignore[method-assign]
        async with region.client() as operator:
            await operator.call(revoke, machine="vm1")
        with pytest.raises(Unauthenticated, match="was revoked"):
            await host.certify_task("web-0", keys.signing_request(keys.new_key(), "x"))
        task.service._clock = lambda: 1e11
        with pytest.raises(HostError, match="was revoked"):
            await task.given()

    asyncio.run(scenario())


@pytest.mark.behaviour("F-79")
def test_a_task_has_no_rights_at_the_public_interfaces(region: Region, tmp_path: Path) -> None:
    """A task's certificate is of the same authority, and names no user, host or component."""
    deploy(region, "web", "vm1")

    async def scenario() -> None:
        host = await joined(region, tmp_path, "vm1")
        task = await Task(tmp_path, host, "web").given()
        context = tls.pinned_context((task.folder / "bundle.pem").read_text(), tls.CONTROL_PLANE)
        context.load_cert_chain(task.folder / "identity.pem")
        async with WireClient(region.url, context) as client:
            request = RenewRequest(csr_pem="none")
            with pytest.raises(Unauthenticated, match="names no identity of Twine"):
                await client.call(ROUTE["renew"], request)
        posing = tls.pinned_context(region.authority.ca_pem, tls.CONTROL_PLANE)
        posing.check_hostname = False
        with pytest.raises(ssl.SSLCertVerificationError, match="no identity of Twine"):
            await talk(task, posing)

    asyncio.run(scenario())
