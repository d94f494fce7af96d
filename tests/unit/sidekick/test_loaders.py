"""sidekick adds its own boot entry, tries it once, and survives a crash at every step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_host import CUSTOM, GRUBENV, ROOT_LINE, Crash, FakeHost, a_target

from sidekick.loaders import find_loader
from sidekick.loaders.grub import MENU
from sidekick.record import Target
from sidekick.report import ProfileState
from sidekick.status import verify
from wire.errors import Unprocessable

THP = "transparent_hugepage=always"
LINE = f"{ROOT_LINE} {THP} panic=30"
Make = Callable[[FakeHost], FakeHost]

LOADERS: dict[str, Make] = {
    "grub": FakeHost.with_grub,
    "systemd-boot": FakeHost.with_systemd_boot,
    "direct": lambda fake: fake,
}
every_loader = pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
real_loader = pytest.mark.parametrize("make", [*LOADERS.values()][:2], ids=[*LOADERS][:2])


def batch(fake: FakeHost, generation: int = 1) -> Target:
    return a_target(fake, "batch", generation, sysctl={"vm.swappiness": 70}, cmdline=(THP,))


def without_kexec(fake: FakeHost) -> FakeHost:
    fake.drop("/usr/sbin/kexec")
    return fake


def test_a_host_is_known_by_its_files(tmp_path: Path) -> None:
    names = [find_loader(make(FakeHost(tmp_path / n)).host()).name for n, make in LOADERS.items()]
    assert names == ["GRUB", "systemd-boot", "none"]
    old = FakeHost(tmp_path / "old").with_grub()
    old.put("/boot/grub/grub.cfg", "menuentry 'x' {\n linux /vmlinuz root=x\n}")
    assert find_loader(old.host()).name == "none", "this menu does not read custom.cfg"


@pytest.mark.behaviour("BUG-SK48")
def test_the_newest_entry_counts_where_the_running_kernel_has_none(fake: FakeHost) -> None:
    """As text 6.9 sorts after 6.10."""
    fake.with_systemd_boot()
    fake.drop("/boot/efi/loader/entries/debian.conf")
    for version in ("6.9.12-1", "6.10.3-2", "6.10.3-10", "6.2.0-rc1"):
        text = f"title x\nversion {version}\nlinux /vmlinuz-{version}\noptions root={version}\n"
        fake.put(f"/boot/efi/loader/entries/{version}.conf", text)
    assert find_loader(fake.host()).own_line(fake.host()) == "root=6.10.3-10"


ENTRIES = "/boot/efi/loader/entries"


def two_of_one_version(fake: FakeHost) -> None:
    """Put a second entry of the running kernel before the host's entry."""
    text = fake.fs.read(f"{ENTRIES}/debian.conf").replace("options ", "options rescue ")
    fake.put(f"{ENTRIES}/a-rescue.conf", text)


@pytest.mark.behaviour("BUG-SK80")
@pytest.mark.parametrize("selected", ["debian.conf", "Debian.conf"])
def test_of_entries_of_one_version_the_one_that_booted_counts(
    fake: FakeHost, selected: str
) -> None:
    """Formerly it was the first one by file name, such as a rescue entry."""
    fake.with_systemd_boot()
    own = find_loader(fake.host()).own_line(fake.host())
    two_of_one_version(fake)
    fake.processes.variable("LoaderEntrySelected", selected)
    assert find_loader(fake.host()).own_line(fake.host()) == own
    fake.apply(batch(fake))
    assert "rescue" not in fake.fs.read(f"{ENTRIES}/twine.conf")
    fake.processes.variable("LoaderEntrySelected", "twine.conf")
    assert find_loader(fake.host()).own_line(fake.host()) == own, "ours is a copy of that entry"
    assert verify(fake.host(), fake.state).state is ProfileState.PENDING_REBOOT


