"""Record every message of a run as bytes, so that attacks can read what a role sees. Recording is off by default.

transcript/manifest.json   schema, run, parties, settings, number of nodes, format of the messages
transcript/messages.bin    records: receiver (u16), length (u64), then the message as `message_bytes` encodes it

Masks and encryption hide tensors in messages, but a client knows its own tensors and decodes the answers. So the file
also contains these tensors unprotected, as messages whose receiver is TO_ONE plus the client. Such messages belong only
to the view of this client.

The file contains all messages from the clients, so it is as confidential as the data of the run: its mode is 0600. It
contains no secret and no cryptographic key. A resumed run appends, so messages of repeated rounds occur twice, as on
the wire.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from glasu.config import RunConfig
from glasu.errors import ConfigError, DataError, ProtocolError
from glasu.files import name_file, write_atomically
from glasu.protocol.message_bytes import compute_format_number, decode, encode, read_header
from glasu.protocol.messages import MESSAGES, Message, TensorMessage
from glasu.records import Sections, parse_json, read_record, to_plain
from glasu.wire.encodings import make_encodings
from glasu.wire.message_key import ALL_CLIENTS, RUN_BYTES, SERVER, TO_ONE, Key, Phase
from glasu.wire.tensor_kinds import TensorKind

TRANSCRIPT = "transcript"  # a folder in the output folder of a run
MANIFEST_FILE, MESSAGE_FILE = "manifest.json", "messages.bin"
RECORD = struct.Struct("<HQ")
TENSOR_MESSAGES = {
    (kind.content().kind, kind.content().is_answer): kind for kind in MESSAGES if issubclass(kind, TensorMessage)
}
MessageT = TypeVar("MessageT", bound=Message)
Rows = NDArray[Any]


@dataclass(frozen=True)
class TranscriptManifest:
    """The content of manifest.json."""

    schema: Literal[2]
    format: int  # format number of the messages
    run: str  # hexadecimal
    parties: tuple[str, ...]
    num_nodes: int
    config: Sections  # the settings that were given; a preset decides the other settings
    # The next two fields are known at the end of the run. `first_round` is the number of the first round of the race's
    # winner in message keys (`glasu.protocol.race`); 0 without a race.
    final_config: Sections | None = None  # all settings
    first_round: int = 0

    def __post_init__(self) -> None:
        if not self.parties or len(bytes.fromhex(self.run)) != RUN_BYTES:
            raise DataError(f"expected at least one party and a run of {RUN_BYTES} bytes.")

    def without_end(self) -> TranscriptManifest:
        """Return the manifest as it was written at the start of the run."""
        return replace(self, final_config=None, first_round=0)


class TranscriptWriter:
    """Appends messages to a transcript, in the order in which they are sent."""

    def __init__(
        self, folder: Path, config: RunConfig, parties: Sequence[str], run: bytes, num_nodes: int, *, fresh: bool
    ) -> None:
        """Create the files, or append to files of the same run after the last complete record.

        Args:
            folder: the folder of the transcript.
            config: the settings of the run, as requested.
            parties: all parties in client order.
            run: the id of the run.
            num_nodes: N.
            fresh: whether to remove an earlier transcript.
        """
        self.path = folder / MESSAGE_FILE
        self._manifest = TranscriptManifest(
            2, compute_format_number(), run.hex(), tuple(parties), num_nodes, config.to_dict(given=True)
        )
        if fresh:
            self.path.unlink(missing_ok=True)
        elif self.path.exists() and _read_manifest(folder).without_end() != self._manifest:
            raise ConfigError(f"{folder}: holds the transcript of another run; remove it, or start over with --fresh.")
        self._write_manifest()
        with name_file(self.path):
            self._file: BinaryIO = os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
            self._file.truncate(_find_end(self._file))
            self._file.seek(0, os.SEEK_END)

    def write(self, message: Message, receiver: int) -> None:
        """Record a message to a client, to ALL_CLIENTS or to the SERVER."""
        content = encode(message)
        with name_file(self.path):
            self._file.write(RECORD.pack(receiver, len(content)) + content)

    def _write_manifest(self) -> None:
        content = json.dumps(to_plain(self._manifest), indent=1).encode()
        write_atomically(self.path.with_name(MANIFEST_FILE), content, 0o600)

    def record_settings(self, config: RunConfig, first_round: int) -> None:
        """Record the settings of the finished run.

        Args:
            config: the settings; after a race, those of the winner.
            first_round: the winner's first round, as numbered in message keys; 0 without a race.
        """
        self._manifest = replace(self._manifest, final_config=config.to_dict(), first_round=first_round)
        self._write_manifest()

    def write_clear(self, client: int, kind: TensorKind, key: Key, rows: Rows, is_answer: bool) -> None:
        """Record the unprotected values of a tensor that a client sent or received in protected form."""
        message = TENSOR_MESSAGES[kind, is_answer]
        self.write(message(key._replace(client=SERVER if is_answer else client), rows), TO_ONE + client)

    def close(self) -> None:
        """Write buffered messages and close the file."""
        with name_file(self.path):
            self._file.close()


@contextmanager
def _explain_missing(folder: Path) -> Iterator[None]:
    """Raise DataError with the remedy if a file of a transcript cannot be read."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{folder}: cannot read a transcript here ({error.strerror}); record one with glasu train --transcript."
        ) from None


