"""The `twine-lab` command."""

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import click
import msgspec

from vm_lab.cache import cache_root
from vm_lab.errors import LabError, reporting
from vm_lab.exclusive import lab_lock
from vm_lab.image.app import ALL_VERSIONS, VERSIONS, build_app
from vm_lab.image.build import VARIANTS, build_image, pack_box
from vm_lab.image.conveyor import build_conveyor
from vm_lab.image.programs import PROGRAMS, build_program
from vm_lab.lab import Lab, UpOptions
from vm_lab.package import build_package
from vm_lab.progress import Progress
from vm_lab.state import STATE_ROOT, LabPaths, require_root
from vm_lab.status import lab_status, status_table
from vm_lab.vagrant import Vagrant
from vm_lab.wheel import REPOSITORY

P = ParamSpec("P")
T = TypeVar("T")

FREE_ARGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


_ON_DEMAND = {
    "dev": ("vm_lab.fleet", "dev_command"),
    "fleet": ("vm_lab.fleet", "command"),
    "power-cuts": ("vm_lab.power_cuts", "command"),
    "region": ("vm_lab.region.cli", "region"),
}
"""Commands that import the whole control plane, which would double the time of `twine-lab ssh`."""


class _Commands(click.Group):
    """The commands; those of `_ON_DEMAND` are imported when they are called."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command; SIGTERM ends it as Ctrl-C does, so that it removes its files."""
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            return super().main(*args, **kwargs)
        finally:
            signal.signal(signal.SIGTERM, before)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _ON_DEMAND:
            return super().get_command(ctx, cmd_name)
        module, name = _ON_DEMAND[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_ON_DEMAND])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Virtual machines to try Twine on, in a separate network namespace."""


def open_lab(name: str) -> Lab:
    """Return the lab of that name, up or not."""
    return Lab(LabPaths(name), Progress())


def timed(function: Callable[P, T]) -> Callable[P, T]:
    """Run the command as root, say how long it took, and print failures with their hint."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        progress = Progress()
        with reporting("twine-lab", (cache_root(), STATE_ROOT)):
            require_root()
            result = function(*args, **kwargs)
        progress.say("done")
        return result

    return wrapper


def name_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option with the name of the lab."""
    return click.option(
        "--name", default="lab", envvar="TWINE_LAB_NAME", show_default=True, help="Name of the lab."
    )(function)


def lab_command(function: Callable[Concatenate[Lab, P], T]) -> Callable[..., T]:
    """Make a timed command whose first argument is the lab that `--name` names."""

    @name_option
    @timed
    @wraps(function)
    def wrapper(name: str, *args: P.args, **kwargs: P.kwargs) -> T:
        return function(open_lab(name), *args, **kwargs)

    return wrapper


@main.command()
@lab_command
@click.option("--count", type=click.IntRange(min=1), help="Number of machines.")
@click.option("--cpus", type=click.IntRange(min=1), help="CPUs of each, in one socket.")
@click.option("--memory-mib", type=click.IntRange(min=512), help="Memory of each.")
@click.option("--variant", type=click.Choice(VARIANTS), default="base", show_default=True)
@click.option("--bare", is_flag=True, help="Machines only: no control plane, no host joins.")
@click.option("--no-project", is_flag=True, help="Boot an image without this project in it.")
def up(
    lab: Lab,
    count: int | None,
    cpus: int | None,
    memory_mib: int | None,
    variant: str,
    bare: bool,
    no_project: bool,
) -> None:
    """Build the image if needed, boot the machines, start the control plane, join them.

    A repetition keeps running machines.
    """
    options = UpOptions(count, cpus, memory_mib, variant, bare or no_project, not no_project)
    lab.up(options)


@main.command()
@lab_command
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text")
def status(lab: Lab, output: str) -> None:
    """Show what runs, its location, and how to reach it."""
    state = lab_status(lab)
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(state)).decode())
    else:
        click.echo(status_table(state))


@main.command(context_settings=FREE_ARGS)
@name_option
@click.argument("machine")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def ssh(name: str, machine: str, command: Sequence[str]) -> None:
    """Open a shell on a machine, or run one command there."""
    lab = open_lab(name)
    line = " ".join(_without_dashes(command)) or None
    _exec(lab, lambda: lab.guests.command(lab.machine(machine), line))


@main.command("exec", context_settings=FREE_ARGS)
@name_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_(name: str, command: Sequence[str]) -> None:
    """Run a command on this host inside the lab's network, curl for instance."""
    lab = open_lab(name)
    _exec(lab, lambda: lab.sandbox.command(_without_dashes(command)))


@main.command(context_settings=FREE_ARGS)
@name_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def vagrant(name: str, command: Sequence[str]) -> None:
    """Run any vagrant command on the lab's machines."""
    lab = open_lab(name)
    try:
        record = lab.paths.get_record()
        status = Vagrant(lab.sandbox, lab.topology, record).interactive(*_without_dashes(command))
    except LabError as e:
        raise click.ClickException(str(e)) from e
    sys.exit(status)


@main.command()
@lab_command
def push(lab: Lab) -> None:
    """Install the working tree in every running machine, restarting agents that run."""
    lab.push()


@main.command()
@lab_command
@click.argument("machine")
def power_off(lab: Lab, machine: str) -> None:
    """Cut a machine's power."""
    lab.power_off(machine)


