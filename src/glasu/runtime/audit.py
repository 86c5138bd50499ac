"""Audit the ledgers in a run's folder: verify them, compute totals, and compare them with reports and recorded heads.

A head is the last chain value of a ledger; other roles record it during a run (`glasu.privacy.ledger`). Nothing is
written or repaired here. Torch is loaded only for ledgers with noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    from glasu.privacy.accounting import Accountant, SpentEpsilon

CheckLevel = Literal["good", "note", "bad", "skipped"]
DELTA = PrivacyConfig().delta  # the default, because a ledger does not contain privacy.delta
REPORTS = {REPORT: "training", "prediction.json": "prediction"}  # file -> purpose of its run
RESTORE = "Restore the file, or move it out of the folder to audit without it."


@dataclass(frozen=True)
class AuditCheck(JsonRecord):
    """The result of one check."""

    check: str
    level: CheckLevel
    text: str


@dataclass(frozen=True)
class ReleaseTotal(JsonRecord):
    """The totals of all releases of one kind in a run."""

    phase: str
    kind: str
    layer: int
    protection: str
    releases: int
    rows: int
    bytes: int
    largest: int  # rows of the largest release
    first: float | None  # seconds since 1970
    last: float | None

    @classmethod
    def of(cls, entry: Entry) -> ReleaseTotal:
        """Return the totals of one release."""
        place = entry.phase, entry.kind, entry.layer, entry.protection
        return cls(*place, 1, entry.rows, entry.size, entry.rows, entry.time, entry.time)

    def add(self, later: ReleaseTotal) -> ReleaseTotal:
        """Return the totals of these releases together with later releases of the same kind."""
        return replace(
            self,
            releases=self.releases + later.releases,
            rows=self.rows + later.rows,
            bytes=self.bytes + later.bytes,
            largest=max(self.largest, later.largest),
            first=later.first if self.first is None else self.first,
            last=later.last,
        )


@dataclass(frozen=True)
class AuditedRun(JsonRecord):
    """One run in a ledger, including the processes that resumed it."""

    purpose: str
    run: str
    settings: str
    policy: str
    processes: int = 1
    finished: bool = False
    totals: tuple[ReleaseTotal, ...] = ()

    @property
    def size(self) -> int:
        """The number of bytes that the ledger records for this run."""
        return sum(total.bytes for total in self.totals)


@dataclass(frozen=True)
class AuditedLedger(JsonRecord):
    """One ledger."""

    party: str
    file: str
    runs: tuple[AuditedRun, ...]
    repairs: int
    incomplete: bool  # whether the last line is incomplete
    fault: str | None  # why the chain is broken; records after the fault are not read
    differential_privacy: SpentEpsilon | None  # privacy spent by all releases with noise; None if no release has noise
    length: int  # number of records
    head: str  # the last chain value; empty if there is none

    def find_run(self, purpose: str) -> AuditedRun | None:
        """Return the last run with this purpose, or None."""
        return next((run for run in reversed(self.runs) if run.purpose == purpose), None)


@dataclass(frozen=True)
class _ReadLedger:
    """A ledger, its chain values, and the heads of other ledgers that are recorded in it."""

    report: AuditedLedger
    chains: tuple[str, ...]  # the chain value after each record
    remembered: tuple[tuple[str, LedgerHead], ...]  # heads of other parties

    def holds(self, head: LedgerHead) -> bool:
        """Return whether this ledger had this head at some time."""
        if not 1 <= head.length <= len(self.chains):
            return False
        return self.chains[head.length - 1] == head.chain and self.chains[0] == head.ledger


class _LedgerCollector:
    """Collects the records of one ledger."""

    def __init__(self, party: str) -> None:
        self._party, self._repairs = party, 0
        self._chains: list[str] = []
        self._remembered: list[tuple[str, LedgerHead]] = []
        self._runs: list[AuditedRun] = []
        self._totals: list[dict[tuple[str, str, int, str], ReleaseTotal]] = []  # totals of each run
        self._accountant: Accountant | None = None  # counts releases with noise; None before the first such release

    def add(self, chain: str, record: LedgerRecord) -> None:
        """Add a record and the chain value after it."""
        self._chains.append(chain)
        match record:
            case Opening(party=party):
                self._party = party
            case Start(resumes=True) if self._runs:
                self._runs[-1] = replace(self._runs[-1], processes=self._runs[-1].processes + 1)
            case Start(purpose=purpose, run=run, settings=settings, policy=policy):
                self._begin(AuditedRun(purpose, run, settings, policy))
            case End() if self._runs:
                self._runs[-1] = replace(self._runs[-1], finished=True)
            case PeerHeads(heads=heads):
                self._remembered += heads.items()
            case Repair():
                self._repairs += 1
            case Entry():
                if not self._runs:
                    self._begin(AuditedRun("unknown", record.run, "", ""))
                self._add_release(record)

    def build(self, file: Path, *, incomplete: bool, fault: str | None) -> _ReadLedger:
        """Return the ledger with all added records."""
        runs = (replace(run, totals=tuple(own.values())) for run, own in zip(self._runs, self._totals, strict=True))
        report = AuditedLedger(
            party=self._party,
            file=str(file),
            runs=tuple(runs),
            repairs=self._repairs,
            incomplete=incomplete,
            fault=fault,
            differential_privacy=None if self._accountant is None else self._accountant.summarize(),
            length=len(self._chains),
            head=self._chains[-1] if self._chains else "",
        )
        return _ReadLedger(report, tuple(self._chains), tuple(self._remembered))

    def _begin(self, run: AuditedRun) -> None:
        self._runs.append(run)
        self._totals.append({})

    def _add_release(self, entry: Entry) -> None:
        totals, place = self._totals[-1], (entry.phase, entry.kind, entry.layer, entry.protection)
        own = ReleaseTotal.of(entry)
        totals[place] = totals[place].add(own) if place in totals else own
        if "noise" in entry.protection.split("+"):
            from glasu.privacy.accounting import Accountant

            self._accountant = self._accountant or Accountant(DELTA)
            self._accountant.add(entry)


@dataclass(frozen=True)
class Audit(JsonRecord):
    """The ledgers of a folder, and the results of all checks."""

    folder: str
    ledgers: tuple[AuditedLedger, ...]
    checks: tuple[AuditCheck, ...]

    @property
    def failures(self) -> list[AuditCheck]:
        """The checks that failed."""
        return self.find("bad")

    def find(self, level: CheckLevel) -> list[AuditCheck]:
        """Return the checks of one level."""
        return [check for check in self.checks if check.level == level]


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
        peers: folders of other parties, or of the server; the ledgers are compared with the heads recorded there.

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
    memories = [(ledger.report.party, ledger.remembered) for ledger in ledgers]
    checks = [check for ledger in ledgers for check in _check_ledger(ledger.report)]
    try:
        for peer in peers:
            memories += _read_recorded_heads(peer)
        checks += _check_reports(folder, ledgers)
    except RecordError as error:
        raise DataError(f"{error} {RESTORE}") from None
    checks += _check_recorded_heads(ledgers, memories)
    return Audit(str(folder), tuple(ledger.report for ledger in ledgers), tuple(checks))


def _read_ledgers(folder: Path) -> Iterator[_ReadLedger]:
    for name, path in list_ledger_files(folder).items():
        collector, incomplete, fault = _LedgerCollector(name), False, None
        try:
            for found in read_ledger_file(path):
                if isinstance(found, Fragment):
                    incomplete = True
                    break
                collector.add(found.chain, found.record)
        except LedgerError as error:
            fault = str(error)
        yield collector.build(path, incomplete=incomplete, fault=fault)


def _read_recorded_heads(folder: Path) -> list[tuple[str, tuple[tuple[str, LedgerHead], ...]]]:
    """Return the heads in a party's ledgers or in a server's state files, each list with the name of its recorder."""
    found = [(ledger.report.party, ledger.remembered) for ledger in _read_ledgers(folder)]
    for name in (SERVING, PREDICTING, ALIGNING):
        state = _read_json(folder / name) or {}
        heads = read_record(_RecordedHeads, state, str(folder / name), partial=True).ledgers
        if heads:
            found.append(("the server", tuple(heads.items())))
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
        yield AuditCheck(name, "good", f"{ledger.length} records, each consistent with the records before it")
    if ledger.incomplete:
        text = "a crash left the last line incomplete; its release was not sent, and the next run repairs the line"
        yield AuditCheck(name, "note", text)
    if ledger.repairs:
        text = f"{ledger.repairs} repair records contain incomplete lines of crashed runs, whose releases were not sent"
        yield AuditCheck(name, "note", text)


def _check_reports(folder: Path, ledgers: Sequence[_ReadLedger]) -> Iterator[AuditCheck]:
    """Compare the ledgers with the reports that the commands wrote."""
    by_party = {ledger.report.party: ledger for ledger in ledgers}
    for file, purpose in REPORTS.items():
        report = _read_report(folder / file)
        if report is None or report.privacy is None or not report.privacy.ledger:
            continue
        for stated in report.privacy.ledger:
            ledger = by_party.get(stated.party)
            if ledger is None:
                yield AuditCheck(file, "bad", f"names the ledger of {stated.party}, which is missing")
            elif ledger.report.fault is None and ledger.chains[stated.length - 1 : stated.length] != (stated.head,):
                text = f"{stated.party}: the ledger had {stated.length} records when the report was written, "
                yield AuditCheck(file, "bad", f"{text}and has {len(ledger.chains)} now: its end was cut or changed")
            elif ledger.report.fault is None:
                yield AuditCheck(file, "good", f"{stated.party}: the ledger still contains the {stated.length} records")
        listed = [by_party[each.party].report for each in report.privacy.ledger if each.party in by_party]
        yield from _check_traffic(file, purpose, report.traffic, listed)


def _check_traffic(
    file: str, purpose: str, traffic: _ReportedTraffic, ledgers: Sequence[AuditedLedger]
) -> Iterator[AuditCheck]:
    """Compare the bytes in a report, minus message headers, with the bytes in the ledgers."""
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
    ledgers: Sequence[_ReadLedger], memories: Sequence[tuple[str, Sequence[tuple[str, LedgerHead]]]]
) -> Iterator[AuditCheck]:
    """Compare every ledger with the heads that other roles recorded."""
    for ledger in ledgers:
        if ledger.report.fault is not None:
            continue
        name, agreed, is_cut = f"recorded heads of {ledger.report.party}", 0, False
        for who, heads in memories:
            own = [head for party, head in heads if party == ledger.report.party]
            lost = [head for head in own if ledger.chains[:1] == (head.ledger,) and not ledger.holds(head)]
            agreed += sum(map(ledger.holds, own))
            if lost:
                is_cut = True
                most = max(head.length for head in lost)
                text = f"{who} saw {most} records of this ledger, which has {len(ledger.chains)} now: "
                yield AuditCheck(name, "bad", f"{text}its end was cut or changed")
        if agreed:
            yield AuditCheck(name, "good", f"{agreed} heads that other roles recorded are in this ledger")
        elif not is_cut:
            text = "there are none to compare with; pass folders of other parties or the server to --peers"
            yield AuditCheck(name, "skipped", text)
