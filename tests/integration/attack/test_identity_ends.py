"""An identity ends at its time, by an operator's command, and at its own domain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest
from click.testing import CliRunner
from inventory import some_facts

from agent.api import Location
from agent.identity.identity import CandidateIdentity, HostIdentity, Invitation
from agent.routes import ROUTES as AGENT_ROUTES
from control_plane.api.routes import ROUTES
from control_plane.cli.root import main
from control_plane.client import ControlPlaneClient
from control_plane.daemon import main as daemon
from control_plane.identity.authority import (
    CertificateAuthority,
    CertificateSubject,
    open_authority,
)
from wire import tls
from wire.errors import Unauthenticated
from wire.routes import Route
from wire.tls import Credential

from .target_process import SETTLES_S, USER, Target, running

pytestmark = pytest.mark.behaviour("BUG-HT5")

FACTS = some_facts("vm1", cpus=1)
VALUES = {"digest": "sha256:" + "0" * 64, "index": "0"}


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A control plane where users come and go."""
    with running("control plane", tmp_path_factory.mktemp("identity")) as target:
        yield target


def connection(target: Target, held: Credential | None) -> HTTPConnection:
    """Return an HTTP connection that presents this credential."""
    context = tls.unverified_context()
    if held is not None:
        tls.install(context, held)
    found = HTTPConnection("x")
    found.sock = context.wrap_socket(target.connect(USER))
    return found


def request_status(http: HTTPConnection, method: str = "GET", path: str = "/v1/myself") -> int:
    """Return the status of a request; 0: the connection ends without an answer."""
    try:
        http.request(method, path)
        answer = http.getresponse()
        answer.read()
    except (OSError, HTTPException):
        return 0
    return answer.status


@pytest.mark.behaviour("BUG-HT5")
def test_a_session_is_not_resumed(target: Target) -> None:
    """Regression: with a session ticket an expired certificate was still accepted, and renewed
    itself.
    """
    held = target.authority.credential(
        CertificateSubject("component" if target.kind == "agent" else "user", "ann"), ""
    )
    context = tls.unverified_context()
    tls.install(context, held)
    with context.wrap_socket(target.connect(USER)) as first:
        first.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in first.recv(65_536)
        session = first.session
    assert session is None or not session.has_ticket
    with context.wrap_socket(target.connect(USER), session=session) as again:
        assert not again.session_reused


@pytest.mark.behaviour("BUG-HT5")
def test_a_kept_connection_ends_with_its_certificate(target: Target) -> None:
    """Regression: the connection was accepted for as long as it was kept."""
    role = "component" if target.kind == "agent" else "user"
    for life_s in (4.0, 30.0, 300.0):  # a slow machine takes long to get here
        held = target.authority.credential(CertificateSubject(role, "ann"), "", life_s)
        try:
            http = connection(target, held)
        except OSError:
            continue
        with closing(http):
            if request_status(http, path="/readyz") != 200:
                continue
            while (answered := request_status(http, path="/readyz")) == 200:
                assert time.time() < held.not_after + 5
                time.sleep(0.2)
            assert answered in (0, 401)
            assert time.time() >= held.not_after - 1
            return
    raise AssertionError("it never got in")


async def _revoke(target: Target, user: str) -> None:
    async with ControlPlaneClient(f"unix:{target.socket}") as client:
        await client.revoke_user(user)


@pytest.mark.behaviour("BUG-HT5")
def test_a_revoked_credential_is_refused_everywhere_and_a_new_one_is_accepted(
    control_plane: Target,
) -> None:
    """Regression: users' credentials could not be revoked."""
    target = control_plane
    held = target.authority.credential(CertificateSubject("user", "zoe"), "")
    with closing(connection(target, held)) as kept:
        assert request_status(kept) == 200
        asyncio.run(_revoke(target, "zoe"))
        assert request_status(kept) in (0, 401)
    with closing(connection(target, held)) as again:
        assert request_status(again) == 401
    revoked_at = time.time()
    while int(time.time()) <= int(revoked_at):
        time.sleep(0.1)
    with closing(
        connection(target, target.authority.credential(CertificateSubject("user", "zoe"), ""))
    ) as new:
        assert request_status(new) == 200

    async def listed() -> list[str]:
        async with ControlPlaneClient(f"unix:{target.socket}") as client:
            return [u.name for u in (await client.list_users()).users if u.revoked_at]

    assert asyncio.run(listed()) == ["zoe"]


