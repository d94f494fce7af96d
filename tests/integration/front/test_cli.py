"""`twinectl` with a front end: its output and its exit codes."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import io
import json
import os
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agent.usage import TaskUsage
from control_plane.api.jobs import JobPhase, JobSpec, task_id
from control_plane.api.tasks import TaskDescription
from control_plane.cli import follow, jobs, main
from control_plane.client import ControlPlaneClient
from control_plane.identity.authority import CertificateSubject
from wire import tls
from wire.errors import Busy

from .conftest import FACTS, Region

IMAGE = "sha256:" + "a" * 64
JOB = f"""
name = "web"
entitlement = "front"
tasks = 2
image = "{IMAGE}"
command = ["/usr/sbin/nginx", "-p", "${{port:http}}"]
ports = ["http"]
"""
Ctl = Callable[..., Result]


@pytest.fixture
def ctl(region: Region) -> Ctl:
    def run(*arguments: str, **environment: str) -> Result:
        environment = {"TWINE_ENDPOINT": f"unix:{region.socket}"} | environment
        return CliRunner().invoke(main, arguments, env=environment)

    return run


@pytest.fixture
def jobfile(tmp_path: Path) -> Path:
    path = tmp_path / "web.toml"
    path.write_text(JOB)
    return path


def an_entitlement(ctl: Ctl) -> None:
    assert ctl("entitlement", "create", "front", "--machines", "3").exit_code == 0


@pytest.mark.behaviour("AG9", "AG10")
def test_volumes_and_devices_of_a_job_are_shown(ctl: Ctl, jobfile: Path) -> None:
    an_entitlement(ctl)
    more = """credentials = { db = "db-password" }
