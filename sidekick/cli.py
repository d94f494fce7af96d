"""The command `sidekick`: bring this machine to a host profile and prove it.

Exit codes: 0 done or unchanged · 1 error · 2 changes pending or drift found · 3 no such
profile · 4 failed and rolled back · 5 refused (the host cannot give that) · 64 usage ·
75 busy · 77 not root · 78 bad profile or configuration.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

import click
import msgspec

from agent import log
from agent.errors import Forbidden, ProgramError, TwineError
from agent.machine import Completed, Processes, boottime_s
from agent.machine.hardware import read_hardware
from agent.machine.kernelfs import KernelFs
from agent.machine.process import HostProcesses
from sidekick import history
from sidekick import status as standing
from sidekick.apply import Run, watch
from sidekick.apply import resume as finish
from sidekick.arguments import COMPLETE, output, profile_argument
from sidekick.facts import read_facts
from sidekick.plan import describe
from sidekick.profile import Library, Profile
from sidekick.reboot import read_config
from sidekick.report import Report, exit_code
from sidekick.setting import Host
from sidekick.settings import SETTINGS, setting_of
from sidekick.shown import print_error, print_json, print_plan, print_report
from sidekick.state import Disk, StateFolder, Target
from sidekick.targets import target_of

STATE = Path("/var/lib/twine/sidekick")
PROFILES = (
    Path("/etc/twine/profiles"),
    Path(sys.prefix, "share/twine/profiles"),
    Path(__file__).resolve().parent.parent / "profiles",
)
"""Of the operator, of the installed package, of the source tree …"""
DELIVERED = "profiles"
"""… and, last, those that the agent was given and keeps in this folder of the state."""


class NoProcesses:
    """Runs nothing: what is done to a tree below `--root` must not reach this host."""

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float = 60.0,  # noqa: ARG002
        check: bool = True,  # noqa: ARG002
    ) -> Completed:
        """Refuse."""
        raise ProgramError(f"cannot run {' '.join(argv)}: programs run only with --root /")

    def lines(self, argv: Sequence[str]) -> NoReturn:
        """Refuse."""
        raise ProgramError(f"cannot run {' '.join(argv)}: programs run only with --root /")


NOTED = frozenset({"apply", "rollback", "resume", "try", "confirm", "revert", "repair"})
"""Commands that leave a line in the history: all that change the host or what becomes of it."""


class Context(msgspec.Struct):
    """The global options, and the host they stand for."""

    root: Path
    state: StateFolder
    profiles: Library
    make_host: Callable[[Path], Host]
    code: int = 0
    """What the command exits with."""

    def host(self) -> Host:
        """Return the host; reads its hardware."""
        return self.make_host(self.root)

    def need_root(self) -> None:
        """Raise `Forbidden` unless this process may change the host."""
        if self.root == Path("/") and os.geteuid() != 0:
            raise Forbidden("sidekick changes the host's kernel", hint="run as root")

    def profile(self, name: str, host: Host) -> Profile:
        """Return a profile, rendered for the host."""
        return self.profiles.load(name, read_facts(host.fs))


def real_host(root: Path) -> Host:
    """Return this host, or the tree below `root` that looks like one."""
    fs = KernelFs(root)
    processes: Processes = HostProcesses() if root == Path("/") else NoProcesses()
    return Host(
        fs=fs,
        processes=processes,
        disk=Disk(),
        hardware=read_hardware(fs),
        now=time.time,
        monotonic=boottime_s,
        sleep=time.sleep,
    )


wait = click.option(
    "--wait-s",
    type=click.FloatRange(0, 3600),
    default=0.0,
    help="Wait so long for another sidekick.",
)
may_reboot = click.option(
    "--reboot", is_flag=True, help="Reboot at once if a setting needs it, by kexec where possible."
)


class _Commands(click.Group):
    """The commands; those that are about profiles alone are imported when they are asked for.

    The timer's `verify` and the agent's `apply-profile` start without them.
    """

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or self._all().get(cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted(self._all())

    def _all(self) -> MutableMapping[str, click.Command]:
        from sidekick import profile_commands

        for command in profile_commands.COMMANDS:
            self.add_command(command)
        return self.commands


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--root", type=click.Path(path_type=Path), default=Path("/"), help="Another root.")
@click.option(
    "--state", type=click.Path(path_type=Path), default=STATE, help="Where state is kept."
)
@click.option(
    "--profiles",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Folder of profiles; repeatable.",
)
@click.option("-v", "--verbose", is_flag=True, help="Log each change.")
@click.pass_context
def cli(
    ctx: click.Context, root: Path, state: Path, profiles: tuple[Path, ...], verbose: bool
) -> None:
    """Bring this machine to a host profile and prove it."""
    log.configure("sidekick", "info" if verbose else "error")
    make_host = ctx.obj or real_host
    ctx.obj = Context(
        root,
        StateFolder(state),
        Library(profiles or (*PROFILES, state / DELIVERED), SETTINGS),
        make_host,
    )


@cli.command()
@profile_argument
@output
@click.pass_obj
def plan(ctx: Context, profile: str, output: str) -> None:
    """Show what applying a profile would change; exit 2 if anything."""
    host = ctx.host()
    target = target_of(ctx.profile(profile, host), host)
    report = describe(profile, Run(host, ctx.state, target).sight.plan, target.wanted)
    ctx.code = 2 if report.changes or report.missing else 0
    if output == "json":
        print_json(report)
        return
    absent = [w.setting for w in (*report.missing, *report.unsupported)]
    print_plan(report, {name: setting_of(name).lacking(name) for name in absent})


@cli.command("apply-profile")
@profile_argument
@may_reboot
@click.option(
    "--generation", type=click.IntRange(0), default=0, help="Of the request, as reported."
)
@click.option("--epoch", type=click.IntRange(0), default=0, help="Of the sender, as reported.")
@wait
@output
@click.pass_obj
def apply_profile(
    ctx: Context,
    profile: str,
    reboot: bool,
    generation: int,
    epoch: int,
    wait_s: float,
    output: str,
) -> None:
    """Bring this host to a profile: change, read back, or undo it all."""
    ctx.need_root()
    host = ctx.host()
    with ctx.state.lock(wait_s, host.monotonic, host.sleep):
        try:
            target = target_of(ctx.profile(profile, host), host, generation, epoch)
            run = Run(host, ctx.state, target, may_reboot=reboot)
            run.heed_others()
        except TwineError as e:
            if generation:  # a program asked, and will look for the answer in the status file
                asked = Target(name=profile, generation=generation, epoch=epoch)
                standing.refuse(host, ctx.state, asked, e)
            raise
        _conclude(ctx, run.carry_out(), output)


@cli.command()
@click.option(
    "--timer",
    is_flag=True,
    help="Also end a trial that is over, and repair drift if /etc/twine/sidekick.toml says so.",
)
@wait
@output
@click.pass_obj
def verify(ctx: Context, timer: bool, wait_s: float, output: str) -> None:
    """Compare this host with its profile; exit 2 if it drifted."""
    ctx.need_root()
    host = ctx.host()
    with ctx.state.lock(wait_s, host.monotonic, host.sleep):
        if timer:
            from sidekick.seen import keep, watched

            repair = read_config(host).repair_drift
            host, kept = watched(host)
            report = watch(host, ctx.state, repair=repair)
            if ctx.state.load().trial is None:
                keep(ctx.state, report, kept)
        else:
            report = standing.verify(host, ctx.state)
    _conclude(ctx, report, output)
    if ctx.code == 1:
        ctx.code = 2


@cli.command()
@may_reboot
@wait
@output
@click.pass_obj
def rollback(ctx: Context, reboot: bool, wait_s: float, output: str) -> None:
    """Give every setting its original value back."""
    ctx.need_root()
    host, none = ctx.host(), Target()
    with ctx.state.lock(wait_s, host.monotonic, host.sleep):
        report = Run(host, ctx.state, none, may_reboot=reboot, command="rollback").carry_out()
    _conclude(ctx, report, output)


@cli.command()
@wait
@output
@click.pass_obj
def resume(ctx: Context, wait_s: float, output: str) -> None:
    """Bring the profile back after a boot, or finish one that was interrupted."""
    ctx.need_root()
    host = ctx.host()
    with ctx.state.lock(wait_s, host.monotonic, host.sleep):
        _conclude(ctx, finish(host, ctx.state), output)


@cli.command()
@output
@click.pass_obj
def status(ctx: Context, output: str) -> None:
    """Show how this host stands, without looking at each setting anew."""
    report = standing.status(ctx.host(), ctx.state)
    ctx.code = 0
    if output == "json":
        print_json(report)
    else:
        print_report(report)


@cli.command("try")
@profile_argument
@click.option(
    "--for",
    "for_",
    metavar="SPAN",
    default="60s",
    callback=lambda _ctx, _param, text: _seconds(text),
    help="How long, such as 90s or 10m.",
)
@wait
@output
@click.pass_obj
def try_(ctx: Context, profile: str, for_: float, wait_s: float, output: str) -> None:
    """Apply a profile that goes by itself unless `sidekick confirm` keeps it."""
    from sidekick import trial

    ctx.need_root()
    host = ctx.host()
    target = target_of(ctx.profile(profile, host), host)
    program = [str(Path(sys.prefix, "bin/sidekick")), f"--state={ctx.state.folder}"]
    revert = [*program, "revert", "--due", "--wait-s=600"]
    with ctx.state.lock(wait_s, host.monotonic, host.sleep):
        _conclude(ctx, trial.begin(host, ctx.state, target, for_, revert), output)


@cli.command()
@wait
@output
@click.pass_obj
def confirm(ctx: Context, wait_s: float, output: str) -> None:
    """Keep the profile that is on trial."""
    from sidekick import trial

    ctx.need_root()
    host = ctx.host()
    with ctx.state.lock(wait_s, host.monotonic, host.sleep):
        _conclude(ctx, trial.confirm(host, ctx.state), output)


@cli.command()
@click.option("--due", is_flag=True, help="Only a trial whose time is over (for its timer).")
@wait
@output
@click.pass_obj
def revert(ctx: Context, due: bool, wait_s: float, output: str) -> None:
    """End a trial now: what was before it comes back."""
    from sidekick import trial

    ctx.need_root()
    host = ctx.host()
    with ctx.state.lock(wait_s, host.monotonic, host.sleep):
        _conclude(ctx, trial.revert(host, ctx.state, due_only=due), output)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)?", text)
    seconds = float(found[1]) * {"m": 60, "h": 3600}.get(found[2], 1) if found else 0.0
    if not 1 <= seconds <= 86400:
        raise click.BadParameter(f"{text!r} is no span from 1s to 24h, such as 90s or 10m")
    return seconds


def _conclude(ctx: Context, report: Report, output: str) -> None:
    ctx.code = exit_code(report)
    if report.command in NOTED and report.at:
        history.note(ctx.state, report)
    if output == "json":
        print_json(report)
    else:
        print_report(report)


def main(argv: Sequence[str] | None = None, make_host: Callable[[Path], Host] | None = None) -> int:
    """Run a command and return its exit code. Tests pass a host of their own."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None and COMPLETE in os.environ:
        cli.main(prog_name="sidekick")  # answers the shell and exits
    try:
        with cli.make_context("sidekick", arguments, obj=make_host) as ctx:
            cli.invoke(ctx)
            return ctx.obj.code if isinstance(ctx.obj, Context) else 0
    except click.exceptions.Exit as e:
        return e.exit_code
    except click.UsageError as e:
        e.show()
        return 64
    except click.Abort:
        return 1
    except BrokenPipeError:  # `| head`: nobody reads on, so there is nothing to say at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except TwineError as e:
        print_error(e)
        return e.exit_code


if __name__ == "__main__":
    sys.exit(main())
