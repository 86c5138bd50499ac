"""Audit the ledgers of a run's folder: verify them, compute totals, and compare them with reports and other parties.

Nothing is written or repaired here. Torch is loaded only for ledgers with noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from glasu.config import PrivacyConfig
from glasu.data.party_name import check_party_name
from glasu.errors import ConfigError, DataError
from glasu.privacy.ledger import (
    End,
    Entry,
    LedgerError,
    LedgerHead,
    LedgerRecord,
    Opening,
    PeerHeads,
    Repair,
    Start,
)
from glasu.records import Bounds, RecordError, parse_json, read_record
from glasu.report import JsonRecord
from glasu.runtime.ledger_file import LEDGER, LEDGERS, Fragment, list_ledger_files, read_ledger_file
from glasu.runtime.output_dir import ALIGNING, PREDICTING, REPORT, SERVING

if TYPE_CHECKING:
    from glasu.privacy.accounting import Accountant

CheckLevel = Literal["good", "note", "bad"]
DELTA = PrivacyConfig().delta  # a ledger does not contain privacy.delta
REPORTS = {REPORT: "training", "prediction.json": "prediction"}  # file -> purpose of its run
RESTORE = "Restore the file, or move it out of the folder to audit without it."


@dataclass(frozen=True)
class AuditCheck(JsonRecord):
    """The result of one check."""

    check: str
    level: CheckLevel
    text: str


@dataclass
class ReleaseTotal(JsonRecord):
    """The totals of all releases of one kind in a run."""

    phase: str
    kind: str
    layer: int
    protection: str
    releases: int = 0
    rows: int = 0
    bytes: int = 0
    largest: int = 0  # rows of the largest release
    first: float | None = None  # seconds since 1970
    last: float | None = None

    def add(self, entry: Entry) -> None:
        """Add a release."""
        self.releases, self.rows, self.bytes = self.releases + 1, self.rows + entry.rows, self.bytes + entry.size
        self.largest = max(self.largest, entry.rows)
        self.first = entry.time if self.first is None else self.first
        self.last = entry.time


@dataclass
class AuditedRun(JsonRecord):
    """One run in a ledger, with all processes that took part in it."""

    purpose: str
    run: str
    settings: str
    policy: str
    processes: int = 1
    finished: bool = False
    totals: list[ReleaseTotal] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of bytes that the ledger records."""
        return sum(total.bytes for total in self.totals)

    def add(self, entry: Entry) -> None:
        """Add a release."""
        place = entry.phase, entry.kind, entry.layer, entry.protection
        for total in self.totals:
            if (total.phase, total.kind, total.layer, total.protection) == place:
                break
        else:
            total = ReleaseTotal(*place)
            self.totals.append(total)
        total.add(entry)


