"""`twinectl entitlement`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec.structs import replace

from agent.api.relaxations import TO_BE_ALLOWED
from control_plane.api.capacity import (
    EntitlementChange,
    EntitlementRequest,
    EntitlementSpec,
    RequestState,
)
from control_plane.api.entitlement_rules import entitlement_relations
from control_plane.cli import show
from control_plane.cli.jobfile import read_document
from control_plane.cli.people import principal_of
from control_plane.cli.program import Target, options, refuse_others, shows_answer
from wire.quantity_fields import parse_quantities
from wire.routes import invalid
from wire.violations import violations

if TYPE_CHECKING:
    from control_plane.client import ControlPlaneClient

Decide = Callable[["ControlPlaneClient", str, str], Awaitable[EntitlementRequest]]
"""Sends a decision about a request, with a note."""


@click.group()
def entitlement() -> None:
    """How many machines an owner may use, their types, and their host profile."""


class _TypeQuota(click.ParamType[tuple[str, int]]):
    """A quota for one machine type: skylake=2000."""

    name = "type=n"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int]:
        """Return type and count."""
        kind, _, count = str(value).partition("=")
        if not kind or not (count.isascii() and count.isdigit()):
            self.fail(f"{value!r} is not TYPE=N, for instance skylake=2000", param, ctx)
        return kind, int(count)


_spec_options = options(
    click.option(
        "--machines",
        type=click.IntRange(0, 1_000_000),
        help="Quota: machines of any of its types; 0 for one that only borrows.",
    ),
    click.option(
        "--quota", "per_type", type=_TypeQuota(), multiple=True, help="Quota by type; repeat."
    ),
    click.option("--rru", type=float, help="Quota in relative resource units."),
    click.option(
        "--type",
        "machine_types",
        metavar="T",
        multiple=True,
        help="Only machines of this type; repeat.",
    ),
    click.option("--datacenter", metavar="DC", help="Restrict machines and jobs to it."),
    click.option("--region", metavar="R", help="Restrict machines and jobs to it."),
    click.option(
        "--host-profile", metavar="P", help="Host profile of its machines [default: base]."
    ),
    click.option(
        "--surge-tasks", type=click.IntRange(0), help="Total extra tasks of all its jobs at once."
    ),
    click.option(
        "--business-unit", metavar="PATH", help="Business unit that pays, such as ads/ranking."
    ),
    click.option(
        "--priority", type=click.IntRange(0, 1000), help="Higher values first [default: 500]."
    ),
    click.option(
        "--owner", "owners", metavar="WHO", multiple=True, help="Exactly these owners; repeat."
    ),
    click.option("--add-owner", "add_owners", metavar="WHO", multiple=True, help="user:N, group:N"),
    click.option("--remove-owner", "remove_owners", metavar="WHO", multiple=True),
    click.option(
        "--materialization", metavar="NAME", help="Share the machines of this entitlement."
    ),
    click.option(
        "--image-key",
        "image_keys",
        metavar="KEY",
        multiple=True,
        help="Exactly these keys may sign its images (twinectl image key); repeat.",
    ),
    click.option(
        "--relaxation",
        "relaxations",
        multiple=True,
        type=click.Choice([r.value for r in TO_BE_ALLOWED]),
        help=(
            "Exactly these relaxations are allowed to its jobs, besides those of every job; repeat."
        ),
    ),
    click.option(
        "--unset",
        metavar="FIELD",
        multiple=True,
        help="Reset this property to its default; repeat.",
    ),
    click.option(
        "--file",
        "file",
        type=click.Path(path_type=Path),
        help="TOML, YAML or JSON with all fields; the options above override it.",
    ),
    click.option("--reason", default="", help="Shown to the users who decide."),
)
_DRY = click.option("--dry-run", is_flag=True, help="Only show the result; change nothing.")


@entitlement.command("create")
@click.argument("name")
@_spec_options
@_DRY
@shows_answer
def entitlement_create(
    target: Target, /, name: str, output: str, *, dry_run: bool, **given: Any
) -> None:
    """Create an entitlement, or give an existing one exactly these properties."""
    _ask(target, name, replace(_change({}, given), dry_run=dry_run), output)


@entitlement.command("update")
@click.argument("name")
@_spec_options
@_DRY
@shows_answer
def entitlement_update(
    target: Target, /, name: str, output: str, *, dry_run: bool, **given: Any
) -> None:
    """Grow, shrink or change an entitlement; properties that are not given stay."""
    change = _change(_current_fields(target, name), given)
    _ask(target, name, replace(change, dry_run=dry_run), output)


@entitlement.command("request")
@click.argument("name")
@click.option("--delete", is_flag=True, help="Request its removal.")
@_spec_options
@shows_answer
def entitlement_request(target: Target, /, name: str, output: str, **given: Any) -> None:
    """Like update or create, but another user grants it, or it is granted later."""
    if given.pop("delete"):
        refuse_others("--delete", {"name", "delete", "reason", "output"}, "it is removed")
        change = EntitlementChange(spec=None, reason=given["reason"], queue=True)
    else:
        known = target.ask(lambda client: client.list_entitlements())
        exists = any(view.record.name == name for view in known.entitlements)
        change = _change(_current_fields(target, name) if exists else {}, given, queue=True)
    _ask(target, name, change, output)


@entitlement.command("delete")
@click.argument("name")
@click.option("--reason", default="", help="Kept with the request.")
@shows_answer
def entitlement_delete(target: Target, name: str, reason: str, output: str) -> None:
    """Remove an entitlement that has no jobs."""
    _ask(target, name, EntitlementChange(spec=None, reason=reason), output)


@entitlement.command("list")
@shows_answer
def entitlement_list(target: Target, output: str) -> None:
    """Show all entitlements and the machines that they hold."""
    found = target.ask(lambda client: client.list_entitlements())
    rows = [
        (
            view.record.name,
            len(view.held),
            _quota(view.record.spec),
            ",".join(view.record.spec.machine_types) or "(any)",
            _place(view.record.spec),
            view.record.spec.host_profile,
            view.record.spec.priority,
            view.record.spec.business_unit or "-",
            show.some(view.jobs, 5),
        )
        for view in found.entitlements
    ]
    place = ("types", "place", "profile")
    columns = ("entitlement", "held", "quota", *place, "priority", "business unit", "jobs")
    show.emit(output, found, lambda: show.table(columns, rows))


@entitlement.command("show")
@click.argument("name")
@shows_answer
def entitlement_show(target: Target, name: str, output: str) -> None:
    """Show one entitlement: its quota, its machines, its jobs, and requests for it."""
    found = target.ask(lambda client: client.get_entitlement(name))
    spec = found.record.spec
    rows = [
        ("quota", _quota(spec)),
        ("held", f"{len(found.held)}: {show.some(found.held, 50)}"),
        ("types", ", ".join(spec.machine_types) or "(any)"),
        ("region", spec.region or "(any)"),
        ("datacenter", spec.datacenter or "(any)"),
        ("host profile", spec.host_profile),
        ("extra tasks", spec.surge_tasks or "- (as many as each job allows)"),
        ("owners", ", ".join(spec.owners) or "- (operators only)"),
        ("business unit", spec.business_unit or "-"),
        ("priority", spec.priority),
        ("stacks on", spec.materialization or "- (its own machines)"),
        ("image keys", ", ".join(spec.image_keys) or "- (images need no signature)"),
        ("relaxations", ", ".join(spec.relaxations) or "- (those of every job)"),
        ("overcommit", f"cpu {spec.overcommit.cpu:g}, memory {spec.overcommit.memory:g}"),
        ("jobs", f"{len(found.jobs)}: {show.some(found.jobs, 50)}"),
        ("waiting", ", ".join(found.pending) or "-"),
        ("created", show.ago(found.record.created_at) + " ago"),
    ]
    show.emit(output, found, lambda: show.table(("what", "value"), [("entitlement", name), *rows]))


@entitlement.command("requests")
@click.option("--all", "decided", is_flag=True, help="Also decided ones.")
@shows_answer
def entitlement_requests(target: Target, decided: bool, output: str) -> None:
    """Show the requests that wait for a decision."""
    found = target.ask(lambda client: client.list_requests(decided=decided))
    rows = [
        (
            request.request_id,
            request.entitlement,
            _quota(request.spec) if request.spec else "(remove)",
            request.requester,
            show.ago(request.created_at),
            request.state.value,
            request.decided_by or "-",
            request.note or request.reason or request.why_pending or "-",
        )
        for request in found.requests
    ]
    columns = ("request", "entitlement", "quota", "by", "age", "state", "decided by", "why")
    show.emit(output, found, lambda: show.table(columns, rows))


def _decision(
    verb: str, text: str, send: Decide, note_text: str = "Kept with the request."
) -> None:
    @entitlement.command(verb, help=text)
    @click.argument("request")
    @click.option("--note", default="", help=note_text)
    @shows_answer
    def decide(target: Target, request: str, note: str, output: str) -> None:
        _print_request(target.ask(lambda client: send(client, request, note)), output)


_decision(
    "approve",
    "Grant a REQUEST; it takes effect now.",
    lambda client, *args: client.approve_request(*args),
)
_decision(
    "deny",
    "Refuse a REQUEST.",
    lambda client, *args: client.deny_request(*args),
    "Shown to the requester.",
)
_decision(
    "withdraw", "Withdraw your own REQUEST.", lambda client, *args: client.withdraw_request(*args)
)


def _ask(target: Target, name: str, change: EntitlementChange, output: str) -> None:
    _print_request(
        target.ask(lambda client: client.request_entitlement(name, change)), output, change.dry_run
    )


def _print_request(request: EntitlementRequest, output: str, dry_run: bool = False) -> None:
    """Print a request's result and its warnings."""

    def print_text() -> None:
        what = "dry run, nothing was changed; result: " if dry_run else ""
        show.lines(what + _request_text(request))
        for warning in request.warnings:
            click.echo(show.printable(f"warning: {warning}"), err=True)

    show.emit(output, request, print_text)


