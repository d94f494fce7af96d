"""The real skopeo pulls OCI images from a real registry onto a real btrfs."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import FakeHost, a_spec, chunks_of, digest_of, running
from msgspec.structs import replace as changed
from oci import Layout, compressed, difference, entry, folder, layer, sha, tree_state
from on_btrfs import machine, mounted, run, use_real_programs

from agent.api import ImageFormat
from agent.machine.btrfs import HostBtrfs
from agent.machine.layer import apply
from wire.errors import TwineError, Unprocessable

pytestmark = pytest.mark.root

BASE = layer(
    folder("etc"),
    entry("etc/os-release", data=b"ID=base\n"),
    entry("big", data=os.urandom(8 << 20), mode=0o600, uid=3, gid=4),
)
CONFIG = {"Cmd": ["/bin/server"]}


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a new registry on the loopback."""
    top = tmp_path_factory.mktemp("registry")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (top / "config.yml").write_text(
        f"version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\n"
        f"storage: {{filesystem: {{rootdirectory: {top}/data}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n"
    )
    command = ["docker-registry", "serve", str(top / "config.yml")]
    with (top / "log").open("wb") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/", timeout=60).close()
                break
            except urllib.error.URLError:
                assert child.poll() is None, (top / "log").read_text()
                time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        child.terminate()
        child.wait()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FakeHost]:
    """Yield a host that trusts the registry, whose units run real skopeo, tar and find."""
    with mounted(tmp_path) as host:
        host.config = changed(host.config, registry_tls_verify=False)
        use_real_programs(host, "skopeo", "tar", "find", "btrfs")
        yield host


def push(layout: Layout, registry: str, name: str) -> str:
    """Push the only image of a layout; return its reference."""
    reference = f"{registry}/{name}"
    run(
        *(
            "skopeo",
            "--insecure-policy",
            "copy",
            "-q",
            "--preserve-digests",
            "--dest-tls-verify=false",
        ),
        *(f"oci:{layout.path}", f"docker://{reference}"),
    )
    return reference


