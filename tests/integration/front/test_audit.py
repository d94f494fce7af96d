"""The audit log has every acknowledged change, and every caller that was refused one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from msgspec.structs import replace

from agent.api import Relaxation
from agent.api.joining import JoinRequest
from control_plane.api.capacity import EntitlementSpec
from control_plane.api.intent_changes import HoldChange, PushChange, SizeChange, SizeChanges
from control_plane.api.inventory import Drain
from control_plane.api.jobs import JobSpec
from control_plane.api.machines import TokenRequest
from control_plane.api.people import AuditEntry, GroupSpec, Outcome
from control_plane.api.routes import ROUTES
from control_plane.cli import main
from control_plane.front_end.trail import REFUSALS_PER_MINUTE
from wire.errors import Forbidden, InvalidInput, TwineError, Unauthenticated

from .conftest import FACTS, Region

ROUTE = {route.name: route for route in ROUTES}
DIGEST = "sha256:" + "0" * 64


def entries(region: Region, **query: Any) -> list[AuditEntry]:
    async def ask() -> Any:
        async with region.client() as client:
            return await client.call(ROUTE["list_audit"], **query)

    found: list[AuditEntry] = asyncio.run(ask()).entries
    return found


def call(region: Region, caller: str, route: str, body: Any = None, **given: Any) -> Any:
    async def ask() -> Any:
        role, name = ("local", "") if caller == "local" else ("user", caller)
        async with region.client("anyone" if caller == "anyone" else role, name) as client:
            return await client.call(ROUTE[route], body, **given)

    return asyncio.run(ask())


def test_the_audit_log_has_caller_change_and_both_revisions(region: Region) -> None:
    spec = EntitlementSpec(machines=1, owners=["user:ann"])
    call(region, "local", "put_entitlement", spec, entitlement="web")
    call(region, "local", "put_entitlement", EntitlementSpec(machines=2), entitlement="web")
    second, first = entries(region)
    assert (first.caller, first.address, first.action) == ("local:0", "", "put_entitlement")
    assert (first.object, first.outcome, first.before) == ("entitlement/web", Outcome.DONE, 0)
    assert first.detail == "machines=1, owners=user:ann, priority=500"
    assert second.before == first.after != 0
    assert second.after is not None
    assert second.after > (second.before or 0)
    assert len({first.request_id, second.request_id}) == 2


def test_the_id_of_a_request_is_in_its_answer_its_error_and_the_log(region: Region) -> None:
    async def put() -> tuple[str, str]:
        async with region.client() as client:
            url = "http://local/v1/groups/web"
            good = await client._open().put(url, data=b'{"members":["ann"]}')
            bad = await client._open().put(url, data=b'{"members":3}')
            assert (await bad.json())["request_id"] == bad.headers["X-Request-Id"]
            return good.headers["X-Request-Id"], bad.headers["X-Request-Id"]

    good, bad = asyncio.run(put())
    assert [e.request_id for e in entries(region)] == [good]
    assert good != bad


def test_a_change_without_effect_is_not_in_the_log(region: Region) -> None:
    spec = EntitlementSpec(machines=1)
    region.run(region.control_plane.portal.put("web", spec, jobs=[]))
    job = JobSpec(name="j", entitlement="web", tasks=1, image=DIGEST, command=["/bin/true"])
    call(region, "local", "apply_job", job, job="j", dry_run="true")
    call(region, "local", "plan_job", job, job="j")
    call(region, "local", "list_jobs")
    assert entries(region) == []


def test_a_secret_in_a_job_is_not_in_the_log(region: Region) -> None:
    region.run(region.control_plane.portal.put("web", EntitlementSpec(machines=1), jobs=[]))
    job = JobSpec(
        name="j",
        entitlement="web",
        tasks=3,
        image=DIGEST,
        command=["/bin/login", "hunter2"],
        environment={"PASSWORD": "hunter2"},
    )
    call(region, "local", "apply_job", job, job="j")
    (entry,) = entries(region)
    assert "hunter2" not in msgspec.json.encode(entry).decode()
    assert entry.detail == f"entitlement=web, tasks=3, image={DIGEST}"


def test_a_failed_change_is_recorded_with_its_reason(region: Region) -> None:
    with pytest.raises(TwineError):
        call(region, "local", "drain_machines", Drain(machines=["no"], reason="new fan"))
    (entry,) = entries(region)
    assert entry.outcome is Outcome.FAILED
    assert entry.detail == "machines=no, kind=maintenance, reason=new fan"
    assert "no" in entry.reason


@pytest.mark.behaviour("BUG-CP18")
@pytest.mark.parametrize("caller", ["vic", "anyone"])
def test_a_refused_change_is_in_the_log(region: Region, caller: str) -> None:
    """Regression: the log did not show the refused caller."""
    with pytest.raises((Forbidden, Unauthenticated)) as refusal:
        call(region, caller, "put_group", GroupSpec(members=[caller]), group="sre")
    (entry,) = entries(region)
    expected = "anyone" if caller == "anyone" else "user:vic"
    assert (entry.caller, entry.address) == (expected, "127.0.0.1")
    assert (entry.action, entry.object, entry.outcome) == ("put_group", "group/sre", "refused")
    assert entry.request_id == refusal.value.request_id
    assert entry.reason == str(refusal.value)


def test_an_owner_that_exceeds_its_rights_is_logged_once(region: Region) -> None:
    for name, owner in (("web", "ann"), ("other", "otto")):
        spec = EntitlementSpec(machines=1, owners=[f"user:{owner}"])
        region.run(region.control_plane.portal.put(name, spec, jobs=[]))
    with pytest.raises(Forbidden):
        call(region, "otto", "delete_entitlement", entitlement="web")
    (entry,) = entries(region)
    assert (entry.outcome, entry.caller) == (Outcome.REFUSED, "user:otto")


def test_refused_reads_and_bad_bodies_are_not_in_the_log(region: Region) -> None:
    with pytest.raises(Unauthenticated):
        call(region, "anyone", "list_jobs")
    with pytest.raises(TwineError):
        call(region, "local", "put_group", {"members": 3}, group="x")
    assert entries(region) == []


def test_the_log_is_read_with_twinectl(region: Region) -> None:
    env = {"TWINE_ENDPOINT": f"unix:{region.socket}"}

    def ctl(*arguments: str) -> Any:
        return CliRunner().invoke(main, arguments, env=env)

    assert ctl("group", "set", "web", "ann", "wendy").stdout == "group web: ann, wendy\n"
    assert ctl("role", "grant", "ann", "operator").stdout == "user:ann is an operator\n"
    assert ctl("role", "grant", "group:nope", "operator").exit_code == 3
    made = ctl("entitlement", "create", "front", "--machines", "1", "--owner", "group:web")
    assert made.exit_code == 0, made.output
    assert ctl("entitlement", "update", "front", "--add-owner", "otto").exit_code == 0
    assert "group:web, user:otto" in ctl("entitlement", "show", "front").stdout
    assert ctl("entitlement", "update", "front", "--remove-owner", "group:web").exit_code == 0
    assert "user:otto" in ctl("entitlement", "show", "front").stdout
    refused = ctl("entitlement", "update", "front", "--add-owner", "group:nope")
    assert (refused.exit_code, "no group 'nope'" in refused.stderr) == (64, True)
    table = ctl("audit").stdout.splitlines()
    assert "put_group" in table[1]
    assert "grant_operator" in table[2]
    found = json.loads(ctl("audit", "--object", "entitlement/front", "-o", "json").stdout)
    assert [e["outcome"] for e in found["entries"]] == ["done"] * 3 + ["failed"]
    assert ctl("audit", "--since", "1h", "--who", "unknown").stdout.count("\n") == 1
    assert "operator" in ctl("whoami").stdout
    assert "user:ann" in ctl("role", "list").stdout
    assert ctl("role", "grant", "ann", "host-admin").stdout == "user:ann is a host admin\n"
    assert "host-admin" in ctl("role", "list").stdout
    gone = ctl("role", "revoke", "ann", "host-admin")
    assert gone.stdout == "user:ann no longer has the role host-admin\n"
    assert "host-admin" not in ctl("role", "list").stdout
    assert ctl("role", "revoke", "ann", "operator").exit_code == 0
    assert ctl("role", "revoke", "root", "operator").exit_code == 5
    assert ctl("group", "remove", "web").exit_code == 0
    assert ctl("group", "list").stdout.count("\n") == 1


@pytest.mark.behaviour("F-83")
def test_tasks_without_a_sandbox_need_a_grant_and_are_logged(
    region: Region,
) -> None:
    """Even an operator needs the grant for `raw`. Its use is always in the log, and the grant can
    be revoked.
    """
    owned = EntitlementSpec(machines=1, owners=["user:ann"])
    call(region, "local", "put_entitlement", owned, entitlement="web")
    plain = JobSpec(name="j", entitlement="web", tasks=1, image=DIGEST, command=["/bin/true"])
    raw = replace(plain, relaxations=[Relaxation.PROC, Relaxation.RAW])
    for caller in ("ann", "root"):  # an owner; an operator by the configuration
        with pytest.raises(Forbidden, match=f"`raw`.*{caller} is not a host admin"):
            call(region, caller, "apply_job", raw, job="j")
    with pytest.raises(Forbidden, match="ann is not an operator"):
        call(region, "ann", "grant_host_admin", admin="user:ann")
    call(region, "ann", "apply_job", plain, job="j")
    for caller in ("ann", "root"):
        with pytest.raises(Forbidden, match=f"`raw`.*{caller} is not a host admin"):
            call(region, caller, "put_push", PushChange(spec=raw), job="j")
    call(region, "root", "grant_host_admin", admin="user:ann")
    assert call(region, "ann", "get_current_user").host_admin
    call(region, "ann", "apply_job", raw, job="j")
    call(region, "root", "revoke_host_admin", admin="user:ann")
    for action in ("restart_job", "resume_job", "rollback_job"):
        with pytest.raises(Forbidden, match="not a host admin"):
            call(region, "ann", action, job="j")
    with pytest.raises(Forbidden, match="not a host admin"):
        call(region, "ann", "put_size", SizeChange(tasks=2), job="j")
    call(region, "ann", "pause_job", job="j")
    call(region, "ann", "put_hold", HoldChange(lasts_s=60), job="j")
    call(region, "ann", "apply_job", plain, job="j")

    recorded = [(e.caller, e.action, e.object, e.outcome) for e in entries(region)]
    assert ("user:root", "grant_host_admin", "host-admin/user:ann", Outcome.DONE) in recorded
    assert ("user:root", "revoke_host_admin", "host-admin/user:ann", Outcome.DONE) in recorded
    uses = [e for e in entries(region) if "relaxations=proc raw" in e.detail]
    assert [(e.caller, e.action, e.object, e.outcome) for e in uses] == [
        ("user:ann", "apply_job", "job/j", Outcome.DONE)
    ]
    refused = [e for e in entries(region) if e.outcome is Outcome.REFUSED]
    assert {e.caller for e in refused} == {"user:ann", "user:root"}
    assert sum("not a host admin" in e.reason for e in refused) == 8


@pytest.mark.behaviour("FE8")
def test_sizes_of_many_jobs_are_each_written_checked_and_in_the_log(region: Region) -> None:
    """A conflict refuses one job alone; a job of another owner refuses the whole request."""
    for name in ("web", "other"):
        owned = EntitlementSpec(machines=1, owners=[f"user:{name}"])
        call(region, "local", "put_entitlement", owned, entitlement=name)
    for job, pool in (("a", "web"), ("b", "web"), ("c", "other")):
        spec = JobSpec(name=job, entitlement=pool, tasks=1, image=DIGEST, command=["/bin/true"])
        call(region, "local", "apply_job", spec, job=job)
    intents = region.control_plane.intents
    intents.stale = {"b"}
    changes = {job: SizeChange(tasks=n, reason="noon") for n, job in enumerate("ab", 2)}
    answer = call(region, "web", "put_sizes", SizeChanges(sizes=changes))
    assert answer.versions == {"a": 3}
    assert answer.refused["b"].code == "conflict"
    assert intents.written == [("size", "a", changes["a"], "user:web")]
    found = {e.object: e for e in entries(region) if e.action == "put_size"}
    assert {name: e.outcome for name, e in found.items()} == {
        "job/a": Outcome.DONE,
        "job/b": Outcome.FAILED,
    }
    assert found["job/a"].detail == "tasks=2, reason=noon"

    changes["c"] = SizeChange(tasks=9)
    with pytest.raises(Forbidden, match="web does not own entitlement 'other'"):
        call(region, "web", "put_sizes", SizeChanges(sizes=changes))
    assert len(intents.written) == 1, "nothing of it is written"
    assert entries(region)[0].outcome is Outcome.REFUSED


@pytest.mark.behaviour("BUG-CP18")
def test_admitted_hosts_are_logged_and_unauthenticated_callers_cannot_fill_the_log(
    region: Region,
) -> None:
    """The log shows the user that brought a machine into the region."""
    token = call(region, "local", "create_token", TokenRequest(machine="vm7"))

    def join(text: str) -> Any:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
        csr = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, SHA256())
        body = JoinRequest(
            token=text,
            machine="vm7",
            csr_pem=csr.public_bytes(Encoding.PEM).decode(),
            address="10.0.0.7:7443",
            facts=FACTS,
        )
        return call(region, "anyone", "join", body)

    join(token.token)
    for _ in range(30):
        with pytest.raises(TwineError):
            join("twn1.x.y")
    found = [e for e in entries(region) if e.action == "join"]
    assert len(found) == 1 + REFUSALS_PER_MINUTE
    assert (found[-1].object, found[-1].outcome) == ("machine/vm7", Outcome.DONE)
    assert {e.outcome for e in found[:-1]} == {Outcome.REFUSED, Outcome.FAILED}


@pytest.mark.behaviour("BUG-CP111")
@pytest.mark.parametrize("name", ["zzz", "foo/x", "job/"])
def test_a_filter_for_an_object_that_no_entry_can_have_is_refused(
    region: Region, name: str
) -> None:
    with pytest.raises(InvalidInput, match=f"parameter object takes KIND/NAME .*, not '{name}'"):
        entries(region, object=name)
    assert entries(region, object="job/web") == entries(region, object="machines:drain") == []
