"""One layer is applied to a tree: which paths it changes, and which it must never reach."""

from __future__ import annotations

import io
import os
import resource
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from oci import compressed, entry, files, folder, layer, sha

from agent.machine import layer as program
from agent.machine.layer import apply
from wire.errors import TwineError, Unprocessable


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a tree with content of lower layers, next to a file outside of all layers."""
    (tmp_path / "outside").write_text("host")
    tree = tmp_path / "tree"
    (tree / "etc" / "old").mkdir(parents=True)
    (tree / "etc" / "hostname").write_text("below")
    (tree / "etc" / "old" / "file").write_text("below")
    (tree / "usr" / "lib").mkdir(parents=True)
    (tree / "lib").symlink_to("usr/lib")
    return tree


def put(tree: Path, data: bytes, how: str = "tar", digest: str = "", diff_id: str = "") -> None:
    """Apply a layer."""
    (tree.parent / "blob").write_bytes(blob := compressed(data, how))
    apply(
        str(tree.parent),
        "blob",
        how,
        digest or sha(blob),
        diff_id or sha(data),
        str(tree),
        owners=os.geteuid() == 0,
    )


def untouched(tree: Path) -> None:
    """Check that nothing outside of the tree was changed."""
    assert (tree.parent / "outside").read_text() == "host"
    assert {p.name for p in tree.parent.iterdir()} == {"outside", "tree", "blob"}


@pytest.mark.behaviour("AG3")
@pytest.mark.parametrize("how", ["tar", "gzip"])
def test_files_come_with_mode_time_and_content_however_they_are_packed(
    tree: Path, how: str
) -> None:
    put(tree, layer(entry("./etc/new", data=b"x" * 70_000, mode=0o640, mtime=1234)), how)

    new = tree / "etc" / "new"
    assert new.read_bytes() == b"x" * 70_000
    assert (stat.S_IMODE(new.stat().st_mode), new.stat().st_mtime) == (0o640, 1234)
    assert (tree / "etc" / "hostname").read_text() == "below"


def test_a_whiteout_removes_only_entries_of_lower_layers(tree: Path) -> None:
    put(tree, layer(entry("etc/.wh.old"), entry("etc/.wh.never-was"), entry("etc/new")))

    assert sorted(p.name for p in (tree / "etc").iterdir()) == ["hostname", "new"]


@pytest.mark.parametrize("last", [True, False])
def test_an_opaque_folder_keeps_only_what_this_layer_put_there(tree: Path, last: bool) -> None:
    mine = [folder("etc"), entry("etc/mine", data=b"1"), folder("etc/old"), entry("etc/old/mine")]
    members = [*mine, entry("etc/.wh..wh..opq")] if last else [entry("etc/.wh..wh..opq"), *mine]
    put(tree, layer(*members))

    found = sorted(str(p.relative_to(tree / "etc")) for p in (tree / "etc").rglob("*"))
    assert found == ["mine", "old", "old/mine"]


def test_a_file_takes_the_place_of_a_folder_and_the_reverse(tree: Path) -> None:
    put(
        tree, layer(entry("etc/old", data=b"file"), folder("etc/hostname"), entry("etc/hostname/x"))
    )

    assert (tree / "etc" / "old").read_bytes() == b"file"
    assert (tree / "etc" / "hostname" / "x").exists()


def test_an_entry_below_a_link_of_the_image_is_written_to_its_target(tree: Path) -> None:
    put(tree, layer(entry("lib/new", data=b"1"), entry("lib/deep/er", data=b"2")))

    assert (tree / "usr" / "lib" / "new").read_bytes() == b"1"
    assert (tree / "usr" / "lib" / "deep" / "er").read_bytes() == b"2"
    assert (tree / "lib").is_symlink()


@pytest.mark.behaviour("F-31")
def test_an_absolute_link_means_the_image_and_not_the_host(tree: Path) -> None:
    (tree / "root").symlink_to("/etc")
    put(tree, layer(entry("root/passwd", data=b"image")))

    assert (tree / "etc" / "passwd").read_bytes() == b"image"
    assert Path("/etc/passwd").read_bytes() != b"image"


def test_hard_links_stay_links_and_a_later_layer_changes_one_of_them_only(tree: Path) -> None:
    put(tree, layer(entry("a", data=b"1"), entry("b", tarfile.LNKTYPE, linkname="a")))
    assert (tree / "a").stat().st_ino == (tree / "b").stat().st_ino

    put(tree, layer(entry("a", data=b"2")))
    assert ((tree / "a").read_bytes(), (tree / "b").read_bytes()) == (b"2", b"1")


@pytest.mark.behaviour("F-31")
def test_attributes_of_users_are_kept_and_capabilities_and_set_uid_bits_are_not(
    tree: Path,
) -> None:
    headers = {
        "SCHILY.xattr.user.note": "a\nb",
        "SCHILY.xattr.security.capability": "x",
        "SCHILY.xattr.trusted.overlay.opaque": "y",
    }
    put(tree, layer(entry("su", mode=0o6755, pax_headers=headers), folder("d", mode=0o1777)))

    assert os.listxattr(tree / "su") == ["user.note"]
    assert os.getxattr(tree / "su", "user.note") == b"a\nb"
    assert stat.S_IMODE((tree / "su").stat().st_mode) == 0o755
    assert stat.S_IMODE((tree / "d").stat().st_mode) == 0o1777


@pytest.mark.behaviour("F-31")
def test_device_nodes_are_left_out_below_dev_and_refused_elsewhere(tree: Path) -> None:
    put(tree, layer(folder("dev"), entry("dev/null", tarfile.CHRTYPE, devmajor=1, devminor=3)))
    assert list((tree / "dev").iterdir()) == []

    with pytest.raises(Unprocessable, match="device node"):
        put(tree, layer(entry("disk", tarfile.BLKTYPE, devmajor=8, devminor=0)))


@pytest.mark.behaviour("AG3")
def test_an_empty_layer_changes_nothing(tree: Path) -> None:
    """Some builders omit the end-of-archive marker of an empty archive; engines accept this.

    An archive that is cut off is another case.
    """
    before = sorted(tree.rglob("*"))
    for how in ("tar", "gzip"):
        put(tree, b"", how)
        put(tree, bytes(1024), how)
    assert sorted(tree.rglob("*")) == before

    with pytest.raises(tarfile.ReadError):
        put(tree, b"no archive at all")


@pytest.mark.parametrize(
    ("member", "words"),
    [
        (
            entry("etc/x", tarfile.LNKTYPE, linkname="no/where"),
            "'etc/x', a link to 'no/where', cannot be created: No such file or directory",
        ),
        (
            entry("etc/pipe", tarfile.FIFOTYPE, pax_headers={"SCHILY.xattr.user.note": "x"}),
            "'etc/pipe' cannot be created: Operation not permitted",
        ),
        (entry("etc/hostname/x"), "'etc/hostname/x' cannot be created: Not a directory"),
    ],
)
def test_the_error_for_a_refused_entry_names_the_entry(
    tree: Path, member: tuple[tarfile.TarInfo, bytes], words: str
) -> None:
    with pytest.raises(Unprocessable) as raised:
        put(tree, layer(entry("etc/before"), member))
    assert str(raised.value) == words


BLOCK = program.BLOCK
WORDS = os.urandom(BLOCK)
CONTENTS = {
    "zeros": bytes(3 << 20),
    "zeros first": bytes(2 << 20) + WORDS,
    "zeros last": WORDS + bytes((2 << 20) + 5),
    "zeros between": WORDS + bytes(2 << 20) + b"end",
    "zeros that fill no block": bytes(BLOCK - 1) + WORDS + bytes(BLOCK - 1),
    "a byte in each block": (bytes(BLOCK - 1) + b"x") * 600,
    "a byte and a block in turn": (b"x" * BLOCK + bytes(BLOCK)) * 300,
    "a byte": bytes(1),
    "nothing": b"",
    "no zeros": b"x" * ((1 << 20) + 1),
}


def sparse(
    size: int, pieces: list[tuple[int, bytes]], words: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    """Return a sparse file as GNU tar packs it (PAX format 1.0), or with the given map."""
    numbers = [len(pieces), *(n for at, data in pieces for n in (at, len(data)))]
    start = (words or "".join(f"{n}\n" for n in numbers)).encode()
    packed = start + bytes(-len(start) % 512) + b"".join(data for _, data in pieces)
    headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "disk",
        "GNU.sparse.realsize": str(size),
    }
    return entry("GNUSparseFile.0/disk", data=packed, pax_headers=headers)


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """Make the kernel refuse files above a size, so that a bug cannot fill the disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.behaviour("AG3")
@pytest.mark.parametrize("kind", CONTENTS)
def test_blocks_of_zeros_become_holes_and_the_content_is_the_same(tree: Path, kind: str) -> None:
    data = CONTENTS[kind]
    put(tree, layer(entry("file", data=data), entry("next", data=b"1")), "gzip")

    blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    wanted = sum(block != bytes(BLOCK) for block in blocks)
    assert (tree / "file").read_bytes() == data
    assert (tree / "next").read_bytes() == b"1"
    assert (tree / "file").stat().st_blocks * 512 <= wanted * BLOCK


