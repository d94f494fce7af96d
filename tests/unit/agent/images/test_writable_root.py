"""Which tasks may write to their root, to which folders, and which folders stay read only."""

from __future__ import annotations

import pytest
from builders import a_spec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.api import OciConfig, Relaxation, RootMode, Volume, VolumeKind
from agent.images.core.writable_root import (
    choose_writable_folders,
    in_run,
    is_writable,
    owner_of_root,
    writable_root_properties,
)
from agent.machine.unit_properties import encode
from agent.runtime.core.records import has_own_init, key_of
from agent.tasks.core.inside import InsideCommand, inside_properties
from agent.tasks.core.unit_properties import unit_properties
from agent.volumes.core.mounts import mount_properties

OCI = OciConfig(command=["serve"])
NAMES = st.text(st.characters(exclude_characters="/\0"), min_size=1, max_size=8)


@pytest.mark.behaviour("BUG-AG31")
def test_only_an_oci_image_has_a_writable_root_by_default() -> None:
    """Existing images of users write below /var, /run and /etc."""
    requested, refused = a_spec(root=RootMode.WRITABLE), a_spec(root=RootMode.READ_ONLY)
    assert is_writable(a_spec(), OCI, has_quotas=True)
    assert not is_writable(a_spec(), None, has_quotas=True)
    assert not is_writable(a_spec(), OCI, has_quotas=False), "nothing would bound it"
    assert is_writable(requested, None, has_quotas=True)
    assert is_writable(requested, OCI, has_quotas=False), "its start is refused instead"
    assert not is_writable(refused, OCI, has_quotas=True)
    for relaxation in (Relaxation.OWN_INIT, Relaxation.RAW):
        assert not is_writable(replace(requested, relaxations=[relaxation]), OCI, has_quotas=True)


def test_its_folders_are_opened_and_shared_volumes_and_sys_stay_closed() -> None:
    shared = Volume(kind=VolumeKind.SHARED, path="/srv/all", source="a.b")
    own = Volume(kind=VolumeKind.SCRATCH, path="/data/own")
    spec = a_spec(volumes={"all": shared, "own": own})
    unit = {**unit_properties("web", spec, "/r"), **mount_properties("web", spec, "/s", "/r")}
    folders = {
        "": ["srv", "data", "run", "proc", "tmp", "home", "a b"],
        "run": ["pg", "systemd"],
        "home": ["u"],
    }
    found = writable_root_properties(unit, spec, choose_writable_folders(folders))
    encode(found)
    assert found["ReadWritePaths"] == ["-+/data", "-+/srv", "-+/home/u", "-+/run", "-+/data/own"]
    assert found["ReadOnlyPaths"] == ("-+/sys", "-+/srv/all")
    assert in_run(choose_writable_folders(folders)) == ["pg"]


def test_run_is_in_memory_and_the_same_for_commands_inside() -> None:
    """The mount is in the root, not in the unit: `exec` found an empty /run, without any socket."""
    spec = a_spec()
    found = mount_properties("db", spec, "/s", "/r", owner_of_root("", ""), ["pg"])
    [command] = found["ExecStartPre"]  # type: ignore[misc]
    size = spec.limits.memory_max_bytes // 2
    mounts = ["tmpfs", "/run", f"size={size},nr_inodes={size // 4096}", "folder", "/run/pg", ""]
    assert command[-6:] == mounts  # type: ignore[has-type]
    unit = {**unit_properties("db", spec, "/r"), **found}
    command_inside = InsideCommand(("true",), 1.0)
    inside = inside_properties(unit, "db", "/workload.slice/x", "in.service", command_inside)
    assert "ExecStartPre" not in inside
    shm = [str(place).partition(":")[0] for place in unit["TemporaryFileSystem"]]  # type: ignore[attr-defined]
    assert shm == ["/dev/shm"]


@given(st.lists(NAMES), st.lists(NAMES))
def test_names_in_an_image_open_no_special_folder(
    writable_folders: list[str], runs: list[str]
) -> None:
    found = choose_writable_folders({"": [*writable_folders, "run"], "run": runs})
    assert not {*found} & {"proc", "sys", "dev", "run", "run/systemd"}
    encode(writable_root_properties({}, a_spec(), found))
    assert not [name for name in found if {*name} & {*": \"'\\\n"}]


def test_an_image_without_a_user_gives_its_root_to_the_task() -> None:
    user = owner_of_root("etc/passwd", "")
    found = mount_properties("web", a_spec(), "/s", "/r", user)
    [command] = found["ExecStartPre"]  # type: ignore[misc]
    words = command[command.index("sh", 6) :]  # type: ignore[has-type]
    assert words[-8:] == ["", "etc/passwd", "root", "/root", "/bin/sh", "", "", "0:0"]
    assert not has_own_init(a_spec())


def test_the_mode_and_limit_of_a_root_change_the_key_of_a_specification() -> None:
    plain = a_spec()
    assert key_of(plain) != key_of(replace(plain, root=RootMode.WRITABLE))
    assert key_of(plain) != key_of(replace(plain, root_max_bytes=1 << 20))
    assert key_of(plain) == key_of(replace(plain, root=None))
