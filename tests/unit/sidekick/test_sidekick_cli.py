"""The command line: its output, and the exit code of each result."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
import pytest
from click.shell_completion import ShellComplete
from fake_host import FakeHost

from sidekick import profile_commands
from sidekick.cli import PROGRAM, main
from sidekick.click_commands import COMPLETE, group
from sidekick.context import AGENT_PROFILES, NoProcesses, real_host
from sidekick.history import KEPT
from wire.errors import ProgramError

Run = Callable[..., tuple[int, str, str]]

CLI = group(PROGRAM, profile_commands.COMMANDS, lambda **_: None)

FILES = {
    "base": "description='Base'\n[sysctl]\n'vm.swappiness'=30\n",
    "web": "description='Web'\nextends='base'\n[sysctl]\n'net.core.somaxconn'=6144\n",
    "boot": "description='Boot'\n[kernel]\ncmdline=['nosmt']\n",
    "broken": "description='Broken'\n[sysctl]\n'vm.swappiness'='= host.nope'\n",
    "wrong": "description='Wrong'\ncolour=1\n[sysctl]\n'vm.swappiness'=1.5\n",
    "einval": "description='Einval'\n[sysctl]\n'kernel.panic'=3\n'vm.swappiness'=300\n",
    "lacking": "description='Lacking'\n[sysctl]\n'vm.swappiness'=3\n'vm.nothing'=1\n",
    "greedy": "description='Greedy'\n[hugepages]\npages_2m=500\n",
}


@pytest.fixture
def run(fake: FakeHost, capsys: pytest.CaptureFixture[str]) -> Run:
    profiles = fake.root / "profiles"
    profiles.mkdir()
    for name, text in FILES.items():
        (profiles / f"{name}.toml").write_text(text)

    def run(*argv: str) -> tuple[int, str, str]:
        options = [f"--root={fake.root}", f"--state={fake.state.folder}", f"--profiles={profiles}"]
        code = main([*options, *argv], make_host=lambda root: fake.host(root))
        out, err = capsys.readouterr()
        return code, out, err

    return run


SETUPS: dict[str, Callable[[FakeHost, Run], object]] = {
    "fresh": lambda fake, run: None,
    "web": lambda fake, run: run("apply-profile", "web"),
    "drift": lambda fake, run: (
        run("apply-profile", "web"),
        fake.fs.write("/proc/sys/vm/swappiness", "77"),
    ),
    "repairing": lambda fake, run: (
        run("apply-profile", "web"),
        fake.put("/etc/twine/sidekick.toml", "repair_drift = true"),
        fake.fs.write("/proc/sys/vm/swappiness", "77"),
    ),
    "trial": lambda fake, run: run("try", "web"),
    "pending": lambda fake, run: run("apply-profile", "boot"),
    "failed": lambda fake, run: run("apply-profile", "einval"),
    "no kexec": lambda fake, run: fake.drop("/usr/sbin/kexec"),
    "bad config": lambda fake, run: fake.put("/etc/twine/sidekick.toml", "kexec_kernel = 3"),
    "stuck": lambda fake, run: (
        run("apply-profile", "boot", "--reboot"),
        fake.boot(),
    ),
    "torn": lambda fake, run: (
        run("apply-profile", "web"),
        fake.put("/var/lib/twine/sidekick/state.json", "{"),
    ),
}

CODES = [
    ("fresh", "list", 0),
    ("fresh", "show web", 0),
    ("fresh", "show nope", 3),
    ("fresh", "show broken", 78),
    ("fresh", "show greedy", 5),
    ("fresh", "facts", 0),
    ("fresh", "lint base web", 0),
    ("fresh", "lint", 78),
    ("fresh", "lint nope", 3),
    ("fresh", "explain vm.swappiness --profile web", 0),
    ("fresh", "explain vm.swappiness", 3),
    ("web", "explain sysctl.vm.swappiness", 0),
    ("web", "explain vm.nothing", 3),
    ("fresh", "diff base web", 0),
    ("fresh", "diff base nope", 3),
    ("fresh", "recommend", 0),
    ("fresh", "history", 0),
    ("web", "history -n 1", 0),
    ("fresh", "import-tuned /", 3),
    ("fresh", "import-tuned /nonexistent", 64),
    ("fresh", "completion zsh", 0),
    ("fresh", "completion tcsh", 64),
    ("fresh", "man", 0),
    ("fresh", "plan web", 2),
    ("web", "plan web", 0),
    ("fresh", "plan nope", 3),
    ("fresh", "plan wrong", 78),
    ("fresh", "plan lacking", 2),
    ("fresh", "plan greedy", 5),
    ("torn", "plan web", 1),
    ("fresh", "apply-profile web", 0),
    ("web", "apply-profile web", 0),
    ("fresh", "apply-profile boot", 2),
    ("fresh", "apply-profile boot --reboot", 2),
    ("no kexec", "apply-profile boot --reboot", 5),
    ("bad config", "apply-profile boot --reboot", 78),
    ("stuck", "apply-profile boot --reboot", 1),
    ("fresh", "apply-profile nope", 3),
    ("fresh", "apply-profile nope --generation 3", 3),
    ("fresh", "apply-profile wrong", 78),
    ("fresh", "apply-profile greedy", 5),
    ("fresh", "apply-profile einval", 4),
    ("fresh", "apply-profile lacking", 4),
    ("torn", "apply-profile web", 1),
    ("fresh", "verify", 0),
    ("web", "verify", 0),
    ("drift", "verify", 2),
    ("pending", "verify", 2),
    ("failed", "verify", 2),
    ("fresh", "rollback", 0),
    ("web", "rollback", 0),
    ("fresh", "resume", 0),
    ("web", "resume", 0),
    ("stuck", "resume", 1),
    ("fresh", "verify --timer", 0),
    ("drift", "verify --timer", 2),
    ("repairing", "verify --timer", 0),
    ("fresh", "try web", 0),
    ("fresh", "try web --for 10m", 0),
    ("fresh", "try boot", 5),
    ("fresh", "try einval", 4),
    ("fresh", "try web --for soon", 64),
    ("fresh", "confirm", 5),
    ("trial", "confirm", 0),
    ("fresh", "revert", 0),
    ("trial", "revert", 0),
    ("trial", "revert --due", 0),
    ("fresh", "status", 0),
    ("drift", "status", 0),
    ("failed", "status", 0),
    ("torn", "status", 1),
    ("fresh", "", 64),
    ("fresh", "wash", 64),
    ("fresh", "apply-profile", 64),
    ("fresh", "apply-profile web --generation x", 64),
    ("fresh", "--help", 0),
    ("fresh", "apply-profile --help", 0),
]


@pytest.mark.parametrize(("setup", "command", "code"), CODES)
def test_every_end_has_its_exit_code(
    fake: FakeHost, run: Run, setup: str, command: str, code: int
) -> None:
    SETUPS[setup](fake, run)
    assert run(*command.split())[0] == code


def test_the_table_of_exit_codes_leaves_no_command_out() -> None:
    assert set(CLI.commands) == {c.split()[0] for _, c, code in CODES if c and code < 64} - {
        "--help"
    }


@pytest.mark.behaviour("F-71")
@pytest.mark.parametrize("command", ["apply-profile web", "verify", "rollback", "resume"])
def test_a_busy_host_is_reported_as_busy(fake: FakeHost, run: Run, command: str) -> None:
    host = fake.host()
    with fake.state.lock(0, host.monotonic, host.sleep):
        code, _, err = run(*command.split())
    assert code == 75
    assert "another sidekick is running" in err
    assert run(*command.split(), "--wait-s", "3")[0] == 0


@pytest.mark.parametrize("command", ["apply-profile web", "verify", "rollback", "resume"])
def test_only_root_may_change_this_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main([f"--state={tmp_path}", *command.split()]) == 77


def test_all_errors_of_a_profile_are_printed_with_field_and_reason(run: Run) -> None:
    _, out, err = run("apply-profile", "wrong")
    assert out == ""
    assert "colour: unknown" in err
    assert "sysctl.vm.swappiness: Expected" in err


def test_output_is_plain_in_a_pipe_and_has_columns_on_a_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, piped, _ = run("plan", "web")
    assert "sysctl.net.core.somaxconn\t4096\t6144\tlive\tnone\tweb:4\n" in piped
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    _, shown, _ = run("plan", "web")
    shown = click.unstyle(shown)
    assert shown.splitlines()[0].split() == ["SETTING", "NOW", "WANTED", "HOW", "RISK", "FROM"]
    assert "\t" not in shown
    assert shown.splitlines()[-1] == "web: 2 to change, 0 as wanted"


@pytest.mark.parametrize(
    "command",
    [
        *("list", "show web", "plan web", "facts", "lint", "recommend", "diff base web"),
        *("explain vm.swappiness --profile web", "apply-profile web", "verify"),
        *("rollback", "status"),
    ],
)
def test_every_command_speaks_json(run: Run, command: str) -> None:
    _, out, _ = run(*command.split(), "-o", "json")
    assert json.loads(out)


@pytest.mark.behaviour("HP9")
def test_a_broken_profile_does_not_hide_the_others(run: Run) -> None:
    _, out, _ = run("list")
    lines = [line.split("\t") for line in out.splitlines()]
    assert [line[0] for line in lines] == sorted(FILES)
    assert dict(zip(sorted(FILES), lines, strict=True))["web"] == ["web", "1", "base", "Web"]
    assert "broken: " in dict(zip(sorted(FILES), lines, strict=True))["broken"][3]


def test_a_plan_names_settings_that_need_a_boot_and_missing_ones(run: Run) -> None:
    assert "needs a kexec" in run("plan", "boot")[1]
    assert "sysctl.vm.nothing\t-\t1\tnot possible" in run("plan", "lacking")[1]


def test_generation_and_epoch_come_back_in_the_report(run: Run) -> None:
    _, out, _ = run("apply-profile", "web", "--generation", "5", "--epoch", "2", "-o", "json")
    assert (json.loads(out)["generation"], json.loads(out)["epoch"]) == (5, 2)
    report = json.loads(run("status", "-o", "json")[1])
    assert (report["name"], report["generation"], report["state"]) == ("web", 5, "verified")


def test_the_agent_finds_a_refusal_in_the_status_file(run: Run) -> None:
    run("apply-profile", "web", "--generation", "1")
    run("apply-profile", "wrong", "--generation", "2")
    report = json.loads(run("status", "-o", "json")[1])
    assert (report["name"], report["generation"], report["state"]) == ("wrong", 2, "degraded")
    assert "colour: unknown" in report["detail"]
    assert report["effective"] == "web"
    run("apply-profile", "wbe")
    assert json.loads(run("status", "-o", "json")[1])["name"] == "wrong", (
        "a person's slip is no request"
    )


def test_the_state_of_an_unfinished_record_is_reported(fake: FakeHost, run: Run) -> None:
    code, _, err = run("apply-profile", "einval")
    assert code == 4
    assert err == ""
    assert "einval: degraded" in run("status")[1]


def test_a_tree_below_another_root_never_reaches_this_host(fake: FakeHost) -> None:
    processes = real_host(fake.root).processes
    assert isinstance(processes, NoProcesses)
    with pytest.raises(ProgramError, match="only with --root /"):
        processes.run(["systemctl", "reboot"])
    with pytest.raises(ProgramError, match="only with --root /"):
        processes.lines(["journalctl"])


def test_lint_reports_all_errors_of_all_profiles(run: Run) -> None:
    code, out, _ = run("lint")
    rows = [line.split("\t") for line in out.splitlines()[:-1]]
    errors = {(row[0], row[2]) for row in rows if row[1] == "error"}
    assert code == 78
    assert errors == {
        ("broken", "sysctl.vm.swappiness"),
        ("einval", "sysctl.vm.swappiness"),
        ("wrong", "colour"),
        ("wrong", "sysctl.vm.swappiness"),
    }
    notes = {row[0]: row[3] for row in rows if row[1] == "note"}
    assert "MiB must stay" in notes["greedy"]
    assert "cannot be applied here: this kernel lacks it" in notes["lacking"]
    assert out.splitlines()[-1].startswith(f"{len(FILES)} profiles: 4 errors, ")


def test_lint_finds_what_the_parent_sets_already(fake: FakeHost, run: Run) -> None:
    text = "description='W'\nextends='base'\n[sysctl]\n'vm.swappiness'=30\n'kernel.panic'=1\n"
    (fake.root / "profiles" / "again.toml").write_text(text)
    assert run("lint", "again")[1].splitlines() == [
        "again\tnote\tsysctl.vm.swappiness\trepeats a setting of base:3",
        "1 profiles: 0 errors, 1 notes",
    ]


def test_a_setting_is_explained_with_the_comment_in_its_profile(fake: FakeHost, run: Run) -> None:
    text = "description='W'\n[sysctl]\n\n# Heaps are hot,\n# caches are not.\n'vm.swappiness'=7\n"
    (fake.root / "profiles" / "hot.toml").write_text(text)
    run("apply-profile", "hot")
    report = json.loads(run("explain", "vm.swappiness", "-o", "json")[1])
    assert report["text"] == ["# Heaps are hot,", "# caches are not.", "'vm.swappiness'=7"]
    assert (report["source"], report["now"], report["original"]) == ("hot:6", "7", "60")
    assert report["documents"].endswith("admin-guide/sysctl/vm.rst, swappiness")
    assert "vm.swappiness" in run("explain", "swappines", "--profile", "hot")[2]


def test_history_lists_every_run_and_the_time_of_each_setting(fake: FakeHost, run: Run) -> None:
    run("apply-profile", "web")
    run("apply-profile", "einval")
    run("rollback")
    run("verify")
    entries = json.loads(run("history", "-o", "json")[1])
    assert [(e["command"], e["name"], e["rolled_back"]) for e in entries] == [
        ("apply", "web", False),
        ("apply", "einval", True),
        ("rollback", "", False),
    ]
    assert set(entries[0]["changed"]) == {"sysctl.vm.swappiness", "sysctl.net.core.somaxconn"}
    assert all(ms > 0 for ms in entries[0]["changed"].values())
    with (fake.state.folder / "history.jsonl").open("a") as file:
        file.write('{"torn')
    assert len(json.loads(run("history", "-o", "json")[1])) == 3


@pytest.mark.behaviour("BUG-SK47")
def test_a_damaged_history_fails_no_run_and_loses_no_later_one(fake: FakeHost, run: Run) -> None:
    """A power cut may leave bytes that are not text, and a line without a newline."""
    run("apply-profile", "web")
    with (fake.state.folder / "history.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\x00torn")
    assert run("rollback")[0] == 0
    assert run("apply-profile", "web")[0] == 0
    entries = json.loads(run("history", "-o", "json")[1])
    assert [e["command"] for e in entries] == ["apply", "rollback", "apply"]


@pytest.mark.behaviour("BUG-SK69")
def test_dates_beyond_the_calendar_are_shown_as_seconds(fake: FakeHost, run: Run) -> None:
    """One damaged or odd line ended `history`, and such a report `verify`, with a traceback."""
    run("apply-profile", "web")
    log, last = fake.state.folder / "history.jsonl", fake.state.read_status()
    assert last is not None
    odd = (1e300, -1e18, 1e12)
    text = log.read_text()
    log.write_text(text + "".join(re.sub(r'"at":[^,]*', f'"at":{at!r}', text) for at in odd))
    code, out, err = run("history")
    fake.fs.write("/proc/sys/vm/swappiness", "77")
    fake.state.write_status(msgspec.structs.replace(last, at=1e300))
    drifted = run("verify")

    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 4
    assert "1e+300 s" in out
    assert (drifted[0], "changed after 1e+300 s" in drifted[1]) == (2, True)


@pytest.mark.behaviour("BUG-SK70")
def test_the_timer_of_a_trial_uses_the_same_folders_from_any_directory(
    fake: FakeHost, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timer runs in `/`: with relative folders it found no trial, or changed another root."""
    monkeypatch.chdir(fake.root)
    fake.root.joinpath("here").mkdir()
    assert run("--root=.", "--state=here/state", "try", "web")[0] == 0
    started = next(ran for ran in fake.processes.ran if ran[0] == "systemd-run")
    assert {f"--root={fake.root}", f"--state={fake.root}/here/state"} <= {*started}


