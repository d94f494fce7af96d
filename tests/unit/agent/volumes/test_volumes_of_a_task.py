"""The paths of a task's volumes, their owners, and which volumes are unavailable."""

from __future__ import annotations

import pytest
from builders import a_spec

from agent.api import Volume, VolumeKind
from agent.api.volumes import contradiction
from agent.runtime.core.records import key_of, user_of
from agent.tasks.core.inside import InsideCommand, inside_properties
from agent.volumes.core.mounts import mount_properties
from agent.volumes.core.volumes import name_of, read_name, unwanted_scratch, volumes_refusal

MIB = 1 << 20
DATA = Volume(kind=VolumeKind.PERSISTENT, path="/data", max_bytes=64 * MIB)
TMP = Volume(path="/work")
CACHE = Volume(kind=VolumeKind.TMPFS, path="/cache", max_bytes=8 * MIB)
THEIRS = Volume(kind=VolumeKind.SHARED, path="/theirs", source="db.data")


@pytest.mark.parametrize("label", ["", "before"])
def test_a_name_shows_the_task_of_a_volume(label: str) -> None:
    named = read_name(name_of("web-1", "data", label))
    assert named
    assert (named.task_id, named.volume, named.label) == ("web-1", "data", label)


@pytest.mark.parametrize("name", ["web", "web.", ".data", "web.a.b", "web.data@", ""])
def test_other_names_belong_to_no_task(name: str) -> None:
    assert read_name(name) is None


@pytest.mark.behaviour("AG9")
def test_volumes_are_mounted_before_the_start_and_unmounted_after_the_end() -> None:
    """Volumes of others are read only; the dynamic user stays unchanged."""
    spec = a_spec(volumes={"data": DATA, "tmp": TMP, "cache": CACHE, "theirs": THEIRS})
    found = mount_properties("web", spec, "/state", "/root")

    assert found["ReadWritePaths"] == ["-+/data", "-+/work", "-+/cache"]
    ((*_, script, _, user, owner, root, a, at_a, _, b, at_b, _, tmpfs, at_c, size, d, at_d, _),) = (
        found["ExecStartPre"]  # type: ignore[misc]
    )
    assert (user, owner, root) == (user_of("web"), "1900000000", "/root")
    assert 'chown "$owner:$owner" "$1"' in script
    assert [(a, at_a), (b, at_b), (d, at_d)] == [
        ("/state/volumes/local/web.data", "/data"),
        ("/state/scratch/web.tmp", "/work"),
        ("/state/volumes/local/db.data", "/theirs"),
    ]
    assert (tmpfs, at_c, size) == ("tmpfs", "/cache", f"size={8 * MIB}")
    ((*_, root, at_a, at_b, at_c, at_d),) = found["ExecStopPost"]  # type: ignore[misc]
    assert (root, at_a, at_b, at_c, at_d) == ("/root", "/data", "/work", "/cache", "/theirs")
    assert "DynamicUser" not in found
    assert not {"ExecStartPre", "ExecStopPost"} & set(
        inside_properties(
            found | {"Environment": []}, "web", "/x", "u", InsideCommand(("sh",), 1.0)
        )
    )


def test_a_task_without_volumes_runs_no_command_for_them() -> None:
    assert mount_properties("web", a_spec(), "/state", "/root") == {}


def test_a_limit_on_disk_changes_without_a_restart_and_the_rest_with_one() -> None:
    def key(volume: Volume) -> str:
        return key_of(a_spec(volumes={"v": volume}))

    larger = Volume(kind=VolumeKind.PERSISTENT, path="/data", max_bytes=128 * MIB)
    memory = Volume(kind=VolumeKind.TMPFS, path="/cache", max_bytes=9 * MIB)
    assert key(DATA) == key(larger)
    assert key(DATA) != key(Volume(kind=VolumeKind.PERSISTENT, path="/other"))
    assert key(CACHE) != key(memory)
    assert key_of(a_spec()) != key(DATA)


@pytest.mark.parametrize(
    ("volumes", "field"),
    [
        ({"a": DATA, "b": Volume(path="/data/x")}, "volumes.b.path"),
        ({"a": Volume(path="/proc/x")}, "volumes.a.path"),
        ({"a": Volume(kind=VolumeKind.TMPFS, path="/a")}, "volumes.a.max_bytes"),
        (
            {"a": Volume(kind=VolumeKind.TMPFS, path="/a", max_bytes=300 * MIB)},
            "volumes.a.max_bytes",
        ),
        ({"a": Volume(kind=VolumeKind.SHARED, path="/a")}, "volumes.a.source"),
        (
            {"a": Volume(kind=VolumeKind.SHARED, path="/a", source="d.b", max_bytes=MIB)},
            "volumes.a.max_bytes",
        ),
        ({"a": Volume(path="/a", source="db.data")}, "volumes.a.source"),
    ],
)
def test_missing_resources_are_named(volumes: dict[str, Volume], field: str) -> None:
    found = contradiction(volumes, 256 * MIB)
    assert found
    assert found[0] == field
    good = {"data": DATA, "tmp": TMP, "cache": CACHE, "t": THEIRS}
    assert contradiction(good, 256 * MIB) is None


@pytest.mark.behaviour("AG9")
def test_limits_of_all_tasks_together_fit_on_the_disk() -> None:
    """The error contains the numbers; the task's earlier limit does not count twice."""
    spec, other = a_spec(volumes={"data": DATA}), a_spec(volumes={"tmp": DATA})
    assert volumes_refusal("web", spec, {"db": other}, 128 * MIB) == ""
    assert volumes_refusal("web", spec, {"web": spec, "db": other}, 128 * MIB) == ""
    why = volumes_refusal("web", spec, {"db": other}, 100 * MIB)
    assert "64MiB do not fit: the disk has 100MiB" in why
    assert "may use 64MiB" in why


def test_a_scratch_volume_is_removed_once_it_is_not_named() -> None:
    names = ["web.tmp", "web.old", "webb.tmp", "db.tmp"]
    assert unwanted_scratch(names, "web", a_spec(volumes={"tmp": TMP})) == ["web.old"]
    assert unwanted_scratch(names, "web", None) == ["web.old", "web.tmp"]


@pytest.mark.behaviour("AG9")
def test_a_volume_of_another_task_is_not_opened_for_writing() -> None:
    """Under ProtectSystem=strict every path that is not listed is read only."""
    found = mount_properties("web", a_spec(volumes={"t": THEIRS}), "/s", "/root")
    assert "ReadWritePaths" not in found
