"""OCI images through the agent's own API: shared layers, refusals, run options."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from builders import FakeHost, a_spec, chunks_of, digest_of, running, unit
from msgspec.structs import replace
from oci import Layout, Registry, entry, files, layer, sha

from agent.api import (
    Events,
    ImageFormat,
    ImageUser,
    OciPull,
    Relaxation,
    RootMode,
    TaskState,
    pull_event_text,
)
from agent.cli.image import fetch
from agent.images.core.image_run import USUAL_PATH, folders_of
from agent.images.roots import TaskRoots
from agent.machine import Property
from agent.machine.fake_programs import ends_with
from agent.runtime.core.records import TaskRecord
from agent.tasks.unit import task_unit
from wire.errors import Busy, HostError, InvalidInput, TwineError, Unprocessable

BASE, APP, OTHER = files(base="base"), files(app="1"), files(app="2", other="x")
LISTS = layer(
    entry("etc/passwd", data=b"root:x:0:0::/root:/bin/sh\nwww:x:33:34::/var/www:/bin/sh\n"),
    entry("etc/group", data=b"web:x:34:\n"),
)
PLACE = "registry.example:5000/team/web:3"
CONFIG = {
    "Entrypoint": ["./serve"],
    "Cmd": ["--port", "80"],
    "Env": ["PATH=/opt/bin:/bin", "MODE=image", "odd.name=x", "HOME=/srv"],
    "User": "www",
    "WorkingDir": "/srv/app",
    "StopSignal": "SIGQUIT",
}


WWW = ImageUser(
    uid=33,
    gid=34,
    name="www",
    home="/var/www",
    shell="/bin/sh",
    users="etc/passwd",
    group="web",
    groups="etc/group",
)


@pytest.fixture
def registry(host: FakeHost) -> Registry:
    """Yield a registry that the host's skopeo reaches."""
    registry = Registry()
    host.fake.systemd.programs["skopeo"] = registry.skopeo
    return registry


def an_image(
    host: FakeHost, registry: Registry, *layers: bytes, place: str = PLACE, **more: Any
) -> str:
    """Push an image; return its digest."""
    layout = Layout(host.folder / f"layout-{place.rpartition(':')[2]}")
    digest = layout.image(*(layers or (BASE, APP)), **more)
    registry.push(place, layout, digest)
    return digest


def stored(host: FakeHost, kind: str) -> set[str]:
    """Return the names of complete images and layers; check that no other ones are on the disk."""
    folder = host.state / kind
    described = {p.stem for p in folder.glob("*.json")}
    assert described == set(host.fake.btrfs.children(folder))
    return described


def nothing_staged(host: FakeHost) -> bool:
    units = [u for p in ("unpack", "fetch") for u in host.fake.systemd.units(f"twine-{p}-*")]
    return not list((host.state / "staging").iterdir()) and not units


@pytest.mark.behaviour("AG3")
async def test_an_image_comes_from_a_registry_with_its_layers_read_only(
    host: FakeHost, registry: Registry
) -> None:
    """Every layer is a subvolume; the image is one of them, and a task's root is another one."""
    digest = an_image(host, registry)
    async with host.agent() as client:
        info = await client.fetch_oci_image(PLACE)

    assert (info.digest, info.manifest, info.format) == (digest, digest, ImageFormat.OCI)
    assert info.reference == PLACE
    assert info.layers[0] == sha(BASE)
    assert info.layers[1] == sha(f"{sha(BASE)} {sha(APP)}".encode())
    tree = host.state / "images" / digest[7:]
    assert {p.name: p.read_text() for p in tree.iterdir()} == {"base": "base", "app": "1"}
    assert stored(host, "layers") == {chain[7:] for chain in info.layers}
    for kind in ("images", "layers"):
        for name in stored(host, kind):
            found = host.fake.btrfs.find(host.state / kind / name)
            assert found
            assert found.read_only
    assert nothing_staged(host)


