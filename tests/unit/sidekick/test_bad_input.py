"""Users without privileges and oversized profiles get one error, without a traceback."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import pytest
from fake_host import FakeHost

from sidekick.__main__ import main as program
from sidekick.cli import main
from wire.toml_limits import find_excess

GOOD = "description='Good'\n[sysctl]\n'vm.swappiness'=10\n"
TOO_MUCH = {
    "brackets": (
        f"description='x'\n[sysctl]\n'a' = {'[' * 3000}{']' * 3000}\n",
        "line 3, column 39",
    ),
    "tables": (f"description='x'\n{'a={' * 200}{'}' * 200}", "line 2, column 99"),
    "keys": ("description='x'\n" + ".".join("a" * 5000) + " = 1\n", "line 2, column 1"),
    "header": ("description='x'\n [" + ".".join("a" * 5000) + "]\n", "line 2, column 3"),
    "number": (f"description='x'\n[sysctl]\n'a' = {'9' * 5000}\n", "line 3, column 7"),
    "hexadecimal": (f"description='x'\nversion = 0x{'f' * 5000}\n", "line 2, column 11"),
}


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    folder = tmp_path / "profiles"
    folder.mkdir()
    (folder / "good.toml").write_text(GOOD)
    return folder


def run(
    fake: FakeHost, profiles: Path, capsys: pytest.CaptureFixture[str], *line: str
) -> tuple[int, str, str]:
    options = [f"--root={fake.root}", f"--state={fake.state.folder}", f"--profiles={profiles}"]
    code = main([*options, *line], make_host=lambda root: fake.host(root))
    output = capsys.readouterr()
    return code, output.out, output.err


@pytest.mark.behaviour("BUG-SK24")
@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_profile_that_exceeds_the_limits_is_one_error_with_its_place(
    fake: FakeHost, profiles: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The result was a traceback, and `list` and `lint` of all profiles ended."""
    text, where = TOO_MUCH[name]
    (profiles / "bad.toml").write_text(text)
    code, _, err = run(fake, profiles, capsys, "plan", "bad")
    assert code == 78
    assert f"{profiles}/bad.toml" in err
    assert where in err
    code, out, _ = run(fake, profiles, capsys, "list")
    assert code == 0
    assert "good\t" in out
    assert where in out
    code, out, _ = run(fake, profiles, capsys, "lint")
    assert code == 78
    assert "2 profiles: 1 errors" in out


@pytest.mark.behaviour("BUG-SK84")
@pytest.mark.parametrize("name", TOO_MUCH)
@pytest.mark.parametrize(
    ("path", "command"),
    [("/etc/twine/location.toml", ["facts"]), ("/etc/twine/sidekick.toml", ["verify", "--timer"])],
)
def test_a_file_of_the_operator_that_exceeds_the_limits_is_one_error_with_its_place(
    fake: FakeHost,
    profiles: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    path: str,
    command: list[str],
) -> None:
    """The result was a traceback, or the parser took seconds."""
    text, where = TOO_MUCH[name]
    fake.put(path, text)
    code, _, err = run(fake, profiles, capsys, *command)
    assert code == 78
    assert path in err
    assert where in err