def _read_manifest(folder: Path) -> TranscriptManifest:
    """Read manifest.json."""
    with _explain_missing(folder):
        content = (folder / MANIFEST_FILE).read_bytes()
    where = str(folder / MANIFEST_FILE)
    return read_record(TranscriptManifest, parse_json(content, where), where)


def _find_end(file: BinaryIO) -> int:
    """Return where the last complete record ends; a killed process may leave an incomplete record."""
    size, end = os.fstat(file.fileno()).st_size, 0
    while end + RECORD.size <= size:
        file.seek(end)
        _, length = RECORD.unpack(file.read(RECORD.size))
        if end + RECORD.size + length > size:
            break
        end += RECORD.size + length
    return end


class RecordedMessage(NamedTuple):
    """One recorded message."""

    kind: type[Message]
    key: Key
    receiver: int  # a client, ALL_CLIENTS, SERVER, or TO_ONE + a client for an unprotected tensor
    start: int
    stop: int

    @property
    def is_clear(self) -> bool:
        """Whether this is an unprotected tensor, which belongs only to the view of one client."""
        return TO_ONE <= self.receiver < ALL_CLIENTS

    @property
    def sender(self) -> int:
        """The client that sent the message, or SERVER."""
        return SERVER if self.key.client >= TO_ONE else self.key.client


def _is_tensor(entry: RecordedMessage) -> bool:
    return issubclass(entry.kind, TensorMessage)


class RecordedTensor(NamedTuple):
    """A decoded tensor, with its chunks joined."""

    sender: int
    key: Key  # the key of the first chunk
    rows: Rows