@pytest.mark.behaviour("BUG-SK80")
def test_an_entry_that_counts_its_attempts_is_known_by_its_identifier(fake: FakeHost) -> None:
    fake.with_systemd_boot()
    two_of_one_version(fake)
    own = find_loader(fake.host()).own_line(fake.host()) or ""
    fake.put(f"{ENTRIES}/debian+2-1.conf", fake.fs.read(f"{ENTRIES}/debian.conf"))
    fake.drop(f"{ENTRIES}/debian.conf")
    fake.processes.variable("LoaderEntrySelected", "debian.conf")
    assert find_loader(fake.host()).own_line(fake.host()) == own.replace("rescue ", "")


@pytest.mark.behaviour("BUG-SK81")
def test_systemd_boot_entries_may_be_indented_and_quoted(fake: FakeHost) -> None:
    """Formerly an indented key was not read, so that the entry or its line was missing."""
    fake.with_systemd_boot()
    own = find_loader(fake.host()).own_line(fake.host())
    lines = fake.fs.read(f"{ENTRIES}/debian.conf").splitlines()
    text = "".join(f"  {line}\n" for line in lines).replace(f"{own}", f'"{own}"')
    fake.put(f"{ENTRIES}/debian.conf", f"\t# options old\n{text}")
    assert find_loader(fake.host()).own_line(fake.host()) == own
    fake.apply(batch(fake))
    assert fake.fs.read(f"{ENTRIES}/twine.conf").count("options ") == 1
    assert verify(fake.host(), fake.state).state is ProfileState.PENDING_REBOOT


@pytest.mark.behaviour("BUG-SK82")
def test_a_line_of_grub_may_continue_on_the_next_one(fake: FakeHost) -> None:
    """Formerly the backslash became the last argument, and the rest was lost."""
    fake.with_grub()
    own = find_loader(fake.host()).own_line(fake.host())
    menu = fake.fs.read(MENU)
    fake.put(MENU, menu.replace(" ro", " \\\n\t\tro", 1))
    assert fake.fs.read(MENU) != menu
    assert find_loader(fake.host()).own_line(fake.host()) == own
    fake.apply(batch(fake))
    assert "\\" not in fake.fs.read(CUSTOM)
    assert verify(fake.host(), fake.state).state is ProfileState.PENDING_REBOOT


@pytest.mark.behaviour("F-69")
@real_loader
def test_an_entry_is_tried_once_and_kept_only_after_a_healthy_boot(
    fake: FakeHost, make: Make
) -> None:
    without_kexec(make(fake))
    untouched = fake.everything()
    fake.apply(batch(fake), may_reboot=True)
    assert fake.processes.ran[-1] == ["systemctl", "reboot"]
    fake.power_cycle()
    assert fake.cmdline == LINE
    assert fake.resume().state is ProfileState.VERIFIED
    fake.power_cycle()
    assert fake.cmdline == LINE, "seen to be healthy, so it is the default"
    fake.resume()
    fake.apply(Target(), may_reboot=True)
    fake.power_cycle()
    assert fake.cmdline == ROOT_LINE
    assert fake.resume().state is ProfileState.NONE
    assert fake.everything() == untouched


@pytest.mark.behaviour("F-69")
@real_loader
def test_a_boot_that_fails_is_followed_by_the_hosts_own_line(fake: FakeHost, make: Make) -> None:
    without_kexec(make(fake))
    fake.apply(batch(fake), may_reboot=True)
    assert fake.next_line() == LINE, "this one panics before anything of ours runs"
    fake.power_cycle()
    assert fake.cmdline == ROOT_LINE
    report = fake.resume()
    assert report.state is ProfileState.DEGRADED
    assert "came back without" in report.detail
    fake.processes.ran.clear()
    fake.apply(batch(fake), may_reboot=True)
    assert ["systemctl", "reboot"] not in fake.processes.ran
    fake.power_cycle()
    assert fake.cmdline == ROOT_LINE, "an entry that failed is no default"


@real_loader
def test_an_unplanned_reboot_uses_the_hosts_own_line(fake: FakeHost, make: Make) -> None:
    make(fake)
    fake.apply(batch(fake))
    fake.power_cycle()
    assert fake.cmdline == ROOT_LINE
    assert fake.resume().state is ProfileState.PENDING_REBOOT