@dataclass
class AuditedLedger(JsonRecord):
    """One ledger."""

    party: str
    file: str
    runs: list[AuditedRun] = field(default_factory=list)
    repairs: int = 0
    incomplete: bool = False  # whether the last line is incomplete
    fault: str | None = None  # why the chain is broken; records after the fault are not read
    chains: list[str] = field(default_factory=list)  # the chain value after each record
    remembered: list[tuple[str, LedgerHead]] = field(default_factory=list)  # heads of other parties
    accountant: Accountant | None = None  # counts the releases with noise; None if there are none

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object; it contains only the length and the end of the chain."""
        values = super().to_dict()
        for name in ("chains", "remembered", "accountant"):
            values.pop(name, None)
        if self.accountant is not None:
            values["differential_privacy"] = asdict(self.accountant.summarize())
        return {**values, "length": len(self.chains), "head": self.chains[-1] if self.chains else ""}

    def holds(self, head: LedgerHead) -> bool:
        """Return whether this ledger had this head at some time."""
        if not 1 <= head.length <= len(self.chains):
            return False
        return self.chains[head.length - 1] == head.chain and self.chains[0] == head.ledger

    def find_run(self, purpose: str) -> AuditedRun | None:
        """Return the last run of a purpose."""
        return next((run for run in reversed(self.runs) if run.purpose == purpose), None)

    def count_record(self, record: LedgerRecord) -> None:
        """Add a record."""
        match record:
            case Opening(party=party):
                self.party = party
            case Start(resumes=True) if self.runs:
                self.runs[-1].processes += 1
            case Start(purpose=purpose, run=run, settings=settings, policy=policy):
                self.runs.append(AuditedRun(purpose, run, settings, policy))
            case End() if self.runs:
                self.runs[-1].finished = True
            case PeerHeads(heads=heads):
                self.remembered += heads.items()
            case Repair():
                self.repairs += 1
            case Entry():
                if not self.runs:
                    self.runs.append(AuditedRun("unknown", record.run, "", ""))
                self.runs[-1].add(record)
                if "noise" in record.protection.split("+"):
                    self._count_noise(record)

    def _count_noise(self, entry: Entry) -> None:
        from glasu.privacy.accounting import Accountant

        self.accountant = self.accountant or Accountant(DELTA)
        self.accountant.add(entry)


@dataclass(frozen=True)
class Audit(JsonRecord):
    """The ledgers of a folder, and the results of all checks."""

    folder: str
    ledgers: tuple[AuditedLedger, ...]
    checks: tuple[AuditCheck, ...]

    @property
    def failures(self) -> list[AuditCheck]:
        """The checks that failed."""
        return [check for check in self.checks if check.level == "bad"]


@dataclass(frozen=True)
class _ReportedLedger:
    party: str
    head: str
    length: Annotated[int, Bounds(0)]

    def __post_init__(self) -> None:
        check_party_name(self.party)


@dataclass(frozen=True)
class _ReportedPrivacy:
    ledger: tuple[_ReportedLedger, ...] | None = None


@dataclass(frozen=True)
class _ReportedTraffic:
    bytes_to_server: Annotated[int, Bounds(0)]
    headers_to_server: Annotated[int, Bounds(0)]


@dataclass(frozen=True)
class _AuditedReport:
    """The part of report.json or prediction.json that is compared with the ledgers."""

    traffic: _ReportedTraffic
    privacy: _ReportedPrivacy | None = None


@dataclass(frozen=True)
class _RecordedHeads:
    """The part of a server's state file that is compared with the ledgers."""

    ledgers: Mapping[str, LedgerHead] = field(default_factory=dict)


def audit_folder(folder: Path, peers: Sequence[Path] = ()) -> Audit:
    """Audit the ledgers of a folder.

    Args:
        folder: the --out folder of `glasu train` or `glasu join`, or a party's folder after `glasu align`.
        peers: folders of other parties, or of the server; the heads recorded there are compared.

    Raises:
        ConfigError: a folder has no ledger.
        DataError: a report, or a state file of the server, is damaged.
    """
    ledgers = tuple(_read_ledgers(folder))
    if not ledgers:
        what = "a server has no ledger" if (folder / SERVING).is_file() else "it has neither file"
        raise ConfigError(
            f"{folder}: holds no ledger ({LEDGER} or {LEDGERS}/NAME.jsonl): {what}. Give the --out folder of glasu "
            "join or glasu train, or a party's folder after glasu align."
        )
    memories = [(ledger.party, ledger.remembered) for ledger in ledgers]
    checks = [check for ledger in ledgers for check in _check_ledger(ledger)]
    try:
        for peer in peers:
            memories += _read_recorded_heads(peer)
        checks += _check_reports(folder, ledgers)
    except RecordError as error:
        raise DataError(f"{error} {RESTORE}") from None
    checks += _check_recorded_heads(ledgers, memories)
    return Audit(str(folder), ledgers, tuple(checks))


def _read_ledgers(folder: Path) -> Iterator[AuditedLedger]:
    for name, path in list_ledger_files(folder).items():
        ledger = AuditedLedger(name, str(path))
        try:
            for found in read_ledger_file(path):
                if isinstance(found, Fragment):
                    ledger.incomplete = True
                    break
                ledger.chains.append(found.chain)
                ledger.count_record(found.record)
        except LedgerError as error:
            ledger.fault = str(error)
        yield ledger


def _read_recorded_heads(folder: Path) -> list[tuple[str, list[tuple[str, LedgerHead]]]]:
    """Return the recorded heads and who recorded them, from the ledgers of a party or the state files of a server."""
    found = [(ledger.party, ledger.remembered) for ledger in _read_ledgers(folder)]
    for name in (SERVING, PREDICTING, ALIGNING):
        state = _read_json(folder / name) or {}
        heads = read_record(_RecordedHeads, state, str(folder / name), partial=True).ledgers
        if heads:
            found.append(("the server", list(heads.items())))
    if not found:
        raise ConfigError(f"--peers {folder}: holds neither a ledger nor the state of a server; give another folder.")
    return found


