"""The unit of a task that has its own init (docs/adr/0106)."""

from __future__ import annotations

import sys

import msgspec
import pytest
from builders import a_spec
from hypothesis import given
from hypothesis import strategies as st

from agent.api import Network, NetworkMode, Relaxation, Resources, Step, VolumeMap
from agent.api.own_init import contradictions
from agent.api.relaxations import OWN_INIT_EXPOSURE, RAW_EXPOSURE, exposure_of
from agent.credentials.core import credential_properties
from agent.identity.core import INSIDE
from agent.machine.unit_properties import encode
from agent.resources.core.limits import limit_properties
from agent.runtime.core.slices import cgroup_of
from agent.tasks.core import own_init
from agent.tasks.core.inside import InsideCommand, inside_properties, step_properties
from agent.tasks.core.unit_properties import TASK_HARDENING, unit_properties
from agent.volumes.core.volumes import OWNER

IDS = own_init.FIRST_ID
PRIVATE = Network(mode=NetworkMode.PRIVATE)


def a_machine(**fields: object) -> dict[str, object]:
    own = {"command": [], "relaxations": [Relaxation.OWN_INIT], "network": PRIVATE}
    volumes = msgspec.convert(fields.pop("volumes", {}), VolumeMap)
    spec = a_spec(**{**own, **fields, "volumes": volumes})
    unit = unit_properties("web", spec, "/var/lib/twine/tasks/web")
    unit |= credential_properties(spec, "/run/s")
    if spec.identity:
        unit["BindReadOnlyPaths"] = [f"/run/twine/identities/web:{INSIDE}"]
    return own_init.container_unit("web", spec, unit, IDS, "/var/lib/twine", "/run/twine")


def words(unit: dict[str, object]) -> list[str]:
    commands = unit["ExecStart"]
    assert isinstance(commands, list)
    return list(commands[0])


@pytest.mark.behaviour("F-84")
def test_a_machine_may_not_use_io_uring() -> None:
    """An address family that the filter refuses could be opened through a ring."""
    assert "~io_uring_setup" in a_machine()["SystemCallFilter"]  # type: ignore[operator]


@pytest.mark.behaviour("AG8")
def test_the_machine_is_in_the_tasks_own_unit_with_all_that_bounds_a_task() -> None:
    """Slice, limits, network, journal and timeouts are those of any task."""
    plain = unit_properties("web", spec := a_spec(network=PRIVATE), "/r")
    found = a_machine()
    same = ("Slice", "NetworkNamespacePath", "LogNamespace", "OOMPolicy", "TimeoutStopUSec")
    for name in (*same, *limit_properties(spec), "RemainAfterExit", "CollectMode"):
        assert found[name] == plain[name], name
    assert found["Delegate"] is True
    assert (found["KillMode"], found["Type"]) == ("mixed", "exec")
    assert {"--keep-unit", "--register=no", "--settings=no"} < set(words(found))
    assert encode(found)


@pytest.mark.behaviour("F-83")
def test_the_output_of_a_task_is_never_taken_for_output_of_a_host_program() -> None:
    """Otherwise the loader of a root process on the host would read the task's variables."""
    evil = {"LD_PRELOAD": "/var/lib/twine/tasks/web/evil.so", "SYSTEMD_NSPAWN_UNIFIED": "0"}
    found = a_machine(environment=evil)
    assert found["Environment"] == ["SYSTEMD_NSPAWN_LOCK=0"]
    arguments = words(found)[words(found).index("--") + 1 :]
    assert {f"systemd.setenv={k}={v}" for k, v in evil.items()} < set(arguments)
    assert not any(v in w for v in evil for w in words(found)[: -len(arguments)])

    command = InsideCommand(("env",), 5.0, environment=("TERM=xterm",))
    group = cgroup_of("web", a_spec())
    inside = inside_properties(found, "web", group, "twine-in-web.exec-1.service", command)
    assert inside["Environment"] == []
    ran = words(inside)
    assert ran[:6] == [
        *(sys.executable, "-I", "-m", "agent.machine.enter"),
        *(group, "twine-in-web.exec-1"),
    ]
    assert "LD_PRELOAD=/var/lib/twine/tasks/web/evil.so" in ran[6:]
    assert ran[-3:] == ["TERM=xterm", "--", "env"]


