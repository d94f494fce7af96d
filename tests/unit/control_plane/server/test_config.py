"""The configuration: defaults, files, options, and all errors at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from control_plane import config
from wire.errors import ConfigError


def test_options_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "cp.toml"
    file.write_text('cluster = "lab"\nlisten = "10.0.0.1:1"\n[scheduler]\ndown_after_s = 5.0\n')
    read = config.load(file, {"listen": "10.0.0.2:2", "state": None, "advertise": ()})
    assert (read.cluster, read.listen, read.scheduler.down_after_s) == ("lab", "10.0.0.2:2", 5.0)
    assert read.state == config.Config().state


def test_all_errors_of_a_file_come_at_once(tmp_path: Path) -> None:
    file = tmp_path / "cp.toml"
    file.write_text('cluster = "L A B"\ncolour = 1\nleaf_life_s = 1\n')
    with pytest.raises(ConfigError) as refusal:
        config.load(file, {})
    assert {e.field for e in refusal.value.errors} == {"cluster", "colour", "leaf_life_s"}
    assert refusal.value.exit_code == 78


@pytest.mark.parametrize("text", [None, "not = [toml"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "cp.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"cp\.toml"):
        config.load(file, {})


@pytest.mark.parametrize("listen", ["", "7440", "host:", "h:99999", "[::1", "a:b:1"])
def test_an_address_to_listen_on_has_host_and_port(listen: str) -> None:
    with pytest.raises(ConfigError):
        config.Config(listen=listen).listen_on()


def test_the_certificate_names_the_first_advertised_name() -> None:
    names = config.Config(listen="[::]:7440", advertise=["cp.example", "10.77.0.1"]).reachable_at()
    assert names[:2] == ["cp.example", "10.77.0.1"]
    assert {"localhost", "127.0.0.1"} < set(names)
    assert config.Config(listen="10.77.0.1:7440").reachable_at()[0] == "10.77.0.1"


def test_a_short_silence_shortens_the_polls() -> None:
    changed = config.with_down_after(config.Config(), "2s").scheduler
    assert changed.down_after_s == 2.0
    assert changed.poll_wait_s < changed.down_after_s
    with pytest.raises(ConfigError):
        config.with_down_after(config.Config(), "0")


@pytest.mark.behaviour("BUG-AG17")
def test_a_file_may_contain_durations_and_sizes_as_text(tmp_path: Path) -> None:
    file = tmp_path / "cp.toml"
    file.write_text(
        'image_max_bytes = "2GiB"\nleaf_life_s = "8h"\n[scheduler]\ndown_after_s = "30s"'
    )
    read = config.load(file, {})
    assert (read.image_max_bytes, read.leaf_life_s) == (2 << 30, 28_800.0)
    assert read.scheduler.down_after_s == 30.0
    file.write_text('image_max_bytes = "2 gigs"')
    with pytest.raises(
        ConfigError, match="image_max_bytes: '2 gigs' is not a size; write bytes or"
    ):
        config.load(file, {})


@pytest.mark.behaviour("AL22")
def test_budgets_of_power_are_named_by_places(tmp_path: Path) -> None:
    file = tmp_path / "cp.toml"
    file.write_text(
        '[scheduler.power]\novercommit = 1.1\n[scheduler.power.budgets_w]\n"dc1/msb1" = 500000\n'
    )
    read = config.load(file, {}).scheduler.power
    assert (read.budgets_w, read.overcommit) == ({"dc1/msb1": 500_000}, 1.1)
    file.write_text('[scheduler.power.budgets_w]\n"dc1//msb1" = 0\n')
    with pytest.raises(ConfigError, match="a data center, or a path below one"):
        config.load(file, {})


def stores(tmp_path: Path, *lines: str) -> config.Config:
    file = tmp_path / "cp.toml"
    text = "\n".join(lines)
    file.write_text(f'state = "{tmp_path}/state"\n[broker_stores]\n{text}\n')
    return config.load(file, {})


@pytest.mark.behaviour("RB9")
def test_a_data_center_may_have_a_separate_store(tmp_path: Path) -> None:
    assert config.load(None, {}).broker_stores == {}
    read = stores(tmp_path, f'dc1 = "{tmp_path}/dc1"', f'dc2 = "{tmp_path}/state/dc2"')
    assert read.broker_stores == {"dc1": f"{tmp_path}/dc1", "dc2": f"{tmp_path}/state/dc2"}


def test_all_that_is_wrong_with_the_folders_of_stores_comes_at_once(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "dc1")
    lines = {
        "dc1": f"{tmp_path}/dc1",
        "again": f"{tmp_path}/x/../dc1/",
        "linked": f"{tmp_path}/link",
        "inside": f"{tmp_path}/dc1/dc2",
        "relative": "dc1",
        "main": f"{tmp_path}/state/store",
        "around": f"{tmp_path}/state",
        "empty": "",
        "NotAName": f"{tmp_path}/dc9",
    }
    with pytest.raises(ConfigError) as refusal:
        stores(tmp_path, *(f'{name} = "{folder}"' for name, folder in lines.items()))
    found: dict[str, str] = {}
    for error in refusal.value.errors:
        found[error.field.removeprefix("broker_stores.")] = error.reason
        assert error.reason in str(refusal.value)
    for name in ("again", "linked", "inside"):
        assert "is the folder of dc1, or one of them lies in the other" in found.pop(name)
    for name in ("main", "around"):
        assert "the folder of the main store" in found.pop(name)
    assert found.pop("relative") == "'dc1' is not an absolute path"
    assert len(found) == 2, found  # the empty folder and the name


def test_a_folder_name_with_a_nul_byte_is_refused_before_any_request(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        stores(tmp_path, 'dc1 = "/a\\u0000b"')


def test_a_process_with_a_role_needs_the_shared_settings(tmp_path: Path) -> None:
    file = tmp_path / "cp.toml"
    file.write_text('role = "shard"\nlisten = "127.0.0.1:0"\n')
    with pytest.raises(ConfigError) as refusal:
        config.load(file, {})
    fields = {"etcd.endpoints", "listen", "shard", "shard_credential"}
    assert {e.field for e in refusal.value.errors} == fields
    file.write_text(
        'role = "shard"\nshard = 2\nshard_credential = "c"\nlisten = "10.0.0.1:7441"\n'
        '[etcd]\nendpoints = ["http://etcd1:2379"]\n'
    )
    assert config.load(file, {}).shard == 2
    assert config.load(file, {"role": "core"}).role == "core"