def _request_text(request: EntitlementRequest) -> str:
    """Return the result of a request as a sentence."""
    what = f"entitlement {request.entitlement}"
    if request.state is RequestState.PENDING and not request.request_id:
        return f"{what}: the request would wait: {request.why_pending}"
    if request.state is RequestState.PENDING:
        return f"{what}: request {request.request_id} waits: {request.why_pending}"
    if request.state is not RequestState.APPROVED:
        return f"{what}: request {request.request_id} is {request.state.value}"
    if request.spec is None:
        return f"{what}: removed"
    return f"{what}: up to {_quota(request.spec)}, profile {request.spec.host_profile}"


def _current_fields(target: Target, name: str) -> dict[str, Any]:
    """Return the fields of an entitlement as they are now."""
    view = target.ask(lambda client: client.get_entitlement(name))
    present = msgspec.to_builtins(view.record.spec)
    assert isinstance(present, dict)
    return present


def _change(
    base: dict[str, Any], given: dict[str, Any], *, queue: bool = False
) -> EntitlementChange:
    """Return the change that a file and options ask for, on top of the present state."""
    document = dict(base)
    reason, file, unset = given.pop("reason"), given.pop("file"), given.pop("unset")
    _check_options(given, unset)
    if file is not None:
        read = read_document(file)
        document = document | read if isinstance(read, dict) else read
    if isinstance(document, dict):
        for field in unset:
            document.pop(field, None)
        _put_owners(document, given)
        given["per_type"] = dict(given["per_type"])
        for listed in ("machine_types", "image_keys", "relaxations"):
            given[listed] = list(given[listed])
        document |= {field: value for field, value in given.items() if value not in (None, {}, [])}
    document = parse_quantities(document, EntitlementSpec)
    if found := violations(document, EntitlementSpec) + entitlement_relations(document):
        raise invalid(found, "the entitlement")
    spec = msgspec.convert(document, EntitlementSpec)
    return EntitlementChange(spec=spec, reason=reason, queue=queue)


