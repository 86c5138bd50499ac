"""No plain hash of an id, or of a list of ids, is in any frame of a training, a prediction or an alignment.

A server could test guesses of an id against such a hash. The tests record every frame of every party in both
directions: the handshake, the messages and the results.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from glasu.data.folders import read_party
from glasu.network.alignment_party import AlignmentParty
from glasu.network.connection import ConnectOptions
from glasu.network.join import join
from glasu.network.options import JoinOptions
from glasu.network.prediction_party import PredictionParty, Query
from glasu.network.training_party import TrainingParty
from glasu.network.transport import ClientStream
from glasu.pki.kit import open_kit
from glasu.protocol.message_bytes import encode
from glasu.protocol.messages import Partial
from glasu.wire.message_key import Key, Phase
from support.cluster import Cluster
from support.messy_ids import SECRETS, name_person, spell, write_messy_folders
from support.roles import Role
from support.tiny import tiny, tiny_parties

ALGORITHMS = ("md5", "sha1", "sha256", "sha512", "blake2b")
PREFIX = 8  # bytes of a digest that are searched, so that shortened digests are found, too
SEPARATORS = ("", " ", ",", ";", "|", "\0", "\n")
NODES = np.array([3, 5, 11])  # of a prediction
PEOPLE = 40


# The search


def list_forms(ids: Iterable[Any]) -> Iterator[bytes]:
    """Yield the bytes that a hash of one id could be computed from."""
    for each in ids:
        yield str(each).encode()
        yield json.dumps(each).encode()
        if isinstance(each, int):
            yield from (struct.pack(layout, each) for layout in ("<q", ">q", "<i", ">i"))


def list_joined(ids: list[Any]) -> Iterator[bytes]:
    """Yield the bytes that a hash of the whole list could be computed from, in its order and sorted."""
    for ordered in (ids, sorted(ids)):
        yield np.array(ordered).tobytes()
        yield json.dumps(ordered).encode()
        yield from (separator.join(map(str, ordered)).encode() for separator in SEPARATORS)


def list_digests(*lists: list[Any]) -> dict[bytes, str]:
    """Return the digests of all ids of some lists and of the joined lists, each with a description."""
    found = {}
    for ids in lists:
        for form in {*list_forms(ids), *list_joined(ids)}:
            for name in ALGORITHMS:
                found[hashlib.new(name, form).digest()] = f"{name} of {form[:40]!r}"
    return found


def find_hashes(content: bytes, digests: Mapping[bytes, str]) -> list[str]:
    """Return the digests that are in the content: as bytes, as hexadecimal digits or in base64."""
    lowered = content.lower()
    found = []
    for digest, name in digests.items():
        encoded = base64.b64encode(digest)[: PREFIX * 8 // 6], base64.urlsafe_b64encode(digest)[: PREFIX * 8 // 6]
        is_plain = any(start in content for start in (digest[:PREFIX], *encoded))
        if is_plain or digest[:PREFIX].hex().encode() in lowered:
            found.append(name)
    return found


def list_party_digests(*parties: Any) -> dict[bytes, str]:
    """Return the digests of the parties' ids, and the digests of lists that glasu itself computes."""
    own = {
        bytes.fromhex(each): "digest of a list" for party in parties for each in (party.ids_digest(), party.set_digest)
    }
    return {**list_digests(*(party.ids.tolist() for party in parties)), **own}


# The recording