def _read_json(path: Path) -> Mapping[str, Any] | None:
    """Return the object in a file; None if the file does not exist."""
    try:
        value = parse_json(path.read_bytes(), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). {RESTORE}") from None
    if not isinstance(value, Mapping):
        raise DataError(f"{path}: is not a JSON object. {RESTORE}")
    return value


def _read_report(path: Path) -> _AuditedReport | None:
    """Read the part of a report that the audit compares; return None if the file does not exist."""
    content = _read_json(path)
    if content is None:
        return None
    return read_record(_AuditedReport, content, str(path), partial=True)


def _check_ledger(ledger: AuditedLedger) -> Iterator[AuditCheck]:
    """Check the chain of one ledger."""
    name = f"chain of {ledger.party}"
    if ledger.fault is not None:
        yield AuditCheck(name, "bad", ledger.fault)
    else:
        yield AuditCheck(name, "good", f"{len(ledger.chains)} records, each consistent with the records before it")
    if ledger.incomplete:
        text = "the last line is incomplete: the process crashed before it sent the release; the next run repairs it"
        yield AuditCheck(name, "note", text)
    if ledger.repairs:
        text = f"{ledger.repairs} incomplete lines were moved into records after crashes; their releases were not sent"
        yield AuditCheck(name, "note", text)


def _check_reports(folder: Path, ledgers: Sequence[AuditedLedger]) -> Iterator[AuditCheck]:
    """Compare the ledgers with the reports that the commands wrote."""
    by_party = {ledger.party: ledger for ledger in ledgers}
    for file, purpose in REPORTS.items():
        report = _read_report(folder / file)
        if report is None or report.privacy is None or not report.privacy.ledger:
            continue
        for stated in report.privacy.ledger:
            ledger = by_party.get(stated.party)
            if ledger is None:
                yield AuditCheck(file, "bad", f"names the ledger of {stated.party}, which is missing")
            elif ledger.fault is None and ledger.chains[stated.length - 1 : stated.length] != [stated.head]:
                text = f"{stated.party}: the ledger had {stated.length} records when the report was written, "
                yield AuditCheck(file, "bad", f"{text}and has {len(ledger.chains)} now: its end was cut or changed")
            elif ledger.fault is None:
                yield AuditCheck(file, "good", f"{stated.party}: the ledger still holds the {stated.length} records")
        listed = [by_party[each.party] for each in report.privacy.ledger if each.party in by_party]
        yield from _check_traffic(file, purpose, report.traffic, listed)


def _check_traffic(
    file: str, purpose: str, traffic: _ReportedTraffic, ledgers: Sequence[AuditedLedger]
) -> Iterator[AuditCheck]:
    """Compare the bytes that a report counts, without message headers, with the bytes in the ledger."""
    counted = traffic.bytes_to_server - traffic.headers_to_server
    runs = [run for ledger in ledgers if (run := ledger.find_run(purpose)) is not None]
    entered = sum(run.size for run in runs)
    if entered == counted:
        yield AuditCheck(file, "good", f"the ledger records the {counted:,} bytes that were sent to the server")
    elif entered > counted:
        text = f"{entered:,} bytes are in the ledger, and {counted:,} in the report: rounds were repeated after a crash"
        yield AuditCheck(file, "note", text)
    else:
        text = f"{counted:,} bytes were sent to the server, but the ledger records only {entered:,}"
        yield AuditCheck(file, "bad", text)


def _check_recorded_heads(
    ledgers: Sequence[AuditedLedger], memories: Sequence[tuple[str, Sequence[tuple[str, LedgerHead]]]]
) -> Iterator[AuditCheck]:
    """Compare every ledger with the heads that others recorded."""
    for ledger in ledgers:
        if ledger.fault is not None:
            continue
        name, agreed = f"recorded heads of {ledger.party}", 0
        for who, heads in memories:
            own = [head for party, head in heads if party == ledger.party]
            lost = [head for head in own if ledger.chains[:1] == [head.ledger] and not ledger.holds(head)]
            agreed += sum(map(ledger.holds, own))
            if lost:
                most = max(head.length for head in lost)
                text = f"{who} saw {most} records of this ledger, which has {len(ledger.chains)} now: "
                yield AuditCheck(name, "bad", f"{text}its end was cut or changed")
        if agreed:
            yield AuditCheck(name, "good", f"{agreed} heads that others recorded are in this ledger")
        elif len(ledgers) == 1:
            text = "nothing to compare with; name folders of other parties or of the server with --peers"
            yield AuditCheck(name, "note", text)
