"""Makes the archive that the agent accepts from an image in an OCI layout or archive."""

from __future__ import annotations

import hashlib
import json
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agent.images.core.oci import TAG
from wire.errors import InvalidInput

_DOCUMENT_MAX_BYTES = 4 << 20
"""The agent's limit for a manifest; protects against reading a layer as a manifest."""


def split(text: str) -> tuple[Path, str]:
    """Return path and tag of PATH[:TAG]; an existing path has no tag."""
    path, colon, tag = text.rpartition(":")
    if Path(text).exists() or not colon or "/" in tag:
        return Path(text), ""
    return Path(path), tag


@contextmanager
def archived(kind: str, text: str) -> Iterator[Path]:
    """Yield an archive of one image from `oci-layout` FOLDER[:TAG] or `oci-archive` FILE[:TAG].

    The same image always gives the same bytes. Raises `InvalidInput`.
    """
    path, tag = split(text)
    if kind == "oci-archive" and not path.is_file():
        raise InvalidInput(f"there is no file {path}")
    if kind == "oci-archive" and not tag:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        if kind == "oci-archive":
            _unpack(path, Path(folder, "layout"))
        layout = Path(folder, "layout") if kind == "oci-archive" else path
        _write(layout, f"{kind}:{path}", tag, Path(folder, "one.tar"))
        yield Path(folder, "one.tar")


def _unpack(archive: Path, into: Path) -> None:
    """Unpack the plain files of an archive."""
    try:
        with tarfile.open(archive) as tar:
            for entry in tar:
                inside = entry.isreg() and not {"..", ""} & set(entry.name.split("/"))
                data = tar.extractfile(entry) if inside else None
                if data is None:
                    continue
                at = into / entry.name
                at.parent.mkdir(parents=True, exist_ok=True)
                with at.open("wb") as out:
                    while chunk := data.read(1 << 20):
                        out.write(chunk)
    except (tarfile.TarError, OSError) as e:
        raise InvalidInput(f"{archive} cannot be read as an archive: {e}") from e


def _write(layout: Path, name: str, tag: str, archive: Path) -> None:
    index = _read(layout / "index.json", name)
    listed = index.get("manifests")
    listed = [m for m in listed if isinstance(m, dict)] if isinstance(listed, list) else []
    tags = {found: m for m in listed if (found := _tag_of(m))}
    if tag and tag not in tags:
        known = ", ".join(sorted(tags)[:10]) or "none"
        raise InvalidInput(f"{name} has no image with the tag {tag!r}", hint=f"tags: {known}")
    if not tag and len(tags) > 1:
        raise InvalidInput(
            f"{name} holds {len(tags)} images with tags",
            hint=f"name one: {name}:TAG, of {', '.join(sorted(tags)[:10])}",
        )
    with tarfile.open(archive, "w") as tar:
        paths = sorted(layout.rglob("*"))
        if tag:
            kept = tags[tag]
            chosen = archive.with_name("index.json")
            document = {k: v for k, v in index.items() if k != "manifests"} | {"manifests": [kept]}
            chosen.write_text(json.dumps(document))
            _add(tar, chosen, "index.json")
            wanted = {layout / "oci-layout"}
            _add_blobs(layout, kept, wanted)
            paths = [path for path in paths if path in wanted]
        for path in paths:
            if path.is_file():
                _add(tar, path, str(path.relative_to(layout)))


def _tag_of(manifest: dict[str, Any]) -> str:
    annotations = manifest.get("annotations")
    return str(annotations.get(TAG) or "") if isinstance(annotations, dict) else ""


def _add_blobs(layout: Path, descriptor: dict[str, Any], wanted: set[Path]) -> None:
    """Add the blobs of an image, or of all images of an index; an index may contain itself."""
    algorithm, _, digits = str(descriptor.get("digest", "")).partition(":")
    path = layout / "blobs" / algorithm / digits
    if not digits.isalnum() or not algorithm.isalnum() or not path.is_file():
        return  # the agent reports the missing blob
    if path in wanted:
        return
    wanted.add(path)
    kind = str(descriptor.get("mediaType", ""))
    if "manifest" in kind or "index" in kind:
        document: dict[str, Any] = {}
        with suppress(InvalidInput):
            document = _read(path, str(path))
        for field in ("config", "layers", "manifests"):
            found = document.get(field)
            for inner in found if isinstance(found, list) else [found]:
                if isinstance(inner, dict):
                    _add_blobs(layout, inner, wanted)


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        if path.stat().st_size > _DOCUMENT_MAX_BYTES:
            raise ValueError("it is too large")
        document = json.loads(path.read_bytes())
    except FileNotFoundError as e:
        raise InvalidInput(f"{name} is not an OCI layout: it has no {path.name}") from e
    except (OSError, ValueError, RecursionError) as e:
        raise InvalidInput(f"{path.name} of {name} cannot be read: {e}") from e
    if not isinstance(document, dict):
        raise InvalidInput(f"{path.name} of {name} is not a JSON object")
    return document


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    entry = tar.gettarinfo(path, name)
    entry.type, entry.mode = tarfile.REGTYPE, 0o644
    entry.size = path.stat().st_size
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    with path.open("rb") as data:
        tar.addfile(entry, data)


def digest_of_file(path: Path) -> str:
    """Return the digest of a file."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