[volumes.data]
kind = "persistent"
path = "/data"
max_bytes = "16MiB"
[volumes.peer]
kind = "shared"
path = "/peer"
source = "other-0.data"
"""
    jobfile.write_text(jobfile.read_text() + more)
    assert ctl("job", "apply", str(jobfile)).exit_code == 0
    shown = ctl("job", "status", "web").stdout.splitlines()
    assert shown[2:4] == [
        "volumes: data (persistent) at /data, at most 16MiB;"
        " peer (shared of other-0.data) at /peer",
        "credentials: db-password as db",
    ]


@pytest.mark.behaviour("FE6")
def test_a_job_is_applied_shown_and_stopped(ctl: Ctl, jobfile: Path) -> None:
    an_entitlement(ctl)
    applied = ctl("job", "apply", str(jobfile), "--wait")
    assert applied.exit_code == 0, applied.output
    assert applied.stdout == "job web: stable, 2/2 healthy, 2 on version 1\n"
    shown = ctl("job", "status", "web").stdout.splitlines()
    assert shown[0] == "job web: stable, 2/2 healthy, 2 on version 1"
    assert shown[2].split() == [
        *("TASK", "PHASE", "HEALTH", "MACHINE", "PORTS", "VERSION", "RESTARTS"),
        *("LAST", "EXIT", "REASON"),
    ]
    assert shown[3].split() == ["web-0", "running", "healthy", "vm1", "http=20000", "1", "0", "-"]
    assert ctl("job", "list").stdout.splitlines()[1].split()[:3] == ["web", "stable", "2/2"]
    assert "h:80" in ctl("job", "endpoints", "web").stdout
    for verb in ("pause", "resume", "restart", "rollback"):
        assert ctl("job", verb, "web").stdout.startswith("job web: ")
    assert json.loads(ctl("job", "pause", "web", "-o", "json").stdout)["record"]["paused"] is True
    assert ctl("job", "move", "web").exit_code == 64
    assert "no entitlement nowhere" in ctl("job", "move", "web", "--entitlement", "nowhere").stderr
    assert ctl("job", "move", "web", "--entitlement", "front").stdout.startswith("job web: ")
    assert ctl("job", "stop", "web", "--wait").stdout == "job web: stopped\n"
    assert ctl("job", "status", "web").exit_code == 3


@pytest.mark.behaviour("BUG-UX127")
def test_a_pause_is_shown_while_nothing_waits_for_it(ctl: Ctl, jobfile: Path) -> None:
    """Regression: `job pause`, `job status` and `job list` did not show that a job is paused."""
    an_entitlement(ctl)
    assert ctl("job", "apply", str(jobfile), "--wait").exit_code == 0
    line = "job web: stable, 2/2 healthy, 2 on version 1, updates are paused"
    assert ctl("job", "pause", "web").stdout.splitlines()[0] == line
    assert ctl("job", "status", "web").stdout.splitlines()[0] == line
    assert ctl("job", "list").stdout.splitlines()[1].split()[:3] == ["web", "stable,", "paused"]


def test_operations_on_tasks_are_reported(ctl: Ctl, jobfile: Path) -> None:
    an_entitlement(ctl)
    assert ctl("job", "apply", str(jobfile), "--wait").exit_code == 0
    head, row = ctl("job", "events", "web").stdout.splitlines()
    assert head.split()[:6] == ["NR", "END", "TOOK", "TASK", "OPERATION", "CAUSE"]
    assert row.split()[3:] == ["3s", "web-0", "start", "release", "done", "m1"]
    assert json.loads(ctl("job", "events", "web", "-o", "json", "--after", "1").stdout) == {
        "job": "web",
        "events": [],
        "more": False,
    }
    story = ctl("task", "events", "web-0").stdout.splitlines()
    assert (story[0], story[2]) == ("task web-0: running on m1", row)
    assert ctl("task", "events", "web").exit_code == 64
    assert ctl("job", "events", "other").exit_code == 3


def test_yaml_json_and_set_give_the_same_job(ctl: Ctl, tmp_path: Path) -> None:
    an_entitlement(ctl)
    document: dict[str, Any] = {
        "name": "web",
        "entitlement": "front",
        "tasks": 1,
        "image": IMAGE,
        "command": ["/bin/true"],
    }
    (tmp_path / "job.json").write_text(json.dumps(document))
    (tmp_path / "job.yaml").write_text(json.dumps(document))
    answers = [
        ctl(
            *("job", "apply", str(tmp_path / name), "-o", "json", "--set", "tasks=4"),
            *("--set", "limits.cpu_weight=200", "--set", "environment.N=1"),
        )
        for name in ("job.json", "job.yaml")
    ]
    specs = [json.loads(a.stdout)["record"]["spec"] for a in answers]
    assert specs[0] == specs[1]
    assert (specs[0]["tasks"], specs[0]["limits"]["cpu_weight"]) == (4, 200)
    assert specs[0]["environment"] == {"N": "1"}


def test_a_bad_file_gets_all_errors_at_once_and_changes_nothing(
    ctl: Ctl, region: Region, tmp_path: Path
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('name = "Web"\ntasks = -1\ncommand = []\n[probe]\nport = "http"\n[limits]\nx=1')
    result = ctl("job", "apply", str(path))
    assert result.exit_code == 64
    assert result.stdout == ""
    for field in ("name", "entitlement", "tasks", "image", "command", "limits.x", "probe.port"):
        assert f"\n  {field}: " in result.stderr
    assert "nothing was changed" in result.stderr
    assert "Traceback" not in result.stderr
    assert region.control_plane.jobs == {}


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("j.toml", "a = [", "cannot be read"),
        ("j.yaml", "a: &x [1]\nb: *x\n", "aliases"),
        ("j.yaml", "a: 1\na: 2\n", "written twice"),
        ("j.yaml", "a: !!python/object:os.system x", "could not determine a constructor"),
        ("j.yaml", "[" * 1000, "cannot be read"),
        ("j.json", "[" * 200_000, "cannot be read"),
        ("j.json", json.dumps(eval("[" * 40 + "]" * 40)), "deeper than 32"),
        ("j.ini", "", "suffix .ini"),
        ("j.toml", "#" * 300_000, "over 256 KiB"),
    ],
)
def test_a_hostile_file_is_one_clear_error(
    ctl: Ctl, tmp_path: Path, name: str, text: str, reason: str
) -> None:
    (tmp_path / name).write_text(text)
    result = ctl("job", "apply", str(tmp_path / name))
    assert result.exit_code == 64
    assert reason in result.stderr
    assert len(result.stderr.splitlines()) <= 4


def test_a_dry_run_changes_nothing(ctl: Ctl, region: Region, jobfile: Path) -> None:
    an_entitlement(ctl)
    result = ctl("job", "apply", str(jobfile), "--dry-run")
    assert result.stdout == "job web: valid, nothing changed\n"
    assert region.control_plane.jobs == {}


def test_waiting_ends_in_time_with_the_reason(ctl: Ctl, region: Region, jobfile: Path) -> None:
    an_entitlement(ctl)
    region.control_plane.phase = JobPhase.WAITING
    region.control_plane.reason = "no machine of type large"
    result = ctl("job", "apply", str(jobfile), "--wait", "--timeout", "1s")
    assert result.exit_code == 1
    assert "is not stable after 1 s" in result.stderr
    assert "2 task(s): no machine of type large" in result.stderr


def test_waiting_ends_when_the_job_is_ready(ctl: Ctl, region: Region, jobfile: Path) -> None:
    an_entitlement(ctl)
    canned = region.control_plane
    canned.phase = JobPhase.PROGRESSING

    def settle() -> None:
        time.sleep(2 * follow.POLL_S)
        canned.phase = JobPhase.STABLE

    thread = threading.Thread(target=settle)
    thread.start()
    result = ctl("job", "apply", str(jobfile), "--wait", "--timeout", "10s")
    thread.join()
    assert result.exit_code == 0
    assert result.stderr.splitlines()[0].startswith("job web: progressing, 0/2 healthy")


@pytest.mark.behaviour("BUG-UX128")
def test_watching_shows_each_change_until_the_job_is_removed(
    ctl: Ctl, region: Region, jobfile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the table of `--watch` had the image without its names."""
    an_entitlement(ctl)
    ctl("job", "apply", str(jobfile))

    known = dict(region.control_plane.jobs)
    image = known["web"].image
    monkeypatch.setattr(jobs, "names_of", lambda _: {"web:v1": image})

    def watched(*options: str) -> Result:
        def end() -> None:
            time.sleep(2 * follow.POLL_S)
            region.control_plane.jobs.clear()

        region.control_plane.jobs.update(known)
        thread = threading.Thread(target=end)
        thread.start()
        result = ctl("job", "status", "web", "--watch", *options)
        thread.join()
        assert "gone" in result.stderr
        return result

    lines = watched("-o", "json").stdout.splitlines()
    assert [json.loads(line)["phase"] for line in lines] == ["stable"]
    assert f"{image} web:v1" in watched().stdout