class Recorder:
    """Starts the parties of a cluster, and keeps all bytes of their connections."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.frames: list[bytes] = []

    def train(self, role: type[TrainingParty] = TrainingParty) -> None:
        """Train with the data of the cluster."""
        server = self.cluster.serve()
        self._finish(server, [role(self._options(party.name), party) for party in self.cluster.parties])

    def predict(self, role: type[PredictionParty] = PredictionParty) -> None:
        """Predict with the trained model; every party requests the same nodes."""
        server = self.cluster.serve_prediction()
        made = [role(self._options(party.name), party, Query(NODES)) for party in self.cluster.parties]
        self._finish(server, made)

    def align(self, folders: Iterable[Any], role: type[AlignmentParty] = AlignmentParty) -> None:
        """Align the tables in these folders."""
        server = self.cluster.serve_alignment()
        given = zip("abc", folders, SECRETS, strict=True)
        options = [
            (dataclasses.replace(self._options(name), out=folder), 1000, secret) for name, folder, secret in given
        ]
        self._finish(server, [role(*each) for each in options])

    def read(self) -> bytes:
        """Return everything: frames, log lines and the files of the server."""
        said = "\n".join(line for lines in self.cluster.lines.values() for line in lines).encode()
        stored = [path.read_bytes() for path in sorted((self.cluster.folder / "server").rglob("*")) if path.is_file()]
        return b"\n".join([*self.frames, said, *stored])

    def _options(self, name: str) -> JoinOptions:
        kit, server = open_kit(self.cluster.kits / name, "party"), f"localhost:{self.cluster.port}"
        return JoinOptions(kit=kit, server=server, out=self.cluster.folder / name, wait=60.0)

    def _finish(self, server: Role, works: list[Any]) -> None:
        """Run the parties to their end. The next session uses another port."""
        roles = [
            Role(each.options.kit.name, lambda each=each: join(each, connect_options=self._choose_connection(each)))
            for each in works
        ]
        for role in (*roles, server):
            role.outcome()
        self.cluster.port = 0

    def _choose_connection(self, work: Any) -> ConnectOptions:
        options = work.options
        return ConnectOptions(options.kit, options.server, options.wait, options.log, connect=self._open_stream)

    def _open_stream(self, kit: Any, address: str, outgoing: Any, arrive: Any) -> ClientStream:
        yield_frames = outgoing.yield_frames

        def send() -> Iterator[bytes]:
            for frame in yield_frames():
                self.frames.append(frame)
                yield frame

        def receive(stream: ClientStream, event: Any) -> None:
            if isinstance(event, bytes):
                self.frames.append(event)
            arrive(stream, event)

        outgoing.yield_frames = send
        return ClientStream(kit, address, outgoing, receive)


def rename(party, kind):
    """Return the party with ids of this kind."""
    numbers = 10_000_000 + 7 * np.arange(party.num_nodes)
    ids = numbers if kind == "numbers" else np.array([f"customer-{number}" for number in numbers])
    return dataclasses.replace(party, ids=ids)


# The laws


@pytest.mark.parametrize("kind", ["numbers", "strings"])
def test_training_and_prediction_send_no_plain_hash_of_an_id(kind, kits, tmp_path):
    config, parties = tiny(features="auto")
    parties = [rename(party, kind) for party in parties]
    recorder = Recorder(Cluster(config, parties, kits, tmp_path))
    digests = list_party_digests(*parties)
    recorder.train()
    assert len(recorder.frames) > 50
    assert find_hashes(recorder.read(), digests) == []
    recorder.predict()
    content = recorder.read()
    assert all(words in content for words in (b"id_tags", b"id_order", b'"training"', b'"prediction"'))
    assert find_hashes(content, digests) == []


def test_an_alignment_and_a_training_of_aligned_parties_send_no_plain_hash_of_an_id(kits, tmp_path):
    config, parties = tiny(chunk_rows=7)
    folders = write_messy_folders(tmp_path / "tables", tiny_parties(num_nodes=PEOPLE))
    recorder = Recorder(Cluster(config, (), kits, tmp_path))
    recorder.align(folders)
    assert len(recorder.frames) > 50
    spelled = [[spell(number, party) for number in range(PEOPLE)] for party in range(3)]
    digests = list_digests([name_person(number) for number in range(PEOPLE)], *spelled)
    assert find_hashes(recorder.read(), digests) == []
    parties = [read_party(folder) for folder in folders]
    recorder = Recorder(Cluster(config, parties, kits, tmp_path / "trained"))
    digests |= list_party_digests(*parties)
    recorder.train()
    assert find_hashes(recorder.read(), digests) == []
    recorder.predict()
    content = recorder.read()
    assert b"id_set" in content
    assert find_hashes(content, digests) == []


# The search finds planted hashes


def leak(kind, method, digest):
    """Return a class of work that states a digest in one of its payloads, in the place of the run of a training."""

    def state(self):
        payload = getattr(super(leaking, self), method)()
        return {**payload, "facts": {**payload["facts"], "training": digest}}

    leaking = type("Leaking", (kind,), {method: state})
    return leaking


@pytest.mark.parametrize("method", ["hello", "statement"])
def test_the_search_finds_a_hash_of_one_id_in_the_handshake_of_a_training(method, kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    parties = [rename(party, "strings") for party in parties]
    leaked = str(parties[0].ids[-1]).encode()
    recorder = Recorder(Cluster(config, parties, kits, tmp_path))
    recorder.train(leak(TrainingParty, method, hashlib.sha256(leaked).hexdigest()))
    assert find_hashes(recorder.read(), list_party_digests(*parties)) == [f"sha256 of {leaked!r}"]


def test_the_search_finds_a_hash_of_the_list_of_ids_in_the_handshake_of_an_alignment(kits, tmp_path):
    folders = write_messy_folders(tmp_path / "tables", tiny_parties(num_nodes=PEOPLE))
    ids = [name_person(number) for number in range(PEOPLE)]
    digest = hashlib.sha256(",".join(ids).encode()).hexdigest()[:20].upper()
    recorder = Recorder(Cluster(tiny()[0], (), kits, tmp_path))
    recorder.align(folders, leak(AlignmentParty, "statement", digest))
    assert len(find_hashes(recorder.read(), list_digests(ids))) == 1


def test_the_search_finds_hashes_in_messages_as_bytes_and_in_base64():
    digests = list_digests([17, 18])
    for name in ALGORITHMS:
        digest = hashlib.new(name, struct.pack("<q", 18)).digest()
        rows = np.frombuffer(digest[:16], "<f4").reshape(1, -1)
        message = encode(Partial(Key(bytes(12), Phase.TRAINING, 0), rows))
        for content in (message, base64.b64encode(digest), base64.urlsafe_b64encode(digest)):
            assert [each.partition(" ")[0] for each in find_hashes(content, digests)] == [name]
