"""Builds images in an OCI layout from recipes: all share one base, and each has its own layer.

The lab's cache keeps the base and each layer under the hash of their inputs.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tests.compat.recipes import Recipe
from vm_lab.cache import Say, cache_root, lock, recipe_key

HERE = Path(__file__).parent
SUITE = "trixie"
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), "amd64")
_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_DROPPED = ("run.sh", "var/lib/apt", "var/cache/apt", "var/cache/debconf", "var/log/apt", "out")
"""Paths that a build leaves behind and that no image contains."""
_WRITTEN = 1_735_689_600
"""Modification time of all files (2025-01-01). cron mistakes a table with time 0 for one that it
has already read."""
_NO_DOCS = "".join(
    f"path-exclude=/usr/share/{name}/*\n" for name in ("doc", "man", "locale", "info")
)


class Builder:
    """Builds images in the lab's cache. It needs root and a mirror of Debian."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._top = cache_root() / "compat"
        self._debs = self._top / "debs"
        self.blobs = self._top / "blobs" / "sha256"
        for folder in (self._debs / "partial", self.blobs, self._top / "layers"):
            folder.mkdir(parents=True, exist_ok=True)
        key = recipe_key([HERE / "layer.sh"], SUITE, _NO_DOCS)
        self._base, self._lists = self._top / f"base-{key}", self._top / f"lists-{key}"

    def image(self, recipe: Recipe, into: Path) -> str:
        """Write the image of a recipe as a layout, tagged with its name. Return its digest."""
        own = self._layer(recipe)
        layers = [own] if recipe.scratch else [self._base_layer(), own]
        config = {
            "architecture": ARCHITECTURE,
            "os": "linux",
            "config": {
                "Entrypoint": recipe.entrypoint,
                "Cmd": recipe.command,
                "Env": recipe.env,
                "User": recipe.user,
                "WorkingDir": recipe.workdir,
                "StopSignal": recipe.stop_signal,
            },
            "rootfs": {"type": "layers", "diff_ids": [layer["diff_id"] for layer in layers]},
        }
        described = self._document(config, "application/vnd.oci.image.config.v1+json")
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": described,
            "layers": [layer["blob"] for layer in layers],
        }
        found = self._document(manifest, _MANIFEST)
        names = [found["digest"], described["digest"], *(x["blob"]["digest"] for x in layers)]
        (into / "blobs" / "sha256").mkdir(parents=True)
        for digest in names:
            os.link(self.blobs / digest[7:], into / "blobs" / "sha256" / digest[7:])
        (into / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
        (into / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [found]}))
        digest: str = found["digest"]
        return digest

    def _document(self, value: object, kind: str) -> dict[str, Any]:
        data = json.dumps(value).encode()
        digest = hashlib.sha256(data).hexdigest()
        (self.blobs / digest).write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}

    def _ensure_base(self) -> None:
        """Build the base, and a separate folder with apt's state, which no image contains."""
        if self._lists.exists():
            return
        self._say("compat: Debian's base")
        for old in (*self._top.glob("base-*"), *self._top.glob("lists-*")):
            shutil.rmtree(old)
        options = ["--variant=minbase", "--mode=root", '--aptopt=Acquire::Languages "none"']
        options += [f"--dpkgopt={line}" for line in _NO_DOCS.splitlines()]
        run = ["mmdebstrap", "--quiet", *options, SUITE, str(self._base)]
        subprocess.run(run, check=True)
        shutil.rmtree(self._base / "dev")
        (self._base / "dev").mkdir()
        lists = self._lists.with_suffix(".partial")
        shutil.rmtree(lists, ignore_errors=True)
        (lists / "usr/sbin").mkdir(parents=True)
        (lists / "usr/sbin/policy-rc.d").write_text("#!/bin/sh\nexit 101\n")
        (lists / "usr/sbin/policy-rc.d").chmod(0o755)
        (lists / "etc/apt/apt.conf.d").mkdir(parents=True)
        keep = 'APT::Keep-Downloaded-Packages "true";\nAcquire::Languages "none";\n'
        (lists / "etc/apt/apt.conf.d/99compat").write_text(keep)
        (lists / "etc").joinpath("resolv.conf").write_text(Path("/etc/resolv.conf").read_text())
        self._in_overlay(str(self._base), lists, "", "apt-get -qq update")
        lists.rename(self._lists)

    def _in_overlay(self, lower: str, upper: Path, packages: str, setup: str) -> None:
        with tempfile.TemporaryDirectory(dir=self._top) as work:
            script = ["bash", str(HERE / "layer.sh"), lower, str(upper), work]
            argv = ["unshare", "--mount", "--propagation", "private", *script]
            clean = {k: v for k, v in os.environ.items() if k != "TMPDIR"}  # is a path of this host
            subprocess.run([*argv, str(self._debs), packages, setup], check=True, env=clean)

    def _base_layer(self) -> dict[str, Any]:
        return self._kept(f"base-{self._base.name}", lambda: self._base)

    def _layer(self, recipe: Recipe) -> dict[str, Any]:
        built = (recipe.packages, recipe.pypi, recipe.npm, recipe.setup, recipe.files)
        key = recipe_key([HERE / "layer.sh"], SUITE, repr(built), str(recipe.scratch))

        def make() -> Path:
            self._ensure_base()
            self._say(f"compat: {recipe.name}")
            upper = self._top / f"upper-{recipe.name}"
            shutil.rmtree(upper, ignore_errors=True)
            self._put(recipe, upper)
            lower = f"{self._lists}:{self._base}"
            self._in_overlay(lower, upper, " ".join(recipe.packages), recipe.setup)
            return upper / "out" if recipe.scratch else upper

        return self._kept(f"{recipe.name}-{key}", make, upper=True)

    def _put(self, recipe: Recipe, upper: Path) -> None:
        upper.mkdir()
        upper.chmod(0o755)
        for path, text in recipe.files.items():
            at = upper / path.lstrip("/")
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_text(text)
            at.chmod(0o755 if text.startswith("#!") else 0o644)
        app = upper / "app"
        if recipe.pypi:
            pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            pip += ["--python-version=3.13", "--only-binary=:all:", f"--target={app}"]
            subprocess.run([*pip, *recipe.pypi], check=True)
        if recipe.npm:
            app.mkdir(exist_ok=True)
            subprocess.run(["npm", "install", "--silent", *recipe.npm], cwd=app, check=True)

    def _kept(self, name: str, make: Any, *, upper: bool = False) -> dict[str, Any]:
        """Return a layer's diff id and descriptor, from the cache if it is there."""
        note = self._top / "layers" / f"{name}.json"
        with lock(self._top, self._say):  # apt's archive folder allows one user at a time
            if note.exists():
                found: dict[str, Any] = json.loads(note.read_text())
                if (self.blobs / found["blob"]["digest"][7:]).exists():
                    return found
            if not upper:
                self._ensure_base()
            found = self._packed(name, make())
            if upper:
                shutil.rmtree(self._top / f"upper-{name.rpartition('-')[0]}")
            note.write_text(json.dumps(found))
            return found

    def _packed(self, name: str, top: Path) -> dict[str, Any]:
        diff = hashlib.sha256()
        packed = self._top / f"{name}.partial"
        with (
            packed.open("wb") as raw,
            gzip.GzipFile("", "wb", 6, raw, mtime=0) as out,
            tarfile.open(fileobj=_Tee(diff, out), mode="w|", format=tarfile.PAX_FORMAT) as tar,
        ):
            for info, data in _members(top):
                tar.addfile(info, data)
        with packed.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = packed.stat().st_size
        packed.rename(self.blobs / digest)
        blob = {"mediaType": _LAYER, "digest": f"sha256:{digest}", "size": size}
        return {"diff_id": f"sha256:{diff.hexdigest()}", "blob": blob}


