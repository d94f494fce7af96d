"""The command `sidekick`: bring this machine to a host profile and prove it.

Exit codes: 0 done or unchanged · 1 error · 2 changes pending or drift found · 3 no such
profile · 4 failed and rolled back · 5 refused (the host cannot give that) · 64 usage ·
75 busy · 77 not root · 78 bad profile or configuration.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sidekick import history
from sidekick import status as host_status
from sidekick.apply import ApplyRun
from sidekick.context import Context, make_context, real_host
from sidekick.grammar import OUTPUT, PROFILE, CliProgram, Number, Option, PathText, Span
from sidekick.observe import HostObservation, record_for_boot
from sidekick.output import print_error, print_json, print_plan, print_report
from sidekick.plan import describe
from sidekick.reboot import read_config
from sidekick.record import Target
from sidekick.report import Report, exit_code
from sidekick.setting import Host
from sidekick.settings import setting_of
from sidekick.targets import target_of
from sidekick.unattended import reapply_while_facts_change, verify_by_timer
from sidekick.unattended import resume as resume_run
from wire.errors import Forbidden, HostError, TwineError

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
RECORDED_COMMANDS = frozenset({"apply", "rollback", "resume", "try", "confirm", "revert", "repair"})
"""Commands that write a line of the history: they change the host, or end a trial."""


STATE = Path("/var/lib/twine/sidekick")
PROGRAM = CliProgram(
    "Bring this machine to a host profile and prove it.",
    (
        Option(words=("--root",), kind=PathText(), default=Path("/"), help="Root of the host."),
        Option(words=("--state",), kind=PathText(), default=STATE, help="Folder of the state."),
        Option(
            words=("--profiles",),
            kind=PathText(),
            is_repeatable=True,
            help="Folder of profiles; repeatable.",
        ),
        Option(words=("-v", "--verbose"), help="Log each change."),
    ),
)
WAIT = Option(
    words=("--wait-s",),
    kind=Number(0.0, 3600.0),
    default=0.0,
    help="Seconds to wait for another sidekick.",
)
REBOOT = Option(
    words=("--reboot",),
    help="Reboot at once if a setting needs it, by kexec where possible.",
)


@PROGRAM.command("plan", PROFILE, OUTPUT)
def plan(ctx: Context, profile: str, output: str) -> None:
    """Show what applying a profile would change; exit code 2 if there are changes."""
    host = ctx.host()
    target = target_of(ctx.profile(profile, host), host)
    observation = HostObservation(host, record_for_boot(host, ctx.state.load()), target)
    report = describe(profile, observation.plan, target.wanted)
    ctx.code = 2 if report.changes or report.missing else 0
    if output == "json":
        print_json(report)
        return
    absent = [w.setting for w in (*report.missing, *report.unsupported)]
    print_plan(report, {name: setting_of(name).why_missing(name) for name in absent})


@PROGRAM.command(
    "apply-profile",
    PROFILE,
    REBOOT,
    Option(
        words=("--generation",),
        kind=Number(0),
        default=0,
        help="Generation of the request, for the report.",
    ),
    Option(
        words=("--epoch",), kind=Number(0), default=0, help="Epoch of the sender, for the report."
    ),
    WAIT,
    OUTPUT,
)
def apply_profile(
    ctx: Context,
    profile: str,
    reboot: bool,
    generation: int,
    epoch: int,
    wait_s: float,
    output: str,
) -> None:
    """Apply a profile to this host: change, read back, or undo all changes."""
    with ctx.locked(wait_s) as host:
        try:
            target = target_of(ctx.profile(profile, host), host, generation, epoch)
            run = ApplyRun(host, ctx.state, target, may_reboot=reboot)
            run.check_allowed()
        except TwineError as e:
            if generation:  # a request of the agent, which reads the result in the status file
                asked = Target(name=profile, generation=generation, epoch=epoch)
                host_status.refuse(host, ctx.state, asked, e)
            raise
        _conclude(ctx, reapply_while_facts_change(host, ctx.state, run.carry_out()), output)


@PROGRAM.command(
    "verify",
    Option(
        words=("--timer",),
        help="Also end an expired trial, and repair drift if /etc/twine/sidekick.toml enables it.",
    ),
    WAIT,
    OUTPUT,
)
def verify(ctx: Context, timer: bool, wait_s: float, output: str) -> None:
    """Compare this host with its profile; exit code 2 if it drifted."""
    with ctx.locked(wait_s) as host:
        if timer:
            from sidekick.read_recorder import store_reads, with_recorder

            repair = read_config(host).repair_drift
            host, recorder = with_recorder(host)
            report = verify_by_timer(host, ctx.state, repair=repair)
            if ctx.state.load().trial is None:
                store_reads(ctx.state, report, recorder)
        else:
            report = host_status.verify(host, ctx.state)
    _conclude(ctx, report, output)
    if ctx.code == 1:
        ctx.code = 2


@PROGRAM.command("rollback", REBOOT, WAIT, OUTPUT)
def rollback(ctx: Context, reboot: bool, wait_s: float, output: str) -> None:
    """Restore the original value of every setting."""
    with ctx.locked(wait_s) as host:
        run = ApplyRun(host, ctx.state, Target(), may_reboot=reboot, command="rollback")
        report = run.carry_out()
    _conclude(ctx, report, output)


@PROGRAM.command("resume", WAIT, OUTPUT)
def resume(ctx: Context, wait_s: float, output: str) -> None:
    """Apply the profile again after a boot, or finish an interrupted one."""
    with ctx.locked(wait_s) as host:
        _conclude(ctx, resume_run(host, ctx.state), output)


@PROGRAM.command("status", OUTPUT)
def status(ctx: Context, output: str) -> None:
    """Show the state of this host, from the last report."""
    report = host_status.status(ctx.host(), ctx.state)
    _print(report, output)


@PROGRAM.command(
    "try",
    PROFILE,
    Option(
        words=("--for",),
        parameter="for_",
        kind=Span(),
        default=60.0,
        help="Duration, such as 90s or 10m.",
    ),
    WAIT,
    OUTPUT,
)
def try_(ctx: Context, profile: str, for_: float, wait_s: float, output: str) -> None:
    """Apply a profile that sidekick reverts unless `sidekick confirm` keeps it."""
    from sidekick import trial

    ctx.require_root()
    host = ctx.host()
    target = target_of(ctx.profile(profile, host), host)
    folders = [f"--root={ctx.root.absolute()}", f"--state={ctx.state.folder.absolute()}"]
    program = str(Path(sys.prefix, "bin/sidekick"))
    revert = [program, *folders, "revert", "--due", "--wait-s=600"]
    with ctx.state.lock(wait_s, host.monotonic, host.sleep):
        _conclude(ctx, trial.begin(host, ctx.state, target, for_, revert), output)


@PROGRAM.command("confirm", WAIT, OUTPUT)
def confirm(ctx: Context, wait_s: float, output: str) -> None:
    """Keep the profile that is on trial."""
    from sidekick import trial

    with ctx.locked(wait_s) as host:
        _conclude(ctx, trial.confirm(host, ctx.state), output)


@PROGRAM.command(
    "revert",
    Option(words=("--due",), help="Only an expired trial (for its timer)."),
    WAIT,
    OUTPUT,
)
def revert(ctx: Context, due: bool, wait_s: float, output: str) -> None:
    """End a trial now: the state before it is restored."""
    from sidekick import trial

    with ctx.locked(wait_s) as host:
        _conclude(ctx, trial.revert(host, ctx.state, due_only=due), output)


def _conclude(ctx: Context, report: Report, output: str) -> None:
    ctx.code = exit_code(report)
    if report.command in RECORDED_COMMANDS and report.at:
        history.append_run(ctx.state, report)
    _print(report, output)


def _print(report: Report, output: str) -> None:
    if output == "json":
        print_json(report)
    else:
        print_report(report)


def main(argv: Sequence[str] | None = None, make_host: Callable[[Path], Host] = real_host) -> int:
    """Run a command and return its exit code. Tests pass a host of their own."""
    line = sys.argv[1:] if argv is None else argv
    if sys.stdout is None:  # closed by the caller (`>&-`): discard the output
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 until the program ends
    call = PROGRAM.read(line)
    try:
        if call is None:
            code = _by_click(line, make_host)
        else:
            context = make_context(make_host, **call.program)
            call.command.function(context, **call.values)
            code = context.code
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head`: the reader is gone
        _discard_output()
        return 0
    except TwineError as e:
        return _report_error(e, line)
    except PermissionError as e:
        what = f"{e.filename}: {e.strerror}" if e.filename else str(e)
        return _report_error(Forbidden(what, hint="run as root"), line)
    except OSError as e:
        if e.filename or e.errno not in _DISK_ERRORS:
            raise
        _discard_output()
        hint = "a change of the host is complete: `sidekick status` shows its result"
        return _report_error(HostError(f"cannot write the output: {e.strerror}", hint=hint), line)


def _discard_output() -> None:
    """Discard the rest of the output, which would fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report_error(error: TwineError, line: Sequence[str]) -> int:
    """Print an error as text, and also as JSON where the line asks for it."""
    if re.search(r"\0(-o\0?|--output[\0=])json\0", "\0".join(["", *line, ""])):
        print_json(error.problem())
        sys.stdout.flush()
    print_error(error)
    return error.exit_code


def _by_click(line: Sequence[str], make_host: Callable[[Path], Host]) -> int:
    """Print help, complete a line, report a wrong line, or run a command that only users run."""
    from sidekick import click_commands, profile_commands

    cli = click_commands.group(
        PROGRAM, profile_commands.COMMANDS, lambda **given: make_context(make_host, **given)
    )
    click_commands.complete(cli)
    return click_commands.run(cli, line)
