"""OCI images made by hand: layers, layouts, and the difference between two trees."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import stat
import subprocess
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.machine.fake_systemd import Ended

LAYER = "application/vnd.oci.image.layer.v1.tar"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), "amd64")


def sha(data: bytes) -> str:
    """Return the digest of some bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def entry(name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """Return a member of a layer; `data` is its content."""
    data: bytes = fields.pop("data", b"")
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mode = kind, len(data), 0o755 if kind == tarfile.DIRTYPE else 0o644
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def folder(name: str, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """Return a folder of a layer."""
    return entry(name, tarfile.DIRTYPE, **fields)


def layer(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """Return a layer with these members."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def files(**content: str) -> bytes:
    """Return a layer with these files at its top."""
    return layer(*(entry(name, data=text.encode()) for name, text in content.items()))


def compressed(data: bytes, how: str) -> bytes:
    """Return a layer in its compressed form, as a registry sends it."""
    if how == "gzip":
        return gzip.compress(data, 1, mtime=0)
    if how == "zstd":
        return subprocess.run(
            ["zstd", "-q", "-c"], input=data, capture_output=True, check=True
        ).stdout
    return data


@dataclass
class Layout:
    """A layout in a folder, to which images are added one by one."""

    path: Path
    index: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.path / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        (self.path / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')

    def blob(self, data: bytes) -> dict[str, Any]:
        """Store some bytes and return their descriptor."""
        (self.path / "blobs" / "sha256" / sha(data)[7:]).write_bytes(data)
        return {"digest": sha(data), "size": len(data)}

    def image(
        self, *layers: bytes, how: str = "gzip", config: dict[str, Any] | None = None, **more: Any
    ) -> str:
        """Add an image of these layers, lowest first. Return the digest of its manifest."""
        suffix = "" if how == "tar" else f"+{how}"
        blobs = [
            {"mediaType": LAYER + suffix, **self.blob(compressed(data, how))} for data in layers
        ]
        described = {
            "architecture": ARCHITECTURE,
            "os": "linux",
            "config": config or {},
            "rootfs": {"type": "layers", "diff_ids": [sha(data) for data in layers]},
        }
        kind = "application/vnd.oci.image.config.v1+json"
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": kind, **self.blob(json.dumps(described).encode())},
            "layers": blobs,
            **more,
        }
        found = {"mediaType": MANIFEST, **self.blob(json.dumps(manifest).encode())}
        self.index.append(found)
        self.close()
        digest: str = found["digest"]
        return digest

    def close(self) -> None:
        """Write the index."""
        document = {"schemaVersion": 2, "manifests": self.index}
        (self.path / "index.json").write_text(json.dumps(document))

    def archive(self) -> bytes:
        """Return the layout as a tar."""
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for path in sorted(self.path.rglob("*")):
                tar.add(path, str(path.relative_to(self.path)), recursive=False)
        return out.getvalue()


@dataclass
class Registry:
    """A registry and skopeo for a service manager in memory. It keeps layouts by image name."""

    images: dict[str, tuple[Layout, str]] = field(default_factory=dict)
    """`docker://REGISTRY/REPOSITORY:TAG` → layout and manifest's digest."""
    fetched: list[str] = field(default_factory=list)
    """Every blob that was fetched, in order."""

    def push(self, reference: str, layout: Layout, digest: str) -> None:
        """Offer an image by its tag and by its digest."""
        repository = reference.rpartition(":")[0]
        self.images[f"docker://{reference}"] = (layout, digest)
        self.images[f"docker://{repository}@{digest}"] = (layout, digest)

    def skopeo(self, argv: list[str], properties: Any) -> Ended:
        """Do what `skopeo inspect --raw` and `skopeo copy` do."""
        name = next(word for word in argv if word.startswith("docker://"))
        if name not in self.images:
            return Ended(code=1)
        layout, digest = self.images[name]
        blobs = layout.path / "blobs" / "sha256"
        data = (blobs / digest[7:]).read_bytes()
        if "inspect" in argv:
            Path(properties["StandardOutputFile"]).write_bytes(data)
            return Ended()
        target = Path(argv[-1].removeprefix("oci:")) / "blobs" / "sha256"
        target.mkdir(parents=True, exist_ok=True)
        manifest = json.loads(data)
        for blob in [manifest["config"], *manifest["layers"]]:
            if not (target / blob["digest"][7:]).exists():
                self.fetched.append(blob["digest"])
                (target / blob["digest"][7:]).write_bytes((blobs / blob["digest"][7:]).read_bytes())
        return Ended()


# Trees, and the changes between two of them.


def tree_state(top: Path) -> dict[str, tuple[object, ...]]:
    """Return the relevant contents of a tree: path → kind, mode, owner, content, …"""
    found: dict[str, tuple[object, ...]] = {}
    firsts: dict[int, str] = {}
    for path in sorted(top.rglob("*")):
        name, status = str(path.relative_to(top)), path.lstat()
        kind = stat.S_IFMT(status.st_mode)
        owner = (status.st_uid, status.st_gid)
        if stat.S_ISLNK(kind):
            found[name] = (kind, owner, os.readlink(path))
            continue
        attributes = {k: os.getxattr(path, k) for k in os.listxattr(path) if k.startswith("user.")}
        about = (kind, stat.S_IMODE(status.st_mode), owner, tuple(sorted(attributes.items())))
        if stat.S_ISREG(kind):
            first = firsts.setdefault(status.st_ino, name)
            found[name] = (*about, path.read_bytes(), first, status.st_mtime_ns)
        else:
            found[name] = about
    return found


def difference(old: Path, new: Path) -> bytes:
    """Return the layer that turns `old` into `new`, in the form of an overlay file system."""
    before, after = tree_state(old), tree_state(new)
    members: list[tuple[tarfile.TarInfo, bytes]] = []
    for name in sorted(before):
        parent = str(Path(name).parent)
        folder_stays = parent == "." or (parent in after and after[parent][0] == stat.S_IFDIR)
        if (
            name not in after
            and folder_stays
            and (parent == "." or before[parent][0] == stat.S_IFDIR)
        ):
            members.append(entry(str(Path(parent) / f".wh.{Path(name).name}")))
    again: set[str] = set()
    for name, about in sorted(after.items()):
        if about[0] == stat.S_IFREG and before.get(name) != about:
            again.add(str(about[5]))
    for name, about in sorted(after.items()):
        linked = about[0] == stat.S_IFREG and about[5] in again
        if before.get(name) != about or linked:
            members.append(_member(new / name, name, about))
    return layer(*members)


def _member(path: Path, name: str, about: tuple[object, ...]) -> tuple[tarfile.TarInfo, bytes]:
    status = path.lstat()
    info = tarfile.TarInfo(name)
    info.mode, info.uid, info.gid = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
    info.pax_headers = {"mtime": f"{status.st_mtime_ns // 10**9}.{status.st_mtime_ns % 10**9:09d}"}
    if stat.S_ISLNK(status.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
        return info, b""
    for key in os.listxattr(path):
        if key.startswith("user."):
            value = os.getxattr(path, key).decode(errors="surrogateescape")
            info.pax_headers[f"SCHILY.xattr.{key}"] = value
    if stat.S_ISDIR(status.st_mode):
        info.type = tarfile.DIRTYPE
        return info, b""
    if stat.S_ISFIFO(status.st_mode):
        info.type = tarfile.FIFOTYPE
        return info, b""
    if about[5] != name:
        info.type, info.linkname = tarfile.LNKTYPE, str(about[5])
        return info, b""
    data = path.read_bytes()
    info.size = len(data)
    return info, data