@pytest.mark.behaviour("BUG-SK51")
def test_a_line_separator_in_a_detail_keeps_its_run_in_the_history(
    fake: FakeHost, run: Run
) -> None:
    """JSON leaves U+2028 and U+0085 as they are; only a newline ends a line of the history."""
    run("apply-profile", "web")
    path = fake.state.folder / "history.jsonl"
    line = path.read_text().replace('"detail":""', '"detail":"a\u2028b\u0085c"')
    path.write_text(line + "torn")
    assert run("rollback")[0] == 0
    entries = json.loads(run("history", "-o", "json")[1])
    assert [e["command"] for e in entries] == ["apply", "rollback"]
    assert entries[0]["detail"] == "a\u2028b\u0085c"


def test_history_lists_trials_and_their_outcome(fake: FakeHost, run: Run) -> None:
    run("try", "web")
    run("confirm")
    run("try", "base")
    run("revert")
    run("revert")
    run("verify")
    entries = json.loads(run("history", "-o", "json")[1])
    assert [(e["command"], e["name"], e["state"]) for e in entries] == [
        ("try", "web", "verified"),
        ("confirm", "web", "verified"),
        ("try", "base", "verified"),
        ("revert", "web", "verified"),
    ]
    assert entries[0]["changed"]
    assert not entries[1]["changed"], "it was in force already"


