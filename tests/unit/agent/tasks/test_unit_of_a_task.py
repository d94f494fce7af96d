"""The properties of a task's unit, and the sandbox that unpacks an image."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders import IMAGE, a_spec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.api import (
    ImageFormat,
    Limits,
    OomPolicy,
    Probe,
    Relaxation,
    RestartPolicy,
    TaskSpec,
    Ulimits,
)
from agent.host.install import targets
from agent.images.core.oci import Blob, Layer
from agent.images.core.unpack import (
    FILL_BYTES_PER_S,
    drop_setuid_properties,
    fetch_properties,
    layer_properties,
    logged_message,
    unpack_properties,
    until_next_check_s,
)
from agent.machine.unit_properties import encode
from agent.runtime.core.records import key_of, task_of, unit_of
from agent.runtime.core.slices import slice_of
from agent.runtime.core.unit_parts import UNLIMITED
from agent.tasks.core.own_init import FIRST_ID, container_unit
from agent.tasks.core.reconcile import leftovers
from agent.tasks.core.unit_properties import NO_PRIORITY, describe_unit, key_in, unit_properties

PIPES = "/s/i.tree.in", "/s/i.tree.out"
LAYER = Layer("sha256:c", "", "sha256:d", Blob("sha256:b", 1, "gzip"))
GOLDEN = Path(__file__).parents[3] / "data" / "unit_properties.json"
TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=50
)


def _as_json(value: object) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


@pytest.mark.behaviour("AG2", "AG8")
def test_the_properties_are_those_that_were_reviewed() -> None:
    """Rewrite the golden file with TWINE_GOLDEN=write, and review the difference."""
    spec = a_spec(
        command=["/bin/server", "--port", "80"],
        environment={"MODE": "test"},
        entitlement="web-front",
        job="shop",
        limits=Limits(cpu_weight=50, cpu_max_cores=1.5, memory_max_bytes=64 << 20, tasks_max=9),
        stop_timeout_s=2.5,
    )
    found = {
        "task": unit_properties("web-0", spec, "/var/lib/twine/tasks/web-0"),
        "tar": unpack_properties("/s/i.stream", "/s/i", ImageFormat.TAR, "/s"),
        "btrfs": unpack_properties("/s/i.stream", "/s/i", ImageFormat.BTRFS, "/s"),
        "layer": layer_properties("/py", "/s/oci-1", [LAYER], "/s/i.tree", PIPES),
        "fetch": fetch_properties(["inspect", "docker://r/x:1"], "/s/oci-1", ["/id"], "/s/o"),
    }
    if os.environ.get("TWINE_GOLDEN") == "write":
        GOLDEN.write_text(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")

    assert _as_json(found) == msgspec.json.decode(GOLDEN.read_bytes())


@pytest.mark.behaviour("F-84")
def test_the_filter_of_a_sandbox_cannot_be_bypassed() -> None:
    """Through a ring (io_uring) a task connected to an abstract socket of its host."""
    for properties in (
        unit_properties("web", a_spec(), "/r"),
        unit_properties("web", a_spec(relaxations=list(Relaxation)[:4]), "/r"),
        unpack_properties("/s", "/t", ImageFormat.TAR, "/s"),
        layer_properties("/py", "/s/oci-1", [LAYER], "/s/i.tree", PIPES),
        fetch_properties(["inspect", "docker://r/x:1"], "/s/oci-1", ["/id"], "/s/o"),
    ):
        assert "~io_uring_setup" in properties["SystemCallFilter"]  # type: ignore[operator]


def test_downloads_are_not_flushed_and_unpacked_images_may_be() -> None:
    fetch = fetch_properties(["inspect", "docker://r/x:1"], "/s/oci-1", ["/id"], "/s/o")
    layer = layer_properties("/py", "/s/oci-1", [LAYER], "/s/i.tree", PIPES)
    allowed, more = layer["SystemCallFilter"], fetch["SystemCallFilter"]

    assert isinstance(allowed, tuple)
    # 0: the call returns success without an effect (systemd.exec(5))
    assert more == (*allowed, "~@sync:0")


@given(st.integers(0, 1 << 44), st.integers(128 << 20, 1 << 30))
def test_unpacking_never_uses_the_reserve_between_two_checks(free: int, reserve: int) -> None:
    pause = until_next_check_s(free, reserve)

    assert 0.1 <= pause <= 1.0
    left = free - pause * FILL_BYTES_PER_S
    # relative to the part of the reserve that was free
    assert left >= min(free, reserve) - 0.1 * FILL_BYTES_PER_S - 1


def test_systemd_takes_every_property() -> None:
    for properties in (
        unit_properties("web", a_spec(), "/r"),
        unpack_properties("/s", "/t", ImageFormat.TAR, "/s"),
        unpack_properties("/s", "/t", ImageFormat.BTRFS, "/s"),
        layer_properties("/py", "/s/oci-1", [LAYER], "/s/i.tree", PIPES),
        fetch_properties(["inspect", "docker://r/x:1"], "/s/oci-1", ["/id"], "/s/o"),
    ):
        assert encode(properties)


@pytest.mark.behaviour("F-24")
@given(st.lists(TEXT, min_size=1, max_size=5), TEXT)
def test_argv_and_environment_are_passed_on_letter_by_letter(argv: list[str], value: str) -> None:
    spec = a_spec(command=argv, environment={"V": value})
    properties = unit_properties("web", spec, "/r")

    assert properties["ExecStart"] == [argv]
    assert f"V={value}" in properties["Environment"]  # type: ignore[operator]


@pytest.mark.behaviour("BUG-UX9")
@pytest.mark.parametrize("own", ["", "de_DE.UTF-8"])
def test_a_task_has_a_locale_that_every_image_has_unless_it_sets_another(own: str) -> None:
    """Small images lack the host's locale C.UTF-8, and redis-server exited because of this."""
    spec = a_spec(environment={"LANG": own} if own else {})
    environment = unit_properties("web", spec, "/r")["Environment"]
    assert [e for e in environment if e.startswith("LANG=")] == [f"LANG={own or 'C'}"]


