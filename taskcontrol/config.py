"""Reads the configuration file of a controller: its kind, its job, its address."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from taskcontrol import observations
from taskcontrol.api import TaskControlRequest, TaskControlResponse
from taskcontrol.observations import Dialect
from taskcontrol.quorum import Quorum
from taskcontrol.shards import Sharded
from taskcontrol.stateless import Stateless
from taskcontrol.windows import Never
from wire.config_file import listen_address, read_config
from wire.errors import ConfigError, InvalidInput, TwineError

log = logging.getLogger(__name__)
Process = Callable[[TaskControlRequest], Awaitable[TaskControlResponse]]
Share = Annotated[float, Meta(ge=0, le=1)]
Url = Annotated[
    str, Meta(pattern=r"^https?://[^\s]+$(?!\n)", description="an http:// or https:// URL")
]


class _FileTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables of the file: unknown fields are refused."""


class QuorumConfig(_FileTable, frozen=True, kw_only=True):
    """An ensemble: followers first, the leader last, always with a majority."""

    members: Annotated[list[Url], Meta(min_length=1, max_length=99)]
    """URL at which each member reports whether it leads, in the order of task indexes."""
    speaks: Dialect = Dialect.PLAIN
    spare: Annotated[int, Meta(ge=0, le=49)] = 0
    """Members that must stay in addition to the majority."""


class ShardsConfig(_FileTable, frozen=True, kw_only=True):
    """Shards with replicas: limits the unavailable replicas of each shard."""

    map: Annotated[str, Meta(min_length=1)]
    """File or URL of a JSON object: shard → indexes of the tasks that hold a replica."""
    most_down: Annotated[int, Meta(ge=1, le=100)] = 1
    """Replicas of a shard that may be unavailable at once."""
    rebuild_s: Annotated[float, Meta(ge=0)] = 1800.0
    """Time to rebuild a replica elsewhere; tasks do not move because of shorter outages."""
    at_once: Annotated[int, Meta(ge=1)] | None = None
    """Tasks that may be unavailable at once; none: as many as the shards allow."""


class StatelessConfig(_FileTable, frozen=True, kw_only=True):
    """Identical tasks: as many at once as the other tasks can carry the load of."""

    load_url: Url | None = None
    """URL that answers with a number from 0 to 1, or with `{"load": 0.4}`."""
    load: Share = 1.0
    """Load of the tasks if there is no `load_url`."""
    full_load: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """Highest load of the tasks while some of them are unavailable."""
    at_most: Share = 0.25
    """Largest share of the tasks that may be unavailable at once, at any load."""
    at_least: Annotated[int, Meta(ge=0)] = 1
    """Number of tasks that may always be unavailable, at any load."""


class NeverConfig(_FileTable, frozen=True, kw_only=True):
    """Times in which no operation begins on a task that serves."""

    during: Annotated[list[str], Meta(min_length=1, max_length=100)]
    """For instance `mon-fri 09:00-17:30`, `sat 22:00-06:00`, `12:00-13:00`."""
    zone: str = "UTC"


class ControllerConfig(_FileTable, frozen=True, kw_only=True):
    """The whole file: exactly one kind, and optionally `never`."""

    job: Annotated[str, Meta(min_length=1, max_length=56)]
    """Requests for other jobs are refused."""
    listen: str = "0.0.0.0:7450"
    credential: Annotated[str, Meta(min_length=1)]
    """File made by `twine-control-plane controller add`."""
    quorum: QuorumConfig | None = None
    shards: ShardsConfig | None = None
    stateless: StatelessConfig | None = None
    never: NeverConfig | None = None

    def listen_on(self) -> tuple[str, int]:
        """Return host and port to listen on, or raise `ConfigError`."""
        return listen_address(self.listen)


def load(path: Path) -> ControllerConfig:
    """Return the configuration of a TOML file, or raise `ConfigError` with all its errors."""
    config = read_config(path, ControllerConfig)
    kinds = [k for k in ("quorum", "shards", "stateless") if getattr(config, k) is not None]
    if len(kinds) != 1:
        raise ConfigError(
            f"{path} is not valid: it has {' and '.join(kinds) or 'none'} of [quorum], [shards]"
            " and [stateless], and needs exactly one"
        )
    config.listen_on()
    controller(config)
    return config


def controller(config: ControllerConfig) -> Process:
    """Return the controller of a configuration. Raises `ConfigError` for wrong windows."""
    decide = _decision(config)
    try:
        never = Never.of(config.never.during, config.never.zone) if config.never else None
    except InvalidInput as e:
        raise ConfigError(f"never.during: {e}", hint=e.hint) from e

    async def process(request: TaskControlRequest) -> TaskControlResponse:
        if request.job_handle != config.job:
            raise InvalidInput(f"this is the controller of {config.job}, not {request.job_handle}")
        return await decide(request if never is None else never.left(request))

    return process


def _decision(config: ControllerConfig) -> Process:
    if config.quorum is not None:
        return _quorum(config.quorum)
    if config.shards is not None:
        return _shards(config.shards)
    return _stateless(config.stateless or StatelessConfig())


def _quorum(config: QuorumConfig) -> Process:
    rule = Quorum(config.spare)

    async def process(request: TaskControlRequest) -> TaskControlResponse:
        leader = (
            await observations.leader(config.members, config.speaks) if request.request else None
        )
        return rule.answer(request, leader)

    return process


def _shards(config: ShardsConfig) -> Process:
    rule = Sharded(config.most_down, config.rebuild_s, config.at_once)
    known: Mapping[int, frozenset[str]] | None = None

    async def process(request: TaskControlRequest) -> TaskControlResponse:
        nonlocal known
        try:
            known = observations.by_task(await _read_document(config.map))
        except TwineError as e:
            log.warning("the shard map cannot be read", extra={"reason": str(e)})
        if known is None:
            return TaskControlResponse()
        return rule.answer(request, known)

    return process


def _stateless(config: StatelessConfig) -> Process:
    rule = Stateless(config.full_load, config.at_most, config.at_least)

    async def process(request: TaskControlRequest) -> TaskControlResponse:
        load = config.load if config.load_url is None else await observations.load(config.load_url)
        return rule.answer(request, load)

    return process


async def _read_document(where: str) -> Any:
    if where.startswith(("http://", "https://")):
        return await observations.read(where)
    try:
        return await asyncio.to_thread(_read_file, Path(where))
    except (OSError, msgspec.DecodeError, UnicodeError, RecursionError) as e:
        raise ConfigError(f"cannot read the shard map {where}: {e}") from e


def _read_file(path: Path) -> Any:
    with path.open("rb") as file:
        return msgspec.json.decode(file.read(observations.ANSWER_MAX_BYTES))