class RecordedRun:
    """A recorded run. The header of every message is checked when the file is opened."""

    def __init__(self, folder: Path) -> None:
        """Open a transcript; raise DataError if it is incomplete or was written by another version."""
        self.folder = folder
        self.manifest = _read_manifest(folder)
        with _explain_missing(folder):
            self._data = _map_file(folder / MESSAGE_FILE)
        if self.manifest.format != compute_format_number():
            raise DataError(f"{folder}: the messages have the format of another version; record the run again.")
        settings = self.manifest.final_config or self.manifest.config
        self.config = RunConfig.from_dict(settings, str(folder / MANIFEST_FILE))
        self.encodings = make_encodings(self.config)
        self.entries = tuple(self._read_entries())

    def _read_entries(self) -> Iterator[RecordedMessage]:
        position, size, count = 0, len(self._data), len(self.manifest.parties)
        run = bytes.fromhex(self.manifest.run)
        while position < size:
            start = position + RECORD.size
            try:
                if start > size:
                    raise ProtocolError(f"expected {RECORD.size} bytes of a record, got {size - position}.")
                receiver, length = RECORD.unpack(self._data[position:start])
                if start + length > size:
                    raise ProtocolError(f"a message of {length} bytes is declared, but {size - start} bytes are left.")
                head = read_header(self._data[start : start + min(length, 64)], length)
                entry = RecordedMessage(head.kind, head.key, receiver, start, start + length)
                self._check(entry, run, count)
            except ProtocolError as error:
                where = f"{self.folder / MESSAGE_FILE}, byte {position}"
                raise DataError(f"{where}: {error} Record the run again.") from None
            yield entry
            position = entry.stop

    @staticmethod
    def _check(entry: RecordedMessage, run: bytes, count: int) -> None:
        sender, receiver, to = entry.sender, entry.receiver, entry.key.client - TO_ONE
        if entry.key.run != run:
            raise ProtocolError("expected a message of this run, got one of another run.")
        if entry.is_clear:
            client = receiver - TO_ONE
            if client >= count or sender not in (client, SERVER) or not issubclass(entry.kind, TensorMessage):
                raise ProtocolError(f"expected an unprotected tensor of a client 0..{count - 1}.")
            return
        if sender != SERVER and (sender >= count or receiver != SERVER):
            raise ProtocolError(f"expected a message from a client 0..{count - 1} to the server.")
        allowed = (*range(count), ALL_CLIENTS) if entry.key.client == SERVER else range(count)[to : to + 1]
        if sender == SERVER and receiver not in allowed:
            raise ProtocolError(
                f"expected a message from the server to clients 0..{count - 1}, got receiver {receiver}."
            )

    def load(self, entry: RecordedMessage) -> Message:
        """Decode one message."""
        try:
            return decode(self._data[entry.start : entry.stop])
        except ProtocolError as error:
            raise DataError(f"{self.folder / MESSAGE_FILE}, byte {entry.start}: {error}") from None

    def view(self, role: str) -> RoleView:
        """Return the messages that the server or one party sees.

        If messages hide tensors, the view of a party instead contains the unprotected tensors that the party knows. If
        there was a race, the view contains the rounds of the winner only, numbered from 0.

        Args:
            role: "server", or the name of a party.
        """
        first = self.manifest.first_round
        entries = [
            each._replace(key=each.key._replace(round=each.key.round - first))
            for each in self.entries
            if each.key.phase is not Phase.CONTROL and each.key.round >= first
        ]
        entries += [each for each in self.entries if each.key.phase is Phase.CONTROL]
        clear = [each for each in entries if each.is_clear]
        messages = [each for each in entries if not each.is_clear]
        if role == "server":
            return RoleView(self, SERVER, tuple(messages))
        if role not in self.manifest.parties:
            listed = ", ".join(("server", *self.manifest.parties))
            raise ConfigError(f"role {role!r}: the roles of this transcript are {listed}.")
        index = self.manifest.parties.index(role)
        if self.config.privacy.hides_parts and not clear and any(_is_tensor(each) for each in messages):
            raise DataError(f"{self.folder}: does not contain what the parties read from hidden sums; record it again.")
        if clear:
            messages = [each for each in messages if not _is_tensor(each)]
        seen = [each for each in messages if each.sender == index or each.receiver in (index, ALL_CLIENTS)]
        return RoleView(self, index, (*seen, *(each for each in clear if each.receiver == TO_ONE + index)))


def _map_file(path: Path) -> mmap.mmap | bytes:
    """Map the content of a file into memory. The file can be closed and removed afterwards."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:  # mmap refuses empty files
            return b""
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


@dataclass(frozen=True)
class RoleView:
    """The messages that one role sent or received. A message that was repeated counts once."""

    transcript: RecordedRun
    index: int  # index of the client, or SERVER
    entries: tuple[RecordedMessage, ...]

    def messages(self, kind: type[MessageT], phase: Phase | None = None) -> Iterator[tuple[RecordedMessage, MessageT]]:
        """Yield the messages of a kind, in the order in which they were sent."""
        seen = set()
        for entry in self.entries:
            place = entry.key.pack_without_attempt(), entry.receiver
            if entry.kind is not kind or (phase is not None and entry.key.phase is not phase) or place in seen:
                continue
            seen.add(place)
            yield entry, self.transcript.load(entry)  # type: ignore[misc]

    def matrices(self, kind: type[TensorMessage], phase: Phase | None = None) -> list[RecordedTensor]:
        """Return the decoded tensors of a kind, each with its chunks joined."""
        encoding = kind.content().find_encoding(self.transcript.encodings)
        parts: dict[tuple[int, int, Phase, int, int], list[tuple[Key, Rows]]] = {}
        for entry, message in self.messages(kind, phase):
            place = entry.sender, entry.receiver, entry.key.phase, entry.key.round, entry.key.layer
            rows = message.value if entry.is_clear else encoding.decode(message.value)
            parts.setdefault(place, []).append((entry.key, rows))
        found = []
        for (sender, *_), chunks in parts.items():
            chunks.sort(key=lambda chunk: chunk[0].chunk)
            # The last chunk may be empty, and an empty chunk of ciphertexts does not show the number of columns.
            filled = [rows for _, rows in chunks if len(rows)] or [chunks[0][1]]
            found.append(RecordedTensor(sender, chunks[0][0], np.concatenate(filled)))
        return found