@pytest.mark.behaviour("BUG-HT5")
def test_a_stream_ends_when_its_reader_is_revoked(control_plane: Target) -> None:
    """A connection without further requests is ended, too."""
    target = control_plane
    held = target.authority.credential(CertificateSubject("user", "yan"), "")
    with closing(connection(target, held)) as kept:
        assert request_status(kept) == 200
        asyncio.run(_revoke(target, "yan"))
        assert kept.sock.recv(1) == b""


def _identities(target: Target) -> dict[str, Credential | None]:
    """Return identities without rights, or with almost none."""
    authority = target.authority
    other = CertificateAuthority(authority.roots, "elsewhere")
    foreign_authority = open_authority(target.folder / "another.pem", "twine")
    found: dict[str, Credential | None] = {
        "another authority's": foreign_authority.credential(CertificateSubject("user", "root"), ""),
        "another trust domain's": other.credential(CertificateSubject("user", "root"), ""),
        "expired": authority.credential(CertificateSubject("user", "root"), "", 0.001),
        "nobody": None,
    }
    if target.kind == "control plane":
        asyncio.run(_revoke(target, "gone"))
        found["revoked"] = authority.credential(CertificateSubject("user", "gone"), "")
        found["a host"] = authority.credential(CertificateSubject("host", "vm1"), "")
    else:
        found["a user"] = authority.credential(CertificateSubject("user", "root"), "")
        found["another host"] = authority.credential(CertificateSubject("host", "vm2"), "")
    return found


def _path(route: Route) -> str:
    path = route.path
    for name in route.parameters:
        path = path.replace(f"{{{name}}}", VALUES.get(name, "vm1"))
    return path


OPEN = {"anyone"}


@pytest.mark.behaviour("F-78", "BUG-HT5", "BUG-HT10")
def test_no_bad_identity_gets_through_any_route(target: Target) -> None:
    """The test covers every route of both programs, from their tables."""
    routes = AGENT_ROUTES if target.kind == "agent" else ROUTES
    time.sleep(0.01)
    passed = []
    for identity, held in _identities(target).items():
        for route in routes:
            if identity in ("nobody", "a host") and {*route.roles} & {"anyone", "host"}:
                continue
            try:
                with closing(connection(target, held)) as http:
                    status = request_status(http, route.method, _path(route))
            except OSError:
                status = 0
            if status not in (0, 401, 403):
                passed.append((identity, route.name, status))
    assert passed == []