def test_a_number_beyond_64_bits_has_its_line(
    fake: FakeHost, profiles: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (profiles / "bad.toml").write_text(f"description='x'\n[sysctl]\n'vm.swappiness'={'9' * 300}\n")
    code, _, err = run(fake, profiles, capsys, "plan", "bad")
    assert (code, "a number is beyond 64 bits (bad:3)" in err) == (78, True)


@pytest.mark.parametrize(
    "text",
    [
        'a = "' + "[" * 100 + '"',
        "a = '" + "{" * 100 + "'",
        "# " + "[" * 100,
        'a = """' + "[\n" * 100 + '"""',
        "a = '''" + "[\n" * 100 + "'''",
        'a = "\\"' + "[" * 100 + '"',
        "a = [" + "1, " * 5000 + "]",
        "a = '" + "9" * 5000 + "'",
    ],
)
def test_the_limits_ignore_texts_and_comments(text: str) -> None:
    assert find_excess(text) is None


@pytest.mark.behaviour("BUG-SK72")
@pytest.mark.parametrize("is_link", [True, False])
def test_a_state_folder_that_is_none_is_named_with_its_fault(
    fake: FakeHost,
    profiles: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    is_link: bool,
) -> None:
    """The error was "File exists", also for a link whose disk is not mounted."""
    state = tmp_path / "state"
    if is_link:
        state.symlink_to("/nowhere/here")
    else:
        state.write_text("")
    before = fake.everything()
    code, _, err = run(fake, profiles, capsys, f"--state={state}", "apply-profile", "good")
    assert (code, fake.everything()) == (1, before)
    assert "it is no folder, or a link to a missing one" in err
    assert "mounted" in err


@pytest.mark.behaviour("BUG-SK38")
@pytest.mark.parametrize(
    ("line", "code", "kind"),
    [
        (["plan", "nosuch"], 3, "not_found"),
        (["explain", "vm.swappiness"], 3, "not_found"),
        (["plan", "wrong"], 78, "config"),
        (["confirm"], 5, "conflict"),
    ],
)
@pytest.mark.parametrize(
    "how", [["-o", "json"], ["-ojson"], ["--output=json"], ["--output", "json"]]
)
def test_an_error_is_json_where_json_is_requested(
    fake: FakeHost,
    profiles: Path,
    capsys: pytest.CaptureFixture[str],
    line: list[str],
    code: int,
    kind: str,
    how: list[str],
) -> None:
    """Exit codes 3, 5 and 78 printed no output."""
    (profiles / "wrong.toml").write_text("description='x'\nnosuch=1\n")
    found, out, err = run(fake, profiles, capsys, *line, *how)
    assert found == code
    problem = json.loads(out)
    assert problem["code"].startswith(kind)
    assert problem["detail"] in err
    assert (problem.get("errors") is not None) is (kind == "config")
    found, out, _ = run(fake, profiles, capsys, *line)
    assert (found, out) == (code, "")


@pytest.fixture
def as_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse every file of sidekick's state, as mode 0700 does; root would have access."""
    closed = str(tmp_path / "var/lib/twine/sidekick")

    def refusing(function):  # type: ignore[no-untyped-def]
        def refuse(path, *more, **options):  # type: ignore[no-untyped-def]
            if str(path).startswith(f"{closed}/"):
                raise PermissionError(13, "Permission denied", str(path))
            return function(path, *more, **options)

        return refuse

    for name in ("stat", "open", "listdir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    monkeypatch.setattr("io.open", refusing(open))


@pytest.mark.behaviour("BUG-SK38")
@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    ("line", "code"),
    [
        (["list"], 0),
        (["lint"], 0),
        (["facts"], 0),
        (["show", "good"], 0),
        (["diff", "good", "good"], 0),
        (["recommend"], 0),
        (["plan", "good"], 77),
        (["status"], 77),
        (["history"], 77),
        (["explain", "sysctl.vm.swappiness", "--profile", "good"], 77),
    ],
)
def test_a_user_without_rights_gets_an_answer_or_one_error(
    fake: FakeHost, profiles: Path, capsys: pytest.CaptureFixture[str], line: list[str], code: int
) -> None:
    """Users who may not read root's state got tracebacks."""
    found, out, err = run(fake, profiles, capsys, *line, "-o", "json")
    assert found == code
    assert json.loads(out) is not None
    assert ("run as root" in err) is (code == 77)


@pytest.mark.behaviour("BUG-SK38")
def test_profiles_that_a_user_may_not_see_are_left_out(
    fake: FakeHost, profiles: Path, capsys: pytest.CaptureFixture[str], as_a_user: None
) -> None:
    """Profiles from the agent are in root's folder."""
    closed = fake.state.folder / "profiles"
    options = [f"--root={fake.root}", f"--state={fake.state.folder}", f"--profiles={closed}"]
    code = main([*options, "list"], make_host=lambda root: fake.host(root))
    assert code == 0


@pytest.mark.behaviour("BUG-SK63")
@pytest.mark.parametrize("command", ["rollback", "list"])
def test_a_full_disk_below_the_output_is_one_error(
    fake: FakeHost,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Formerly it was a traceback, also after a change of the host."""
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        line = [f"--root={fake.root}", f"--state={fake.state.folder}", command]
        assert main(line, make_host=fake.host) == 1
    assert "cannot write the output: No space left on device" in capsys.readouterr().err


@pytest.mark.behaviour("BUG-SK63")
@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_output_is_no_error(
    fake: FakeHost, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly `sidekick list >&-`, and each command with `2>&-`, ended with a traceback."""
    codes: list[int] = []
    line = ["sidekick", f"--root={fake.root}", f"--state={fake.state.folder}", "list"]
    monkeypatch.setattr(sys, "argv", line)
    monkeypatch.setattr(sys, closed, None)
    monkeypatch.setattr(os, "_exit", codes.append)
    program()
    gc.enable()
    assert codes == [0]
    if closed == "stdout":
        sys.stdout.close()


@pytest.mark.behaviour("BUG-SK66")
@pytest.mark.parametrize("command", ["list", "plan odd", "explain --profile=odd vm.swappiness"])
def test_a_profile_cannot_control_the_terminal(
    fake: FakeHost, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Formerly an owner's description cleared the screen of an operator."""
    odd = "# \u2066clear\ndescription = '\u2066clear \\u001b[2J'\n[sysctl]\n# why \u202eyes\n"
    odd = odd.replace("'", '"') + "'vm.swappiness' = 7\n"
    profiles = fake.root / "profiles"
    profiles.mkdir()
    (profiles / "odd.toml").write_text(odd)
    (profiles / "bad.toml").write_text('"\\u001b[2J" = 1\n')
    options = [f"--root={fake.root}", f"--profiles={profiles}", f"--state={fake.state.folder}"]
    main([*options, *command.split()], make_host=fake.host)
    main([*options, "show", "bad"], make_host=fake.host)
    for text in capsys.readouterr():
        assert text
        assert all(c.isprintable() or c in "\n\t" for c in text), text