@pytest.mark.behaviour("AG3")
async def test_a_second_image_on_the_same_base_fetches_and_applies_its_own_layer_only(
    host: FakeHost, registry: Registry
) -> None:
    """Images share layers; a present layer is neither fetched nor unpacked again."""
    an_image(host, registry)
    an_image(host, registry, BASE, OTHER, place="registry.example:5000/team/web:4")
    async with host.agent() as client:
        first = await client.fetch_oci_image(PLACE)
        registry.fetched.clear()
        before = len(host.fake.systemd.started)
        second = await client.fetch_oci_image("registry.example:5000/team/web:4")
        applied = [u for u in host.fake.systemd.started[before:] if "unpack" in u]

    assert first.layers[0] == second.layers[0]
    assert len(stored(host, "layers")) == 3
    assert len(registry.fetched) == 2  # its configuration, and one layer
    assert len(applied) == 1
    tree = host.state / "images" / second.digest[7:]
    assert (tree / "base").read_text() + (tree / "app").read_text() == "base2"


@pytest.mark.behaviour("AG3")
async def test_an_image_that_has_the_same_layer_twice_is_taken_in(
    host: FakeHost, registry: Registry
) -> None:
    """The same packed layer on different lower layers is two layers."""
    an_image(host, registry, BASE, APP, OTHER, APP)
    async with host.agent() as client:
        info = await client.fetch_oci_image(PLACE)

    assert len(set(info.layers)) == 4
    assert (host.state / "images" / info.digest[7:] / "app").read_text() == "1"


@pytest.mark.behaviour("AG3")
async def test_pulls_of_one_image_at_once_share_one_download(
    host: FakeHost, registry: Registry
) -> None:
    """One of five concurrent callers fetches; another pull by digest fetches nothing."""
    digest = an_image(host, registry)
    async with host.agent() as client:
        infos = await asyncio.gather(*(client.fetch_oci_image(PLACE) for _ in range(5)))
        fetched = list(registry.fetched)
        again = await client.fetch_oci_image(f"{PLACE.rpartition(':')[0]}@{digest}")

    assert [i.digest for i in infos] == [digest] * 5
    assert again == infos[0]
    assert sorted(fetched) == sorted(set(fetched)) == sorted(registry.fetched)


