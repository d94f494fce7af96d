"""`twine-agent show | top | restart | events | image rm | profile`: output for users."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import IMAGE, OTHER_IMAGE, FakeHost, unit
from click import Group
from msgspec.structs import replace

from agent.api import Event
from agent.cli.host import _print_event
from agent.cli.root import cli
from agent.machine import Usage
from agent.machine.fake import FakeCgroups
from agent.machine.fake_programs import ends_with

Run = Callable[..., tuple[int, str, str]]


def _start(host: FakeHost, run: Run, name: str = "web") -> str:
    """Start a task; return its cgroup."""
    assert run("run", name, f"--image={IMAGE}", "--", "/bin/server", host=host)[0] == 0
    (state,) = host.fake.systemd.units(unit(name))
    return state.control_group


def test_all_that_is_known_of_a_task_is_shown(host: FakeHost, run: Run) -> None:
    group = _start(host, run)
    host.fake.cgroups.usage[group] = Usage(
        cpu_s=2.25, memory_bytes=20 << 20, memory_peak_bytes=33 << 20, oom_kills=1, processes=4
    )
    code, out, _ = run("show", "web", host=host)
    as_json = json.loads(run("show", "web", "-o", "json", host=host)[1])

    rows = dict(line.split(maxsplit=1) for line in out.splitlines()[1:] if " " in line)
    assert code == 0
    assert (rows["state"], rows["health"], rows["unit"]) == ("running", "healthy", unit("web"))
    assert rows["cpu"] == "2.2 s, throttled for 0.0 s"
    assert rows["memory"] == "20MiB, at most 33MiB, 1 OOM kills"
    assert as_json["task"]["task_id"] == as_json["usage"]["task_id"] == "web"


def test_how_a_task_ended_last_is_shown(host: FakeHost, run: Run) -> None:
    host.fake.systemd.programs["once"] = ends_with(7)
    run("run", "job", f"--image={IMAGE}", "--restart=never", "--", "once", host=host)
    _, out, _ = run("show", "job", host=host)

    assert "exit-code, exit code 7" in out
    assert "it ended with exit code 7" in out


def test_the_busiest_task_is_on_top(
    host: FakeHost, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, cpu_s in (("idle", 0.5), ("busy", 4.0)):
        group = _start(host, run, name)
        host.fake.cgroups.usage[group] = Usage(cpu_s=cpu_s, memory_bytes=4 << 20)
    read, more = FakeCgroups.read, iter([0.0, 9.0])

    def grows(self: FakeCgroups, group: str) -> Usage | None:
        found = read(self, group)
        if found is None or "busy" not in group:
            return found
        return replace(found, cpu_s=found.cpu_s + next(more))

    monkeypatch.setattr(FakeCgroups, "read", grows)
    code, out, _ = run("top", "--interval=10ms", host=host)

    assert code == 0
    assert out.splitlines()[0].split()[:4] == ["TASK", "CPUS", "WAITS", "MEMORY"]
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["busy", "idle"]
    assert float(out.splitlines()[1].split()[1]) > 0.0
    assert "4MiB" in out


def test_a_task_is_restarted_and_waited_for(host: FakeHost, run: Run) -> None:
    _start(host, run)
    before = host.invocation("web")
    code, out, _ = run("restart", "web", host=host)

    assert (code, out) == (0, "web: running, healthy\n")
    assert host.invocation("web") != before


def test_events_are_shown_in_order(host: FakeHost, run: Run) -> None:
    _start(host, run)
    run("stop", "web", host=host)
    code, out, _ = run("events", host=host)
    as_json = [json.loads(x) for x in run("events", "-o", "json", host=host)[1].splitlines()]

    lines = [line.split("  ", 1)[1] for line in out.splitlines()]
    assert code == 0
    assert lines[0].startswith("agent ")
    assert lines[0].endswith(": ready")
    assert "task web: running, healthy" in lines
    assert len(set(lines)) == len(lines)
    of_tasks = [line for line in lines if line.startswith("task")]
    assert of_tasks[-1] == "task-removed web: stopped and removed"
    assert [e["sequence"] for e in as_json] == sorted(e["sequence"] for e in as_json)


def test_an_event_about_nothing_named_has_no_empty_places(
    capsys: pytest.CaptureFixture[str],
) -> None:
    event = Event(sequence=1, at=0.0, kind="profile", object="", message="none: ")
    _print_event(event, "table", {})

    assert capsys.readouterr().out.endswith("  profile: none\n")


def _event(name: str, message: str) -> Event:
    return Event(sequence=1, at=0.0, kind="task", object=name, message=message)


def test_people_are_warned_once_and_programs_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    """A status may change in a field that its sentence does not contain."""
    last_states: dict[str, str] = {}
    words = ["running", "running", "stopping", "running"]
    for word in words:
        _print_event(_event("web", word), "table", last_states)
        _print_event(_event("api", "running"), "table", last_states)
    lines = [line.split("  ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    for word in words:
        _print_event(_event("web", word), "json", {})

    assert [line for line in lines if "web" in line] == [
        "task web: running",
        "task web: stopping",
        "task web: running",
    ]
    assert lines.count("task api: running") == 1
    assert len(capsys.readouterr().out.splitlines()) == len(words)


def test_an_image_is_removed_by_its_first_digits(host: FakeHost, run: Run) -> None:
    host.give_image(OTHER_IMAGE)
    digits = OTHER_IMAGE.removeprefix("sha256:")
    removed = run("image", "rm", digits[:12], host=host)
    again = run("image", "rm", digits[:12], host=host)

    assert removed == (0, f"{OTHER_IMAGE}: removed\n", "")
    assert again[0] == 3
    assert OTHER_IMAGE not in run("images", host=host)[1]


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("image", "rm", "11"), 64, "is not a digest"),
        (("image", "rm", "latest"), 64, "is not a digest"),
        (("show", "nothing"), 3, "there is no task nothing"),
        (("restart", "nothing"), 3, "there is no task nothing"),
    ],
)
def test_missing_objects_are_reported(
    host: FakeHost, run: Run, argv: tuple[str, ...], code: int, words: str
) -> None:
    ended, _, err = run(*argv, host=host)

    assert ended == code
    assert words in err


def test_an_image_in_use_is_not_removed(host: FakeHost, run: Run) -> None:
    _start(host, run)
    code, _, err = run("image", "rm", IMAGE, host=host)

    assert code == 5
    assert "is used by 1 tasks: web" in err


def test_a_host_without_a_profile_reports_it(host: FakeHost, run: Run) -> None:
    assert run("profile", host=host)[:2] == (0, "(none): none\n")


def test_every_command_is_in_its_document() -> None:
    lines = (Path(__file__).parents[4] / "docs" / "agent.md").read_text()

    for name, command in cli.commands.items():
        inner = command.commands if isinstance(command, Group) else {"": command}
        names = [f"{name} {word}".strip() for word, of in inner.items() if not of.hidden]
        assert all(f"| `twine-agent {n}" in lines for n in names), names


@pytest.mark.behaviour("AG8")
def test_limits_of_devices_are_changed_by_the_names_that_they_have_in_a_file(
    host: FakeHost, run: Run
) -> None:
    """A new limit replaces all limits of the named device; other devices keep theirs."""
    host.fake.cgroups.devices = {"vda": "vda", "vdb": "vdb", "disk/by-path/pci-0:1": "vdb"}
    _start(host, run)

    def kept() -> list[dict[str, object]]:
        (record,) = (host.state / "journal").glob("web*")
        spec = json.loads(record.read_text().splitlines()[1])["spec"]
        return [{k: v for k, v in io.items() if v is not None} for io in spec["resources"]["io"]]

    def in_force(*io: str) -> list[dict[str, object]]:
        words = [word for limits in io for word in ("--io", limits)]
        code, _, err = run("resize", "web", *words, host=host)
        assert code == 0, err
        return kept()

    vda = {"device": "/dev/vda", "write_bytes_per_s": 10 << 20}
    vdb = {"device": "/dev/disk/by-path/pci-0:1", "read_ops_per_s": 1000}
    assert in_force("device=/dev/vda,write_bytes_per_s=10MiB") == [vda]
    assert in_force("device=/dev/disk/by-path/pci-0:1, read_ops_per_s=1_000") == [vda, vdb]
    assert in_force("device=/dev/vda,read_bytes_per_s=7") == [
        vdb,
        {"device": "/dev/vda", "read_bytes_per_s": 7},
    ]
    assert in_force("device=/dev/vda") == [vdb]

    def refused(code: int, words: str, *io: str) -> None:
        more = [word for limits in io for word in ("--io", limits)]
        ended, _, err = run("resize", "web", *more, host=host)
        assert words in " ".join(err.split())
        assert ended == code

    refused(64, "'speed=9' is not one of device=…, read_bytes_per_s=…", "device=/dev/vda,speed=9")
    refused(64, "read_ops_per_s=1MiB: a whole number", "device=/dev/vda,read_ops_per_s=1MiB")
    refused(64, "is given twice", "device=/dev/vda,read_ops_per_s=1,read_ops_per_s=2")
    refused(64, "missing required field `device`", "read_ops_per_s=1")
    refused(64, ">= 1", "device=/dev/vda,read_ops_per_s=0")
    refused(5, "no block device /dev/none", "device=/dev/none,read_ops_per_s=1")
    refused(5, "are both /dev/vdb", "device=/dev/vdb,read_ops_per_s=1")
    refused(
        5, "named twice", "device=/dev/vda,read_ops_per_s=1", "device=/dev/vda,read_ops_per_s=2"
    )
    refused(5, "io: /dev/vda has no limit to remove", "device=/dev/vda")
    assert kept() == [vdb]
