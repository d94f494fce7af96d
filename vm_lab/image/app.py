"""The demo application's image: a root file system with nginx, as a tar, in two versions."""

from pathlib import Path

from vm_lab.cache import Say, cache_root, is_cached, keep_newest, lock, recipe_key
from vm_lab.errors import LabError
from vm_lab.image.recipe import RECIPE, run_recipe

VERSIONS = ("v1", "v2")
FILES = ("app.sh", "app-start.sh", "app-nginx.conf")


def build_app(version: str, say: Say) -> Path:
    """Return the tar of the application's root file system.

    The same recipe and the same Debian packages make the same bytes. Its entry point is
    `/usr/bin/start`; it listens on $PORT and answers / and /healthz.
    """
    if version not in VERSIONS:
        raise LabError(f"no version {version!r} of the demo", hint=f"have: {' '.join(VERSIONS)}")
    cache = cache_root()
    cache.mkdir(parents=True, exist_ok=True)
    key = recipe_key([RECIPE / name for name in FILES], version)
    tar = cache / f"demo-{version}-{key}.tar"
    with lock(cache, say):
        if not is_cached(tar):
            say(f"image: building the demo application {version}")
            run_recipe("app.sh", tar, RECIPE, version, say=say)
        keep_newest(cache, f"demo-{version}-*")
    return tar