@pytest.mark.behaviour("AG3")
def test_a_sparse_file_stays_sparse(tree: Path) -> None:
    """The unpacker does not read each byte of a hole."""
    size = 1 << 32
    pieces = [(1 << 20, WORDS), (1 << 31, b"x" * 700), (size, b"")]
    put(tree, layer(sparse(size, pieces), entry("next", data=b"1")), "gzip")

    with (tree / "disk").open("rb") as file:
        assert os.fstat(file.fileno()).st_size == size
        for at, data in pieces:
            file.seek(at - 1 if at else 0)
            assert file.read(len(data) + 1) == b"\0" + data
    assert (tree / "disk").stat().st_blocks * 512 <= 4 * BLOCK
    assert (tree / "next").read_bytes() == b"1"


@pytest.mark.behaviour("F-31", "F-32")
@pytest.mark.parametrize(
    ("size", "words", "why"),
    [
        (5000, "2\n4096\n100\n0\n100\n", "100 bytes at 0, after 4196 and of 5000"),
        (5000, "2\n0\n4096\n100\n100\n", "100 bytes at 100, after 4096 and of 5000"),
        (5000, "1\n4096\n1000\n", "1000 bytes at 4096, after 0 and of 5000"),
        (5000, "1\n0\n-1\n", "-1 bytes at 0, after 0 and of 5000"),
        (5000, "1\n-1\n9\n", "9 bytes at -1, after 0 and of 5000"),
        (-5, "0\n", "'disk' has -5 bytes, which is impossible for a file"),
        (1 << 63, "0\n", "'disk' has 9223372036854775808 bytes, which is impossible for a file"),
    ],
)
def test_a_map_of_holes_that_cannot_be_is_refused_and_nothing_is_written(
    tree: Path, size: int, words: str, why: str
) -> None:
    with pytest.raises(Unprocessable, match=why), no_file_above(1 << 20):
        put(tree, layer(sparse(size, [(0, bytes(4096))], words)))
    assert not (tree / "disk").exists()
    untouched(tree)


