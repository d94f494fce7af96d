"""The user that an image requests is resolved by its own lists and passed to the unit."""

from __future__ import annotations

import pytest
from builders import a_spec

from agent.api import ImageUser, Volume
from agent.images.core.image_user import ListedUsers, login, names_user, resolve
from agent.runtime.core.records import user_of
from agent.tasks.core.inside import InsideCommand, inside_properties
from agent.volumes.core.mounts import mount_properties
from wire.errors import Unprocessable

USERS = ListedUsers(
    "etc/passwd",
    b"root:x:0:0:root:/root:/bin/sh\ntoor:x:0:0::/root:/bin/sh\n\n# odd\nhalf:x:9\n"
    b"app:x:1000:1001:The App,,:/home/app:/bin/bash\nagain:x:1000:7:::\n"
    b"www data:x:33:33::relative:/bin/sh\nlate:x:44:x:::\nbig:x:4294967295:1::/:\n",
)
GROUPS = ListedUsers("etc/group", b"root:x:0:\nstaff:x:1001:app\nwheel:x:10:\nbad name:x:33:\n")
APP = ImageUser(
    uid=1000,
    gid=1001,
    name="app",
    home="/home/app",
    shell="/bin/bash",
    group="staff",
    users="etc/passwd",
    groups="etc/group",
)


@pytest.mark.behaviour("AG3")
@pytest.mark.parametrize(
    ("user", "numbers", "names"),
    [
        ("app", (1000, 1001), ("app", "staff")),
        ("app:wheel", (1000, 10), ("app", "wheel")),
        ("app:77", (1000, 77), ("app", "")),
        ("1000", (1000, 1001), ("app", "staff")),
        ("1000:0", (1000, 0), ("app", "root")),
        ("01000", (1000, 1001), ("app", "staff")),
        ("1234", (1234, 0), ("", "root")),
        ("1234:staff", (1234, 1001), ("", "staff")),
        ("2147483647:2147483647", (2147483647, 2147483647), ("", "")),
        ("www data", (33, 33), ("", "")),
        ("late", (44, 0), ("late", "root")),
    ],
)
def test_a_user_is_resolved_by_the_lists_of_the_image(
    user: str, numbers: tuple[int, int], names: tuple[str, str]
) -> None:
    """The user is a name or a number, with or without a group; the first matching line counts."""
    found = resolve(user, USERS, GROUPS)
    assert found
    assert ((found.uid, found.gid), (found.name, found.group)) == (numbers, names)
    assert (found.users != "", found.groups != "") == (names[0] != "", names[1] != "")


@pytest.mark.parametrize("user", ["", "0", "root", "0:1000", "root:staff", "toor", "00"])
def test_root_needs_no_image_user(user: str) -> None:
    assert resolve(user, USERS, GROUPS) is None
    assert names_user(user) is (user in ("toor", "00"))


@pytest.mark.parametrize(
    ("user", "why"),
    [
        ("nobody", "user 'nobody', and its /etc/passwd has no such user"),
        ("app:nobody", "group 'nobody', and its /etc/group has no such group"),
        ("half", "user 'half'"),
        ("big", "user 'big'"),
        ("-1", "user '-1'"),
        ("2147483648", "user 2147483648: the highest number is 2147483647"),
        ("app:99999999999", "group 99999999999: the highest"),
        ("\u0661", "user"),
    ],
)
def test_the_error_for_an_unknown_user_has_a_hint(user: str, why: str) -> None:
    with pytest.raises(Unprocessable, match=why) as raised:
        resolve(user, USERS, GROUPS)
    assert "build it" in (raised.value.hint or "")


def test_an_image_without_lists_takes_numbers_alone() -> None:
    assert resolve("5:6", ListedUsers(), ListedUsers()) == ImageUser(uid=5, gid=6)
    with pytest.raises(Unprocessable, match="which it does not have, has no such user"):
        resolve("app", ListedUsers(), ListedUsers())


def test_a_program_gets_its_user_name_if_the_image_has_one() -> None:
    assert login(resolve("app", USERS, GROUPS)) == {
        "HOME": "/home/app",
        "USER": "app",
        "LOGNAME": "app",
    }
    assert login(resolve("late", USERS, GROUPS))["HOME"] == "/"
    assert login(resolve("1234", USERS, GROUPS)) == login(None) == {}


@pytest.mark.parametrize("home", ["relative", "/a\tb", "/" + "x" * 5000, "/\udc80", ""])
def test_a_home_that_cannot_be_passed_on_is_the_top(home: str) -> None:
    line = f"app:x:1:1::{home}:{home}".encode(errors="surrogateescape")
    found = resolve("app", ListedUsers("etc/passwd", line), ListedUsers())
    assert found
    assert (found.home, found.shell) == ("/", "")


@pytest.mark.behaviour("AG3")
def test_the_root_is_mounted_before_volumes_and_unmounted_after_them() -> None:
    """The user keeps the sandbox."""
    assert resolve("app", USERS, GROUPS) == APP
    spec = a_spec(volumes={"data": Volume(path="/data")})
    found = mount_properties("web", spec, "/state", "/root", APP)

    (command,) = found["ExecStartPre"]  # type: ignore[misc]
    script, _, user, _, root, image, of_root, *words = command[5:]
    assert command[:5] == ["/usr/bin/nsenter", "--target=1", "--mount", "/bin/sh", "-c"]
    assert script.index("--make-private") < script.index("mount -t tmpfs")
    assert (user, root) == (user_of("web"), "/root")
    assert image == f"/state/images/{spec.image.removeprefix('sha256:')}"
    assert of_root == "u:0:0:1 g:0:0:1"
    named = ["etc/passwd", "app", "/home/app", "/bin/bash", "etc/group", "staff", "1000:1001"]
    assert words == [*named, "/state/scratch/web.data", "/data", ""]
    ((*_, at, first, last),) = found["ExecStopPost"]  # type: ignore[misc]
    assert (at, first, last) == ("/root", "/data", "")
    assert not {"DynamicUser", "User", "PrivateUsers", "ProtectSystem", "ProtectHome"} & set(found)
    assert not {"ExecStartPre", "ExecStopPost"} & set(
        inside_properties(
            found | {"Environment": []}, "web", "/x", "u", InsideCommand(("sh",), 1.0)
        )
    )


def test_a_number_is_shown_once_so_the_group_of_root_may_be_the_users() -> None:
    user = ImageUser(uid=7, gid=0)
    found = mount_properties("web", a_spec(), "/state", "/root", user)
    ((*_, of_root, users, _, _, _, groups, _, numbers),) = found["ExecStartPre"]  # type: ignore[misc]
    assert (of_root, users, groups, numbers) == ("u:0:0:1", "", "", "7:0")
    assert "tmpfs" not in found["ExecStartPre"][0][5]  # type: ignore[index]