@main.command()
@lab_command
@click.argument("machine")
def power_on(lab: Lab, machine: str) -> None:
    """Start a machine from the disk it had; return once ssh answers."""
    lab.power_on(machine)


@main.command("control-plane")
@lab_command
@click.argument("what", type=click.Choice(["stop", "start", "pause", "continue"]))
@click.option(
    "--config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="TOML file for `start`.",
)
def control_plane(lab: Lab, what: str, config: Path | None) -> None:
    """Stop, start or freeze the lab's control plane; machines are not changed."""
    if config is not None and what != "start":
        raise click.UsageError(f"--config is for `start`, not for `{what}`")
    control = lab.control
    steps = {
        "stop": control.stop,
        "start": lambda: control.start(config),
        "pause": control.pause,
        "continue": control.resume,
    }
    with lab_lock(lab.paths, f"control-plane {what}"):
        steps[what]()


@main.group()
def proxy() -> None:
    """HAProxy in front of the jobs of a lab."""


@proxy.command("start")
@lab_command
@click.argument("services", nargs=-1, required=True, metavar="JOB:PORT…")
def proxy_start(lab: Lab, services: Sequence[str]) -> None:
    """Forward to ports of jobs, such as web:http, by discovery; print the URL of each."""
    with lab_lock(lab.paths, "proxy start"):
        urls = lab.proxy.start(services)
    click.echo("\n".join(urls))


@proxy.command("stop")
@lab_command
def proxy_stop(lab: Lab) -> None:
    """End the proxy."""
    with lab_lock(lab.paths, "proxy stop"):
        lab.proxy.stop()


@main.command()
@lab_command
@click.argument("machine")
@click.option("--heal", is_flag=True, help="Reconnect it.")
def partition(lab: Lab, machine: str, heal: bool) -> None:
    """Cut a machine from the network; it continues to run."""
    lab.partition(machine, heal=heal)


@main.command()
@lab_command
@click.argument("snapshot")
def snapshot(lab: Lab, snapshot: str) -> None:
    """Save all machines, memory included, and the control plane's state."""
    lab.snapshot(snapshot)


@main.command()
@lab_command
@click.argument("snapshot")
def restore(lab: Lab, snapshot: str) -> None:
    """Bring all machines and the control plane back to a snapshot."""
    lab.restore(snapshot)


@main.command()
@lab_command
def down(lab: Lab) -> None:
    """Remove the lab and check that no part of it is left."""
    checks = lab.down()
    for check in checks:
        click.echo(f"{check.kind}: {', '.join(check.found) or 'none'}")
    if any(check.found for check in checks):
        raise LabError(f"something of lab {lab.paths.name!r} is left, see above")


@main.command()
@click.option("--into", type=click.Path(path_type=Path), default=Path("dist"), show_default=True)
@click.option(
    "--source",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="The tree; default: this one.",
)
@timed
def package(into: Path, source: Path | None) -> None:
    """Build the agent's Debian package and print its path."""
    click.echo(build_package(into, Progress().say, source or REPOSITORY))


@main.group()
def image() -> None:
    """Build what the lab boots and runs."""


@image.command("build")
@click.option("--variant", type=click.Choice(VARIANTS), default="base", show_default=True)
@click.option("--no-project", is_flag=True, help="Leave this project out.")
@click.option("--box", is_flag=True, help="Also pack a .box file, for `vagrant up` by hand.")
@timed
def build(variant: str, no_project: bool, box: bool) -> None:
    """Build the machines' image and print its folder."""
    progress = Progress()
    built = build_image(variant, progress.say, project=not no_project)
    if box:
        with progress.step("packing the box"):
            pack_box(built)
    click.echo(built.folder)


@image.command("program")
@click.argument("names", nargs=-1, type=click.Choice(sorted(PROGRAMS)))
@timed
def image_program(names: Sequence[str]) -> None:
    """Build images of well-known servers from Debian's packages; print the tars."""
    progress = Progress()
    for name in names or sorted(PROGRAMS):
        click.echo(build_program(name, progress.say))


@image.command("conveyor")
@timed
def image_conveyor() -> None:
    """Build the image of `vm_lab/jobs/conveyor.toml` and print its tar."""
    click.echo(build_conveyor(Progress().say))


@image.command("app")
@click.argument("versions", nargs=-1, type=click.Choice(ALL_VERSIONS))
@timed
def app(versions: Sequence[str]) -> None:
    """Build the demo application's images, v1 and v2 unless named, and print each path."""
    progress = Progress()
    for version in versions or VERSIONS:
        click.echo(build_app(version, progress.say))


def _without_dashes(words: Sequence[str]) -> Sequence[str]:
    """Return the words without the "--" that may separate them from our own."""
    return words[1:] if words and words[0] == "--" else words


def _exec(lab: Lab, command: Callable[[], list[str]]) -> None:
    """Replace this process by the command, so that a signal for this process reaches it."""
    try:
        require_root()
        argv = command()
    except LabError as e:
        raise click.ClickException(f"{e}\nhint: {e.hint}" if e.hint else str(e)) from e
    lab.paths.ssh.mkdir(parents=True, exist_ok=True, mode=0o700)
    sys.stdout.flush()
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main()