HOSTILE = {
    "climbs": [entry("../outside", data=b"bad")],
    "climbs from inside": [entry("etc/../../outside", data=b"bad")],
    "climbs by whiteout": [entry("../.wh.outside")],
    "whites out nothing": [entry("etc/.wh.")],
    "whites out its parent": [entry("etc/.wh...")],
    "hard link out": [entry("x", tarfile.LNKTYPE, linkname="../outside")],
    "hard link to a folder": [entry("x", tarfile.LNKTYPE, linkname="etc")],
    "hard link to nothing": [entry("x", tarfile.LNKTYPE, linkname="no/where")],
    "file as folder": [entry("f"), entry("f/x", data=b"bad")],
    "link in a circle": [
        entry("a", tarfile.SYMTYPE, linkname="b"),
        entry("b", tarfile.SYMTYPE, linkname="a"),
        entry("a/x", data=b"bad"),
    ],
    "too deep": [entry("d/" * 200 + "x", data=b"bad")],
    "unknown kind": [entry("x", b"Z")],
}


@pytest.mark.behaviour("F-31", "F-32")
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_archive_is_refused_and_reaches_nothing(tree: Path, kind: str) -> None:
    """No path outside of the tree is read, written or removed."""
    with pytest.raises((TwineError, OSError)):
        put(tree, layer(*HOSTILE[kind]))
    untouched(tree)