@pytest.mark.behaviour("AG8")
def test_a_command_inside_has_the_sandbox_of_the_machine_and_leaves_nothing() -> None:
    """The command has its own cgroup below the task's, which is killed with it."""
    group = cgroup_of("web", a_spec())
    whole = a_machine(
        credentials={"db": "password"},
        configuration={"a": "x"},
        volumes={"data": {"path": "/data"}},
    )
    command = InsideCommand(("true",), 5.0, quiet=True)
    found = inside_properties(whole, "web", group, "twine-in-web.probe.service", command)
    for name in own_init.SANDBOX:
        assert found[name] == whole[name], name
    left = ("LoadCredential", "SetCredential", "ExecStartPre", "ExecStopPost", "Delegate")
    for name in (*left, "NetworkNamespacePath"):
        assert name not in found
    assert found["PartOf"] == found["Requisite"] == ["twine-task-web.service"]
    assert f"CREDENTIALS_DIRECTORY={own_init.CREDENTIALS}" in words(found)
    assert found["StandardOutput"] == "null"
    assert encode(found)


@pytest.mark.behaviour("AG4")
def test_a_step_is_the_only_program_of_such_a_machine() -> None:
    step = Step(name="make", command=["/bin/make", "all"], timeout_s=7.0)
    whole = a_machine(volumes={"data": {"path": "/data", "kind": "persistent"}})
    found = step_properties(whole, "web", step)
    ran = words(found)
    assert ran[-4:] == ["--as-pid2", "--", "/bin/make", "all"]
    assert "--boot" not in ran
    assert "--bind=/run/twine/machines/web/data:/data" in ran
    assert found["ExecStartPre"] == whole["ExecStartPre"]
    assert encode(found)