@pytest.mark.behaviour("F-69")
def test_grub_does_not_try_an_entry_once_if_it_cannot_record_the_try(
    fake: FakeHost,
) -> None:
    without_kexec(fake.with_grub("btrfs"))
    with pytest.raises(Unprocessable, match="cannot record on btrfs"):
        fake.apply(batch(fake), may_reboot=True)
    assert fake.processes.ran == []


@pytest.mark.behaviour("BUG-SK60")
@pytest.mark.parametrize(
    ("files", "layer"),
    [
        ({"dev/block/254:1/dm/uuid": "LVM-abc"}, "LVM"),
        ({"dev/block/254:1/md/level": "raid1"}, "a software RAID"),
        ({"dev/block/254:1/slaves/dm-0/x": "", "class/block/dm-0/dm/uuid": "LVM-abc"}, "LVM"),
    ],
    ids=["lvm", "raid", "crypt on lvm"],
)
def test_grub_cannot_record_a_try_on_lvm_or_a_raid(
    fake: FakeHost, files: dict[str, str], layer: str
) -> None:
    """Formerly a host with / on LVM booted an entry that panics again and again."""
    without_kexec(fake.with_grub())
    for path, text in files.items():
        fake.put(f"/sys/{path}", text)
    with pytest.raises(Unprocessable, match=f"GRUB cannot record on {layer} that"):
        fake.apply(batch(fake), may_reboot=True)
    assert fake.processes.ran == []


@pytest.mark.behaviour("BUG-SK61")
@pytest.mark.parametrize("access", ["--unrestricted", "--users=op", "--users op"])
def test_our_entry_needs_no_password_where_the_hosts_entry_needs_none(
    fake: FakeHost, access: str
) -> None:
    """Formerly a host with GRUB's `superusers` waited for a password at its next boot."""
    fake.with_grub()
    menu = fake.fs.read(MENU).replace("--class debian", f"--class debian {access}", 1)
    fake.put(MENU, menu)
    fake.apply(batch(fake))
    assert f"--id twine {access} {{" in fake.fs.read(CUSTOM)
    assert verify(fake.host(), fake.state).state is ProfileState.PENDING_REBOOT


@pytest.mark.behaviour("BUG-SK62")
def test_our_entry_keeps_all_initial_ram_disks(fake: FakeHost) -> None:
    """Formerly only the first was kept, which is the microcode: no root file system was found."""
    fake.with_grub()
    menu = fake.fs.read(MENU).replace("initrd\t", "initrd\t/boot/intel-uc.img ", 1)
    fake.put(MENU, menu)
    fake.apply(batch(fake))
    assert "\tinitrd\t/boot/intel-uc.img /boot/initrd.img-6.12.0" in fake.fs.read(CUSTOM)
    assert verify(fake.host(), fake.state).state is ProfileState.PENDING_REBOOT


OLDER = """submenu 'Advanced options' $menuentry_id_option 'advanced-1' {
	menuentry 'Debian, with Linux 6.1' --class debian $menuentry_id_option 'gnulinux-6.1' {
		insmod ext2
		linux	/boot/vmlinuz-6.1 root=/dev/vda1 ro older
		initrd	/boot/initrd.img-6.1
	}
}
"""


@pytest.mark.behaviour("BUG-SK67")
@pytest.mark.parametrize(
    "default",
    ["1>0", "advanced-1>gnulinux-6.1", "Advanced options>Debian, with Linux 6.1", "saved"],
)
def test_our_entry_is_a_copy_of_the_default_not_of_the_first(fake: FakeHost, default: str) -> None:
    """Formerly a profile booted the newest kernel of a host that was pinned to an older one."""
    fake.with_grub()
    if default == "saved":
        default = "${saved_entry}"
        fake.put(GRUBENV, "# GRUB Environment Block\nsaved_entry=advanced-1>gnulinux-6.1\n####")
    menu = fake.fs.read(MENU).replace('"0"', f'"{default}"', 1)
    fake.put(MENU, menu.replace("### BEGIN /etc", f"{OLDER}### BEGIN /etc"))
    fake.apply(batch(fake))
    text = fake.fs.read(CUSTOM)
    assert f"linux\t/boot/vmlinuz-6.1 root=/dev/vda1 ro older {THP} panic=30\n" in text
    assert "\tinitrd\t/boot/initrd.img-6.1\n" in text
    assert verify(fake.host(), fake.state).state is ProfileState.PENDING_REBOOT


