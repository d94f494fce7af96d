"""The file system behaviour that Twine relies on, on a fake and on real btrfs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.machine import QuotaMode
from wire.errors import BtrfsError, Conflict

from .conftest import Volume

MIB = 1 << 20


def an_image(volume: Volume, name: str = "image") -> Path:
    """Make a subvolume that holds a file and a link."""
    path = volume.folder / name
    volume.btrfs.create(path)
    (path / "etc").mkdir()
    (path / "etc" / "hostname").write_text("web\n")
    (path / "link").symlink_to("/etc/hostname")
    return path


def test_a_new_subvolume_is_empty_and_writable(volume: Volume) -> None:
    path = volume.folder / "new"

    volume.btrfs.create(path)

    found = volume.btrfs.find(path)
    assert found
    assert (found.read_only, found.parent_uuid, found.received_uuid) == (False, "", "")
    assert len(found.uuid) == 32
    assert list(path.iterdir()) == []


def test_a_name_that_is_taken_is_a_conflict_that_names_it(volume: Volume) -> None:
    taken = an_image(volume)

    with pytest.raises(Conflict, match=f"{taken}.*File exists"):
        volume.btrfs.create(taken)
    with pytest.raises(Conflict, match=f"{taken}.*File exists"):
        volume.btrfs.snapshot(taken, taken)


def test_a_missing_parent_folder_is_an_error_that_names_the_path(volume: Volume) -> None:
    with pytest.raises(BtrfsError, match=r"no/where: No such file"):
        volume.btrfs.create(volume.folder / "no" / "where")


def test_a_subvolume_cannot_be_made_on_another_file_system(volume: Volume) -> None:
    with pytest.raises(BtrfsError, match="not on a btrfs file system"):
        volume.btrfs.create(Path("/proc/self/twine"))


def test_a_snapshot_has_the_content_and_names_its_origin(volume: Volume) -> None:
    image = an_image(volume)
    task = volume.folder / "task"

    volume.btrfs.snapshot(image, task)

    assert (task / "etc" / "hostname").read_text() == "web\n"
    assert (task / "link").readlink() == Path("/etc/hostname")
    origin, child = volume.btrfs.find(image), volume.btrfs.find(task)
    assert origin
    assert child
    assert child.parent_uuid == origin.uuid != child.uuid
    assert not child.read_only


def test_writes_of_a_task_stay_in_its_snapshot(volume: Volume) -> None:
    image = an_image(volume)
    first, second = volume.folder / "first", volume.folder / "second"
    volume.btrfs.snapshot(image, first)

    (first / "etc" / "hostname").write_text("changed\n")
    volume.btrfs.snapshot(image, second)

    assert (second / "etc" / "hostname").read_text() == "web\n"


def test_a_snapshot_of_a_read_only_image_is_writable_unless_requested_otherwise(
    volume: Volume,
) -> None:
    image = an_image(volume)
    volume.btrfs.set_read_only(image, True)

    volume.btrfs.snapshot(image, volume.folder / "open")
    volume.btrfs.snapshot(image, volume.folder / "closed", read_only=True)

    for name, closed in (("image", True), ("open", False), ("closed", True)):
        found = volume.btrfs.find(volume.folder / name)
        assert found
        assert found.read_only is closed


def test_nothing_can_be_made_inside_a_read_only_subvolume(volume: Volume) -> None:
    image = an_image(volume)
    volume.btrfs.set_read_only(image, True)

    with pytest.raises(BtrfsError, match="Read-only file system"):
        volume.btrfs.create(image / "inner")

    volume.btrfs.set_read_only(image, False)
    volume.btrfs.create(image / "inner")


def test_a_nested_subvolume_is_left_out_of_a_snapshot(volume: Volume) -> None:
    image = an_image(volume)
    volume.btrfs.create(image / "inner")
    (image / "inner" / "file").write_text("x")

    volume.btrfs.snapshot(image, volume.folder / "task")

    assert list((volume.folder / "task" / "inner").iterdir()) == []
    assert volume.btrfs.find(volume.folder / "task" / "inner") is None


@pytest.mark.parametrize("name", ["missing", "folder", "file"])
def test_only_a_subvolume_can_be_snapshotted_or_closed(volume: Volume, name: str) -> None:
    (volume.folder / "folder").mkdir()
    (volume.folder / "file").write_text("x")
    reason = "No such file" if name == "missing" else "not a subvolume|Not a directory"

    with pytest.raises(BtrfsError, match=f"{name}.*({reason})"):
        volume.btrfs.snapshot(volume.folder / name, volume.folder / "task")
    with pytest.raises(BtrfsError, match=f"{name}.*({reason})"):
        volume.btrfs.set_read_only(volume.folder / name, True)


@pytest.mark.parametrize("name", ["missing", "folder", "file", "link", "file/below"])
def test_a_path_that_is_no_subvolume_is_not_found(volume: Volume, name: str) -> None:
    image = an_image(volume)
    (volume.folder / "folder").mkdir()
    (volume.folder / "file").write_text("x")
    (volume.folder / "link").symlink_to(image)

    assert volume.btrfs.find(volume.folder / name) is None


def test_deleting_takes_nested_and_read_only_ones_along(volume: Volume) -> None:
    image = an_image(volume)
    volume.btrfs.create(image / "etc" / "inner")
    volume.btrfs.create(image / "etc" / "inner" / "innermost")
    volume.btrfs.set_read_only(image / "etc" / "inner", True)
    volume.btrfs.set_read_only(image, True)

    volume.btrfs.delete(image)

    assert not image.exists()
    assert volume.btrfs.find(image) is None


def test_deleting_a_missing_object_is_no_error(volume: Volume) -> None:
    volume.btrfs.delete(volume.folder / "missing")
    volume.btrfs.delete(volume.folder / "missing" / "too")


def test_a_plain_folder_is_never_deleted(volume: Volume) -> None:
    (volume.folder / "folder").mkdir()

    with pytest.raises(BtrfsError, match=r"folder: it is not a subvolume"):
        volume.btrfs.delete(volume.folder / "folder")

    assert (volume.folder / "folder").is_dir()


def test_a_subvolume_keeps_its_identity_when_it_is_renamed(volume: Volume) -> None:
    staged = an_image(volume, "staged")
    before = volume.btrfs.find(staged)

    staged.rename(volume.folder / "published")

    assert volume.btrfs.find(volume.folder / "published") == before
    assert volume.btrfs.find(staged) is None


def test_only_the_subvolumes_directly_below_are_children(volume: Volume) -> None:
    an_image(volume, "b")
    an_image(volume, "a")
    volume.btrfs.create(volume.folder / "a" / "inner")
    (volume.folder / "folder").mkdir()
    (volume.folder / "file").write_text("x")

    assert volume.btrfs.children(volume.folder) == ["a", "b"]
    with pytest.raises(BtrfsError, match="missing"):
        volume.btrfs.children(volume.folder / "missing")


def test_a_file_system_is_synced_by_any_folder_of_it(volume: Volume) -> None:
    (volume.folder / "file").write_bytes(b"x" * 100_000)
    volume.btrfs.sync(volume.folder)

    with pytest.raises(BtrfsError, match="missing"):
        volume.btrfs.sync(volume.folder / "missing")


def test_free_space_is_part_of_the_size(volume: Volume) -> None:
    size, free = volume.btrfs.free_bytes(volume.folder)

    assert 0 < free <= size
    with pytest.raises(BtrfsError, match="missing"):
        volume.btrfs.free_bytes(volume.folder / "missing")


def test_a_path_lies_in_the_nearest_subvolume_above_it(volume: Volume) -> None:
    image = an_image(volume)

    assert (
        volume.btrfs.containing_subvolume(image)
        == volume.btrfs.containing_subvolume(image / "etc")
        == image
    )
    assert volume.btrfs.containing_subvolume(volume.folder) != image
    with pytest.raises(BtrfsError, match="not on a btrfs file system"):
        volume.btrfs.containing_subvolume(Path("/proc/self"))


def test_the_own_size_of_a_subvolume_is_a_number_or_unknown(volume: Volume) -> None:
    found = volume.btrfs.exclusive_bytes(an_image(volume))

    assert found is None or found >= 0  # data that is not written to disk yet is not counted yet
    assert volume.real or found


@pytest.mark.behaviour("AG9")
def test_a_limit_is_read_back_and_can_be_changed_and_lifted(volume: Volume) -> None:
    """Enabled quotas stay enabled; without quotas no usage is counted."""
    btrfs, path = volume.btrfs, volume.folder / "limited"
    btrfs.create(path)
    first = btrfs.enable_quota(volume.folder)

    assert first in (QuotaMode.SIMPLE, QuotaMode.REGULAR)
    assert btrfs.enable_quota(volume.folder) is btrfs.quota(volume.folder) is first
    for most in (8 * MIB, 16 * MIB, None):
        btrfs.limit(path, most)
        usage = btrfs.usage(path)
        assert usage
        assert usage.max_bytes == most
    btrfs.delete(path)
    assert btrfs.find(path) is None


@pytest.mark.behaviour("AG9")
def test_a_limit_holds_for_the_volume_and_subvolumes_inside(volume: Volume) -> None:
    """A full volume and everything nested in it can be deleted; its snapshot stays."""
    btrfs, path, kept = volume.btrfs, volume.folder / "full", volume.folder / "full@kept"
    btrfs.create(path)
    btrfs.enable_quota(volume.folder)
    btrfs.limit(path, 2 * MIB)
    btrfs.create(path / "nested")
    if volume.real:
        with pytest.raises(OSError, match="Disk quota exceeded"):
            _fill(path / "nested" / "file", 4 * MIB)
        with pytest.raises(OSError, match="Disk quota exceeded"):
            _fill(path / "file", 1 * MIB)
        usage = btrfs.usage(path)
        assert usage
        assert MIB < usage.used_bytes <= 2 * MIB
    btrfs.snapshot(path, kept, read_only=True)
    btrfs.delete(path)

    assert (btrfs.find(path), btrfs.find(kept) is not None) == (None, True)
    btrfs.create(path)
    fresh = btrfs.usage(path)
    assert fresh
    assert fresh.max_bytes is None


def _fill(path: Path, size: int) -> None:
    with path.open("wb") as file:
        for _ in range(size // 65536):
            file.write(os.urandom(65536))
            file.flush()
            os.fsync(file.fileno())