@pytest.mark.behaviour("F-31")
@pytest.mark.parametrize("target", ["/", "..", "../outside", "/proc/self/root", "/../../outside"])
def test_a_link_to_the_outside_leads_nowhere_outside(tree: Path, target: str) -> None:
    members = [entry("x", tarfile.SYMTYPE, linkname=target), entry("x/outside", data=b"bad")]
    members += [entry("x/.wh.outside"), entry("y", tarfile.LNKTYPE, linkname="x/outside")]
    with suppress(TwineError, OSError):
        put(tree, layer(*members))
    untouched(tree)


@pytest.mark.behaviour("F-29")
def test_a_changed_byte_is_noticed_before_anything_is_unpacked(tree: Path) -> None:
    data = layer(entry("new"))
    with pytest.raises(Unprocessable, match="has digest"):
        put(tree, data, digest="sha256:" + "0" * 64)
    assert not (tree / "new").exists()

    with pytest.raises(Unprocessable, match="the uncompressed content has digest"):
        put(tree, data, "gzip", diff_id="sha256:" + "0" * 64)


@pytest.mark.behaviour("F-29")
def test_a_layer_cut_short_is_refused(tree: Path) -> None:
    data = layer(entry("new", data=os.urandom(50_000)))
    blob = compressed(data, "gzip")[:-1000]
    (tree.parent / "blob").write_bytes(blob)
    with pytest.raises((EOFError, TwineError, tarfile.TarError)):
        apply(str(tree.parent), "blob", "gzip", sha(blob), sha(data), str(tree), owners=False)


@pytest.mark.behaviour("F-31")
def test_a_blob_that_is_a_link_or_a_pipe_is_not_opened(tree: Path) -> None:
    data = layer(entry("new"))
    (tree.parent / "real").write_bytes(data)
    (tree.parent / "blob").symlink_to("real")
    os.mkfifo(tree.parent / "pipe")
    for name, why in (
        ("blob", "symbolic links"),
        ("../blob", "not a path below"),
        ("pipe", "not a regular file"),
    ):
        with pytest.raises(OSError, match=why):
            apply(str(tree.parent), name, "tar", sha(data), sha(data), str(tree), owners=False)


@pytest.mark.behaviour("F-32")
def test_too_many_entries_are_refused(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "ENTRIES_MAX", 3)
    with pytest.raises(Unprocessable, match="more than 3 entries"):
        put(tree, layer(*(entry(f"f{n}") for n in range(4))))


def test_the_program_reports_a_refusal_in_one_line(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree.parent / "blob").write_bytes(b"x")
    wrong = "sha256:" + "0" * 64
    code = program.main([str(tree.parent), str(tree), "blob", "tar", wrong, wrong])

    assert code == 1
    assert capsys.readouterr().err.startswith("the layer has digest sha256:2d7")


@pytest.mark.behaviour("BUG-AG38")
def test_one_process_applies_each_layer_on_request(tree: Path) -> None:
    """One process was started for each layer, which takes longer than unpacking a small layer."""
    words, requests, output = [], io.BytesIO(b"continue\n"), io.BytesIO()
    for name in ("one", "two", "three"):
        data = files(**{name: name})
        (tree.parent / name).write_bytes(data)
        words += [name, "tar", sha(data), sha(data)]
    owners = os.geteuid() == 0
    code = program.main([str(tree.parent), str(tree), *words], requests, output, owners=owners)
    assert (code, output.getvalue()) == (0, b"applied\n" * 2)
    assert (tree / "one").read_text() + (tree / "two").read_text() == "onetwo"
    assert not (tree / "three").exists(), "no member requested it"
