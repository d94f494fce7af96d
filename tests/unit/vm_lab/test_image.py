import os
from pathlib import Path

from vm_lab.cache import is_cached, keep_newest, partial_folder, recipe_key
from vm_lab.image.build import guest_packages
from vm_lab.image.initrd import load_order
from vm_lab.wheel import select_requirements


def test_the_key_changes_with_content_name_and_extra_but_not_with_order(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("1")
    b.write_text("2")
    key = recipe_key([a, b], "x")
    assert key == recipe_key([b, a], "x")
    assert key != recipe_key([a, b], "y")
    assert key != recipe_key([a], "x")
    b.write_text("3")
    assert key != recipe_key([a, b], "x")
    assert len(key) == 12


def test_a_folder_appears_only_when_it_is_complete(tmp_path):
    folder = tmp_path / "image"
    try:
        with partial_folder(folder) as partial:
            (partial / "half").touch()
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert not folder.exists()
    with partial_folder(folder) as partial:
        assert not (partial / "half").exists()
    assert folder.is_dir()


def test_the_cache_keeps_recently_used_images(tmp_path):
    for number in range(8):
        (tmp_path / f"layer-{number}").touch()
        os.utime(tmp_path / f"layer-{number}", (number, number))
    assert is_cached(tmp_path / "layer-0")
    assert not is_cached(tmp_path / "layer-9")
    keep_newest(tmp_path, "layer-*")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "layer-0", "layer-5", "layer-6", "layer-7",
    ]  # fmt: skip


def test_the_bench_variant_has_the_rivals_on_top_of_the_base():
    assert set(guest_packages("base")) < set(guest_packages("bench"))
    assert "podman" in guest_packages("bench")


def test_modules_load_once_and_after_their_dependencies():
    lines = [
        "builtin virtio_pci",
        "insmod /m/xor.ko.xz ",
        "insmod /m/raid6_pq.ko.xz ",
        "insmod /m/btrfs.ko.xz ",
        "insmod /m/xor.ko.xz ",
    ]
    assert load_order(lines) == [
        Path("/m/xor.ko.xz"), Path("/m/raid6_pq.ko.xz"), Path("/m/btrfs.ko.xz"),
    ]  # fmt: skip


def test_a_host_gets_the_host_extra_and_debian_packages_for_what_needs_a_compiler():
    lines = [
        "click>=8.1",
        'aiohttp>=3.10; extra == "host"',
        "rich>=13; extra == 'lab'",
        'pystemd>=0.15; extra == "host"',
        'btrfsutil==6.13; extra == "native"',
    ]
    assert select_requirements(lines, "host") == ("aiohttp>=3.10", "click>=8.1")