def ctl(target: Target, *arguments: str) -> str:
    """Return the output of `twinectl`."""
    result = CliRunner().invoke(main, ["--endpoint", f"unix:{target.socket}", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def ends_without_signal(kept: HTTPConnection) -> bool:
    """Wait until the server closes a connection that carries no requests."""
    try:
        return kept.sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.behaviour("BUG-HT5")
def test_a_credential_is_listed_and_revoked_by_command(
    control_plane: Target, tmp_path: Path
) -> None:
    """The commands are `twinectl user list | revoke`."""
    target, out = control_plane, tmp_path / "ida.json"
    state = str(target.folder / "state")
    made = CliRunner().invoke(
        daemon,
        ["user", "add", "ida", "--out", str(out), "--state", state, "--url", "https://x"],
    )
    assert made.exit_code == 0, made.output
    row = next(line for line in ctl(target, "user", "list").splitlines() if "ida" in line)
    assert row.split()[-1] == "-", row
    with closing(connection(target, tls.load(out))) as kept:
        assert request_status(kept) == 200
        assert "are revoked" in ctl(target, "user", "revoke", "ida")
        assert ends_without_signal(kept)
    with closing(connection(target, tls.load(out))) as again:
        assert request_status(again) == 401
    found = json.loads(ctl(target, "user", "list", "--output", "json"))
    assert {u["name"]: bool(u["revoked_at"]) for u in found["users"]}["ida"]
    row = next(line for line in ctl(target, "user", "list").splitlines() if "ida" in line)
    assert row.split()[-1] != "-", row


def joins(target: Target, machine: str, address: str = "127.0.0.1:1") -> HostIdentity:
    """Let a host join as operators do: with a token from a command, then with the pin."""
    token = json.loads(ctl(target, "token", "create", "--host", machine, "--output", "json"))
    host = HostIdentity(target.folder / machine)
    url = f"https://{USER}:{target.port}"
    wanted = CandidateIdentity(machine, address, FACTS, Location(msb="msb2"), "small")
    asyncio.run(host.join(Invitation(url, token["token"], token["ca_hash"]), wanted))
    return host


@pytest.mark.behaviour("BUG-HT5", "BUG-UX110")
def test_a_host_whose_identity_is_revoked_by_command_has_to_join_again(
    control_plane: Target,
) -> None:
    """`twinectl machine revoke-identity` makes it. The agent receives the reason."""
    target = control_plane
    host = joins(target, "vm9")
    asyncio.run(host.renew())
    held = tls.load(target.folder / "vm9/identity.json")
    with closing(connection(target, held)) as kept:
        assert request_status(kept, path="/readyz") == 200
        revoked_result = ctl(target, "machine", "revoke-identity", "vm9")
        revoked_at = time.time()
        assert "machine vm9: its certificates are revoked" in revoked_result
        assert (
            "to restore it: twinectl token create --host vm9" in revoked_result.splitlines()
        )  # BUG-UX110
        assert ends_without_signal(kept)
    with pytest.raises(Unauthenticated, match="vm9 was revoked"):
        asyncio.run(host.renew())
    while int(time.time()) <= int(revoked_at):
        time.sleep(0.1)
    asyncio.run(joins(target, "vm9").renew())


@pytest.mark.behaviour("BUG-HT5")
def test_revoking_the_identity_of_an_unknown_machine_is_refused(
    control_plane: Target,
) -> None:
    """The error reports a mistyped name."""
    arguments = [
        "--endpoint",
        f"unix:{control_plane.socket}",
        "machine",
        "revoke-identity",
        "nobody",
    ]
    unknown_machine = CliRunner().invoke(main, arguments)
    assert unknown_machine.exit_code == 3, unknown_machine.output


@contextmanager
def shown(held: Credential) -> Iterator[int]:
    """Present a host's certificate to every caller of its agent's port; yield the port."""
    context = tls.server_context(held, require_client=True)
    with socket.create_server((USER, 0)) as listener:

        def show() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                sock.settimeout(SETTLES_S)
                with contextlib.suppress(OSError), context.wrap_socket(sock, server_side=True):
                    pass

        thread = threading.Thread(target=show)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def endings(target: Target) -> float:
    """Return the lines of a scrape about identities that expire."""
    held = target.authority.credential(CertificateSubject("user", "ann"), "")
    with closing(connection(target, held)) as http:
        http.request("GET", "/metrics")
        text = http.getresponse().read().decode()
    return float(re.findall(r"^twine_identities_ending (\S+)$", text, re.MULTILINE)[0])


@pytest.mark.behaviour("BUG-HT5")
def test_a_host_that_does_not_renew_is_warned_of_a_week_ahead(control_plane: Target) -> None:
    """The warning is in the list of machines, in the metrics, and in the log."""
    target = control_plane
    life_s = 3 * 86_400.0
    held = target.authority.credential(
        CertificateSubject("host", "old", (USER,)), "https://x", life_s
    )
    with shown(held) as port:
        joins(target, "old", f"{USER}:{port}")
        target.until(lambda: "identity ends in " in ctl(target, "machine", "list"), "no warning")
    rows = ctl(target, "machine", "list").splitlines()
    assert [row.split()[0] for row in rows if "identity ends in " in row] == ["old"]
    assert endings(target) == 1.0
    warned = [x for x in target.log.read_text().splitlines() if "ends soon and is not renewed" in x]
    assert len(warned) == 1
    assert "old" in warned[0]
    ctl(target, "machine", "drain", "old", "--kind", "decommission", "--reason", "old")
    ctl(target, "machine", "remove", "old")
    assert endings(target) == 0.0, "of a machine that is gone nothing is to be done"