def test_history_is_bounded_in_size(fake: FakeHost, run: Run) -> None:
    run("apply-profile", "web")
    path = fake.state.folder / "history.jsonl"
    path.write_text(path.read_text() * (2 * KEPT))
    run("rollback")
    assert len(path.read_text().splitlines()) == KEPT
    assert json.loads(run("history", "-n", "1", "-o", "json")[1])[0]["command"] == "rollback"


def test_profiles_are_distinguished(run: Run) -> None:
    rows = json.loads(run("diff", "base", "web", "-o", "json")[1])
    assert rows == [
        {"setting": "sysctl.net.core.somaxconn", "base": "-", "web": "6144", "sources": "- web:4"}
    ]


def test_a_profile_is_recommended_to_hosts_that_it_was_made_for(fake: FakeHost, run: Run) -> None:
    for name, fits in (("small", "memory.mib < 2048"), ("large", "memory.mib >= 2048")):
        (fake.root / "profiles" / f"{name}.toml").write_text(f"description='D'\nfits='{fits}'\n")
    rows = {row["name"]: row["fits"] for row in json.loads(run("recommend", "-o", "json")[1])}
    assert rows["small"] == "yes"
    assert rows["large"] == "no"
    assert rows["web"] == "any host"
    assert rows["lacking"] == rows["broken"] == "no"


