"""Align the folders of all parties on one disk: run the scripts of an alignment in one process."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from glasu.config import WireConfig
from glasu.data.alignment_file import CommonIds
from glasu.data.folders import read_manifest, read_normalized_ids
from glasu.errors import AlignmentError, ConfigError
from glasu.files import OTHER_COMMAND, hold_folder
from glasu.privacy.blinding import Blinding
from glasu.privacy.release import Release
from glasu.protocol.alignment import DEFAULT_MAX_IDS, Comparison, SetLimits, client_alignment, server_alignment
from glasu.protocol.requests import Event, Save
from glasu.protocol.state import Identity
from glasu.report import Traffic
from glasu.runtime.alignment_ledger import limit_sets, open_alignment_ledger
from glasu.runtime.inprocess import ScriptRun, count_cores, run_together
from glasu.runtime.ledger_file import keep_run
from glasu.runtime.policy_file import PolicyFile
from glasu.runtime.telemetry import TrafficCounter
from glasu.runtime.workers import Workers
from glasu.timing import Stopwatch
from glasu.wire.message_key import RUN_BYTES, SERVER


@dataclass(frozen=True)
class AlignmentOptions:
    """Options of an alignment in one process."""

    max_ids: int = DEFAULT_MAX_IDS  # maximum number of ids of one party
    chunk_rows: int = WireConfig.chunk_rows
    secrets: Sequence[bytes] | None = None  # the parties' secrets, in client order; None: random
    observer: Callable[[Event], None] | None = None
    policies: Mapping[str, PolicyFile] = field(default_factory=dict)  # by party


@dataclass(frozen=True, eq=False)
class LocalAlignment:
    """The result of an alignment in one process."""

    names: tuple[str, ...]
    files: tuple[Path, ...]
    comparison: Comparison
    traffic: Traffic


def align_folders(folders: Sequence[Path], options: AlignmentOptions | None = None) -> LocalAlignment:
    """Align the folders of parties, then write alignment.parquet to each folder.

    Every release of a party is recorded in ledger.jsonl in the party's folder.
    """
    options = options or AlignmentOptions()
    with ExitStack() as stack:
        for folder in {path.resolve(): path for path in folders}.values():
            read_manifest(folder)  # a wrong folder is refused before a lock file is created in it
            stack.enter_context(hold_folder(folder, OTHER_COMMAND))
        return _align(folders, options)


def _align(folders: Sequence[Path], options: AlignmentOptions) -> LocalAlignment:
    """Align folders that this process has locked."""
    tables = [read_normalized_ids(folder) for folder in folders]
    names = tuple(manifest.name for manifest, _ in tables)
    if len(set(names)) < len(names) or len(names) < 2:
        raise ConfigError(f"an alignment needs two or more parties with different names; got {', '.join(names)}.")
    rules = {name: manifest.id_rules for name, (manifest, _) in zip(names, tables, strict=True)}
    if len(set(rules.values())) > 1:
        listed = "; ".join(f"{name}: {own}" for name, own in rules.items())
        raise AlignmentError(
            f"the rules for ids differ ({listed}); set id_unicode, id_case and id_whitespace to the same values in "
            "every party.toml."
        )
    own = options.secrets or [secrets.token_bytes(32) for _ in names]
    limits, run, traffic = (
        SetLimits(options.chunk_rows, options.max_ids),
        secrets.token_bytes(RUN_BYTES),
        TrafficCounter(),
    )
    watch = Stopwatch(time.perf_counter)
    server = ScriptRun("server", server_alignment(Identity(names, None, SERVER, run), limits), watch)
    clients = []

    def perform(request: Save | Event) -> None:
        if options.observer is not None and isinstance(request, Event):  # an alignment saves nothing
            options.observer(request)

    ledgers = {
        name: open_alignment_ledger(folder, name, len(ids), options.policies.get(name))
        for folder, name, (_, ids) in zip(folders, names, tables, strict=True)
    }

    def sync_ledgers() -> None:
        for ledger in ledgers.values():
            ledger.sync()

    with keep_run(ledgers):
        for index, (_, ids) in enumerate(tables):
            identity, release = Identity(names, None, index, run), Release({}, ledger=ledgers[names[index]])
            release.ledger.begin("alignment", run.hex())
            own_limits = limit_sets(limits, options.policies.get(names[index]))
            script = client_alignment(identity, ids.tolist(), Blinding(own[index]), own_limits, release)
            clients.append(ScriptRun(names[index], script, Stopwatch(time.perf_counter), perform))
        workers = min(len(names), count_cores())  # libsodium runs without the GIL
        with Workers(workers, "glasu-align") as pool:
            run_together(server, clients, traffic, pool.map, sync_ledgers)
    files = tuple(
        CommonIds.of(ids, client.result.rows, client.result.key, names, manifest.id_rules).write(folder)
        for folder, (manifest, ids), client in zip(folders, tables, clients, strict=True)
    )
    return LocalAlignment(names, files, server.result, traffic.snapshot())
