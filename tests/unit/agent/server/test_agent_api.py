"""The agent's API: which callers it accepts, and that every refusal is a problem document."""

from __future__ import annotations

import asyncio
import grp
import io
import json
import socket
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
from builders import IMAGE, FakeHost, a_spec, gone, running, unit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent import api
from agent.api import Network, NetworkMode
from agent.host import callers
from agent.host.callers import authorize_with
from agent.machine import Usage
from agent.machine.fake_programs import ends_with
from agent.network.core.addresses import veth_of
from agent.routes import ROUTES
from agent.runtime.core.slices import cgroup_of
from wire.errors import Forbidden, KernelFileError, Problem, SystemdError, Unauthenticated
from wire.fairness import Peer

ROUTE = ROUTES[0]


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    """Return a machine that has one image."""
    host = FakeHost(tmp_path)
    host.give_image()
    return host


def _session(host: FakeHost) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        "http://local", connector=aiohttp.UnixConnector(host.config.socket)
    )


async def _problem(response: aiohttp.ClientResponse) -> Problem:
    assert response.content_type == "application/problem+json"
    problem = msgspec.json.decode(await response.read(), type=Problem)
    assert (problem.status, problem.code != "", problem.detail != "") == (
        response.status,
        True,
        True,
    )
    return problem


async def test_the_socket_is_for_root_and_one_group(host: FakeHost) -> None:
    async with host.agent():
        found = Path(host.config.socket).stat()
    assert stat.S_IMODE(found.st_mode) == 0o660
    assert found.st_gid == grp.getgrnam("root").gr_gid
    assert not Path(host.config.socket).exists()


async def test_without_the_group_the_socket_is_for_its_owner_only(host: FakeHost) -> None:
    host.config = msgspec.structs.replace(host.config, socket_group="no-such-group")
    async with host.agent() as client:
        assert stat.S_IMODE(Path(host.config.socket).stat().st_mode) == 0o600
        assert (await client.readyz()).ok


def _request(monkeypatch: pytest.MonkeyPatch, user: Any, peer: Peer | None) -> Any:
    monkeypatch.setattr(callers, "local_user", lambda _: user)
    monkeypatch.setattr(callers, "tls_peer", lambda *_: peer)
    return SimpleNamespace(transport=None)


@pytest.mark.parametrize("user", [(0, 0), (0, 5), (4242, 7), (1000, 7), (1001, 5)])
def test_root_and_the_group_may_call_from_this_host(
    monkeypatch: pytest.MonkeyPatch, user: tuple[int, int]
) -> None:
    group = SimpleNamespace(gr_gid=7, gr_mem=["member", "removed"])
    monkeypatch.setattr(grp, "getgrnam", lambda _: group)

    def user_id(name: str) -> Any:
        if name == "removed":
            raise KeyError(name)
        return SimpleNamespace(pw_uid=1001)

    monkeypatch.setattr(callers.pwd, "getpwnam", user_id)
    peer = authorize_with("twine")(_request(monkeypatch, user, None), ROUTE)

    assert peer == Peer(name=f"local:{user[0]}", role="local", is_trusted=True)


