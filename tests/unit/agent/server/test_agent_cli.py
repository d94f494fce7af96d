"""`twine-agent` against an agent on a machine in memory: its output and its exit codes."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from builders import IMAGE, FakeHost, a_spec, a_tar, digest_of, unit

from agent.cli import main
from agent.client import AgentClient
from agent.config import AgentConfig, load
from agent.machine.fake_programs import ends_with
from wire.errors import InvalidInput

Run = Callable[..., tuple[int, str, str]]
BYTES = pytest.mark.behaviour("BUG-AG82")
LOGGED = b"\xff\x1b[1mred\n"


@pytest.mark.behaviour("AG4")
def test_a_task_is_run_listed_read_and_stopped_on_one_host_alone(host: FakeHost, run: Run) -> None:
    started = run(
        "run", "web", f"--image={IMAGE}", "-e", "A=1", "--", "/bin/server", "-v", host=host
    )
    listed = run("ps", host=host)
    as_json = run("ps", "-o", "json", host=host)
    logs = run("logs", "web", "--tail=5", host=host)
    properties = host.fake.systemd.properties(unit("web"))
    stopped = run("stop", "web", host=host)

    assert started == (0, "web: running, healthy\n", "")
    assert listed[1].splitlines()[0].split()[:3] == ["TASK", "STATE", "HEALTH"]
    assert listed[1].splitlines()[1].split()[:3] == ["web", "running", "healthy"]
    assert json.loads(as_json[1])["tasks"][0]["task_id"] == "web"
    assert (logs[0], logs[1]) == (0, "one\nt\x1bwo\n")
    assert properties["ExecStart"] == [["/bin/server", "-v"]]
    assert "A=1" in properties["Environment"]  # type: ignore[operator]
    assert stopped == (0, "web: gone\n", "")
    assert (host.units(), host.roots()) == ([], [])


@pytest.mark.behaviour("BUG-AG80")
def test_a_task_can_be_run_again_after_the_clock_was_set_back(
    host: FakeHost, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generation of a run is a time; the next run got the error that its own is older."""
    later_ns = time.time_ns() + 86_400 * 10**9
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time_ns", lambda: later_ns)
        first = run("run", "web", f"--image={IMAGE}", "--", "/bin/server", "-v", host=host)
    again = run("run", "web", f"--image={IMAGE}", "--", "/bin/server", host=host)

    assert first == again == (0, "web: running, healthy\n", "")
    assert host.fake.systemd.properties(unit("web"))["ExecStart"] == [["/bin/server"]]


