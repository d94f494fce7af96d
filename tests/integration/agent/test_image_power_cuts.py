"""The power fails at each step of a pull; afterwards every complete image is intact.

The test runs on a real btrfs. It copies the disk at that moment and mounts the copy in its place.
The copy holds only the data that the file system was made to write.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from builders import FakeHost
from oci import Layout, Registry, files
from on_btrfs import machine, mounted, run, use_real_programs

from agent.machine.btrfs import HostBtrfs
from agent.runtime import crashpoints
from agent.runtime.crashpoints import POINTS

pytestmark = pytest.mark.root

PLACE = "registry.example/team/web:1"
WAYS = [p for p in POINTS if p.startswith("pull.")]
WAYS += ["image.synced", "image.moved", "image.declared"]
BASE, APP = "b" * 300_000, "a" * 200_000
"""More bytes than btrfs keeps in its tree, which is written with each commit."""


def with_a_registry(host: FakeHost, folder: Path) -> FakeHost:
    registry, layout = Registry(), Layout(folder / f"layout-{host.folder.name}")
    host.fake.systemd.programs["skopeo"] = registry.skopeo
    use_real_programs(host, "tar", "find")
    registry.push(PLACE, layout, layout.image(files(base=BASE), files(app=APP)))
    return host


@contextmanager
def after_the_cut(disk: Path, folder: Path) -> Iterator[FakeHost]:
    host = FakeHost(folder)
    host.state.mkdir()
    run("mount", "-o", "loop", str(disk), str(host.state))
    try:
        yield host
    finally:
        run("umount", str(host.state))


def trees(host: FakeHost, kind: str) -> dict[str, dict[str, str]]:
    """Return the content of all subvolumes that are marked complete."""
    found = {p.stem: p.with_suffix("") for p in (host.state / kind).glob("*.json")}
    return {
        name: {file.name: file.read_text() for file in tree.iterdir()}
        for name, tree in found.items()
    }


@pytest.mark.behaviour("F-42")
@pytest.mark.parametrize("point", WAYS)
async def test_an_image_that_is_complete_after_a_power_cut_is_whole(
    tmp_path: Path, point: str
) -> None:
    """No image is incomplete, and an image that was reported to a caller stays."""
    before, after, cut = tmp_path / "before", tmp_path / "after", tmp_path / "cut"
    before.mkdir()
    after.mkdir()

    def fail() -> None:
        if not cut.exists():  # the first time
            shutil.copyfile(before / "image", cut)

    with mounted(before) as host:
        # Only the agent's own calls may commit.
        run("mount", "-o", "remount,commit=300", str(host.state))
        with_a_registry(host, tmp_path)
        async with host.agent(machine(host)) as client:
            crashpoints.arm(point, fail)
            try:
                info = await client.fetch_oci_image(PLACE)
            finally:
                crashpoints.arm("")
    assert cut.exists(), f"{point} was not reached"

    with after_the_cut(cut, after) as host:
        with_a_registry(host, tmp_path)
        base, app = (chain.removeprefix("sha256:") for chain in info.layers)
        whole = {base: {"base": BASE}, app: {"base": BASE, "app": APP}}
        image = {info.digest.removeprefix("sha256:"): whole[app]}
        async with host.agent(machine(host)) as client:
            layers, images = trees(host, "layers"), trees(host, "images")
            assert layers.items() <= whole.items()
            assert images.items() <= image.items()
            if point == "image.declared":
                assert (layers, images) == (whole, image)
            for kind, found in (("layers", layers), ("images", images)):
                assert set(HostBtrfs().children(host.state / kind)) == set(found)
            again = await client.fetch_oci_image(PLACE)
        assert again.layers == info.layers
        assert (trees(host, "layers"), trees(host, "images")) == (whole, image)
