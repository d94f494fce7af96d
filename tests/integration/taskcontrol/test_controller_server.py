"""Controllers on real sockets with mutual TLS: which callers they accept, and their answers."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from control_plane.identity.authority import (
    CertificateAuthority,
    CertificateSubject,
    OwnIdentity,
    open_authority,
)
from taskcontrol import config, server
from taskcontrol.api import (
    CompletedOperation,
    TaskControlRequest,
    TaskControlResponse,
    TaskOperation,
    UnhealthyTask,
)
from taskcontrol.routes import PROCESS
from wire import tls
from wire.client import WireClient
from wire.errors import Forbidden, InvalidInput, TwineError, Unreachable

ROOT = Path(__file__).resolve().parents[3]
UPDATES = [
    TaskOperation(id=f"db-{task}.{task + 7}", task=task, kind="update", cause="release")
    for task in range(3)
]


def a_request(job: str = "db", down: tuple[int, ...] = ()) -> TaskControlRequest:
    return TaskControlRequest(
        job_handle=job,
        request=UPDATES,
        all_unhealthy_tasks=[UnhealthyTask(task=task) for task in down],
        sequence_number=7,
        tasks=3,
        at=1_767_571_200.0,
    )


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return open_authority(tmp_path / "authority.pem", "test")


def a_credential(authority: CertificateAuthority, path: Path, name: str = "db") -> Path:
    subject = CertificateSubject("controller", name, ("127.0.0.1",))
    tls.save(authority.credential(subject, ""), path)
    return path


@asynccontextmanager
async def calling(
    authority: CertificateAuthority, port: int, expected: str = "/controller/db"
) -> AsyncIterator[WireClient]:
    identity = OwnIdentity(authority, ["127.0.0.1"])
    client = WireClient(f"https://127.0.0.1:{port}", identity.agents_context(), timeout_s=30)
    client.expected = expected
    async with client:
        yield client


def first(request: TaskControlRequest) -> TaskControlResponse:
    return TaskControlResponse(ack=[request.request[0].id])


async def later(request: TaskControlRequest) -> TaskControlResponse:
    await asyncio.sleep(0)
    return first(request)


@pytest.mark.behaviour("TC1", "TC2", "TC3")
@pytest.mark.parametrize("process", [first, later])
def test_the_control_plane_asks_and_is_answered(
    process, authority: CertificateAuthority, tmp_path: Path
):

    async def main() -> None:
        credential = a_credential(authority, tmp_path / "c.json")
        async with (
            server.serving(process, credential, "127.0.0.1", 0) as port,
            calling(authority, port) as client,
        ):
            answer = await client.call(PROCESS, a_request())
            assert answer.ack == ["db-0.7"]

    asyncio.run(main())


@pytest.mark.parametrize("role", ["user", "host", "controller"])
def test_only_the_control_plane_may_ask(role: str, authority: CertificateAuthority, tmp_path: Path):
    async def main() -> None:
        credential = a_credential(authority, tmp_path / "c.json")
        held = authority.credential(CertificateSubject(role, "control-plane"), "")
        context = tls.client_context(held, "/controller/db")
        async with (
            server.serving(first, credential, "127.0.0.1", 0) as port,
            WireClient(f"https://127.0.0.1:{port}", context, timeout_s=30) as client,
        ):
            with pytest.raises(Forbidden):
                await client.call(PROCESS, a_request())

    asyncio.run(main())


def test_another_controller_at_the_address_is_not_believed(
    authority: CertificateAuthority, tmp_path: Path
):
    async def main() -> None:
        credential = a_credential(authority, tmp_path / "c.json", "other")
        async with (
            server.serving(first, credential, "127.0.0.1", 0) as port,
            calling(authority, port) as client,
        ):
            with pytest.raises(Unreachable, match="/controller/other answered"):
                await client.call(PROCESS, a_request())

    asyncio.run(main())


@pytest.mark.behaviour("BUG-AG72")
def test_a_new_credential_also_brings_its_authority(
    authority: CertificateAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The region's authority is replaced from time to time; no controller has to restart."""
    monkeypatch.setattr(server, "_RELOAD_S", 0.01)
    following = open_authority(tmp_path / "next.pem", "test")

    async def main() -> None:
        credential = a_credential(authority, tmp_path / "c.json")
        async with server.serving(first, credential, "127.0.0.1", 0) as port:
            a_credential(following, credential)
            async with asyncio.timeout(60), calling(following, port) as client:
                while True:
                    try:
                        answer = await client.call(PROCESS, a_request())
                    except Unreachable:
                        await asyncio.sleep(0.01)
                        continue
                    assert answer.ack == ["db-0.7"]
                    return

    asyncio.run(main())


@pytest.mark.behaviour("TC2")
def test_the_request_and_response_have_the_papers_field_names():
    """Figure 8 of the paper and OpenAPI have the same names."""
    sent = msgspec.json.decode(msgspec.json.encode(a_request(down=(2,))))
    names = {"jobHandle", "request", "allUnhealthyTasks", "sequenceNumber", "tasks", "at"}
    assert sent.keys() == names
    schemas = server.openapi()["components"]["schemas"]
    assert names | {"completed", "advanceNotices", "indexes"} == (
        schemas["TaskControlRequest"]["properties"].keys()
    )
    assert list(schemas["TaskControlResponse"]["properties"]) == ["ack"]
    assert "/v1/process" in server.openapi()["paths"]