@pytest.mark.behaviour("BUG-AG92")
def test_a_stopped_task_can_be_run_again_after_the_clock_was_set_back(
    host: FakeHost, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generation of the stopped task was later than the one of every run until that time."""
    later_ns = time.time_ns() + 86_400 * 10**9
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time_ns", lambda: later_ns)
        run("run", "web", f"--image={IMAGE}", "--", "/bin/server", "-v", host=host)
    stopped = run("stop", "web", host=host)
    again = run("run", "web", f"--image={IMAGE}", "--", "/bin/server", host=host)

    assert stopped == (0, "web: gone\n", "")
    assert again == (0, "web: running, healthy\n", "")


@pytest.mark.behaviour("F-86")
@pytest.mark.parametrize(
    ("terminals", "printed"),
    [((), LOGGED), ((0, 2), LOGGED), ((0, 1, 2), "\ufffd\ufffd[1mred\n".encode())],
    ids=["a script", "a file, asked for at a terminal", "a terminal"],
)
def test_logs_go_into_a_file_byte_for_byte_and_cannot_steer_a_terminal(
    host: FakeHost,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    terminals: tuple[int, ...],
    printed: bytes,
) -> None:
    """Bytes that are not UTF-8 were lost, and colours too if only stderr was a terminal."""
    host.fake.processes.answers["journalctl",] = [LOGGED]
    assert run("run", "web", f"--image={IMAGE}", "--", "/bin/server", host=host)[0] == 0
    taken = io.BytesIO()
    monkeypatch.setattr("os.isatty", lambda fd: fd in terminals)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(taken, encoding="utf-8"))
    code, _, _ = run("logs", "web", host=host)

    assert (code, taken.getvalue()) == (0, printed)


def test_a_stop_of_a_task_that_is_wanted_again_ends(
    host: FakeHost, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control plane puts a task again as soon as the agent reports that it is leaving."""
    run("run", "web", f"--image={IMAGE}", "--", "/bin/server", host=host)
    stop = host.fake.systemd.stop

    def owner_wants_it_again(unit: str) -> None:
        async def put() -> None:
            async with AgentClient(f"unix:{host.config.socket}") as client:
                await client.put_task("web", a_spec(generation=1 << 50))

        monkeypatch.setattr(host.fake.systemd, "stop", stop)
        asyncio.run(put())
        stop(unit)

    monkeypatch.setattr(host.fake.systemd, "stop", owner_wants_it_again)
    stopped = run("stop", "web", host=host)

    assert (
        stopped[1]
        == f"web: stopped, and then requested again by its owner (generation {1 << 50})\n"
    )


def test_a_root_file_system_given_as_a_file_becomes_an_image(
    host: FakeHost, run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "root.tar"
    file.write_bytes(a_tar())
    code, _, err = run("run", "web", f"--image={file}", "--", "/bin/server", host=host)
    images = run("images", host=host)

    assert (code, digest_of(file.read_bytes()) in err) == (0, True)
    assert digest_of(file.read_bytes()) in images[1]


@pytest.mark.parametrize(
    ("exit_code", "restart", "expected"),
    [(0, "never", 0), (3, "never", 1), (3, "always", 1)],
)
def test_run_ends_as_the_task_did(
    host: FakeHost, run: Run, exit_code: int, restart: str, expected: int
) -> None:
    host.fake.systemd.programs["once"] = ends_with(exit_code)
    code, out, _ = run(
        "run", "job", f"--image={IMAGE}", f"--restart={restart}", "--", "once", host=host
    )

    assert code == expected
    assert f"exit code {exit_code}" in out


@pytest.mark.behaviour("BUG-AG11")
def test_run_that_waits_for_a_task_that_is_broken_fails(host: FakeHost, run: Run) -> None:
    """The command ended with 0 and the word "unhealthy"."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        code, out, _ = run(
            *("run", "web", f"--image={IMAGE}", f"--port={port}", "--start-period=0s"),
            *("--", "/bin/server"),
            host=host,
        )

    assert code == 1
    assert "web: running, unhealthy" in out


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (("stop", "nothing"), 3, "there is no task nothing"),
        (("logs", "nothing"), 3, "there is no task nothing"),
        (("run", "web", "--image=sha256:" + "9" * 64, "--", "x"), 5, "is not on this machine"),
        (("run", "web", "--image=/no/such.tar", "--", "x"), 64, "neither a digest nor a file"),
        (("run", "web", "--image=nginx", "--", "x"), 64, "as oci:REGISTRY/nginx"),
        (("run", "web", "--image=docker.io/a/b:3", "--", "x"), 64, "as oci:docker.io/a/b:3"),
        (("run", "web", "--image=docker://q.io/b", "--", "x"), 64, "as oci:q.io/b"),
        (("run", "web", "--image=docker-archive:/x", "--", "x"), 64, "skopeo copy docker-arch"),
        (("run", "WEB", f"--image={IMAGE}", "--", "x"), 64, "is not a task ID"),
        (("run", "web", f"--image={IMAGE}", "--memory=lots", "--", "x"), 64, "is not a size"),
        (("run", "web", f"--image={IMAGE}", "-e", "A", "--", "x"), 64, "is not NAME=VALUE"),
        (("run", "web", f"--image={IMAGE}", "--memory=1K", "--", "x"), 64, "memory_max_bytes"),
        (("run", "web", f"--image={IMAGE}", "--max-run=0", "--", "x"), 64, "max_run_s"),
        (("run", "web", f"--image={IMAGE}", "--port=0", "--", "x"), 64, "probe.port"),
        (("run", "web", f"--image={IMAGE}", "--egress-mbps=0", "--", "x"), 64, "egress_mbps"),
        (("run", "web", f"--image={IMAGE}"), 5, "has a command"),
        (("image", "pull", "web"), 64, "does not name an image in a registry"),
        (("run", "web", "--image=oci-archive:/none"), 64, "there is no file /none"),
        (("dance",), 64, "No such command"),
        pytest.param(
            ("show", "caf\udce9"), 64, "'caf\\udce9' is not UTF-8", marks=BYTES, id="a name"
        ),
        pytest.param(
            ("run", "web", f"--image={IMAGE}", "--", "ls", "caf\udce9"),
            *(64, "\\udce9' is not UTF-8 text"),
            marks=BYTES,
            id="an argument",
        ),
        pytest.param(
            ("run", "web", f"--image={'a' * 300}", "--", "x"),
            *(64, "File name too long"),
            marks=BYTES,
            id="a long name of a file",
        ),
    ],
)
def test_an_impossible_command_has_one_message_and_an_exit_code(
    host: FakeHost, run: Run, argv: tuple[str, ...], code: int, message: str
) -> None:
    found, out, err = run(*argv, host=host)

    assert (found, out) == (code, "")
    assert err.count(message) == 1


def test_without_an_agent_the_tool_reports_it(run: Run) -> None:
    code, _, err = run("ps")

    assert code == 69
    assert "is the service running" in err


def test_facts_are_shown_as_a_table_or_as_json(host: FakeHost, run: Run) -> None:
    table, as_json = run("facts", host=host), run("facts", "-o", "json", host=host)

    assert "Fake CPU" in table[1]
    shown = dict(line.split(None, 1) for line in table[1].splitlines() if " " in line.strip())
    assert shown["nics"].strip() == "eth0"
    assert shown["leaving"].strip() == "no"
    assert json.loads(as_json[1])["sockets"] == 1


def test_the_configuration_in_force_is_printed(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("config")

    assert code == 0
    assert msgspec.json.decode(out, type=AgentConfig).socket == str(tmp_path / "nothing.sock")


@pytest.mark.behaviour("BUG-AG99")
@pytest.mark.parametrize("port", ["", "\u00b2", "-1", "9" * 5000])
def test_a_port_that_is_not_a_number_is_refused(run: Run, port: str) -> None:
    code, _, error = run("run", "web", "--image=web.tar", f"--listen=http={port}")

    assert code == InvalidInput.exit_code
    assert "--listen 'http' is not NAME=PORT" in error


@pytest.mark.behaviour("BUG-AG99")
def test_a_wrong_configuration_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "agent.toml"
    for text in ("colour = 1", "x", 'listen = "nowhere"', 'listen = "0.0.0.0:\u00b2"'):
        config.write_text(text)
        monkeypatch.setattr(sys, "argv", ["twine-agent", f"--config={config}", "config"])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 78
        assert capsys.readouterr().err


def test_install_puts_units_group_and_configuration_below_a_root(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", "/srv/venv")
    root = tmp_path / "root"
    code, out, _ = run("install", f"--root={root}")
    placed = sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())
    service = (root / "etc/systemd/system/twine-agent.service").read_text()
    config = root / "etc/twine/agent.toml"

    assert code == 0
    assert placed == [
        "etc/systemd/logind.conf.d/twine.conf",
        "etc/systemd/system/hostcritical.slice",
        "etc/systemd/system/init.scope.d/twine.conf",
        "etc/systemd/system/sidekick-resume.service",
        "etc/systemd/system/sidekick-verify.service",
        "etc/systemd/system/sidekick-verify.timer",
        "etc/systemd/system/system.slice.d/twine.conf",
        "etc/systemd/system/systemd-journald-sync@.service.d/twine.conf",
        "etc/systemd/system/systemd-journald-varlink@.socket.d/twine.conf",
        "etc/systemd/system/systemd-journald@.service.d/twine.conf",
        "etc/systemd/system/systemd-journald@.socket.d/twine.conf",
        "etc/systemd/system/twine-agent.service",
        "etc/systemd/system/twine-fence.service",
        "etc/systemd/system/twine-leave.service",
        "etc/systemd/system/twine-network.service",
        "etc/systemd/system/twine-network.socket",
        "etc/systemd/system/twine-output.service",
        "etc/systemd/system/workload.slice",
        "etc/sysusers.d/twine.conf",
        "etc/twine/agent.toml",
        "etc/udev/rules.d/90-twine-sidekick.rules",
    ]
    assert len(out.splitlines()) == len(placed)
    assert "ExecStart=/srv/venv/bin/twine-agent serve" in service
    assert "/opt/twine/" not in service
    assert load(config).sidekick == "/srv/venv/bin/sidekick"

    config.write_text('log_level = "debug"\n')
    run("install", f"--root={root}")
    assert load(config).log_level == "debug"


@pytest.mark.behaviour("F-08")
def test_a_second_agent_ends_with_the_code_for_busy(
    host: FakeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "agent.toml"
    config.write_bytes(_toml(host))
    monkeypatch.setattr("agent.machine.real.real_machine", lambda: host.fake.machine)
    monkeypatch.setattr("wire.log.configure", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["twine-agent", f"--config={config}", "serve"])

    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 75


def _toml(host: FakeHost) -> bytes:
    values = msgspec.to_builtins(host.config)
    return "\n".join(f"{k} = {json.dumps(v)}" for k, v in values.items()).encode()
