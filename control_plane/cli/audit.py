"""`twinectl audit`: changes with their authors, and refused attempts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from control_plane.api.people import AuditEntry, AuditPage
from control_plane.cli import show
from control_plane.cli.program import Target, shows_answer
from wire.options import seconds

if TYPE_CHECKING:
    from control_plane.client import ControlPlaneClient

_AT_ONCE = 1000


@click.command()
@click.option("--since", type=seconds(), metavar="DURATION", help="Only the last 10m, 8h, 30d, …")
@click.option("--who", metavar="CALLER", help="Only of this user; or host:NAME, local:UID.")
@click.option("--object", "object_", metavar="KIND/NAME", help="Only about job/web, machine/m1, …")
@click.option("--limit", type=click.IntRange(1, 100_000), default=100, show_default=True)
@shows_answer
def audit(
    target: Target,
    since: float | None,
    who: str | None,
    object_: str | None,
    limit: int,
    output: str,
) -> None:
    """Show changes with author and address, and refused requests; the newest last."""
    if object_ is not None:
        _check_object(object_)
    start = None if since is None else time.time() - since

    async def read(client: ControlPlaneClient) -> AuditPage:
        entries: list[AuditEntry] = []
        before = None
        while True:
            page = await client.list_audit(
                before=before,
                limit=min(limit - len(entries), _AT_ONCE),
                since=start,
                who=who,
                object=object_,
            )
            entries += page.entries
            before = page.next
            if not before or len(entries) >= limit:
                return AuditPage(entries=entries[::-1], next=before)

    found = target.ask(read)
    columns = ("at", "caller", "from", "what", "object", "outcome", "revision", "request", "more")
    show.emit(output, found, lambda: show.table(columns, map(_row, found.entries)))


def _check_object(name: str) -> None:
    """Raise if no entry can have this object; the routes are imported for this command only."""
    from control_plane.api.routes import object_error

    if error := object_error(name):
        raise click.UsageError(f"--object {error}")


def _row(entry: AuditEntry) -> tuple[object, ...]:
    more = [entry.reason, entry.detail, ", ".join(entry.also)]
    if entry.suppressed:
        more.append(f"and {entry.suppressed} earlier refused ones that are not listed")
    return (
        time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(entry.at)),
        entry.caller,
        entry.address or "-",
        entry.action,
        entry.object,
        entry.outcome.value,
        _revisions(entry),
        entry.request_id,
        "; ".join(filter(None, more)) or "-",
    )


def _revisions(entry: AuditEntry) -> str:
    if entry.before is None:
        return "-"
    after = "?" if entry.after is None else entry.after
    return f"{entry.before or '-'} -> {after or '-'}"