@pytest.mark.parametrize("default", ["7", "1", "gone>gnulinux-6.1", "", "${saved_entry}"])
def test_a_default_that_does_not_exist_is_the_first(fake: FakeHost, default: str) -> None:
    fake.with_grub()
    menu = fake.fs.read(MENU).replace('"0"', f'"{default}"', 1)
    fake.put(MENU, menu.replace("### BEGIN /etc", f"{OLDER}### BEGIN /etc"))
    assert find_loader(fake.host()).own_line(fake.host()) == ROOT_LINE


def test_other_lines_of_the_file_stay(fake: FakeHost) -> None:
    fake.with_grub()
    mine = "menuentry 'mine' {\n\tlinux /x\n}\n\n# end"
    fake.fs.path(CUSTOM).write_text(mine + "\n")
    fake.apply(batch(fake))
    text = fake.fs.path(CUSTOM).read_text()
    assert text.startswith(mine)
    assert f"linux\t/boot/vmlinuz-6.12.0-cloud-amd64 {LINE}\n" in text
    assert "search --no-floppy --fs-uuid --set=root 1234" in text
    fake.apply(Target())
    assert fake.fs.path(CUSTOM).read_text() == mine + "\n"


def test_an_entry_that_is_missing_damaged_or_outdated_is_drift(fake: FakeHost) -> None:
    fake.with_grub()
    fake.apply(batch(fake))
    fake.boot(LINE)
    assert fake.resume().state is ProfileState.VERIFIED
    whole = fake.fs.read(CUSTOM)
    for text in ("", whole[:200], whole.replace("ext2", "xfs")):
        fake.fs.path(CUSTOM).write_text(text)
        assert verify(fake.host(), fake.state).state is ProfileState.DRIFTED
        fake.apply(batch(fake))
        entry = whole.partition("menuentry")[2]
        assert fake.fs.read(CUSTOM).partition("menuentry")[2] == entry
    menu = fake.fs.path("/boot/grub/grub.cfg")
    menu.write_text(menu.read_text().replace("6.12.0-", "6.13.0-"))
    assert verify(fake.host(), fake.state).state is ProfileState.DRIFTED
    fake.apply(batch(fake))
    assert "vmlinuz-6.13.0-" in fake.fs.read(CUSTOM)


@pytest.mark.behaviour("BUG-SK2", "F-65", "HP12")
@every_loader
def test_a_crash_at_any_point_of_staging_loses_nothing(tmp_path: Path, make: Make) -> None:
    whole = make(FakeHost(tmp_path / "whole"))
    whole.apply(batch(whole))
    points = whole.points.passed
    assert points > 15
    for point in range(1, points + 1):
        fake = make(FakeHost(tmp_path / f"{point}"))
        untouched = fake.everything()
        fake.points.at = point
        with pytest.raises(Crash):
            fake.apply(batch(fake))
        fake.points.at = None
        if point % 2:
            fake.apply(batch(fake))
            assert fake.everything() == whole.everything(), f"at point {point}"
        fake.apply(Target())
        assert fake.everything() == untouched, f"at point {point}"
        assert fake.state.load().boot == ()


@pytest.mark.behaviour("BUG-SK2", "F-65", "F-69", "HP12")
@every_loader
def test_a_crash_at_any_point_of_a_reboot_or_of_its_rollback_loses_nothing(
    tmp_path: Path, make: Make
) -> None:
    """Covers the life of a line: staged, armed, booted, made the default, released, removed."""

    def boot(fake: FakeHost) -> None:
        kexec = next((a for a in fake.processes.ran if a[0] == "kexec"), None)
        line = kexec[3].removeprefix("--command-line=") if kexec else fake.next_line()
        fake.processes.ran.clear()
        fake.boot(line)

    def life(fake: FakeHost) -> None:
        fake.apply(batch(fake), may_reboot=True)
        boot(fake)
        fake.resume()
        fake.apply(Target(), may_reboot=True)
        boot(fake)
        fake.resume()

    whole = make(FakeHost(tmp_path / "whole"))
    life(whole)
    untouched = whole.everything()
    for point in range(1, whole.points.passed + 1):
        fake = make(FakeHost(tmp_path / f"{point}"))
        fake.points.at = point
        with pytest.raises(Crash):
            life(fake)
        fake.points.at = None
        fake.processes.ran.clear()
        fake.power_cycle()
        fake.resume()
        assert fake.cmdline in (LINE, ROOT_LINE)
        fake.apply(Target(), may_reboot=True)
        boot(fake)
        report = fake.resume()
        assert report.state is ProfileState.NONE, f"at point {point}: {report.detail}"
        assert fake.cmdline == ROOT_LINE, f"at point {point}"
        assert fake.everything() == untouched, f"at point {point}"
        assert fake.state.load().boot == ()