class _Tee(io.RawIOBase):
    def __init__(self, hashing: Any, out: Any) -> None:
        self._hashing, self._out = hashing, out

    def write(self, data: Any) -> int:
        self._hashing.update(data)
        written: int = self._out.write(data)
        return written


def _members(top: Path) -> Iterator[tuple[tarfile.TarInfo, io.BufferedReader | None]]:
    """Yield the contents of a folder as members of a layer. Whiteouts of overlayfs become those of
    OCI."""
    tar = tarfile.TarFile(fileobj=io.BytesIO(), mode="w", format=tarfile.PAX_FORMAT)
    for path in sorted(top.rglob("*")):
        name = str(path.relative_to(top))
        if any(name == gone or name.startswith(f"{gone}/") for gone in _DROPPED):
            continue
        status = path.lstat()
        if stat.S_ISCHR(status.st_mode) and not status.st_rdev:
            yield tarfile.TarInfo(str(path.relative_to(top).with_name(f".wh.{path.name}"))), None
            continue
        if stat.S_ISSOCK(status.st_mode):
            continue
        info = tar.gettarinfo(str(path), name)
        info.mtime, info.uname, info.gname = _WRITTEN, "", ""
        if info.type == tarfile.LNKTYPE:
            info.type, info.size = tarfile.REGTYPE, status.st_size
        if info.isreg():
            with path.open("rb") as data:
                yield info, data
        else:
            yield info, None
        if info.isdir() and "trusted.overlay.opaque" in os.listxattr(path):
            yield tarfile.TarInfo(f"{name}/.wh..wh..opq"), None


def as_json(recipe: Recipe) -> bytes:
    """Return a recipe in the form that `in_guest.py` reads."""
    return msgspec.json.encode(recipe)