@pytest.mark.behaviour("F-23")
@given(st.from_regex(r"\A[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z"))
def test_names_of_units_and_slices_are_made_from_ids_alone(name: str) -> None:
    assert task_of(unit_of(name)) == name
    assert unit_of(name) == f"twine-task-{name}.service"
    assert slice_of(name).count("-") == 1


@pytest.mark.behaviour("F-23")
@pytest.mark.parametrize(
    "hostile", ["", "a/b", "../x", "a\n", "A", "a.service", "%i", "$x", "-a", "a-", "x" * 64, "ä"]
)
def test_hostile_entitlements_are_no_entitlements(hostile: str) -> None:
    wanted = msgspec.to_builtins(a_spec()) | {"entitlement": hostile}

    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wanted, TaskSpec)


@pytest.mark.behaviour("F-24")
@pytest.mark.parametrize(
    "wrong",
    [
        {"command": ["a\0b"]},
        {"environment": {"A": "\0"}},
        {"environment": {"A\n": "x"}},
        {"job": "\0"},
        {"image": IMAGE + "\n"},
        {"probe": {"port": 80, "path": "/\n"}},
        {"command": ["x" * 131_073]},
    ],
)
def test_unforwardable_requests_are_refused_by_the_front_end(wrong: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(msgspec.to_builtins(a_spec()) | wrong, TaskSpec)


@pytest.mark.behaviour("F-05")
def test_the_key_of_a_unit_is_the_same_in_every_release() -> None:
    spec = TaskSpec(image=IMAGE, command=["/bin/server"], environment={"B": "2", "A": "1"})

    assert key_of(spec) == "d4210669850c"
    assert key_in(describe_unit("web", spec)) == key_of(spec)
    assert key_in("another program's unit") == ""


def test_only_what_the_process_is_made_from_changes_the_key() -> None:
    spec = a_spec()
    live = {
        "limits": Limits(tasks_max=3),
        "probe": Probe(port=1),
        "restart": RestartPolicy(),
        "generation": 9,
        "epoch": 9,
        "offline_restart": True,
    }
    made = {
        "image": "sha256:" + "3" * 64,
        "command": ["/x"],
        "environment": {"A": "1"},
        "entitlement": "other",
        "stop_timeout_s": 3.0,
    }

    assert all(key_of(replace(spec, **{k: v})) == key_of(spec) for k, v in live.items())
    assert all(key_of(replace(spec, **{k: v})) != key_of(spec) for k, v in made.items())


def test_the_unpacker_can_write_nowhere_but_into_its_target() -> None:  # P10
    for format_ in ImageFormat:
        properties = unpack_properties("/s/i.stream", "/s/i", format_, "/s")
        assert properties["ReadWritePaths"] == ("/s/i",)
        assert properties["PrivateNetwork"] is True
        assert properties["ProtectSystem"] == "strict"
    tar = unpack_properties("/s/i.stream", "/s/i", ImageFormat.TAR, "/s")
    assert "CAP_MKNOD" not in tar["CapabilityBoundingSet"]  # type: ignore[operator]


@pytest.mark.behaviour("BUG-AG12")
def test_the_unpacker_cannot_lift_its_sandbox() -> None:
    """With CAP_SYS_ADMIN and every system call, the unpacker could mount any file system."""
    for properties in (
        *(unpack_properties("/s/i.stream", "/s/i", f, "/s") for f in ImageFormat),
        drop_setuid_properties("/s/i"),
        layer_properties("/py", "/s/oci-1", [LAYER], "/s/i.tree", PIPES),
        fetch_properties(["inspect", "docker://r/x:1"], "/s/oci-1", ["/id"]),
    ):
        allowed = properties["SystemCallFilter"]
        assert isinstance(allowed, tuple)
        assert allowed[0] == "@system-service"  # an allow list without @mount
        assert all(word.startswith("~") for word in allowed[1:])
        capabilities = properties["CapabilityBoundingSet"]
        assert isinstance(capabilities, tuple)
        assert "CAP_MKNOD" not in capabilities
        assert properties["NoNewPrivileges"] is True


@pytest.mark.behaviour("F-85")
def test_the_fetcher_has_no_capability_and_sees_no_secret() -> None:
    fetch = fetch_properties(["inspect", "docker://r/x:1"], "/s/oci-1", ["/id"], "/s/o")
    assert fetch["CapabilityBoundingSet"] == ()
    assert fetch["InaccessiblePaths"] == ["-/tmp", "-/var/tmp", "-/id"]
    assert fetch["ReadWritePaths"] == ("/s/oci-1",)


@pytest.mark.behaviour("F-06")
def test_an_object_without_a_task_is_left_over_unless_it_is_excluded() -> None:  # P9
    units = [unit_of(t) for t in ("known", "kept", "orphan")]
    roots = ["known", "kept", "old"]

    assert leftovers({"known"}, {"kept"}, units, roots) == ["old", "orphan"]


@pytest.mark.behaviour("BUG-AG18")
def test_the_root_of_a_task_is_read_only_and_the_docs_say_so() -> None:
    """The docs described a root that a task may write to, and no task could write to it."""
    properties = unit_properties("web", a_spec(), "/r")
    page = (Path(__file__).parents[4] / "docs" / "task-lifecycle.md").read_text()

    assert properties["ProtectSystem"] == "strict"
    assert not properties.get("ReadWritePaths")
    assert "The root is read-only for its task" in page


@pytest.mark.behaviour("BUG-AG17")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            r'time="2026-11-24T15:44:19Z" level=fatal msg="no \"v2\": dial tcp: refused"',
            'no "v2": dial tcp: refused',
        ),
        ("tar: x: Cannot open: Permission denied", "tar: x: Cannot open: Permission denied"),
        ('level=fatal msg="torn', 'level=fatal msg="torn'),
        ("", ""),
    ],
)
def test_an_error_of_a_program_is_reported_without_decoration(line: str, expected: str) -> None:
    assert logged_message(line) == expected


