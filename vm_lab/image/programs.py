"""Images of well-known servers from Debian's archive, with their own clients.

Each listens on $PORT and stores its data in /data, or in /tmp if nothing is mounted at /data.
The image also has podman, with what it needs to run containers in its own network, and
systemd-oomd, which a test installs on a host.
"""

from dataclasses import dataclass
from pathlib import Path

from vm_lab.cache import Say, is_cached, keep_newest, locked_cache, recipe_key
from vm_lab.errors import LabError
from vm_lab.image.recipe import RECIPE, run_program_recipe


@dataclass(frozen=True, slots=True)
class GuestProgram:
    """The files from Debian packages, and the script that starts the program."""

    packages: tuple[str, ...]
    paths: tuple[str, ...]
    start: str


PROGRAMS = {
    "redis": GuestProgram(
        ("redis-server", "redis-tools"),
        # one of the first two is a link to the other, which checks the name of its call
        ("/usr/bin/redis-check-rdb", "/usr/bin/redis-server", "/usr/bin/redis-cli"),
        'exec redis-server --port "$PORT" --bind "*" --dir "$DATA" --protected-mode no\n',
    ),
    "memcached": GuestProgram(
        ("memcached",),
        ("/usr/bin/memcached",),
        'exec memcached -l 0.0.0.0 -p "$PORT" -m 16 -U 0 -v\n',
    ),
    "haproxy": GuestProgram(
        ("haproxy",),
        ("/usr/sbin/haproxy",),
        "cat > /tmp/haproxy.cfg <<END\n"
        "defaults\n  mode http\n  timeout connect 15s\n  timeout client 60s\n"
        "  timeout server 60s\n"
        "frontend here\n  bind *:$PORT\n  http-request return status 200 content-type text/plain"
        ' string "haproxy of $TWINE_TASK"\n'
        "END\nexec haproxy -db -f /tmp/haproxy.cfg\n",
    ),
    "etcd": GuestProgram(
        ("etcd-server", "etcd-client"),
        ("/usr/bin/etcd", "/usr/bin/etcdctl"),
        'exec etcd --name "$TWINE_TASK" --data-dir "$DATA/member" "$@"\n',
    ),
    "postgresql": GuestProgram(
        ("postgresql-17", "postgresql-client-17", "libnss-wrapper"),
        (
            *(f"/usr/lib/postgresql/17/bin/{name}" for name in ("initdb", "postgres", "psql")),
            *(f"/usr/lib/postgresql/17/lib/{name}.so" for name in ("dict_snowball", "plpgsql")),
            "/usr/share/postgresql/17",
            "/usr/share/zoneinfo/UTC",
            "/usr/lib/x86_64-linux-gnu/libnss_wrapper.so",
        ),
        # It needs a name for its user id; the image has none, because the id belongs to the task.
        'echo "postgres:x:$(id -u):$(id -g)::/tmp:/bin/sh" > /tmp/passwd\n'
        'echo "postgres:x:$(id -g):" > /tmp/group\n'
        "export LD_PRELOAD=libnss_wrapper.so NSS_WRAPPER_PASSWD=/tmp/passwd"
        " NSS_WRAPPER_GROUP=/tmp/group\n"
        "bin=/usr/lib/postgresql/17/bin\ncd /tmp\n"
        '[ -e "$DATA/pg/PG_VERSION" ] ||'
        ' $bin/initdb -D "$DATA/pg" --locale=C --encoding=UTF8 --auth=trust --username=postgres\n'
        'echo "host all all all trust" >> "$DATA/pg/pg_hba.conf"\n'
        'exec $bin/postgres -D "$DATA/pg" -p "$PORT" -c listen_addresses="*"'
        " -c unix_socket_directories= -c shared_buffers=16MB -c fsync=off\n",
    ),
    "podman": GuestProgram(
        (
            *("podman", "crun", "conmon", "netavark"),
            *("golang-github-containers-common", "golang-github-containers-image"),
        ),
        (
            *(f"/usr/bin/{name}" for name in ("podman", "crun", "conmon")),
            *("/usr/lib/podman/netavark", "/usr/share/containers", "/etc/containers"),
        ),
        'exec podman "$@"\n',
    ),
    # Not for a task: the files of systemd-oomd on a Debian host.
    "systemd-oomd": GuestProgram(
        ("systemd-oomd",),
        (
            *("/usr/bin/oomctl", "/usr/lib/systemd/systemd-oomd"),
            *(f"/usr/lib/systemd/system/systemd-oomd.{kind}" for kind in ("service", "socket")),
            *("/usr/lib/systemd/oomd.conf.d", "/usr/lib/sysusers.d/systemd-oom.conf"),
            "/usr/share/dbus-1/system.d/org.freedesktop.oom1.conf",
        ),
        'exec oomctl "$@"\n',
    ),
}
"""Name → how its image is made. The clients are in the same image, and run from it."""
HEAD = """#!/bin/sh
# Starts the server of this image on $PORT.
set -eu
export LC_ALL=C
DATA=${DATA:-/tmp}
"""


def build_program(name: str, say: Say) -> Path:
    """Return the tar of a program's root file system; its entry point is `/usr/bin/start`."""
    if name not in PROGRAMS:
        raise LabError(f"no program {name!r}", hint=f"have: {' '.join(PROGRAMS)}")
    program = PROGRAMS[name]
    recipe = [*program.packages, *program.paths, program.start, HEAD]
    key = recipe_key([RECIPE / "program.sh"], "\n".join(recipe))
    with locked_cache(say) as cache:
        tar = cache / f"program-{name}-{key}.tar"
        if not is_cached(tar):
            say(f"image: building {name} from Debian's packages")
            start = HEAD + program.start
            run_program_recipe(tar, start, program.packages, program.paths, say)
        keep_newest(cache, f"program-{name}-*.tar")
        return tar
