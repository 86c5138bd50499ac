"""The ledger of a party: one entry per release, written before the bytes of the release leave the party.

A ledger is a list of records, one JSON line each. Every line ends with `chain`, the SHA-256 of the previous chain value
and the rest of the line. So a changed, moved or omitted line is detected. Two ledgers with the same last chain value,
the head, contain the same records. The first record contains random bytes. Without them, a party that knows only the
head could test guesses about the records.

`Release` records every release. A rule, such as a policy or the accounting, checks
every entry before it is written, and can refuse the release. A sink stores the lines; this module accesses no files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeAlias

from glasu.errors import DataError
from glasu.records import Bounds, Length, RecordError, parse_json, read_record, to_plain
from glasu.timing import Clock
from glasu.wire import ids

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from glasu.wire.message_key import Key

LEDGER_FORMAT = 1
ROW_DIGEST_BYTES = 16
START_OF_CHAIN = bytes(32)
CHAIN = re.compile(rb',"chain":"([0-9a-f]{64})"\}')
CHAIN_LENGTH = len(b',"chain":"","}') + 63
SentBytes: TypeAlias = Callable[[], Iterable[Any]]  # returns the buffers that are sent, one after the other


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The first record of a ledger."""

    format: int
    party: str
    salt: bytes  # random bytes
    time: float | None = None


@dataclass(frozen=True, kw_only=True)
class Start:
    """A process begins, or continues, a run."""

    purpose: str  # training, prediction or alignment
    run: str
    resumes: bool  # whether the process continues an unfinished run of this ledger; False: the totals start at zero
    settings: str = ""  # the digest of the settings
    policy: str = ""  # SHA-256 of the policy file; empty: there is none
    time: float | None = None