@pytest.mark.behaviour("BUG-AG17")
def test_errors_of_a_fetch_are_not_mixed_with_its_answer() -> None:
    """The error of a refused image was only `exit-code`."""
    unit = fetch_properties(["inspect", "docker://r/x:1"], "/s/oci-1", ["/id"], "/s/o")
    assert (unit["StandardOutput"], unit["StandardError"]) == ("file", "journal")


@pytest.mark.behaviour("BUG-AG30")
def test_a_task_has_shared_memory_of_its_own_within_its_memory() -> None:
    """`PrivateDevices` alone would bind the host's /dev/shm into every task."""
    spec = a_spec(limits=Limits(memory_max_bytes=64 << 20))
    properties = unit_properties("web-0", spec, "/root")
    encode({"TemporaryFileSystem": properties["TemporaryFileSystem"]})
    mounts = properties["TemporaryFileSystem"]
    assert mounts == [f"/dev/shm:mode=1777,nosuid,nodev,size={32 << 20},nr_inodes=8192"]


@pytest.mark.behaviour("BUG-AG35")
def test_new_files_of_a_task_are_readable_by_others_unless_its_job_overrides_it() -> None:
    """Other runtimes use 0022; the keys of running units stay unchanged."""
    plain = a_spec()
    same, strict = replace(plain, umask="022"), replace(plain, umask="0077")
    assert unit_properties("web", plain, "/r")["UMask"] == 0o022
    assert unit_properties("web", strict, "/r")["UMask"] == 0o077
    assert key_of(same) == key_of(plain) != key_of(strict)
    with pytest.raises(msgspec.ValidationError, match="umask"):
        msgspec.convert({"image": IMAGE, "umask": "0o9"}, TaskSpec)