def _check_options(given: dict[str, Any], unset: Sequence[str]) -> None:
    """Raise if an option would be lost: an unknown field, or one that is given twice."""
    for field in unset:
        if field not in EntitlementSpec.__struct_fields__:
            known = ", ".join(EntitlementSpec.__struct_fields__)
            raise click.UsageError(f"--unset {field}: there is no such property; known: {known}")
        if given.get(field) not in (None, (), {}) or (field == "owners" and given["add_owners"]):
            raise click.UsageError(f"--unset {field} cannot be given with a value of {field}")
    for kind, count in Counter(kind for kind, _ in given["per_type"]).items():
        if count > 1:
            raise click.UsageError(f"--quota {kind}=… is given {count} times")


def _put_owners(document: dict[str, Any], given: dict[str, Any]) -> None:
    """Change the owners in a document; a name alone is a user's.

    Raises `UsageError` if an owner is both named and removed.
    """
    exactly, more, less = (
        [principal_of(who) for who in given.pop(option)]
        for option in ("owners", "add_owners", "remove_owners")
    )
    for option, named in (("--owner", exactly), ("--add-owner", more)):
        if both := sorted({*named} & {*less}):
            who = ", ".join(both)
            raise click.UsageError(f"{option} and --remove-owner are both given for {who}")
    owners = document.get("owners", [])
    if isinstance(owners, list) and (exactly or more or less):
        document["owners"] = [
            w for w in dict.fromkeys([*(exactly or owners), *more]) if w not in less
        ]


def _place(spec: EntitlementSpec) -> str:
    return "/".join(filter(None, (spec.region, spec.datacenter))) or "(any)"


def _quota(spec: EntitlementSpec) -> str:
    parts = [f"{spec.machines} machines"] if spec.machines is not None else []
    parts += [f"{count} {kind}" for kind, count in sorted(spec.per_type.items())]
    parts += [f"{spec.rru:g} RRU"] if spec.rru is not None else []
    return ", ".join(parts)