def test_a_release_takes_an_armed_entry_back(fake: FakeHost) -> None:
    without_kexec(fake.with_grub())
    fake.apply(batch(fake), may_reboot=True)
    assert "next_entry=twine" in fake.fs.read(GRUBENV)
    fake.apply(Target())
    assert "next_entry" not in fake.fs.read(GRUBENV)
    assert not fake.fs.exists(CUSTOM)


@pytest.mark.behaviour("BUG-SK41")
@pytest.mark.parametrize(
    "theirs",
    [
        b"",
        b"menuentry 'Mine' {\n}\n",
        b"set timeout=1",
        b"# caf\xe9 in Latin-1\r\nset x=1\n\n\n",
        None,
    ],
)
def test_other_text_in_custom_cfg_stays_unchanged_to_the_byte(
    fake: FakeHost, theirs: bytes | None
) -> None:
    """This covers the last newline, the encoding, the mode, and whether the file existed."""
    fake.with_grub()
    path = fake.fs.path(CUSTOM)
    if theirs is not None:
        path.write_bytes(theirs)
        path.chmod(0o640)
    for target in (batch(fake), a_target(fake, "other", cmdline=("nosmt",))):
        fake.apply(target)
        assert path.read_bytes().startswith(theirs or b"###")
        assert path.read_bytes().count(b"### BEGIN twine") == 1
    fake.apply(Target())
    assert (path.read_bytes() if path.exists() else None) == theirs
    assert theirs is None or path.stat().st_mode & 0o777 == 0o640


@pytest.mark.behaviour("BUG-SK41")
def test_text_added_after_our_block_stays_in_its_place(fake: FakeHost) -> None:
    """Our block is replaced at its place, and removed from there."""
    fake.with_grub()
    path = fake.fs.path(CUSTOM)
    path.write_bytes(b"set a=1")
    fake.apply(batch(fake))
    with path.open("ab") as file:
        file.write(b"set b=2")
    fake.apply(a_target(fake, "other", cmdline=("nosmt",)))
    assert path.read_bytes().endswith(b"### END twine\nset b=2")
    fake.apply(Target())
    assert path.read_bytes() == b"set a=1\nset b=2"


@pytest.mark.behaviour("BUG-SK41")
@pytest.mark.parametrize("content", [b"set a=1\n", None])
def test_a_link_to_custom_cfg_stays_one(fake: FakeHost, content: bytes | None) -> None:
    """The link's target kept the old content, and a copy replaced the link."""
    fake.with_grub()
    link, real = fake.fs.path(CUSTOM), fake.fs.path("/boot/real.cfg")
    link.symlink_to("../real.cfg")
    if content is not None:
        real.write_bytes(content)
    fake.apply(batch(fake))
    assert link.is_symlink()
    assert b"### BEGIN twine" in real.read_bytes()
    fake.apply(Target())
    assert link.is_symlink()
    assert (real.read_bytes() if real.exists() else None) == content


def test_a_block_of_an_earlier_release_is_removed_without_a_trace(fake: FakeHost) -> None:
    fake.with_grub()
    fake.apply(batch(fake))
    path = fake.fs.path(CUSTOM)
    path.write_text("".join(x for x in path.read_text().splitlines(True) if "before:" not in x))
    fake.apply(batch(fake))
    assert "before:" not in path.read_text()
    fake.apply(Target())
    assert not path.exists()