def example() -> str:
    page = (ROOT / "docs" / "taskcontrol.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return code


@pytest.mark.behaviour("TC17")
def test_the_example_of_the_guide_is_short_and_works():
    """The page shows a whole controller; the test runs exactly this code."""
    assert len(example().splitlines()) < 60
    namespace: dict[str, object] = {"__name__": "cache_controller"}
    exec(compile(example(), "docs/taskcontrol.md", "exec"), namespace)
    process = namespace["process"]
    night, noon = 1_767_571_200.0, 1_767_571_200.0 + 12 * 3600
    operations = [
        TaskOperation(id=f"c-{t}.1", task=t, kind="update", cause="release") for t in range(40)
    ]

    def permitted(at: float, *down: int, **more: object) -> int:
        request = TaskControlRequest(
            job_handle="cache",
            request=operations,
            all_unhealthy_tasks=[UnhealthyTask(task=task) for task in down],
            sequence_number=1,
            tasks=40,
            at=at,
        )
        response = process(msgspec.structs.replace(request, **more))  # type: ignore[operator]
        return len(response.ack)

    assert permitted(night) == 4
    assert permitted(night, 38, 39) == 4  # the two tasks that are down, and two more
    assert permitted(noon) == 1
    done = CompletedOperation(id="c-0.0", task=0, kind="update", cause="release", outcome="done")
    assert permitted(noon, completed=[done]) == 0
    assert permitted(noon + 601) == 1


@pytest.mark.behaviour("TC17")
def test_a_controller_from_a_file_runs_as_a_program(
    authority: CertificateAuthority, tmp_path: Path
):
    a_credential(authority, tmp_path / "c.json")
    (tmp_path / "shards.json").write_text('{"a": [0, 1], "b": [2]}')
    file = tmp_path / "db.toml"
    file.write_text(
        textwrap.dedent(f"""
            job = "db"
            listen = "127.0.0.1:0"
            credential = "{tmp_path / "c.json"}"
            [shards]
            map = "{tmp_path / "shards.json"}"
            rebuild_s = "30m"
            """)
    )
    command = [sys.executable, "-m", "taskcontrol.cli"]
    check = subprocess.run(
        [*command, "check", str(file)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert check.returncode == 0, check.stderr
    assert "shards controller of db, at 127.0.0.1:0" in check.stdout

    async def main() -> None:
        process = await asyncio.create_subprocess_exec(
            *command, "serve", str(file), stderr=asyncio.subprocess.PIPE, cwd=ROOT
        )
        try:
            assert process.stderr is not None
            line_text = ""
            while "serves at" not in line_text:
                line = await process.stderr.readline()
                assert line, "it ended before it served"
                line_text = line.decode()
            port = int(line_text.rsplit(":", 1)[1])
            async with calling(authority, port) as client:
                answer = await client.call(PROCESS, a_request())
                assert answer.ack == ["db-0.7", "db-2.9"]
                answer = await client.call(PROCESS, a_request(down=(1,)))
                assert answer.ack == ["db-1.8", "db-2.9"]
                with pytest.raises(InvalidInput, match="the controller of db, not web"):
                    await client.call(PROCESS, a_request("web"))
        finally:
            process.terminate()
            await process.communicate()
        assert process.returncode == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "job: missing; credential: missing"),
        ('job = "db"\ncredential = "c"', "none of"),
        ('job = "db"\ncredential = "c"\n[quorum]\nmembers = []', "quorum.members"),
        ('job = "db"\ncredential = "c"\n[quorum]\nmembers = ["ftp://x"]', "quorum.members"),
        ('job = "db"\ncredential = "c"\n[stateless]\nload = 2', "stateless.load"),
        ('job = "db"\ncredential = "c"\n[stateless]\n[never]\nduring = ["x"]', "never.during"),
        ('job = "db"\ncredential = "c"\n[stateless]\n[shards]\nmap = "x"', "exactly one"),
    ],
)
def test_a_file_with_mistakes_is_refused_with_their_places(text: str, wrong: str, tmp_path: Path):
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(TwineError, match=wrong):
        config.load(tmp_path / "c.toml")


def test_the_credential_of_a_controller_is_made_by_a_command(tmp_path: Path):
    state = tmp_path / "state"
    state.mkdir()
    open_authority(state / "authority.pem", "twine")
    command = [sys.executable, "-m", "control_plane.daemon", "controller", "add", "db"]
    out = tmp_path / "c.json"

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, "--state", str(state), "--out", str(out), *more],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )

    done = run("--host", "10.1.0.9")
    assert done.returncode == 0, done.stderr
    assert "controller db may serve at 10.1.0.9 for 30 d" in done.stdout
    assert out.stat().st_mode & 0o777 == 0o600
    assert tls.load(out).name == "db"
    wrong = run("--host", "https://10.1.0.9:1")
    assert wrong.returncode != 0
    assert "neither an address nor a DNS name" in wrong.stderr