async def test_layers_are_snapshots_of_one_tree_and_their_blobs_are_gone_by_then(
    host: FakeHost, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each snapshot is a transaction; a blob that is deleted before the flush is never written."""
    an_image(host, registry)
    an_image(host, registry, BASE, OTHER, place="registry.example:5000/team/web:4")
    snapshots, blobs = list[tuple[str, bool]](), list[int]()
    snapshot = host.fake.btrfs.snapshot

    def noted(source: Path, target: Path, *, read_only: bool = False) -> None:
        snapshots.append((target.parent.name, read_only))
        if read_only:
            left = [
                p for p in (host.state / "staging").rglob("sha256/*") if p.read_bytes().strip(b"\0")
            ]
            blobs.append(len(left))
        snapshot(source, target, read_only=read_only)

    def never(_: Path) -> None:
        raise AssertionError("the files of all processes were flushed")

    monkeypatch.setattr(host.fake.btrfs, "snapshot", noted)
    monkeypatch.setattr(host.fake.btrfs, "sync", never)
    async with host.agent() as client:
        await client.fetch_oci_image(PLACE)
        assert snapshots == [("layers", True), ("layers", True)]
        assert blobs == [2, 1]  # its configuration, and the layers that are not applied yet
        snapshots.clear()
        await client.fetch_oci_image("registry.example:5000/team/web:4")
        assert snapshots == [("staging", False), ("layers", True)]


@pytest.mark.behaviour("AG3")
async def test_pulls_at_once_of_images_on_one_base_each_get_their_own(
    host: FakeHost, registry: Registry
) -> None:
    """A pull that waited for a layer of another pull continues from that layer."""
    stacks = [(BASE, APP), (BASE, OTHER), (BASE, APP, OTHER), (BASE,), (OTHER, APP)]
    for number, layers in enumerate(stacks):
        an_image(host, registry, *layers, place=f"registry.example/web:{number}")
    async with host.agent() as client:
        infos = await asyncio.gather(
            *(client.fetch_oci_image(f"registry.example/web:{n}") for n in range(len(stacks)))
        )
        applied = [u for u in host.fake.systemd.started if "unpack" in u]

    found = [
        {p.name: p.read_text() for p in (host.state / "images" / info.digest[7:]).iterdir()}
        for info in infos
    ]
    assert found == [
        {"base": "base", "app": "1"},
        {"base": "base", "app": "2", "other": "x"},
        {"base": "base", "app": "2", "other": "x"},
        {"base": "base"},
        {"app": "1", "other": "x"},
    ]
    assert len(applied) == len(set(applied)) <= 6
    assert len(stored(host, "layers")) == 6
    assert nothing_staged(host)


async def test_a_staged_image_is_fetched_after_the_answer(
    host: FakeHost, registry: Registry
) -> None:
    digest = an_image(host, registry)
    async with host.agent() as client, asyncio.timeout(10):
        after = (await client.get_events(0)).latest
        answer = await client.stage_image(PLACE)
        messages: list[str] = []
        while "published" not in messages:
            events = await client.get_events(after, wait_s=5)
            after = events.latest
            messages += [e.message for e in events.events if e.object == digest]
        assert (await client.get_image(digest)).reference == PLACE
        after = (await client.get_events(0)).latest
        await client.stage_image("registry.example/no:where")
        failed = (await client.get_events(after, wait_s=5)).events

    assert answer.detail.endswith("is being fetched")
    assert messages[0] == pull_event_text(PLACE)
    assert messages[1].startswith("fetching 2 of 2 layers")
    assert messages[2:4] == ["layer 1 of 2 is present", "layer 2 of 2 is present"]
    assert "not fetched: cannot read docker://registry.example/no:where" in failed[0].message


async def test_a_fetch_prints_only_events_of_its_own_image(
    host: FakeHost, registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    other = "registry.example/other:two"
    an_image(host, registry, BASE, LISTS, place=other)
    digest = an_image(host, registry)
    async with host.agent() as client, asyncio.timeout(10):
        found, _ = await asyncio.gather(fetch(client, PLACE), client.fetch_oci_image(other))

    printed = capsys.readouterr().err.splitlines()
    assert found.digest == digest
    assert {line.split(": ")[0] for line in printed} == {digest.removeprefix("sha256:")[:12]}
    assert printed[0].endswith(pull_event_text(PLACE))
    assert printed[-1].endswith("published")


async def test_a_fetch_succeeds_even_if_its_events_cannot_be_read(
    host: FakeHost, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = an_image(host, registry)
    async with host.agent() as client, asyncio.timeout(10):
        listen, requests = client.get_events, list[int]()

        async def once(after: int, wait_s: float = 0.0) -> Events:
            requests.append(after)
            if len(requests) > 1:
                raise Busy("too many wait")
            return await listen(after, wait_s)

        monkeypatch.setattr(client, "get_events", once)
        assert (await fetch(client, PLACE)).digest == digest
    assert len(requests) > 1


async def test_an_archive_is_an_image_under_the_digest_of_the_archive(host: FakeHost) -> None:
    layout = Layout(host.folder / "layout")
    manifest = layout.image(BASE, APP, LISTS, how="tar", config=CONFIG)
    data = layout.archive()
    async with host.agent() as client:
        info = await client.put_image(digest_of(data), ImageFormat.OCI, chunks_of(data))
        await client.put_task("web", a_spec(image=info.digest, command=[]))
        await running(client, "web")

    assert (info.digest, info.manifest) == (digest_of(data), manifest)
    assert (host.state / "tasks" / "web" / "base").read_text() == "base"
    assert nothing_staged(host)


@pytest.mark.behaviour("AG3")
async def test_a_task_runs_as_its_image_specifies_unless_the_task_overrides_it(
    host: FakeHost, registry: Registry
) -> None:
    """The image gives entry point, command, variables, working directory and stop signal."""
    digest = an_image(host, registry, BASE, LISTS, config=CONFIG)
    async with host.agent() as client:
        await client.fetch_oci_image(PLACE)
        await client.put_task("own", a_spec(image=digest, command=[]))
        theirs = a_spec(image=digest, command=["/bin/x", "-v"], environment={"MODE": "task"})
        await client.put_task("theirs", theirs)
        status = await running(client, "own")
        await running(client, "theirs")
        own, other = (host.fake.systemd.properties(unit(t)) for t in ("own", "theirs"))
        images = (await client.list_images()).images

    assert own["ExecStart"] == [["/srv/app/serve", "--port", "80"]]
    assert (own["WorkingDirectory"], own["KillSignal"]) == ("/srv/app", 3)
    assert own["KillMode"] == "mixed"  # as in other runtimes: only the main process gets the signal
    assert own["ExecSearchPath"] == ["/opt/bin", "/bin"]
    assert {"MODE=image", "HOME=/srv", "TWINE_TASK=own"} <= set(_words(own["Environment"]))
    assert other["ExecStart"] == [["/bin/x", "-v"]]
    assert "MODE=task" in _words(other["Environment"])
    assert "MODE=image" not in _words(other["Environment"])
    assert own["DynamicUser"] is True  # whichever user the image names
    assert status.state is TaskState.RUNNING
    config = next(i.config for i in images if i.digest == digest)
    assert config is not None
    assert (config.user, config.runs_as) == ("www", WWW)
    assert {"USER=www", "LOGNAME=www"} <= set(_words(own["Environment"]))
    [command] = own["ExecStartPre"]  # type: ignore[misc, union-attr]
    assert "33:34" in command
    assert "odd.name" not in config.environment


@pytest.mark.behaviour("AG3")
async def test_an_image_that_leaves_folder_and_path_open_runs_as_elsewhere(
    host: FakeHost, registry: Registry
) -> None:
    """Engines create a working directory that no layer has, and search programs in /bin."""
    config = {"Cmd": ["serve"], "WorkingDir": "/srv/made/here"}
    digest = an_image(host, registry, BASE, config=config)
    async with host.agent() as client:
        await client.fetch_oci_image(PLACE)
        await client.put_task("web", a_spec(image=digest, command=[]))
        await running(client, "web")
        found = host.fake.systemd.properties(unit("web"))

    assert (host.state / "tasks" / "web" / "srv" / "made" / "here").is_dir()
    assert found["WorkingDirectory"] == "/srv/made/here"
    assert found["ExecSearchPath"][-2:] == ["/sbin", "/bin"]  # type: ignore[index]


async def test_an_image_with_a_file_as_working_directory_is_refused(
    host: FakeHost, registry: Registry
) -> None:
    an_image(host, registry, BASE, config={"Cmd": ["serve"], "WorkingDir": "/base/below"})
    async with host.agent() as client:
        with pytest.raises(
            Unprocessable,
            match="cannot open the image's working directory '/base/below': Not a directory",
        ):
            await client.fetch_oci_image(PLACE)
    assert nothing_staged(host)


@pytest.mark.behaviour("BUG-AG47", "BUG-AG49")
@pytest.mark.parametrize("folder", ["/srv/\0app", "/srv\nExecStopPost=+/bin/sh"])
async def test_an_image_whose_working_directory_is_not_printable_is_refused(
    host: FakeHost, registry: Registry, folder: str
) -> None:
    """No file name can contain a NUL, and the agent answered with an internal error.

    A newline ended the line in the unit's file.
    """
    an_image(host, registry, BASE, config={"Cmd": ["serve"], "WorkingDir": folder})
    async with host.agent() as client:
        with pytest.raises(Unprocessable, match=r"working directory .*: its name is not printable"):
            await client.fetch_oci_image(PLACE)
    assert nothing_staged(host)


@pytest.mark.behaviour("BUG-AG47")
async def test_a_fetch_on_a_disk_that_takes_no_writes_is_reported(
    host: FakeHost, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed fetch in the background was not reported."""
    an_image(host, registry)
    mkdir = Path.mkdir

    def refuse(path: Path, *args: Any, **kwargs: Any) -> None:
        if path.name.startswith("oci-"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refuse)
    async with host.agent() as client, asyncio.timeout(10):
        with pytest.raises(HostError, match=r"cannot store image .*: Read-only file system"):
            await client.fetch_oci_image(PLACE)
        after = (await client.get_events(0)).latest
        await client.stage_image(PLACE)
        [failed] = (await client.get_events(after, wait_s=5)).events
    assert failed.message.startswith("not fetched: cannot store image")


@pytest.mark.behaviour("BUG-AG48")
@pytest.mark.parametrize(
    ("path", "folders"),
    [
        ("", USUAL_PATH.split(":")),
        ("/opt/app//bin:/opt/./jre/../jdk/bin/:/bin/..", ["/opt/app/bin", "/opt/jdk/bin", "/"]),
        ("//bin:/bin::bin:./bin:/sbin", ["/bin", "/sbin"]),
        ("/bin:/sbin\nExecStopPost=+/bin/sh:/usr/bin", ["/bin", "/usr/bin"]),
        (f"/{'a' * 256}:/{'b/' * 2048}:/bin", ["/bin"]),
    ],
)
def test_the_folders_of_a_path_are_those_that_systemd_accepts(
    path: str, folders: list[str]
) -> None:
    """A task with any other folder in its PATH never started."""
    assert folders_of(path) == folders


async def test_an_image_of_root_starts_without_a_command_before_it_if_nothing_is_written(
    host: FakeHost, registry: Registry
) -> None:
    digest = an_image(host, registry, BASE, LISTS, config={**CONFIG, "User": "root"})
    async with host.agent() as client:
        info = await client.fetch_oci_image(PLACE)
        await client.put_task("web", a_spec(image=digest, command=[], root=RootMode.READ_ONLY))
        await running(client, "web")
        found = host.fake.systemd.properties(unit("web"))

    assert info.config
    assert info.config.runs_as is None
    assert "ExecStartPre" not in found
    assert "USER=www" not in _words(found["Environment"])


async def test_a_machine_of_such_an_image_is_root_as_its_init_is(
    host: FakeHost, registry: Registry
) -> None:
    """A task with its own init has all users of its image."""
    digest = an_image(host, registry, BASE, LISTS, config=CONFIG)
    async with host.agent() as client:
        await client.fetch_oci_image(PLACE)
    roots = TaskRoots(host.fake.btrfs, host.state / "tasks", host.state / "images")
    spec = a_spec(image=digest)
    own_init = replace(spec, relaxations=[Relaxation.OWN_INIT])
    plain, machine = (task_unit(roots, TaskRecord(task_id="web", spec=s)) for s in (spec, own_init))

    assert "USER=www" in _words(plain["Environment"])  # type: ignore[arg-type]
    assert "ExecStartPre" in plain
    assert "USER=www" not in _words(machine["Environment"])  # type: ignore[arg-type]
    assert not {"ExecStartPre", "ExecStopPost"} & set(machine)


@pytest.mark.behaviour("F-30", "F-84")
@pytest.mark.parametrize(
    ("lists", "why"),
    [
        (APP, "user 'www', and its /etc/passwd, which it does not have, has no such user"),
        (files(etc="a file"), "which it does not have"),
        (layer(entry("etc/passwd", data=b"root:x:0:0\n")), "has no such user"),
        (
            layer(entry("etc/passwd", tarfile.SYMTYPE, linkname="/etc/passwd")),
            "its /etc/passwd cannot be read: Too many levels of symbolic links",
        ),
        (layer(entry("etc/passwd", tarfile.FIFOTYPE)), "cannot be read"),
        (
            layer(
                entry("etc/passwd", tarfile.SYMTYPE, linkname="us\ners"),
                entry("etc/us\ners", data=b"www:x:1:1\n"),
            ),
            "a link has a target that is not plain text",
        ),
        (layer(entry("etc/passwd", data=b"\n" * ((1 << 20) + 1))), "cannot be read"),
    ],
)
async def test_an_image_with_an_unknown_user_is_refused(
    host: FakeHost, registry: Registry, lists: bytes, why: str
) -> None:
    """The agent does not look for the user outside of the image."""
    digest = an_image(host, registry, BASE, lists, config=CONFIG)
    async with host.agent() as client:
        with pytest.raises(Unprocessable, match=why):
            await client.fetch_oci_image(PLACE)
    assert nothing_staged(host)
    assert digest[7:] not in stored(host, "images")


def _words(value: Property) -> list[str]:
    assert isinstance(value, list)
    return value


async def test_a_task_without_a_command_needs_an_image_that_has_one(
    host: FakeHost, registry: Registry
) -> None:
    digest = an_image(host, registry)
    async with host.agent() as client:
        await client.fetch_oci_image(PLACE)
        for image in (digest, "sha256:" + "1" * 64):
            with pytest.raises(Unprocessable, match="has a command"):
                await client.put_task("web", a_spec(image=image, command=[]))


async def test_an_index_leads_to_the_image_for_this_processor(
    host: FakeHost, registry: Registry
) -> None:
    digest = an_image(host, registry)
    layout, _ = registry.images[f"docker://{PLACE}"]
    for of in ("s390x", "amd64", "arm64"):
        layout.index[0]["platform"] = {"os": "linux", "architecture": of}
    listed = [
        {**layout.index[0], "platform": {"os": "linux", "architecture": a}, "digest": d}
        for a, d in (("s390x", sha(b"no")), ("amd64", digest), ("arm64", digest))
    ]
    index = json.dumps({"schemaVersion": 2, "manifests": listed}).encode()
    registry.images[f"docker://{PLACE}"] = (layout, layout.blob(index)["digest"])
    async with host.agent() as client:
        assert (await client.fetch_oci_image(PLACE)).digest == digest


def _tampered(host: FakeHost, registry: Registry) -> None:
    layout, digest = registry.images[f"docker://{PLACE}"]
    manifest = json.loads((layout.path / "blobs/sha256" / digest[7:]).read_bytes())
    path = layout.path / "blobs/sha256" / manifest["layers"][1]["digest"][7:]
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def _shifted(host: FakeHost, registry: Registry) -> None:
    layout, digest = registry.images[f"docker://{PLACE}"]
    path = layout.path / "blobs/sha256" / digest[7:]
    by_digest = f"docker://{PLACE.rpartition(':')[0]}@{digest}"
    path.write_bytes(path.read_bytes() + b" ")
    registry.images[f"docker://{PLACE}"] = registry.images[by_digest]


def _big(host: FakeHost, registry: Registry) -> None:
    host.fake.btrfs.available_bytes = 100 << 20


def _broken(host: FakeHost, registry: Registry) -> None:
    host.fake.systemd.programs["python"] = ends_with(1)
    host.fake.systemd.programs["python3"] = ends_with(1)


@pytest.mark.behaviour("BUG-AG79")
async def test_an_image_with_a_huge_environment_is_refused(
    host: FakeHost, registry: Registry
) -> None:
    """A few of them made the list of a host's images longer than any reader accepts."""
    config = CONFIG | {"Env": [f"V{number}={'x' * 1000}" for number in range(70)]}
    an_image(host, registry, BASE, LISTS, config=config)
    async with host.agent() as client:
        with pytest.raises(Unprocessable, match="69 KiB of commands and environment, more than 64"):
            await client.fetch_oci_image(PLACE)
    assert nothing_staged(host)


@pytest.mark.behaviour("F-29", "F-30", "F-33")
@pytest.mark.parametrize(
    ("harm", "why"),
    [(_tampered, "layer sha256:.* is refused"), (_big, "does not fit"), (_broken, "is refused")],
)
async def test_an_image_that_is_damaged_in_transfer_is_refused_and_leaves_nothing(
    host: FakeHost, registry: Registry, harm: Any, why: str
) -> None:
    """The error has a message, and only whole layers stay."""
    digest = an_image(host, registry)
    harm(host, registry)
    async with host.agent() as client:
        with pytest.raises(Unprocessable, match=why):
            await client.fetch_oci_image(PLACE)
    assert nothing_staged(host)
    assert digest[7:] not in stored(host, "images")
    assert len(stored(host, "layers")) <= 1


@pytest.mark.behaviour("F-30")
async def test_a_manifest_with_another_digest_is_refused(
    host: FakeHost, registry: Registry
) -> None:
    digest = an_image(host, registry)
    _shifted(host, registry)
    async with host.agent() as client:
        with pytest.raises(Unprocessable, match="has digest"):
            await client.fetch_oci_image(f"{PLACE.rpartition(':')[0]}@{digest}")
    assert nothing_staged(host)


@pytest.mark.parametrize(
    "reference", ["web", "web:3", "reg/we b:3", "reg/../x:1", "reg/x:1;rm", "docker://reg/x:1", ""]
)
async def test_a_reference_that_names_no_place_is_refused(host: FakeHost, reference: str) -> None:
    async with host.agent() as client:
        with pytest.raises(InvalidInput, match="reference"):
            await client.fetch_oci_image(reference)


@pytest.mark.behaviour("F-42")
async def test_a_pull_of_a_killed_agent_is_removed_and_its_layers_are_used(
    host: FakeHost, registry: Registry
) -> None:
    """The next start removes leftovers of a pull and keeps whole layers."""
    an_image(host, registry)
    async with host.agent() as client:
        info = await client.fetch_oci_image(PLACE)
    staging, layers = host.state / "staging", host.state / "layers"
    host.fake.btrfs.create(staging / "oci-abc")
    (staging / "oci-abc.json").write_text("{")
    host.fake.btrfs.create(staging / "x.layer")
    host.fake.btrfs.create(layers / ("5" * 64))
    (layers / f".{'6' * 64}.new").write_text("{")
    (layers / f"{'7' * 64}.json").write_text("{}")
    async with host.agent():
        assert stored(host, "layers") == {chain[7:] for chain in info.layers}
    assert nothing_staged(host)


@pytest.mark.behaviour("F-85")
async def test_the_credentials_and_the_option_to_trust_come_from_the_configuration(
    tmp_path: Path,
) -> None:
    """No option of a request disables verification or names a file."""
    host = FakeHost(tmp_path)
    requests: list[list[str]] = []
    seen: list[Property] = []

    def skopeo(argv: list[str], properties: Any) -> Any:
        requests.append(argv)
        seen.append(properties["InaccessiblePaths"])
        return ends_with(1)(argv, properties)

    host.fake.systemd.programs["skopeo"] = skopeo
    lax = replace(
        host.config,
        registry_tls_verify=False,
        registry_credentials_file="/etc/twine/registries.json",
    )
    for config in (host.config, lax):
        host.config = config
        async with host.agent() as client:
            with pytest.raises(TwineError, match="cannot read"):
                await client.fetch_oci_image(PLACE)

    plain, trusting = requests
    assert plain[1:] == ["--insecure-policy", "inspect", "--raw", f"docker://{PLACE}"]
    assert {"--tls-verify=false", "--authfile=/etc/twine/registries.json"} <= set(trusting)
    assert all(f"-{host.state}/identity" in _words(paths) for paths in seen)


def test_a_pull_sends_what_it_accepts() -> None:
    assert OciPull(reference=PLACE).reference == PLACE