@pytest.mark.behaviour("AG9", "AG10")
def test_volumes_credentials_and_identity_are_handed_to_the_machine() -> None:
    """On disk the machine's users match the owner of volumes, whatever their kernel ids are."""
    volumes = {
        "data": {"path": "/data", "kind": "persistent"},
        "ref": {"path": "/ref", "kind": "shared", "source": "other.data"},
        "fast": {"path": "/fast", "kind": "tmpfs", "max_bytes": 1 << 20},
    }
    found = a_machine(
        volumes=volumes,
        credentials={"db": "password"},
        configuration={"a.toml": "x"},
        identity=True,
    )
    assert {
        "--bind=/run/twine/machines/web/data:/data",
        "--bind-ro=/run/twine/machines/web/ref:/ref",
        "--tmpfs=/fast:mode=1777,nosuid,nodev,size=1048576",
        "--load-credential=db:db",
        "--load-credential=a.toml:a.toml",
        f"--bind-ro=/run/twine/identities/web:{INSIDE}",
    } < set(words(found))
    staged = found["ExecStartPre"][0]  # type: ignore[index]
    assert [str(OWNER), str(IDS), str(own_init.ID_COUNT)] == staged[7:10]
    # the memory that it can write to
    assert staged[12] == str(a_spec().limits.memory_max_bytes // 2)
    assert staged[-4:] == [
        *("data", "/var/lib/twine/volumes/local/web.data"),
        *("ref", "/var/lib/twine/volumes/local/other.data"),
    ]
    assert found["ExecStopPost"][0][-2:] == ["data", "ref"]  # type: ignore[index]
    assert found["LoadCredential"] == ["db:/run/s"]
    assert found["SetCredential"] == {"a.toml": b"x"}


@pytest.mark.behaviour("BUG-AG30")
def test_the_shared_memory_of_a_machine_is_bounded_by_its_memory() -> None:
    """systemd-nspawn's own /dev/shm has the size of half of the host's memory."""
    found = [word for word in words(a_machine()) if ":mode=1777" in word]
    half = a_spec().limits.memory_max_bytes // 2
    more = f"mode=1777,nosuid,nodev,size={half},nr_inodes={half // 4096}"
    assert found == [f"--tmpfs=/dev/shm:{more}"]
    own = {"shm": {"path": "/dev/shm", "kind": "tmpfs", "max_bytes": 1 << 20}}
    found = [word for word in words(a_machine(volumes=own)) if ":mode=1777" in word]
    assert found == ["--tmpfs=/dev/shm:mode=1777,nosuid,nodev,size=1048576"]


@pytest.mark.behaviour("F-83")
def test_no_property_of_the_plain_sandbox_is_left_by_chance() -> None:
    """Every property is either kept on purpose or absent, and a plain task has all of them."""
    assert {*TASK_HARDENING} & {*a_machine()} == {*TASK_HARDENING} & ({*own_init.SANDBOX})
    plain = unit_properties("web", a_spec(), "/r")
    assert {*TASK_HARDENING} <= {*plain}


@given(st.lists(st.from_regex(r"[a-z0-9]{1,12}", fullmatch=True), unique=True, max_size=40))
def test_no_two_machines_of_a_host_have_a_user_in_common(names: list[str]) -> None:
    taken: dict[str, int] = {}
    for name in names:
        ids = own_init.choose_ids(name, taken.values())
        assert OWNER + own_init.ID_COUNT <= ids <= 2147352575 - own_init.ID_COUNT
        assert ids % own_init.ID_COUNT == 0
        taken[name] = ids
    assert len({*taken.values()}) == len(names)
    assert all(own_init.choose_ids(n, ()) == own_init.choose_ids(n, ()) for n in names)


def test_where_all_ranges_are_taken_one_is_shared() -> None:
    every = {own_init.FIRST_ID + n * own_init.ID_COUNT for n in range(own_init.SLOTS)}
    assert own_init.choose_ids("web", every) in every


@pytest.mark.behaviour("AG8", "F-83")
def test_nested_containers_get_their_files_only_on_request() -> None:
    """The host mounts and later removes one additional folder; no privilege or filter changes.

    A container that dies at its own limit does not end the machine.
    """
    data = {"data": {"path": "/data", "kind": "persistent"}}
    plain = a_machine(volumes=data)
    found = a_machine(volumes=data, relaxations=[Relaxation.OWN_INIT, Relaxation.NESTED])
    changed = {name for name in found if found[name] != plain[name]} - {"Description"}
    assert changed == {"ExecStart", "ExecStartPre", "ExecStopPost", "OOMPolicy"}
    assert (found["OOMPolicy"], plain["OOMPolicy"]) == ("continue", "kill")
    assert {*found} == {*plain}
    assert [w for w in words(found) if w not in words(plain)] == [
        f"--bind=/run/twine/machines/web/.nested:{own_init.VISIBLE}"
    ]
    first, second = found["ExecStartPre"]  # type: ignore[misc]
    assert [first] == plain["ExecStartPre"]
    assert second[-1] == "/run/twine/machines/web"
    assert found["ExecStopPost"][0] == [*plain["ExecStopPost"][0], ".nested"]  # type: ignore[index]
    step = Step(name="make", command=["/bin/make"], timeout_s=7.0)
    assert step_properties(found, "web", step)["ExecStartPre"] == [first, second]
    assert encode(found)


def test_nested_needs_a_machine_and_excludes_all_other_relaxations() -> None:
    nested = [Relaxation.NESTED]
    ((field, why),) = contradictions(nested, ["/bin/x"], Network(), Resources())
    assert (field, why.partition(":")[0]) == ("relaxations", "nested requires own-init")
    assert not [*contradictions([Relaxation.OWN_INIT, *nested], [], PRIVATE, Resources())]
    mixture = [Relaxation.OWN_INIT, Relaxation.PROC, *nested]
    ((field, why),) = contradictions(mixture, [], PRIVATE, Resources())
    assert "cannot be combined with proc:" in why


def test_all_conflicts_with_an_own_init_are_reported_at_once() -> None:
    both = [Relaxation.OWN_INIT, Relaxation.RAW, Relaxation.PROC]
    pages = Resources(hugepages_2mib=1, hugepages_1gib=1)
    found = dict(contradictions(both, ["/bin/x"], Network(), pages))
    assert {*found} == {
        *("relaxations", "command", "network.mode"),
        *("resources.hugepages_2mib", "resources.hugepages_1gib"),
    }
    assert "proc, raw" in found["relaxations"]
    assert not [*contradictions([Relaxation.OWN_INIT], [], PRIVATE, Resources())]
    assert not [*contradictions([Relaxation.RAW], ["/bin/x"], Network(), pages)]


def test_a_machine_is_dearer_than_any_sandbox_and_cheaper_than_none() -> None:
    machine = [Relaxation.OWN_INIT, Relaxation.NESTED]
    small = [r for r in Relaxation if r not in (Relaxation.RAW, *machine)]
    assert exposure_of(small) < OWN_INIT_EXPOSURE == exposure_of(machine[:1])
    assert exposure_of(machine) == OWN_INIT_EXPOSURE
    assert OWN_INIT_EXPOSURE < RAW_EXPOSURE == exposure_of(Relaxation)


@pytest.mark.parametrize("field", ["User", "RootDirectory", "WorkingDirectory"])
def test_nspawn_itself_runs_as_the_hosts_own_program(field: str) -> None:
    assert field not in a_machine()