@pytest.mark.parametrize("words", [("job", "logs", "web", "0"), ("task", "logs", "web-0")])
def test_logs_pass_through_a_pipe_and_come_as_json_lines(
    ctl: Ctl, region: Region, jobfile: Path, words: tuple[str, ...]
) -> None:
    """Regression: `task logs` printed ends of lines as two characters, and cut characters between
    chunks.
    """
    an_entitlement(ctl)
    ctl("job", "apply", str(jobfile))
    region.control_plane.logs = [b"on", b"e\ntw\xc3", b"\xb6\x1b[31m\n", b"\xff end"]
    assert ctl(*words).stdout_bytes == b"one\ntw\xc3\xb6\x1b[31m\n\xff end"
    lines = ctl(*words, "-o", "json").stdout.splitlines()
    assert [json.loads(x)["line"] for x in lines] == ["one", "twö\x1b[31m", "� end"]
    assert ctl(*words, "--tail", "1", "--since", "10m").stdout_bytes == b"\xff end"


def test_top_shows_a_task_or_the_tasks_of_a_job(
    ctl: Ctl, region: Region, jobfile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it accepted only a job name, and reported for a task that no job has its name."""

    async def describe(job: str, index: int) -> TaskDescription:
        usage = TaskUsage(task_id=task_id(job, index), memory_bytes=(index + 1) << 20)
        return TaskDescription(
            task=task_id(job, index),
            machine="m1",
            phase="running",
            version=1,
            usage=None if job == "web-1" and index == 1 else usage,
        )

    monkeypatch.setattr(region.control_plane.task_service, "describe", describe)
    an_entitlement(ctl)
    ctl("job", "apply", str(jobfile))

    def shown(*words: str) -> list[str]:
        result = ctl("task", "top", *words, "-o", "json")
        assert result.exit_code == 0, result.output
        return [found["task"] for found in json.loads(result.stdout)]

    assert shown("web") == ["web-0", "web-1"]
    assert shown("web-1") == ["web-1"]
    assert "2MiB" in ctl("task", "top", "web-1").stdout
    for name in ("web-2", "none", "none-0"):
        missing = ctl("task", "top", name)
        assert missing.exit_code == ctl("job", "status", "none").exit_code
        assert f"there is neither a task nor a job {name}" in missing.stderr

    other = tmp_path / "web-1.toml"
    other.write_text(JOB.replace('"web"', '"web-1"'))
    ctl("job", "apply", str(other))
    assert shown("web-1") == ["web-1"]  # as every verb of `task` accepts it
    assert shown("web-1", "--job") == ["web-1-0"]
    idle = ctl("task", "top", "web-1-1")
    assert "task web-1-1 has no processes: it is running" in idle.stderr
    assert "twinectl task describe web-1-1" in idle.stderr


@pytest.mark.parametrize(
    "words", [("describe",), ("logs",), ("restart",), ("events",), ("exec", "--", "ls")]
)
def test_a_job_name_in_place_of_a_task_is_refused_with_a_hint(
    ctl: Ctl, words: tuple[str, ...]
) -> None:
    verb, *rest = words
    result = ctl("task", verb, "web", *rest)
    assert result.exit_code == 64
    assert "'web' is not the name of a task" in result.stderr
    assert "as web-3" in result.stderr


def test_a_log_that_breaks_off_is_an_error_not_an_end(
    ctl: Ctl, region: Region, jobfile: Path
) -> None:
    an_entitlement(ctl)
    ctl("job", "apply", str(jobfile))
    region.control_plane.logs_break = True
    result = ctl("job", "logs", "web", "0")
    assert result.exit_code == 69
    region.control_plane.logs = []
    assert "the agent went away" in ctl("job", "logs", "web", "0").stderr


def a_tar(content: bytes) -> bytes:
    """Return a tar with one file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        entry = tarfile.TarInfo("bin/serve")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def test_an_image_is_pushed_once_and_verified(ctl: Ctl, region: Region, tmp_path: Path) -> None:
    data = a_tar(os.urandom(3 << 20))
    (tmp_path / "root.tar").write_bytes(data)
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    first = ctl("image", "push", str(tmp_path / "root.tar"))
    assert (first.exit_code, first.stdout) == (0, f"{digest}\n")
    again = ctl("image", "push", str(tmp_path / "root.tar"), "-o", "json")
    assert json.loads(again.stdout)["stream_bytes"] == len(data)
    assert "already in the image store" in again.stderr
    assert digest in ctl("image", "list").stdout
    assert ctl("image", "push", str(tmp_path / "none")).exit_code == 64


def test_an_image_is_signed_and_an_entitlement_names_the_key(ctl: Ctl, tmp_path: Path) -> None:
    (tmp_path / "root.tar").write_bytes(a_tar(b"an image to be signed"))
    digest = ctl("image", "push", str(tmp_path / "root.tar")).stdout.strip()
    file = str(tmp_path / "release.pem")
    public = ctl("image", "key", file, "--new").stdout.strip()
    assert public.startswith("ed25519:")
    assert (tmp_path / "release.pem").stat().st_mode & 0o777 == 0o600
    assert ctl("image", "key", file).stdout.strip() == public
    assert "File exists" in ctl("image", "key", file, "--new").stderr

    signed = ctl("image", "sign", digest, "--name", "web/1.4", "--key", file)
    assert signed.stdout == f"{digest} is signed as web/1.4 with {public}\n"
    assert "web/1.4" in ctl("image", "list").stdout
    refused = ctl("image", "sign", digest, "--name", "Web 1", "--key", file)
    assert (refused.exit_code, "name" in refused.stderr) == (64, True)
    assert ctl("image", "sign", digest, "--name", "x", "--key", str(tmp_path)).exit_code == 64

    made = ctl("entitlement", "create", "signed", "--machines", "1", "--image-key", public)
    assert made.exit_code == 0, made.stderr
    assert public in ctl("entitlement", "show", "signed").stdout
    ctl("entitlement", "update", "signed", "--unset", "image_keys")
    assert "images need no signature" in ctl("entitlement", "show", "signed").stdout
    bad = ctl("entitlement", "update", "signed", "--image-key", public[:-2])
    assert "image_keys[0]" in bad.stderr


@pytest.mark.behaviour("BUG-CP23")
def test_an_image_is_removed_unless_a_job_runs_it(ctl: Ctl, region: Region, tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(a_tar(b"an image that was replaced"))
    digest = json.loads(ctl("image", "push", str(tmp_path / "old"), "-o", "json").stdout)["digest"]
    job = JobSpec(name="user", entitlement="front", tasks=1, image=digest, command=["/bin/true"])
    region.control_plane.jobs[job.name] = job
    refused = ctl("image", "rm", digest)
    assert refused.exit_code != 0
    assert f"job {job.name} uses it" in refused.stderr
    assert digest in ctl("image", "list").stdout
    del region.control_plane.jobs[job.name]
    assert f"{digest} is removed" in ctl("image", "rm", digest).stdout
    assert digest not in ctl("image", "list").stdout
    assert ctl("image", "rm", digest).exit_code == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_image_that_is_too_large_is_refused_while_it_is_sent(ctl: Ctl, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"\0" * (9 << 20))
    result = ctl("image", "push", str(tmp_path / "big"))
    assert (result.exit_code, "has more than 8388608 bytes" in result.stderr) == (64, True)
    gc.collect()  # the client leaves while it is still sending: its socket is closed here


def test_the_stream_of_btrfs_send_is_recognised(ctl: Ctl, tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"btrfs-stream\0" + b"x" * 100)
    pushed = ctl("image", "push", str(tmp_path / "image"), "-o", "json")
    assert json.loads(pushed.stdout)["format"] == "btrfs"


def test_a_token_is_printed_with_all_that_a_host_needs(ctl: Ctl, region: Region) -> None:
    made = json.loads(ctl("token", "create", "--host", "vm1").stdout)
    assert set(made) == {"token", "ca_hash", "url", "machine", "expires_at"}
    assert made["ca_hash"] == region.authority.ca_hash
    assert made["expires_at"] == pytest.approx(time.time() + 600, abs=30)
    command = ctl("token", "create", "--host", "vm1", "-o", "table").stdout
    assert command.startswith(f"twine-agent join {region.url} --token twn1.")


def test_machines_and_entitlements_are_listed(ctl: Ctl, region: Region) -> None:
    from agent.api import Location
    from agent.api.joining import JoinRequest

    request = JoinRequest(
        token="", machine="vm1", csr_pem="", address="a:1", location=Location(), facts=FACTS
    )
    an_entitlement(ctl)
    region.run(region.control_plane.joined(request))
    assert ctl("machine", "list").stdout.splitlines()[1].split()[:2] == ["vm1", "up"]
    assert "local/dc1/msb1/row1/rack1" in ctl("machine", "show", "vm1").stdout
    assert "(any)" in ctl("entitlement", "list").stdout
    assert ctl("entitlement", "delete", "front").stdout == "entitlement front: removed\n"
    assert json.loads(ctl("entitlement", "list", "-o", "json").stdout) == {"entitlements": []}


@pytest.mark.behaviour("F-86")
def test_names_cannot_steer_a_terminal(ctl: Ctl, region: Region) -> None:
    evil = "\x1b]0;owned\x07\x9b2J\u202e"
    refused = ctl("entitlement", "create", "front", "--machines", "1", "--business-unit", evil)
    assert refused.exit_code == 64
    ctl("entitlement", "request", "front", "--machines", "1", "--reason", evil)
    for form in ("table", "json"):
        shown = ctl("entitlement", "requests", "-o", form).stdout
        for text in (shown, refused.output):
            assert not set(evil) & {"\x1b", "\x07", "\x9b", "\u202e"} & set(text)
    decoded = json.loads(ctl("entitlement", "requests", "-o", "json").stdout)
    assert decoded["requests"][0]["reason"] == evil


def credential(region: Region, path: Path, life_s: float = 3600.0) -> Path:
    tls.save(
        region.authority.credential(CertificateSubject("user", "ada"), region.url, life_s), path
    )
    return path


def test_a_user_calls_over_tls_with_a_credential(region: Region, tmp_path: Path) -> None:
    file = credential(region, tmp_path / "ada.json")
    arguments = ("--credential", str(file), "job", "list", "-o", "json")
    result = CliRunner().invoke(main, arguments, env={"TWINE_ENDPOINT": ""})
    assert (result.exit_code, json.loads(result.stdout)) == (0, {"jobs": []})


# Exit codes: one row per kind of exit.

EXITS: list[tuple[str, int, tuple[str, ...]]] = [
    ("done", 0, ("job", "list")),
    ("help", 0, ("job", "apply", "--help")),
    ("no such job", 3, ("job", "status", "nothing")),
    ("no such job to stop", 3, ("job", "stop", "nothing")),
    ("no such log", 3, ("job", "logs", "nothing", "0")),
    ("no such machine", 3, ("machine", "show", "nothing")),
    ("no such machine to drain", 3, ("machine", "drain", "nothing", "--reason", "x")),
    ("no such machine to revoke", 3, ("machine", "revoke", "nothing")),
    ("no machine in this scope", 3, ("machine", "undrain", "--scope", "cluster=none")),
    ("nothing to drain", 64, ("machine", "drain", "--reason", "x")),
    ("bad scope", 64, ("machine", "drain", "--reason", "x", "--scope", "colour=red")),
    ("bad kind", 64, ("machine", "drain", "vm1", "--reason", "x", "--kind", "failure")),
    ("free and assigned", 64, ("machine", "list", "--free", "--entitlement", "front")),
    ("no such list", 64, ("machine", "import", "/nonexistent.csv")),
    ("no such entitlement", 3, ("entitlement", "delete", "nothing")),
    ("no such command", 64, ("frobnicate",)),
    ("no command", 64, ()),
    ("no such option", 64, ("job", "list", "--frobnicate")),
    ("bad number", 64, ("entitlement", "create", "x", "--machines", "0")),
    ("bad duration", 64, ("token", "create", "--host", "vm1", "--ttl", "10")),
    ("bad host", 64, ("token", "create", "--host", "VM 1")),
    ("no such file", 64, ("job", "apply", "/nonexistent.toml")),
    ("bad endpoint", 64, ("--endpoint", "http://x", "job", "list")),
    ("no server", 69, ("--endpoint", "unix:/nonexistent.sock", "job", "list")),
    ("no credential", 77, ("--endpoint", "https://127.0.0.1:1", "job", "list")),
    ("bad credential", 78, ("--credential", "/nonexistent", "job", "list")),
]


@pytest.mark.parametrize(("code", "arguments"), [pytest.param(c, a, id=i) for i, c, a in EXITS])
def test_exit_codes(ctl: Ctl, code: int, arguments: tuple[str, ...]) -> None:
    result = ctl(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    assert len(result.stderr.splitlines()) <= 5 or code == 64


def test_removing_an_object_in_use_is_refused(ctl: Ctl, jobfile: Path) -> None:
    an_entitlement(ctl)
    ctl("job", "apply", str(jobfile))
    result = ctl("entitlement", "delete", "front")
    assert result.exit_code == 5
    assert result.stderr.splitlines() == [
        "error: cannot delete entitlement 'front': it is used by job web",
        "try:   stop its jobs; machines that still hold tasks are freed after that",
    ]


def test_an_expired_credential_is_not_permitted(region: Region, tmp_path: Path) -> None:
    file = credential(region, tmp_path / "ada.json", life_s=-1.0)
    result = CliRunner().invoke(main, ("--credential", str(file), "job", "list"))
    assert result.exit_code == 77
    assert "has expired" in result.stderr


def test_a_host_cannot_use_the_commands_of_a_user(region: Region, tmp_path: Path) -> None:
    held = region.authority.credential(CertificateSubject("host", "vm1"), region.url)
    tls.save(held, tmp_path / "vm1.json")
    result = CliRunner().invoke(main, ("--credential", str(tmp_path / "vm1.json"), "job", "list"))
    assert result.exit_code == 77


def test_a_busy_answer_is_retried(region: Region) -> None:
    region.control_plane.is_ready = False

    async def ready() -> None:
        async with ControlPlaneClient(f"unix:{region.socket}") as client:
            await client.readyz()

    with pytest.raises(Busy, match="not ready: loading") as refusal:
        asyncio.run(ready())
    assert refusal.value.exit_code == 75


@pytest.mark.behaviour("BUG-UX3")
def test_an_image_is_called_by_its_name_and_applied_by_its_digest(
    ctl: Ctl, region: Region, tmp_path: Path
) -> None:
    """`apply` resolves the name and shows it next to the digest; the name may move later."""
    (tmp_path / "root.tar").write_bytes(a_tar(b"an image with a name"))
    digest = ctl("image", "push", str(tmp_path / "root.tar"), "--name", "redis:7").stdout.strip()
    assert ctl("image", "list").stdout.splitlines()[1].split()[:2] == ["redis:7", digest]
    assert ctl("entitlement", "create", "named", "--machines", "2").exit_code == 0
    job = tmp_path / "cache.toml"
    job.write_text(
        'name = "cache"\nentitlement = "named"\ntasks = 1\nimage = "redis:7"\n'
        'command = ["/bin/redis"]\n'
    )
    applied = ctl("job", "apply", str(job))
    assert applied.exit_code == 0, applied.output
    assert f"image redis:7 is {digest}" in applied.stderr
    assert region.control_plane.jobs["cache"].image == digest
    assert f"image {digest} redis:7" in ctl("job", "status", "cache").stdout
    assert f"{digest[7:19]} redis:7" in ctl("job", "list").stdout
    for verb in (("push", "cache"), ("canary", "cache", "--for", "1h")):
        assert ctl("job", *verb, "--image", "redis:7").exit_code == 0
        assert region.control_plane.intents.written[-1][2].image == digest
        assert "with the name 'redis:8'" in ctl("job", *verb, "--image", "redis:8").stderr
    assert ctl("job", "push", "cache", "--file", str(job)).exit_code == 0
    assert region.control_plane.intents.written[-1][2].spec.image == digest
    unknown = ctl("job", "apply", str(job), "--set", "image=redis:8")
    assert unknown.exit_code == 64
    assert "the image store has no image with the name 'redis:8'" in unknown.stderr
    (tmp_path / "new.tar").write_bytes(a_tar(b"the next one"))
    newer = ctl("image", "push", str(tmp_path / "new.tar")).stdout.strip()
    assert ctl("image", "name", newer, "redis:7").stdout == f"redis:7 is {newer}\n"
    assert region.control_plane.jobs["cache"].image == digest
    wrong = ctl("image", "name", newer, "Redis 7")
    assert wrong.exit_code == 64
