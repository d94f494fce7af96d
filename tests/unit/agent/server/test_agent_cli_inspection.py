"""`twine-agent logs --previous | show --unit | config show --origin` show where data come from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import IMAGE, FakeHost, unit

from agent.config import load_with_origins
from agent.machine.fake_programs import ends_with
from wire.errors import ConfigError

Run = Callable[..., tuple[int, str, str]]


def _called(host: FakeHost, program: str) -> tuple[str, ...]:
    """Return the last call of a program."""
    return next(call for call in reversed(host.fake.processes.calls) if call[0] == program)


@pytest.mark.behaviour("AG10")
def test_the_output_of_the_previous_run_is_found(host: FakeHost, run: Run) -> None:
    """After a restart `--previous` shows the run that ended, not the current one."""
    run("run", "web", f"--image={IMAGE}", "--", "/bin/server", host=host)
    first = host.fake.systemd.find(unit("web"))
    none_yet = run("logs", "web", "--previous", host=host)
    run("restart", "web", host=host)
    code, out, _ = run("logs", "web", "--previous", host=host)
    arguments = _called(host, "journalctl")
    again = host.fake.systemd.find(unit("web"))

    assert first is not None
    assert again is not None
    assert none_yet[0] == 3
    assert "no earlier run" in none_yet[2]
    assert (code, out) == (0, "one\nt\x1bwo\n")
    own, about_drops = arguments[: arguments.index("+")], arguments[arguments.index("+") + 1 :]
    assert own[-2:] == (
        "_SYSTEMD_UNIT=twine-task-web.service",
        f"_SYSTEMD_INVOCATION_ID={first.invocation_id}",
    )
    assert about_drops[-1] == f"OBJECT_SYSTEMD_INVOCATION_ID={first.invocation_id}"
    assert first.invocation_id != again.invocation_id


def test_a_deleted_task_is_reported_with_how_to_read_its_logs(host: FakeHost, run: Run) -> None:
    code, _, err = run("logs", "web", "--previous", host=host)

    assert code == 3
    assert "logs without --previous shows the output that the journal still has" in err


def test_the_previous_run_of_an_ended_task_is_its_last_run(host: FakeHost, run: Run) -> None:
    host.fake.systemd.programs["once"] = ends_with(7)
    run("run", "job", f"--image={IMAGE}", "--restart=never", "--", "once", host=host)
    code, _, _ = run("logs", "job", "--previous", host=host)
    arguments = _called(host, "journalctl")

    assert code == 0
    own = arguments[: arguments.index("+")]
    assert own[-1].startswith("_SYSTEMD_INVOCATION_ID=")


def test_a_run_that_ended_cannot_be_followed(host: FakeHost, run: Run) -> None:
    code, _, err = run("logs", "web", "-f", "--previous", host=host)
    assert code == 64 or code == 5
    assert "exclude each other" in err


@pytest.mark.behaviour("AG8")
def test_logs_are_kept_apart_by_entitlement(host: FakeHost, run: Run) -> None:
    """A task writes into its entitlement's journal; a deleted task is searched in all journals."""
    run("run", "web", f"--image={IMAGE}", "--entitlement=shop", "--", "/bin/server", host=host)
    properties = host.fake.systemd.properties(unit("web"))
    run("logs", "web", host=host)
    here = _called(host, "journalctl")
    run("stop", "web", host=host)
    run("logs", "web", host=host)
    gone = _called(host, "journalctl")

    assert properties["LogNamespace"] == "twine-shop"
    assert "--namespace=+twine-shop" in here
    assert "--namespace=*" in gone


def test_the_exact_unit_is_shown_next_to_systemds(host: FakeHost, run: Run) -> None:
    run("run", "web", f"--image={IMAGE}", "--memory=48MiB", "--", "/bin/server", host=host)
    host.fake.processes.answers[("systemctl", "show")] = [
        b"LoadState=loaded\n",
        b"MemoryMax=50331648\n",
        b"NoNewPrivileges=yes\n",
    ]
    code, out, _ = run("show", "web", "--unit", "-o", "json", host=host)
    table = run("show", "web", "--unit", host=host)[1]

    shown = json.loads(out)
    found = {p["name"]: (p["wanted"], p["in_force"]) for p in shown["properties"]}
    properties = host.fake.systemd.properties(unit("web"))
    assert code == 0
    assert shown["unit"] == unit("web")
    assert set(found) == set(properties)
    assert found["MemoryMax"] == ("50331648", "50331648")
    assert found["NoNewPrivileges"] == ("true", "yes")
    assert "MemoryMax" in table


def test_each_field_of_the_configuration_names_its_file(tmp_path: Path, run: Run) -> None:
    """The files of `agent.toml.d` replace fields in the order of their names."""
    drop_ins = tmp_path / "agent.toml.d"
    drop_ins.mkdir()
    (drop_ins / "20-late.toml").write_text('log_level = "error"\n')
    (drop_ins / "10-early.toml").write_text('log_level = "debug"\nimage_keep_s = "2h"\n')
    (drop_ins / "ignored.txt").write_text("no toml")
    _, out, _ = run("config", "show", "--origin", "-o", "json")
    table = run("config", "show", "--origin")[1]
    plain = json.loads(run("config")[1])

    found = json.loads(out)
    assert found["log_level"] == {"value": "error", "origin": str(drop_ins / "20-late.toml")}
    assert found["image_keep_s"] == {"value": 7200.0, "origin": str(drop_ins / "10-early.toml")}
    assert found["socket"]["origin"] == str(tmp_path / "agent.toml")
    assert found["state_dir"]["origin"] == "default"
    assert plain["log_level"] == "error"
    assert table.splitlines()[0].split() == ["FIELD", "VALUE", "ORIGIN"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('log_level = "loud"\n', "log_level"),
        ("nonsense = 1\n", "nonsense"),
        ("= 1\n", "is not TOML"),
        pytest.param(
            "a." * 40 + "b = 1\n", "nested deeper", marks=pytest.mark.behaviour("BUG-AG97")
        ),
    ],
)
def test_an_error_in_a_drop_in_is_reported_with_its_file(
    tmp_path: Path, text: str, expected: str
) -> None:
    config = tmp_path / "agent.toml"
    config.write_text("")
    wrong = tmp_path / "agent.toml.d" / "50-wrong.toml"
    wrong.parent.mkdir()
    wrong.write_text(text)
    with pytest.raises(ConfigError, match=r"50-wrong\.toml") as caught:
        load_with_origins(config)
    assert expected in str(caught.value)
