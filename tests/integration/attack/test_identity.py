"""An identity ends when it ends: by time, by an operator's word, at its own domain (BUG-HT5)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest

from agent.routes import ROUTES as AGENT_ROUTES
from agent.wire import tls
from agent.wire.routes import Route
from agent.wire.tls import Credential
from control_plane.api.routes import ROUTES
from control_plane.client import ControlPlaneClient
from control_plane.identity.authority import Authority, Subject, open_authority

from .face import USER, Face, running

VALUES = {"digest": "sha256:" + "0" * 64, "index": "0"}


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Face]:
    """A control plane where people come and go."""
    with running("control plane", tmp_path_factory.mktemp("identity")) as face:
        yield face


def connection(face: Face, held: Credential | None) -> HTTPConnection:
    """Return an HTTP connection that shows this credential."""
    context = tls.unverified_context()
    if held is not None:
        tls.install(context, held)
    found = HTTPConnection("x")
    found.sock = context.wrap_socket(face.connect(USER))
    return found


def asked(http: HTTPConnection, method: str = "GET", path: str = "/v1/myself") -> int:
    """Return the status of a request; 0: the connection ends without an answer."""
    try:
        http.request(method, path)
        answer = http.getresponse()
        answer.read()
    except (OSError, HTTPException):
        return 0
    return answer.status


def test_a_session_is_not_resumed(face: Face) -> None:
    """BUG-HT5: with a ticket an expired certificate went on, and renewed itself."""
    held = face.authority.credential(
        Subject("component" if face.kind == "agent" else "user", "ann"), ""
    )
    context = tls.unverified_context()
    tls.install(context, held)
    with context.wrap_socket(face.connect(USER)) as first:
        first.sendall(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in first.recv(65_536)
        session = first.session
    assert session is None or not session.has_ticket
    with context.wrap_socket(face.connect(USER), session=session) as again:
        assert not again.session_reused


def test_a_kept_connection_ends_with_its_certificate(face: Face) -> None:
    """BUG-HT5: it went on for as long as it was kept."""
    role = "component" if face.kind == "agent" else "user"
    for life_s in (4.0, 30.0, 300.0):  # a slow machine takes long to get there
        held = face.authority.credential(Subject(role, "ann"), "", life_s)
        try:
            http = connection(face, held)
        except OSError:
            continue
        with closing(http):
            if asked(http, path="/readyz") != 200:
                continue
            while (answered := asked(http, path="/readyz")) == 200:
                assert time.time() < held.not_after + 5
                time.sleep(0.2)
            assert answered in (0, 401)
            assert time.time() >= held.not_after - 1
            return
    raise AssertionError("it never got in")


async def _revoke(face: Face, user: str) -> None:
    async with ControlPlaneClient(f"unix:{face.socket}") as client:
        await client.revoke_user(user)


def test_a_revoked_user_is_let_in_nowhere_and_a_new_credential_is(control_plane: Face) -> None:
    """BUG-HT5: users' credentials could not be revoked."""
    face = control_plane
    held = face.authority.credential(Subject("user", "zoe"), "")
    with closing(connection(face, held)) as kept:
        assert asked(kept) == 200
        asyncio.run(_revoke(face, "zoe"))
        assert asked(kept) in (0, 401)
    with closing(connection(face, held)) as again:
        assert asked(again) == 401
    revoked_at = time.time()
    while int(time.time()) <= int(revoked_at):
        time.sleep(0.1)
    with closing(connection(face, face.authority.credential(Subject("user", "zoe"), ""))) as new:
        assert asked(new) == 200

    async def listed() -> list[str]:
        async with ControlPlaneClient(f"unix:{face.socket}") as client:
            return [u.name for u in (await client.list_users()).users if u.revoked_at]

    assert asyncio.run(listed()) == ["zoe"]


def test_a_stream_ends_when_its_reader_is_revoked(control_plane: Face) -> None:
    """BUG-HT5: also a connection on which nothing is asked any more."""
    face = control_plane
    held = face.authority.credential(Subject("user", "yan"), "")
    with closing(connection(face, held)) as kept:
        assert asked(kept) == 200
        asyncio.run(_revoke(face, "yan"))
        assert kept.sock.recv(1) == b""


def _identities(face: Face) -> dict[str, Credential | None]:
    """Return who may do nothing, or next to nothing."""
    authority = face.authority
    other = Authority(authority._key, authority._certificate, "elsewhere")
    stranger = open_authority(face.folder / "another.pem", "twine")
    found: dict[str, Credential | None] = {
        "another authority's": stranger.credential(Subject("user", "root"), ""),
        "another trust domain's": other.credential(Subject("user", "root"), ""),
        "expired": authority.credential(Subject("user", "root"), "", 0.001),
        "nobody": None,
    }
    if face.kind == "control plane":
        asyncio.run(_revoke(face, "gone"))
        found["revoked"] = authority.credential(Subject("user", "gone"), "")
        found["a host"] = authority.credential(Subject("host", "vm1"), "")
    else:
        found["a user"] = authority.credential(Subject("user", "root"), "")
        found["another host"] = authority.credential(Subject("host", "vm2"), "")
    return found


def _path(route: Route) -> str:
    path = route.path
    for name in route.parameters:
        path = path.replace(f"{{{name}}}", VALUES.get(name, "vm1"))
    return path


OPEN = {"anyone"}


def test_no_bad_identity_gets_through_any_route(face: Face) -> None:
    """F-78, BUG-HT5, BUG-HT10: every route of both programs, made from their tables."""
    routes = AGENT_ROUTES if face.kind == "agent" else ROUTES
    time.sleep(0.01)
    passed = []
    for identity, held in _identities(face).items():
        for route in routes:
            if identity in ("nobody", "a host") and {*route.roles} & {"anyone", "host"}:
                continue
            try:
                with closing(connection(face, held)) as http:
                    status = asked(http, route.method, _path(route))
            except OSError:
                status = 0
            if status not in (0, 401, 403):
                passed.append((identity, route.name, status))
    assert passed == []


def test_a_credential_is_listed_and_revoked_by_command(control_plane: Face, tmp_path: Path) -> None:
    """BUG-HT5: `twinectl user list | revoke`."""
    from click.testing import CliRunner

    from control_plane.cli.root import main
    from control_plane.daemon import main as daemon

    face, out = control_plane, tmp_path / "ida.json"
    state = str(face.folder / "state")
    made = CliRunner().invoke(
        daemon,
        ["user", "add", "ida", "--out", str(out), "--state", state, "--url", "https://x"],
    )
    assert made.exit_code == 0, made.output
    at = ["--endpoint", f"unix:{face.socket}"]
    listed = CliRunner().invoke(main, [*at, "user", "list"])
    assert "ida" in listed.output, listed.output
    revoked = CliRunner().invoke(main, [*at, "user", "revoke", "ida"])
    assert "does not count any more" in revoked.output, revoked.output
    found = json.loads(CliRunner().invoke(main, [*at, "user", "list", "--output", "json"]).output)
    assert {u["name"]: bool(u["revoked_at"]) for u in found["users"]}["ida"]
    nobody = CliRunner().invoke(main, [*at, "machine", "revoke-identity", "nobody"])
    assert nobody.exit_code == 3, nobody.output