@dataclass(frozen=True, kw_only=True)
class End:
    """The current run is finished at all parties."""

    time: float | None = None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One release."""

    kind: str  # "representation", "change", "gradient", "probabilities", "node sets", "losses", "metrics", ...
    phase: str  # the name of the phase in reports
    round: int
    layer: int  # -1: the release is not about a layer
    rows: int
    columns: int
    size: int  # bytes of the content; message headers are not counted
    protection: str  # names joined by "+", or "none"
    sha256: str  # SHA-256 of the sent bytes; empty if the ledger is not stored
    run: str
    incarnation: int = 0
    attempt: int = 0
    nodes: bytes | None = None  # positions of the rows, packed; None: not recorded
    row_digests: bytes | None = None  # HMACs of the rows before noise, ROW_DIGEST_BYTES each; None: not recorded
    time: float | None = None

    def unpack_nodes(self) -> NDArray[Any] | None:
        """Return the positions of the rows, increasing; None if they are not recorded."""
        import numpy as np

        return None if self.nodes is None else ids.decode(np.frombuffer(self.nodes, np.uint8))

    def list_row_digests(self) -> list[bytes]:
        """Return the HMACs of the rows before noise, in row order; an empty list if they are not recorded."""
        whole, size = self.row_digests or b"", ROW_DIGEST_BYTES
        return [whole[start : start + size] for start in range(0, len(whole), size)]


@dataclass(frozen=True, kw_only=True)
class LedgerHead:
    """The identity, length and last chain value of a ledger."""

    ledger: Annotated[str, Length(64)]  # the chain value of the opening record; it identifies the ledger
    length: Annotated[int, Bounds(0, 2**53)]  # number of records
    chain: Annotated[str, Length(64)]  # the last chain value

    def describe_contradiction(self, later: LedgerHead) -> str | None:
        """Return why a later head cannot belong to this ledger, or None if it can."""
        if later.ledger != self.ledger:
            return "it is a different ledger"
        if later.length < self.length:
            return f"it had {self.length} records before, and has {later.length} now"
        if later.length == self.length and later.chain != self.chain:
            return f"its first {self.length} records have changed"
        return None


@dataclass(frozen=True, kw_only=True)
class PeerHeads:
    """The ledgers of the other parties at the start of an attempt, as the server forwarded them."""

    scope: str  # the id of the training run; empty in an alignment
    attempt: int
    heads: Mapping[str, LedgerHead]  # by party
    time: float | None = None


@dataclass(frozen=True, kw_only=True)
class Repair:
    """An incomplete last line after a crash. It was never synced, so the bytes of its release were not sent."""

    fragment: bytes
    time: float | None = None


LedgerRecord: TypeAlias = Opening | Start | Entry | PeerHeads | Repair | End
RECORDS: dict[str, type[Any]] = {
    "opening": Opening,
    "start": Start,
    "release": Entry,
    "peers": PeerHeads,
    "repair": Repair,
    "end": End,
}
RECORD_NAMES = {cls: name for name, cls in RECORDS.items()}
_to_json = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` would make an encoder for every line


class LedgerError(DataError):
    """A record of a ledger was changed, moved or omitted, or the end is missing."""

    code = "broken_ledger"
    exit_code = 1
    public_default = "its ledger is damaged, or shorter than before; see that party's log."


class BrokenChainError(LedgerError):
    """A record does not follow from the records before it."""


def describe_truncation(why: str) -> str:
    """Return the error text for a party whose ledger contradicts a head that another role recorded."""
    return (
        f"its ledger differs from the one that it stated before: {why}. It was truncated, or replaced by an old copy. "
        "Restore its ledger file, or move the file to another folder and start a new run."
    )


class Sink(Protocol):
    """Stores the lines of a ledger."""

    def append(self, line: bytes) -> None:
        """Store a line, which ends with a newline."""
        ...

    def sync(self) -> None:
        """Make all lines durable. A runtime calls this before the next message leaves."""
        ...


class Rule(Protocol):
    """Checks and counts every release in order, including releases that earlier processes recorded in the ledger."""

    def check(self, entry: Entry) -> None:
        """Raise GlasuError to refuse a release. Then nothing is recorded and nothing is sent."""
        ...

    def add(self, entry: Entry) -> None:
        """Count a release that was recorded."""
        ...


@dataclass
class Ledger:
    """The releases of one party. Without a sink, the ledger only keeps totals and computes no digests."""

    sink: Sink | None = None
    rules: Sequence[Rule] = ()
    clock: Clock | None = None  # returns Unix time in seconds; None: records have no time
    policy: str = ""  # SHA-256 of the policy file that is one of the rules; `begin` records it
    length: int = 0
    name: bytes = START_OF_CHAIN  # the chain value of the opening
    chain: bytes = START_OF_CHAIN
    unfinished: str = ""  # the id of the run that has started but not ended; empty if there is none
    # By phase, kind, layer and protection: releases, rows and bytes of the current run, including repeated rounds.
    totals: dict[tuple[str, str, int, str], tuple[int, int, int]] = field(default_factory=dict)
    peers: dict[tuple[str, str], LedgerHead] = field(default_factory=dict)  # by party and scope: the last head

    @property
    def head(self) -> LedgerHead:
        """The state of the ledger."""
        return LedgerHead(ledger=self.name.hex(), length=self.length, chain=self.chain.hex())

    def begin(self, purpose: str, run: str, settings: str = "", *, fresh: bool = False) -> None:
        """Record that this process begins a run, or continues one that has not finished.

        Args:
            purpose: training, prediction or alignment.
            run: the id of the run.
            settings: the digest of the settings.
            fresh: whether the run starts over if it is unfinished.
        """
        resumes = run == self.unfinished and not fresh
        self.write(Start(purpose=purpose, run=run, resumes=resumes, settings=settings, policy=self.policy))

    def record_heads(self, heads: Mapping[str, LedgerHead], *, scope: str = "", attempt: int = 0) -> None:
        """Record the heads of the other parties' ledgers; raise LedgerError if one contradicts an earlier head.

        Args:
            heads: the heads, by party.
            scope: the id of the training run. No party may continue with another ledger during a training run.
            attempt: the number of the attempt that begins.
        """
        for party, head in heads.items():
            for (name, where), before in self.peers.items():
                same = where == scope != "" or before.ledger == head.ledger
                if name == party and same and (why := before.describe_contradiction(head)):
                    message = f"party {party!r}: {describe_truncation(why)}"
                    raise LedgerError(message, message)
        self.write(PeerHeads(scope=scope, attempt=attempt, heads=dict(heads)))

    def record(
        self,
        kind: str,
        key: Key,
        content: SentBytes,
        *,
        size: int,
        rows: int,
        columns: int = 1,
        protection: str = "none",
        nodes: NDArray[Any] | None = None,
        row_digests: bytes | None = None,
    ) -> None:
        """Record a release before its bytes are sent, or raise the error of a rule that forbids the release.

        Args:
            kind: the kind of content.
            key: the key of the first message that carries it.
            content: returns the bytes that will be sent.
            size: the number of these bytes.
            rows: the number of rows.
            columns: the number of columns.
            protection: the names of the protections, joined by "+".
            nodes: positions of the rows, increasing; None: not known.
            row_digests: HMACs of the rows before noise under a secret of the party, ROW_DIGEST_BYTES each.
        """
        entry = Entry(
            kind=kind,
            phase=key.phase.reported,
            round=key.round,
            layer=key.layer,
            rows=rows,
            columns=columns,
            size=size,
            protection=protection,
            sha256="" if self.sink is None else digest_content(content()),
            run=key.run.hex(),
            incarnation=key.incarnation,
            attempt=key.attempt,
            nodes=None if nodes is None else ids.encode(nodes).tobytes(),
            row_digests=row_digests,
            time=self._read_clock(),
        )
        for rule in self.rules:
            rule.check(entry)
        self._append(entry)

    def write(self, record: LedgerRecord) -> None:
        """Append a record with the time of this call."""
        self._append(replace(record, time=self._read_clock()))

    def _read_clock(self) -> float | None:
        return None if self.clock is None else round(self.clock(), 3)

    def _append(self, record: LedgerRecord) -> None:
        if self.sink is not None:
            line, self.chain = format_line(record, self.chain)
            self.sink.append(line)
        self.length += 1
        self.count_record(record)

    def count_record(self, record: LedgerRecord) -> None:
        """Update totals and rules with a record that this process or an earlier process wrote."""
        match record:
            case Opening():
                self.name = self.chain
            case Start(run=run, resumes=resumes):
                self.unfinished = run
                if not resumes:
                    self.totals.clear()
            case End():
                self.unfinished = ""
            case PeerHeads(scope=scope, heads=heads):
                self.peers.update({(party, scope): head for party, head in heads.items()})
            case Entry():
                self._count(record)

    def _count(self, record: Entry) -> None:
        place = record.phase, record.kind, record.layer, record.protection
        releases, all_rows, all_bytes = self.totals.get(place, (0, 0, 0))
        self.totals[place] = releases + 1, all_rows + record.rows, all_bytes + record.size
        for rule in self.rules:
            rule.add(record)

    def sync(self) -> None:
        """Wait until all records are durable. A message may be sent only after this call."""
        if self.sink is not None:
            self.sink.sync()

    def count_releases(self) -> int:
        """Return the number of releases of the current run, including repeated rounds."""
        return sum(releases for releases, _, _ in self.totals.values())

    def list_totals(self) -> list[dict[str, str | int]]:
        """Return the totals, one dictionary per kind of release."""
        return [
            {
                "phase": phase,
                "kind": kind,
                "layer": layer,
                "protection": protection,
                "releases": releases,
                "rows": rows,
                "bytes": size,
            }
            for (phase, kind, layer, protection), (releases, rows, size) in sorted(self.totals.items())
        ]


def digest_content(content: Iterable[Any]) -> str:
    """Return the SHA-256 of the concatenated buffers, in hexadecimal."""
    found = hashlib.sha256()
    for part in content:
        found.update(part)
    return found.hexdigest()


def format_line(record: LedgerRecord, chain: bytes) -> tuple[bytes, bytes]:
    """Return the line of a record, and the chain value after the record.

    Args:
        record: the record.
        chain: the chain value before the record.
    """
    body = _to_json({"record": RECORD_NAMES[type(record)], **to_plain(record)}).encode()
    after = hashlib.sha256(chain + body).digest()
    return body[:-1] + b',"chain":"' + after.hex().encode() + b'"}\n', after


def read_line(line: bytes, chain: bytes, source: str) -> tuple[LedgerRecord, bytes]:
    """Return the record of a line, and the chain value after it. Raise LedgerError if the line cannot follow `chain`.

    Args:
        line: the line, with its newline.
        chain: the chain value before the line.
        source: names the file and the line in errors.
    """
    end = line[-CHAIN_LENGTH:-1]
    found = CHAIN.fullmatch(end)
    if found is None:
        raise BrokenChainError(f"{source}: is not a complete record; the ledger was changed.")
    body = line[:-CHAIN_LENGTH] + b"}"
    after = hashlib.sha256(chain + body).digest()
    if after.hex().encode() != found[1]:
        raise BrokenChainError(
            f"{source}: does not follow from the records before it; a record was changed, moved or omitted."
        )
    try:
        fields = parse_json(body, source)
        name = fields.pop("record", None) if isinstance(fields, dict) else None
        if name not in RECORDS:
            raise LedgerError(f"{source}: has an unknown kind of record; read it with the version that wrote it.")
        return read_record(RECORDS[str(name)], fields, source), after
    except RecordError as error:
        raise LedgerError(f"{str(error).rstrip('.')}; read the ledger with the version that wrote it.") from None