def written(host: FakeHost) -> int:
    """Return the bytes that the file system holds, after all data is on disk."""
    # by now the kernel has freed the deleted data
    run("btrfs", "subvolume", "sync", str(host.state))
    HostBtrfs().sync(host.state)
    reported = subprocess.run(
        ["btrfs", "filesystem", "usage", "--raw", str(host.state)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return int(next(line for line in reported.splitlines() if "Used:" in line).split()[1])


@pytest.mark.behaviour("AG3", "BUG-AG31")
@pytest.mark.parametrize("how", ["gzip", "zstd", "tar"])
async def test_an_image_from_a_registry_equals_the_pushed_tree(
    host: FakeHost, registry: str, tmp_path: Path, how: str
) -> None:
    """The agent pulls it with skopeo, verifies it, unpacks each layer on btrfs and runs a task."""
    old, new = tmp_path / "old", tmp_path / "new"
    for tree, text in ((old, "old"), (new, "new")):
        (tree / "etc").mkdir(parents=True)
        (tree / "etc" / "release").write_text(text)
        (tree / "bin").mkdir()
        (tree / "bin" / "server").write_text("#!")
        (tree / "bin" / "server").chmod(0o755)
        os.link(tree / "bin" / "server", tree / "bin" / "other")
    (old / "gone").write_text("x")
    (new / "etc" / "link").symlink_to("/etc/release")
    os.chown(new / "etc" / "release", 12, 34)
    os.setxattr(new / "etc" / "release", "user.note", b"1")
    (tmp_path / "empty").mkdir()
    layout = Layout(tmp_path / "layout")
    layers = (difference(tmp_path / "empty", old), difference(old, new))
    digest = layout.image(*layers, how=how, config=CONFIG)
    reference = push(layout, registry, f"tree-{how}:1")

    async with host.agent(machine(host)) as client:
        info = await client.fetch_oci_image(reference)
        again = await client.fetch_oci_image(f"{reference.rpartition(':')[0]}@{digest}")
        await client.put_task("web", a_spec(image=info.digest, command=[]))
        await running(client, "web")

    assert again == info
    assert info.digest == digest
    assert tree_state(host.state / "images" / digest[7:]) == tree_state(new)
    root = tree_state(host.state / "tasks" / "web")
    written = {name: root.pop(name) for name in ("etc/hosts", "etc/hostname", "etc/resolv.conf")}
    assert root == tree_state(new)
    assert len(written) == 3, "files of names are written into each root (BUG-AG31)"
    found = HostBtrfs().find(host.state / "images" / digest[7:])
    assert found
    assert found.read_only
    assert list((host.state / "staging").iterdir()) == []


@pytest.mark.behaviour("AG3")
async def test_a_second_image_on_a_base_costs_its_own_layer(
    host: FakeHost, registry: str, tmp_path: Path
) -> None:
    """The file system grows by the second image's own layer, not by its base."""
    own = [layer(entry(f"app{n}", data=os.urandom(2 << 20))) for n in (1, 2)]
    references = []
    for n in (0, 1):
        layout = Layout(tmp_path / f"layout{n}")
        layout.image(BASE, own[n], config=CONFIG)
        references.append(push(layout, registry, f"shared:{n}"))
    async with host.agent(machine(host)) as client:
        await client.fetch_oci_image(references[0])
        before = written(host)
        await client.fetch_oci_image(references[1])
        grown = written(host) - before

    assert 2 << 20 <= grown < 4 << 20  # its 2 MiB and metadata; the base has 8


async def test_an_archive_by_skopeo_is_an_image(host: FakeHost, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "layout")
    layout.image(BASE, config=CONFIG)
    archive = tmp_path / "archive.tar"
    run(
        *("skopeo", "--insecure-policy", "copy", "-q"),
        *(f"oci:{layout.path}", f"oci-archive:{archive}:web:1"),
    )
    data = archive.read_bytes()
    async with host.agent(machine(host)) as client:
        info = await client.put_image(digest_of(data), ImageFormat.OCI, chunks_of(data, 1 << 20))

    big = host.state / "images" / info.digest[7:] / "big"
    assert (big.stat().st_uid, stat.S_IMODE(big.stat().st_mode)) == (3, 0o600)
    assert info.layers == [sha(BASE)]


async def test_an_archive_of_dockers_is_refused_by_name(host: FakeHost, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "layout")
    layout.image(BASE)
    archive = tmp_path / "archive.tar"
    run(
        *("skopeo", "--insecure-policy", "copy", "-q"),
        *(f"oci:{layout.path}", f"docker-archive:{archive}:web:1"),
    )
    data = archive.read_bytes()
    async with host.agent(machine(host)) as client:
        with pytest.raises(Unprocessable, match="not an OCI image") as refused:
            await client.put_image(digest_of(data), ImageFormat.OCI, chunks_of(data, 1 << 20))
    assert "Docker archive" in refused.value.hint
    assert list((host.state / "staging").iterdir()) == []


@pytest.mark.behaviour("F-31")
async def test_an_archive_whose_index_is_a_link_reads_nothing_of_the_host(
    host: FakeHost, tmp_path: Path
) -> None:
    data = layer(
        entry("oci-layout", data=b"{}"),
        entry("index.json", tarfile.SYMTYPE, linkname="/etc/shadow"),
    )
    async with host.agent(machine(host)) as client:
        with pytest.raises(Unprocessable, match=r"not an OCI image: index\.json"):
            await client.put_image(digest_of(data), ImageFormat.OCI, chunks_of(data))


async def test_an_image_missing_in_a_registry_is_reported(host: FakeHost, registry: str) -> None:
    async with host.agent(machine(host)) as client:
        with pytest.raises(TwineError, match="cannot read docker://"):
            await client.fetch_oci_image(f"{registry}/none:1")
    assert list((host.state / "staging").iterdir()) == []


async def test_many_pulls_at_once_fetch_each_layer_once(
    host: FakeHost, registry: str, tmp_path: Path
) -> None:
    layout = Layout(tmp_path / "layout")
    layout.image(BASE, config=CONFIG)
    reference = push(layout, registry, "many:1")
    async with host.agent(machine(host)) as client:
        infos = await asyncio.gather(*(client.fetch_oci_image(reference) for _ in range(4)))
    copies = [u for u in host.fake.systemd.started if "unpack" in u]
    assert len({i.digest for i in infos}) == len(copies) == 1


@pytest.mark.behaviour("F-29")
def test_a_zstd_layer_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    data = layer(entry("new", data=os.urandom(50_000)))
    blob = compressed(data, "zstd")[:-1000]
    (tmp_path / "blob").write_bytes(blob)
    (tmp_path / "tree").mkdir()
    with pytest.raises((TwineError, tarfile.TarError)):
        apply(str(tmp_path), "blob", "zstd", sha(blob), sha(data), str(tmp_path / "tree"))


# Streams of btrfs.


def send(source: Path, target: Path, parent: Path | None = None) -> bytes:
    """Return a stream of a read-only subvolume, full or relative to another."""
    on_top = ["-p", str(parent)] if parent else []
    run("btrfs", "send", "-q", *on_top, "-f", str(target), str(source))
    return target.read_bytes()


@pytest.mark.behaviour("AG3", "BUG-AG12")
async def test_an_incremental_stream_needs_its_parent_and_costs_its_difference(
    host: FakeHost, tmp_path: Path
) -> None:
    """A full stream is received, then an incremental one; without its parent it is refused.

    The agent drops set-uid.
    """
    sender = tmp_path / "sender"
    with (tmp_path / "other").open("wb") as file:
        file.truncate(256 << 20)
    sender.mkdir()
    run("mkfs.btrfs", "-q", str(tmp_path / "other"))
    run("mount", "-o", "loop", str(tmp_path / "other"), str(sender))
    try:
        btrfs = HostBtrfs()
        btrfs.create(sender / "work")
        (sender / "work" / "big").write_bytes(os.urandom(4 << 20))
        btrfs.snapshot(sender / "work", sender / "v1", read_only=True)
        (sender / "work" / "new").write_text("2")
        (sender / "work" / "new").chmod(0o6755)
        btrfs.snapshot(sender / "work", sender / "v2", read_only=True)
        full = send(sender / "v1", tmp_path / "full")
        more = send(sender / "v2", tmp_path / "more", sender / "v1")
    finally:
        run("umount", str(sender))
    assert len(more) < len(full) / 100

    async with host.agent(machine(host)) as client:
        with pytest.raises(Unprocessable, match="cannot be unpacked as btrfs"):
            await client.put_image(digest_of(more), ImageFormat.BTRFS, chunks_of(more))
        assert list((host.state / "staging").iterdir()) == []
        first = await client.put_image(digest_of(full), ImageFormat.BTRFS, chunks_of(full, 1 << 20))
        before = written(host)
        second = await client.put_image(digest_of(more), ImageFormat.BTRFS, chunks_of(more))
        grown = written(host) - before

    images = host.state / "images"
    assert (images / second.digest[7:] / "new").read_text() == "2"
    assert (images / second.digest[7:] / "big").stat().st_size == 4 << 20
    assert stat.S_IMODE((images / second.digest[7:] / "new").stat().st_mode) == 0o755
    assert not (images / first.digest[7:] / "new").exists()
    assert grown < 1 << 20
