"""The cache of files that are slow to build, named by the hash of their recipe; safe to delete."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

KEPT = 4
Say = Callable[[str], None]


def cache_root() -> Path:
    """Return the folder of built images; if it is deleted, they are built again."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "twine-lab"


def recipe_key(files: Iterable[Path], *extra: str) -> str:
    """Return 12 hex digits that change when a file, its name or an extra string does."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\0".encode())
    for text in extra:
        digest.update(f"{text}\0".encode())
    return digest.hexdigest()[:12]


@contextmanager
def partial_folder(folder: Path) -> Iterator[Path]:
    """Give a folder that takes its final name only when it is complete."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def partial_file(file: Path) -> Iterator[Path]:
    """Give a path for a file that takes its final name only when it is complete."""
    partial = file.with_name(f"{file.name}.partial")
    try:
        yield partial
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def locked_cache(say: Say) -> Iterator[Path]:
    """Return the folder of the cache; one build at a time writes to it."""
    cache = cache_root()
    cache.mkdir(parents=True, exist_ok=True)
    with lock(cache, say):
        yield cache


@contextmanager
def lock(cache: Path, say: Say) -> Iterator[None]:
    """Let one build at a time write to a folder."""
    with (cache / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("image: waiting for another build to finish")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_locked(cache: Path) -> bool:
    """Return whether a build is running."""
    try:
        with (cache / "lock").open("r") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def is_cached(entry: Path) -> bool:
    """Return whether the entry is there, and mark it as used."""
    if not entry.exists():
        return False
    os.utime(entry)
    return True


def keep_newest(cache: Path, pattern: str) -> None:
    """Delete all but the newest few entries that match the pattern."""
    entries = sorted(cache.glob(pattern), key=lambda p: p.stat().st_mtime, reverse=True)
    for old in entries[KEPT:]:
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink()