@pytest.mark.parametrize("group", ["root", "no-such-group"])
def test_other_users_of_this_host_may_not_call(monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    with pytest.raises(Forbidden, match="user 1000"):
        authorize_with(group)(_request(monkeypatch, (1000, 1000), None), ROUTE)


@pytest.mark.behaviour("F-79")
@pytest.mark.parametrize("role", ["host", "user"])
def test_over_tls_only_components_may_call(monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    allowed = Peer(name="spiffe://c/component/control-plane", role="component")  # F-79
    authorize = authorize_with("root")

    assert authorize(_request(monkeypatch, None, allowed), ROUTE) is allowed
    with pytest.raises(Forbidden):
        authorize(_request(monkeypatch, None, Peer(name="x", role=role)), ROUTE)
    front_end = Peer(name="spiffe://c/component/front-end", role="component")
    with pytest.raises(Forbidden, match="front-end may not call"):
        authorize(_request(monkeypatch, None, front_end), ROUTE)
    with pytest.raises(Unauthenticated):
        authorize(_request(monkeypatch, None, None), ROUTE)


async def test_the_openapi_document_lists_every_route(host: FakeHost) -> None:
    async with host.agent(), _session(host) as session, session.get("/openapi.json") as response:
        document = await response.json()

    listed = {(p, m.upper()) for p, methods in document["paths"].items() for m in methods}
    assert listed == {(r.path, r.method) for r in ROUTES}


async def test_metrics_count_tasks_by_state_and_images(host: FakeHost) -> None:
    async with host.agent() as client, _session(host) as session:
        await client.put_task("web", a_spec())
        await running(client, "web")
        async with session.get("/metrics") as response:
            text = await response.text()

    assert 'twine_tasks{state="running"} 1.0' in text
    assert "twine_images 1.0" in text


@pytest.mark.behaviour("AG10")
async def test_metrics_of_each_task_and_of_the_host_are_read_at_the_scrape(host: FakeHost) -> None:
    """Covers usage, pressure, restarts, OOM kills and probes."""
    async with host.agent() as client, _session(host) as session:
        probe = api.Probe(kind=api.ProbeKind.EXEC, command=["true"], interval_s=0.1)
        await client.put_task("web", a_spec(job="shop", probe=probe))
        await running(client, "web")
        group = cgroup_of("web", a_spec())
        host.fake.cgroups.usage[group] = Usage(
            cpu_s=2.5, memory_bytes=1 << 20, oom_kills=3, cpu_pressure=0.25
        )
        host.fake.cgroups.usage["/workload.slice"] = Usage(cpu_s=7.0, memory_bytes=2 << 20)

        async def probed() -> str:
            async with session.get("/metrics") as response:
                return await response.text()

        text = await probed()
        while 'twine_probe_answers_total{kind="exec",outcome="good"}' not in text:
            text = await probed()
        await client.delete_task("web")
        await gone(client, "web")
        after = await probed()

    labels = '{job="shop",task="web"}'
    assert f"twine_task_cpu_seconds_total{labels} 2.5" in text
    assert f"twine_task_oom_kills_total{labels} 3.0" in text
    assert f"twine_task_restarts_total{labels} 0.0" in text
    assert 'twine_task_pressure_ratio{job="shop",resource="cpu",task="web"} 0.25' in text
    assert 'twine_host_cpu_seconds_total{of="tasks"} 7.0' in text
    assert 'task="web"' not in after


@pytest.mark.behaviour("BUG-AG79")
async def test_no_task_or_request_makes_the_answers_of_a_host_unreadable(host: FakeHost) -> None:
    """The control plane counted such a host as silent, and so did `twine-agent ps`."""
    name = f"registry.example/{'a' * 400}:1"
    command = ["/" + "x" * 100_000]
    host.fake.systemd.programs[command[0]] = ends_with(1)
    probe = api.Probe(
        kind=api.ProbeKind.EXEC, command=command, interval_s=0.05, failures=1, start_period_s=0.0
    )
    async with host.agent() as client, asyncio.timeout(60):
        after = (await client.get_events(0)).latest
        await client.put_task("web", a_spec(probe=probe))
        await client.stage_image(name)
        messages: list[str] = []
        while not any("unhealthy" in m for m in messages) or not any(
            "not fetched" in m for m in messages
        ):
            events = await client.get_events(after, wait_s=5)
            after = events.latest
            messages += [e.message for e in events.events]
        status = (await client.list_tasks()).tasks[0]

    assert status.health is api.Health.UNHEALTHY
    assert status.reason.startswith("probe command /xxx")
    assert status.reason.endswith("x…")


async def test_two_agents_can_live_in_one_process(tmp_path: Path) -> None:
    first, second = FakeHost(tmp_path / "a"), FakeHost(tmp_path / "b")
    async with first.agent() as one, second.agent() as two:
        assert (await one.readyz()).ok
        assert (await two.readyz()).ok


async def test_the_agent_is_busy_until_it_has_reconciled(host: FakeHost) -> None:
    async with host.serving() as (services, _), _session(host) as session:
        services.ready = False
        for method, path in (
            ("GET", "/readyz"),
            ("GET", "/v1/tasks"),
            ("DELETE", "/v1/tasks/web"),
            ("PUT", f"/v1/images/{IMAGE}"),
            ("DELETE", f"/v1/images/{IMAGE}"),
        ):
            async with session.request(method, path) as response:
                problem = await _problem(response)
                assert (problem.status, problem.retryable) == (503, True)
        async with session.get("/healthz") as response:
            assert response.status == 200


HOSTILE: list[tuple[str, str, bytes | None, int]] = [
    ("GET", "/nothing", None, 404),
    ("PATCH", "/v1/tasks", None, 405),
    ("GET", "/v1/tasks/web", None, 404),
    ("GET", "/v1/tasks/WEB", None, 400),
    ("GET", "/v1/tasks/a%2Fb", None, 400),
    ("GET", "/v1/tasks/web%0A", None, 400),
    ("GET", "/v1/tasks/" + "x" * 300, None, 400),
    ("PUT", "/v1/tasks/a:restart", b"{}", 400),
    ("GET", "/v1/images/sha256:xyz", None, 400),
    ("PUT", f"/v1/images/{IMAGE[:-1]}2?format=zip", b"", 400),
    ("GET", "/v1/events?after=x", None, 400),
    ("GET", "/v1/events?after=nan", None, 400),
    ("GET", "/v1/events?wait_s=-1", None, 400),
    ("GET", "/v1/events?wait_s=1e999", None, 400),
    ("GET", "/v1/events?unknown=1", None, 400),
    ("PUT", "/v1/tasks/web", b"", 400),
    ("PUT", "/v1/tasks/web", b"[" * 100_000, 400),
    ("PUT", "/v1/tasks/web", b'{"a":' * 100_000, 400),
    ("PUT", "/v1/tasks/web", b"\xff\xfe{\x00}\x00", 400),
    ("PUT", "/v1/tasks/web", b'{"image": "\\ud800"}', 400),
    ("PUT", "/v1/tasks/web", b'{"generation": NaN}', 400),
    ("PUT", "/v1/tasks/web", b'{"generation": 1e999}', 400),
    ("PUT", "/v1/tasks/web", b" " * (5 << 20), 413),
    ("PUT", "/v1/profile", b'{"name": "../x"}', 400),
    ("POST", "/v1/images:pull", b'{"digest": "x", "path": ""}', 400),
]  # F-76


async def test_hostile_requests_get_a_problem_document_each(host: FakeHost) -> None:
    async with host.agent() as client, _session(host) as session:
        for method, path, body, status in HOSTILE:
            url = aiohttp.client.URL(path, encoded=True)
            data = None if body is None else io.BytesIO(body)
            async with session.request(method, url, data=data) as response:
                problem = await _problem(response)
                assert problem.status == status, (method, path[:60], problem)
        assert (await client.list_tasks()).tasks == []


async def test_all_errors_of_a_task_are_reported_at_once(host: FakeHost) -> None:
    wrong = {"image": "x", "command": [1], "limits": {"tasks_max": 0}, "colour": "red"}
    async with (
        host.agent(),
        _session(host) as session,
        session.put("/v1/tasks/web", json=wrong) as response,
    ):
        problem = await _problem(response)

    fields = {e.field for e in problem.errors}
    assert {"image", "command[0]", "limits.tasks_max", "colour"} <= fields


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from([f.name for f in msgspec.structs.fields(api.TaskSpec)])
            | st.text(max_size=5),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)
BODIES = (
    st.binary(max_size=200)
    | JSON.map(lambda v: str(v).encode())
    | JSON.map(lambda v: json.dumps(v).encode())
)
SEGMENT = st.sampled_from(["v1", "tasks", "images", "profile", "events", "web", ":restart", IMAGE])
PATHS = st.lists(SEGMENT | st.text(max_size=8), max_size=4).map("/".join)
QUERIES = st.dictionaries(
    st.sampled_from(
        ["after", "wait_s", "generation", "epoch", "follow", "since", "tail", "format"]
    ),
    st.sampled_from(["0", "1", "-1", "1.5", "nan", "", "x", "9" * 30, "true", "tar"]),
    max_size=3,
)
METHODS = st.sampled_from(["GET", "PUT", "POST", "DELETE"])
REQUESTS = st.lists(st.tuples(METHODS, PATHS, QUERIES, BODIES), min_size=20, max_size=40)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(REQUESTS)
def test_nothing_a_client_can_send_makes_a_500(
    tmp_path_factory: pytest.TempPathFactory, requests: list[Any]
) -> None:  # P7
    async def send() -> None:
        host = FakeHost(tmp_path_factory.mktemp("h"))
        host.fake.processes.answers[("journalctl",)] = [b"line\n"]
        async with host.agent() as client, _session(host) as session:
            for method, path, query, body in requests:
                url = aiohttp.client.URL.build(path="/" + path, query=query)
                async with session.request(method, url, data=body) as response:
                    assert response.status != 500, (method, path, query, body)
                    if response.status >= 400:
                        await _problem(response)
            assert (await client.readyz()).ok

    asyncio.run(send())


async def test_a_body_that_never_comes_is_no_bug_of_ours(host: FakeHost) -> None:
    async with host.agent() as client:
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(host.config.socket)
            raw.sendall(b"PUT /v1/tasks/web HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        assert (await client.list_tasks()).tasks == []


async def test_a_reader_of_the_log_of_nothing_gets_a_problem_not_an_empty_log(
    host: FakeHost,
) -> None:
    host.fake.processes.answers[("journalctl",)] = []
    async with (
        host.agent(),
        _session(host) as session,
        session.get("/v1/tasks/web/logs") as response,
    ):
        assert (await _problem(response)).code == "not_found"


async def test_the_log_of_a_removed_task_can_be_read(host: FakeHost) -> None:
    host.fake.processes.answers[("journalctl",)] = [b"last words\n", b"and more\n"]
    async with host.agent() as client:
        reported = b"".join([chunk async for chunk in client.task_logs("web", follow=True)])

    assert reported == b"last words\nand more\n"
    assert "_SYSTEMD_UNIT=twine-task-web.service" in host.fake.processes.calls[-1]
    assert "--follow" not in host.fake.processes.calls[-1]


async def test_usage_is_reported_for_tasks_with_processes(host: FakeHost) -> None:
    async with host.agent() as client:
        await client.put_task("web", a_spec(entitlement="with-dash"))
        await running(client, "web")
        (group,) = host.fake.systemd.units(unit("web"))
        host.fake.cgroups.usage[group.control_group] = Usage(cpu_s=1.5, memory_bytes=7 << 20)
        first = await client.get_usage()
        host.fake.cgroups.usage.clear()
        later = await client.get_usage()

    assert [(u.task_id, u.cpu_s, u.memory_bytes) for u in first.tasks] == [("web", 1.5, 7 << 20)]
    assert later.tasks == []
    assert later.at_boot_s > first.at_boot_s > 0


@pytest.mark.behaviour("RE2")
async def test_traffic_of_private_networks_and_processor_power_are_reported(
    host: FakeHost,
) -> None:
    """Plans use these values; a host without RAPL reports no power."""
    link, zone = f"/sys/class/net/{veth_of('web')}/statistics", "/sys/class/powercap/intel-rapl:"
    private = Network(mode=NetworkMode.PRIVATE)
    async with host.agent() as client:
        for name, spec in (("web", a_spec(network=private)), ("db", a_spec())):
            await client.put_task(name, spec)
            await running(client, name)
            (group,) = host.fake.systemd.units(unit(name))
            host.fake.cgroups.usage[group.control_group] = Usage(cpu_s=1.5)
        before = await client.get_usage()
        texts = {f"{link}/rx_bytes": "700", f"{link}/tx_bytes": "60"}
        for number, name in enumerate(("package-0", "package-1", "psys")):
            texts |= {f"{zone}{number}/name": name, f"{zone}{number}/energy_uj": "2500000"}
        host.fake.texts |= texts
        after = await client.get_usage()

    assert before.energy_j is None
    assert after.energy_j == 5.0
    assert {u.task_id: u.network_bytes for u in after.tasks} == {"web": 760, "db": None}


@pytest.mark.behaviour("BUG-AG118")
@pytest.mark.parametrize("unreadable", ["tx_bytes", "energy_uj"])
async def test_usage_is_reported_while_a_link_is_removed(host: FakeHost, unreadable: str) -> None:
    """Between two reads of a removed link the kernel answers EINVAL; all usage was missing."""
    link, zone = f"/sys/class/net/{veth_of('web')}/statistics", "/sys/class/powercap/intel-rapl:0"
    texts = {f"{link}/rx_bytes": "700", f"{link}/tx_bytes": "60"}
    texts |= {f"{zone}/name": "package-0", f"{zone}/energy_uj": "2500000"}

    class Files(dict[str, str]):
        def get(self, path: str, default: Any = None) -> Any:
            if path.endswith(unreadable):
                raise KernelFileError(f"cannot read {path}: Invalid argument")
            return super().get(path, default)

    host.fake.texts = Files(texts)
    async with host.agent() as client:
        await client.put_task("web", a_spec(network=Network(mode=NetworkMode.PRIVATE)))
        await running(client, "web")
        (group,) = host.fake.systemd.units(unit("web"))
        host.fake.cgroups.usage[group.control_group] = Usage(cpu_s=1.5)
        used = await client.get_usage()

    expected = (1.5, None) if unreadable == "tx_bytes" else (1.5, 760)
    assert [(u.cpu_s, u.network_bytes) for u in used.tasks] == [expected]
    assert used.energy_j == (2.5 if unreadable == "tx_bytes" else None)


@pytest.mark.behaviour("BUG-AG3")
async def test_machine_facts_are_reported_while_systemd_hangs(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Facts waited behind the starts of tasks, and the host appeared dead."""
    async with host.agent() as client:
        before = await client.get_machine()

        def silent() -> int:
            raise SystemdError("cannot ask systemd for its version: it does not answer")

        monkeypatch.setattr(host.fake.systemd, "version", silent)
        assert await client.get_machine() == before


@pytest.mark.behaviour("F-83")
def test_a_task_without_a_sandbox_is_for_root_and_for_the_control_plane() -> None:
    """Otherwise members of the socket's group would get root privileges."""
    image = "sha256:" + "0" * 64
    raw = api.TaskSpec(image=image, relaxations=[api.Relaxation.RAW])
    machine = api.TaskSpec(image=image, relaxations=[api.Relaxation.OWN_INIT])
    member, root = Peer(name="local:1000", role="local"), Peer(name="local:0", role="local")
    plane = Peer(name="twine.local/component/control-plane", role="component")
    for spec, why in ((raw, "has no sandbox"), (machine, "has an init of its own")):
        with pytest.raises(Forbidden, match=f"{why} .*only root may request that"):
            callers.check_raw(member, "web", spec)
        for peer in (root, plane):
            callers.check_raw(peer, "web", spec)
    callers.check_raw(member, "web", api.TaskSpec(image=raw.image))