def test_a_shell_completes_the_names_of_profiles(fake: FakeHost, run: Run) -> None:
    complete = ShellComplete(CLI, {}, "sidekick", COMPLETE)
    words = [f"--profiles={fake.root / 'profiles'}", "plan"]
    assert [c.value for c in complete.get_completions(words, "b")] == ["base", "boot", "broken"]
    assert COMPLETE in run("completion", "fish")[1]


def test_the_manual_page_has_every_command_and_option(run: Run) -> None:
    page = run("man")[1]
    plain = page.replace("\\-", "-")
    assert [name for name in CLI.commands if f".SS sidekick {name}" not in plain] == []
    options = [p.opts[-1] for c in CLI.commands.values() for p in c.params if p.opts[0][0] == "-"]
    assert [option for option in options if option not in plain] == []
    assert all(line[0] == "." or line[0].isalnum() or line[0] == "[" for line in page.splitlines())


@pytest.mark.behaviour("HP13")
def test_profiles_from_the_agent_are_found_after_those_of_the_package(
    fake: FakeHost, capsys: pytest.CaptureFixture[str]
) -> None:
    """This holds for every command, so at each boot too. None replaces a profile of the package."""
    folder = fake.state.folder / AGENT_PROFILES
    folder.mkdir(parents=True)
    (folder / "web-0123.toml").write_text("description='Longer queues'\nextends='web'\n")
    (folder / "web.toml").write_text("description='Not this one'\n")
    options = [f"--root={fake.root}", f"--state={fake.state.folder}"]
    assert main([*options, "list"], make_host=lambda root: fake.host(root)) == 0
    out = capsys.readouterr().out
    assert "Longer queues" in out
    assert "Not this one" not in out


@pytest.mark.behaviour("BUG-SK86")
def test_plan_changes_nothing_after_a_boot_with_sidekicks_line(fake: FakeHost, run: Run) -> None:
    """Only a run that holds the lock ends the effect of `panic=30`."""
    run("apply-profile", "boot")
    fake.boot(fake.fs.read("/etc/twine/boot-line").splitlines()[-1])
    fake.put("/proc/sys/kernel/panic", "30")
    assert run("plan", "web")[0] == 2
    assert fake.sysctl("kernel.panic") == "30"
    run("resume")
    assert fake.sysctl("kernel.panic") == "0"