@pytest.mark.behaviour("BUG-AG35")
@pytest.mark.parametrize("relaxations", [[], [Relaxation.RAW]])
def test_limits_of_processes_are_those_of_the_specification(
    relaxations: list[Relaxation],
) -> None:
    more = Ulimits(nofile=4096, nproc=64, memlock_bytes=1 << 20, stack_bytes=1 << 23, core_bytes=0)
    spec = a_spec(ulimits=more, relaxations=relaxations)
    unit = unit_properties("web", spec, "/r")
    encode({name: value for name, value in unit.items() if name.startswith("Limit")})
    assert [unit[f"Limit{n}"] for n in ("NOFILE", "NPROC", "MEMLOCK", "STACK", "CORE")] == [
        *(4096, 64, 1 << 20, 1 << 23, 0)
    ]
    assert unit["LimitCORESoft"] == 0
    assert "LimitNOFILE" not in unit_properties("web", a_spec(), "/r")
    assert key_of(spec) != key_of(replace(spec, ulimits=Ulimits()))


def test_a_session_of_pam_may_be_opened_by_default() -> None:
    """pam_limits raises the hard limit of cores and sets its own priority; core dumps stay off."""
    unit = unit_properties("web", a_spec(), "/r")
    assert list(unit).index("LimitCORE") < list(unit).index("LimitCORESoft")
    assert (unit["LimitCORE"], unit["LimitCORESoft"]) == (UNLIMITED, 0)
    encode({name: unit[name] for name in ("LimitCORE", "LimitCORESoft")})
    calls = unit["SystemCallFilter"]
    assert isinstance(calls, tuple)
    assert calls.index(NO_PRIORITY) > calls.index("~@resources")  # the later value counts
    chosen = unit_properties("web", a_spec(relaxations=[Relaxation.SCHEDULING]), "/r")
    assert not {NO_PRIORITY, "~@resources"} & {*_as_json(chosen["SystemCallFilter"])}
    machine = a_spec(relaxations=[Relaxation.OWN_INIT], ulimits=Ulimits(nofile=4096))
    plain = unit_properties("m", machine, "/r")
    [words] = container_unit("m", machine, plain, FIRST_ID, "/s", "/r")["ExecStart"]
    limits = [word for word in words if word.startswith("--rlimit")]
    assert limits == ["--rlimit=CORE=0:infinity", "--rlimit=NOFILE=4096:4096"]


@pytest.mark.behaviour("BUG-AG33")
def test_an_owner_chooses_what_ends_above_the_memory_limit() -> None:
    plain, process = a_spec(), a_spec(oom=OomPolicy.PROCESS)
    assert unit_properties("web", plain, "/r")["OOMPolicy"] == "kill"
    assert unit_properties("web", process, "/r")["OOMPolicy"] == "continue"
    assert key_of(process) != key_of(plain) == key_of(a_spec(oom=OomPolicy.TASK))


@pytest.mark.behaviour("BUG-AG40")
def test_a_killed_journald_restarts_and_keeps_its_streams() -> None:
    """Debian's unit of a namespace has Restart=no; a regular exit is a success."""
    places = {target: name for _, name, target in targets()}
    name = places["etc/systemd/system/systemd-journald@.service.d/twine.conf"]
    lines = (files("agent") / "units" / name).read_text().splitlines()
    for line in ("Restart=on-failure", "FileDescriptorStorePreserve=yes", "OOMScoreAdjust=-250"):
        assert line in lines
