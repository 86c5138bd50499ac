"""Checks of one machine: its kit, its disk, its clock and its connection to the server. Torch is not loaded here."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from glasu.config import RunConfig
from glasu.errors import ConfigError, GlasuError, TransportError
from glasu.network.connection_codes import ConnectionCode, Disconnection, describe_end
from glasu.network.findings import Finding, Level
from glasu.network.options import JoinOptions, RoleOptions, ServeOptions
from glasu.network.probe import probe
from glasu.network.run_folder import (
    CHECKPOINTS,
    NEW_RUN,
    check_same_secret,
    continues_part,
    continues_run,
    open_serving,
)
from glasu.network.state_file import JoiningRecord, ServingRecord, StateFile
from glasu.pki.identity import Role
from glasu.pki.kit import Kit, open_kit
from glasu.pki.refusal import find_pin_error
from glasu.privacy.accounting import load_accounting
from glasu.privacy.blinding import load_group
from glasu.privacy.secure_aggregation import find_secure_aggregation
from glasu.runtime.checkpointing import SUFFIX
from glasu.runtime.output_dir import JOINING, SERVING

EXPIRES_SOON = timedelta(days=30)
CLOCK_DIFFERS, CLOCK_IS_WRONG = 10.0, 300.0  # seconds; a certificate is valid from 5 minutes before its issue


def log_detail(log: logging.Logger, check: str, detail: str) -> None:
    """Log facts of this role that are not sent to other roles."""
    log.info("%s (only in this log): %s", check, detail)


def explain_error(check: str, error: GlasuError, log: logging.Logger, text: str = "") -> Finding:
    """Log an error, and return a finding that all roles may see: with `text` or, if empty, the public message."""
    log_detail(log, check, str(error))
    return Finding(check, "bad", text or error.public_message)


def check_kit(folder: Path, role: Role, log: logging.Logger, now: datetime | None = None) -> tuple[Kit | None, Finding]:
    """Open a kit and check its validity; the kit is None if it cannot be used."""
    now = now or datetime.now(UTC)
    try:
        kit = open_kit(folder, role, now=now)
    except TransportError as error:
        return None, explain_error("certificate", error, log, "its kit cannot be used; see that role's log")
    bearer = f"the server at {', '.join(kit.hosts)}" if kit.role == "server" else f"party {kit.name}"
    return kit, _judge_validity("certificate", f"of {bearer}", kit.expires, now)


def check_group(log: logging.Logger) -> Finding:
    """Check that the optional package for alignments is installed."""
    return _check_extra(load_group, "alignments (glasu[psi])", log)


def check_extras(config: RunConfig, log: logging.Logger) -> list[Finding]:
    """Check that all optional packages that a party requires with these settings are installed."""
    found, way = [], find_secure_aggregation(config.privacy)
    if way.extra:
        found.append(_check_extra(way.load_package, f"encryption (glasu[{way.extra}])", log))
    if config.privacy.adds_noise:
        found.append(_check_extra(load_accounting, "accounting (glasu[dp])", log))
    return found


def _check_extra(load: Callable[[], Any], package: str, log: logging.Logger) -> Finding:
    try:
        load()
    except GlasuError as error:
        return explain_error("extra", error, log)
    return Finding("extra", "good", f"the package for {package} is installed")


def _judge_validity(check: str, whose: str, expires: datetime, now: datetime) -> Finding:
    left = expires - now
    if left > EXPIRES_SOON:
        return Finding(check, "good", f"{whose}, valid until {expires:%Y-%m-%d}")
    return Finding(
        check, "warning", f"{whose}, expires on {expires:%Y-%m-%d}, in {left.days} days; ask for a renewed kit soon"
    )


def check_server_folder(options: ServeOptions, config: RunConfig) -> list[Finding]:
    """Return findings about the folder of `glasu serve`; none if the folder is new."""
    record = open_serving(options.out).value
    return _check_folder(options, record, lambda: continues_run(options.out, record, config, options.kit.roster))


def check_joining_folder(options: JoinOptions, data: str | None) -> list[Finding]:
    """Return findings about the folder of `glasu join`; none if the folder is new.

    Args:
        options: the options of the party.
        data: the digest of the party's data; None if the data cannot be read.
    """
    record = StateFile(options.out / JOINING, JoiningRecord(party=options.kit.name)).value

    def continues() -> bool:
        is_this_run = continues_part(options.out, record, data, options.run)
        if is_this_run:
            check_same_secret(options.kit, record)
        return is_this_run

    return [*_check_secret(options.kit), *_check_folder(options, record, continues)]


def _check_secret(kit: Kit) -> list[Finding]:
    """Return a finding if the party has no secret and `glasu join` cannot make it."""
    if kit.secret is not None or os.access(kit.folder, os.W_OK | os.X_OK):
        return []
    why = "its kit holds no secret and cannot be written to; run `glasu provision secret KIT` where it can be written"
    return [Finding("secret", "bad", why)]


def _check_folder(
    options: RoleOptions, record: ServingRecord | JoiningRecord, continues: Callable[[], bool]
) -> list[Finding]:
    parent = _find_existing_parent(options.out)
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        return [Finding("folder", "bad", "its --out folder cannot be written to; choose another folder")]
    if options.fresh:
        count = len(list((options.out / CHECKPOINTS).glob(f"*{SUFFIX}")))
        return [Finding("folder", "warning", f"holds {count} checkpoints, which --fresh will remove")] if count else []
    try:
        if not continues():
            return []
    except ConfigError as error:
        return [explain_error("folder", error, options.log)]
    if record.closed:
        return [Finding("folder", "warning", f"holds a finished run, which will not begin again; {NEW_RUN}")]
    return [Finding("folder", "good", "holds a run that will continue")]


def check_disk(out: Path, needed: int) -> Finding:
    """Check that checkpoints and results fit on the disk."""
    free = shutil.disk_usage(_find_existing_parent(out)).free
    level: Level = "good" if free >= needed else "bad"
    holds_run = any((out / name).is_file() for name in (SERVING, JOINING))  # the run cannot move to another folder
    advice = (
        "" if level == "good" else "; free some space" if holds_run else "; free some space or choose another --out"
    )
    return Finding(
        "disk", level, f"{_format_size(free)} free, checkpoints and results need {_format_size(needed)}{advice}"
    )


def _find_existing_parent(path: Path) -> Path:
    return next(parent for parent in (path.resolve(), *path.resolve().parents) if parent.exists())


def _format_size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def judge_clock(difference: float, uncertainty: float) -> Finding:
    """Judge a party's clock.

    Args:
        difference: seconds by which the party's clock is ahead of the server's clock.
        uncertainty: the maximum error of this measurement.
    """
    off = max(0.0, abs(difference) - uncertainty)
    level: Level = "good" if off <= CLOCK_DIFFERS else "warning" if off <= CLOCK_IS_WRONG else "bad"
    advice = "" if level == "good" else "; set both clocks by NTP, or certificates will seem expired or not valid yet"
    way = "ahead of" if difference > 0 else "behind"
    return Finding("clock", level, f"{abs(difference):.1f} s {way} the server's{advice}")


def check_connection(kit: Kit, address: str, now: datetime) -> tuple[Finding, bool]:
    """Try to connect to the server.

    Returns:
        The finding, and whether waiting may help because the server may not have been started yet.
    """
    found = probe(kit, address)
    if isinstance(found, Disconnection):
        may_come = found.code in (ConnectionCode.NOTHING_LISTENS, ConnectionCode.NO_ANSWER)
        advice = "; is the server running, and do all firewalls open the port?" if may_come else ""
        return Finding(
            "server", "bad", f"{address}: {describe_end(found, address, kit.ca_fingerprint)}{advice}"
        ), may_come
    if found.role != "server":
        return Finding("server", "bad", f"the server at {address} is not a GLASU server"), False
    if error := find_pin_error(found, kit):
        return Finding("server", "bad", f"{error}; compare the fingerprints over the telephone"), False
    whose = f"reached at {address}; its certificate names {', '.join(found.hosts)}"
    return _judge_validity("server", whose, found.expires, now), False
