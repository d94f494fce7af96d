"""The demo application: nginx and what it needs as a tar, in versions good, bad and slow."""

from pathlib import Path

from vm_lab.cache import Say, is_cached, keep_newest, locked_cache, recipe_key
from vm_lab.errors import LabError
from vm_lab.image.recipe import RECIPE, run_recipe

VERSIONS = ("v1", "v2")
BAD_VERSIONS = ("v3", "v4")
"""One that answers slowly, and one that answers half of the requests with errors."""
LIMITED_VERSION = "v5"
"""One that answers two requests in a second; others wait for their turn, up to 1,000 of them."""
ALL_VERSIONS = (*VERSIONS, *BAD_VERSIONS, LIMITED_VERSION)
FILES = ("app.sh", "app-start.sh", "app-nginx.conf")


def build_app(version: str, say: Say) -> Path:
    """Return the tar of the application's root file system.

    The same recipe and the same Debian packages make the same bytes. Its entry point is
    `/usr/bin/start`; it listens on $PORT and answers / and /healthz.
    """
    if version not in ALL_VERSIONS:
        raise LabError(
            f"no version {version!r} of the demo", hint=f"have: {' '.join(ALL_VERSIONS)}"
        )
    key = recipe_key([RECIPE / name for name in FILES], version)
    with locked_cache(say) as cache:
        tar = cache / f"demo-{version}-{key}.tar"
        if not is_cached(tar):
            say(f"image: building the demo application {version}")
            run_recipe("app.sh", tar, RECIPE, version, say=say)
        keep_newest(cache, f"demo-{version}-*")
        return tar
