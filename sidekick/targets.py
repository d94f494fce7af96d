"""Computes what a profile asks of this host, and checks it before the first write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sidekick import boot
from sidekick.facts import read_facts
from sidekick.profile import Profile, render
from sidekick.record import Target
from sidekick.report import WantedSetting
from sidekick.setting import Contribution, Host, Setting
from sidekick.settings import SETTINGS, setting_of, settings_of
from wire.errors import ConfigError, FieldError, TwineError


def target_of(profile: Profile, host: Host, generation: int = 0, epoch: int = 0) -> Target:
    """Return what a profile asks of this host.

    Raises `ConfigError` with all errors of the profile, and `Unprocessable` if it asks for more
    than the host has.
    """
    settings = settings_of(profile.sections)
    errors = [error for setting in settings for error in setting.check(profile)]
    if not errors:
        wanted = [w for setting in settings for w in setting.wanted(profile, host)]
        errors = [*_conflicts(wanted), *boot.conflicts(contributions(wanted, ""))]
    if errors:
        raise ConfigError(f"profile {profile.name} cannot be used", errors=tuple(errors))
    return Target(
        name=profile.name,
        generation=generation,
        epoch=epoch,
        wanted=tuple(wanted),
        texts=profile.texts,
    )


def render_again(target: Target, host: Host) -> tuple[Target, str]:
    """Return what an applied profile asks of the host now, from the files it was applied from.

    Disks, interfaces and processors come and go. A target of an earlier release has no files and is
    returned unchanged. A target that no longer fits the host is too, with the reason.
    """
    texts = {text.name: text for text in target.texts}
    if target.name not in texts:
        return target, ""
    try:
        profile = render(target.name, lambda name, _: texts[name], SETTINGS, read_facts(host.fs))
        return target_of(profile, host, target.generation, target.epoch), ""
    except TwineError as e:
        reason = "; ".join([str(e), *(f"{error.field}: {error.reason}" for error in e.errors)])
        return target, f"the profile does not fit the present host: {reason}"


def contributions(wanted: Sequence[WantedSetting], own: str) -> list[Contribution]:
    """Return the kernel arguments that these values need; `own` is the host's own line."""
    settings = settings_of(w.setting for w in wanted)
    return [c for setting in settings for c in setting.boot(of_kind(setting, wanted), own)]


def of_kind(setting: Setting, wanted: Iterable[WantedSetting]) -> list[WantedSetting]:
    """Return the wanted values of one kind."""
    return [w for w in wanted if setting.owns(w.setting)]


def _conflicts(wanted: Iterable[WantedSetting]) -> list[FieldError]:
    """Return an error for each setting that sets the same thing as another one."""
    owners: dict[str, str] = {}
    errors = []
    for each in wanted:
        for path in setting_of(each.setting).touches(each.setting):
            other = owners.setdefault(path, each.setting)
            if other != each.setting:
                reason = f"sets {path}, which {other} also sets (in {each.source})"
                errors.append(FieldError(field=each.setting, reason=reason))
    return errors
