"""Alignment between organisations: the files of one process, then training and prediction on the aligned folders."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json

import numpy as np
import pytest

from glasu.data.alignment_file import ALIGNMENT_FILE, read_alignment
from glasu.data.folders import find_query_nodes, read_party
from glasu.errors import AlignmentError, ConfigError, ProtocolError
from glasu.network.alignment_party import AlignmentParty
from glasu.network.facts import collect_party_facts
from glasu.network.handshake import Code, RefusalError
from glasu.network.join import PartyPerformer
from glasu.network.options import JoinOptions
from glasu.network.purposes import TRAINING
from glasu.pki.kit import open_kit
from glasu.protocol.message_bytes import encode
from glasu.protocol.messages import BlindedSet
from glasu.protocol.requests import Send
from glasu.runtime.audit import audit_folder
from glasu.runtime.local_alignment import AlignmentOptions, align_folders
from glasu.runtime.trained_model import TrainedModel
from support.cluster import Cluster
from support.kits import simulate_with_secrets
from support.messy_ids import SECRETS, list_common, list_people, name_person, spell, write_messy_folders
from support.roles import Killed
from support.tiny import settings, tiny, tiny_parties

PEOPLE = 60


@pytest.fixture
def folders(tmp_path):
    return write_messy_folders(tmp_path / "tables", tiny_parties(num_nodes=PEOPLE))


@pytest.fixture
def cluster(kits, tmp_path):
    return Cluster(settings(num_rounds=2, evaluate_every=1, chunk_rows=7), (), kits, tmp_path / "runs")


def align(cluster, folders, secrets=SECRETS):
    server = cluster.serve_alignment()
    roles = [cluster.align_with(*each) for each in zip("abc", folders, secrets, strict=True)]
    found = [role.outcome() for role in roles]
    report = server.outcome()
    cluster.port = 0
    return report, found


def test_an_alignment_enters_everything_in_the_ledgers_before_it_leaves(cluster, folders):
    report, _ = align(cluster, folders)
    ledgers = [audit_folder(folder, [other for other in folders if other != folder]) for folder in folders]
    assert [audit.failures for audit in ledgers] == [[], [], []]
    entered = sum(audit.ledgers[0].find_run("alignment").size for audit in ledgers)
    assert entered == report.traffic.bytes_to_server - report.traffic.headers_to_server
    sizes = {total.kind: total.rows for total in ledgers[0].ledgers[0].runs[0].totals}
    assert sizes == {"set size": 1, "key share": 2, "blinded ids": sum(report.sizes.values())}


def test_an_alignment_over_grpc_writes_the_files_of_one_process(cluster, folders, tmp_path):
    report, found = align(cluster, folders)
    over_network = [(folder / ALIGNMENT_FILE).read_bytes() for folder in folders]
    here = align_folders(folders, AlignmentOptions(secrets=SECRETS, chunk_rows=9))
    assert [file.read_bytes() for file in here.files] == over_network
    assert set(read_alignment(folders[0]).ids.tolist()) == list_common(PEOPLE)
    assert [each.common for each in found] == [report.common] * 3 == [len(list_common(PEOPLE))] * 3
    written = json.loads((tmp_path / "runs" / "server" / "alignment.json").read_text())
    assert written["sizes"] == {name: len(list_people(index, PEOPLE)) for index, name in enumerate("abc")}
    assert written["overlaps"][0] == {"parties": ["a", "b", "c"], "ids": report.common}
    assert {(folder / ALIGNMENT_FILE).stat().st_mode & 0o777 for folder in folders} == {0o600}


def test_parties_align_train_and_predict_over_the_network(cluster, folders, kits, tmp_path):
    align(cluster, folders, [None] * 3)
    parties = [read_party(folder) for folder in folders]
    assert {party.ids_digest() for party in parties} == {parties[0].ids_digest()}
    assert set(parties[0].ids.tolist()) == list_common(PEOPLE)
    config = settings(num_rounds=2, evaluate_every=1)
    training = Cluster(config, parties, kits, tmp_path / "training")
    training.run()
    model = TrainedModel.of(simulate_with_secrets(parties, config).clients)
    asked = sorted(int(each[-3:]) for each in parties[1].ids[:5].tolist())
    query = tmp_path / "ids.csv"
    query.write_text("id\n" + "".join(f'"{spell(number, 1)}"\n' for number in asked), encoding="utf-8")
    nodes = find_query_nodes(query, folders[1], parties[1])
    assert parties[1].ids[nodes].tolist() == [name_person(number) for number in asked]
    _, predicted = training.predict(b=nodes)
    assert np.array_equal(predicted["b"].scores, model.predict_proba(parties, nodes))
    with predicted["b"].file.open(encoding="utf-8") as file:
        assert [row["id"] for row in csv.DictReader(file)] == [name_person(number) for number in asked]


def test_no_frame_contains_an_id_in_any_spelling_or_a_plain_hash_of_one(cluster, folders):
    sent = []

    class Recording(PartyPerformer):
        def __call__(self, request):
            if isinstance(request, Send):
                sent.append(encode(request.message))
            return super().__call__(request)

    server = cluster.serve_alignment()
    roles = [cluster.align_with(*each, performer=Recording) for each in zip("abc", folders, SECRETS, strict=True)]
    assert [role.outcome().party for role in roles] == ["a", "b", "c"]
    server.outcome()
    kept = [path.read_bytes() for path in sorted((cluster.folder / "server").iterdir()) if path.is_file()]
    said = "\n".join(line for lines in cluster.lines.values() for line in lines).encode()
    content = b"".join([*sent, *kept, said])
    for number in range(PEOPLE):
        for text in (name_person(number), *(spell(number, party) for party in range(3))):
            plain = text.encode()
            for digest in (plain, *(hashlib.new(name, plain).digest() for name in ("sha256", "sha512", "blake2b"))):
                assert digest not in content
                assert digest.hex().encode() not in content


def test_the_facts_of_aligned_parties_are_equal_and_are_no_digests_that_the_server_can_compute(folders):
    plain = [read_party(folder) for folder in folders]
    align_folders(folders, AlignmentOptions(secrets=SECRETS))
    parties = [read_party(folder) for folder in folders]
    stated = [collect_party_facts(party, TRAINING) for party in parties]
    assert len({(facts.alignment, facts.id_set, facts.id_order) for facts in stated}) == 1
    guessed = {dataclasses.replace(party, alignment_key=None) for party in (*parties, *plain)}
    known = {digest for party in guessed for digest in (party.ids_digest(), party.set_digest)}
    assert not known & {stated[0].id_set, stated[0].id_order, stated[0].alignment}
    assert collect_party_facts(plain[0], TRAINING).alignment == "none"


def test_a_party_of_another_alignment_is_refused(folders, kits, tmp_path):
    align_folders(folders, AlignmentOptions(secrets=SECRETS))
    parties = [read_party(folder) for folder in folders]
    align_folders(folders)
    mixed = [*parties[:2], read_party(folders[2])]
    cluster = Cluster(settings(num_rounds=1), mixed, kits, tmp_path / "mixed")
    server = cluster.serve(wait=2.0)
    roles = {name: cluster.join(name, wait=5.0) for name in "abc"}
    refused = [error for role in roles.values() if isinstance(error := role.error(), RefusalError)]
    assert refused
    assert refused[0].code == Code.DIFFERENT_FACTS
    assert "run glasu align at every party" in str(refused[0])
    assert server.error() is not None


def test_other_rules_for_ids_are_refused_before_a_point_is_sent(cluster, folders):
    (folders[2] / "party.toml").write_text('id_case = "keep"\n')
    server = cluster.serve_alignment(wait=2.0)
    roles = [cluster.align_with(*each) for each in zip("abc", folders, SECRETS, strict=True)]
    errors = [role.error() for role in roles]
    assert any("rules for ids" in str(error) and isinstance(error, RefusalError) for error in errors)
    assert server.error() is not None
    assert not any((folder / ALIGNMENT_FILE).exists() for folder in folders)


def test_a_party_joins_an_alignment_only_and_not_a_training(cluster, folders):
    server = cluster.serve_alignment(wait=2.0)
    _, parties = tiny(num_rounds=1)
    training = Cluster(cluster.config, parties, cluster.kits, cluster.folder, cluster.port)
    error = training.join("a").error()
    assert isinstance(error, RefusalError)
    assert error.code == Code.OTHER_PURPOSE
    assert "glasu align" in str(error)
    assert "An alignment needs all parties." in str(server.error())


def test_a_set_above_the_limit_of_a_party_stops_the_alignment(cluster, folders):
    server = cluster.serve_alignment()
    roles = [cluster.align_with(*each, max_ids=20) for each in zip("abc", folders, SECRETS, strict=True)]
    errors = [role.error() for role in roles]
    assert any(isinstance(error, AlignmentError) and "the limit here is 20" in str(error) for error in errors)
    assert server.error() is not None
    assert not any((folder / ALIGNMENT_FILE).exists() for folder in folders)


def test_a_party_that_sends_garbage_is_named(cluster, folders):
    class Garbage(PartyPerformer):
        def __call__(self, request):
            if isinstance(request, Send) and isinstance(request.message, BlindedSet) and request.message.key.round == 3:
                changed = np.full_like(request.message.points, 255)
                request = Send(dataclasses.replace(request.message, points=changed))
            return super().__call__(request)

    server = cluster.serve_alignment()
    bad = cluster.align_with("b", folders[1], performer=Garbage)
    roles = [cluster.align_with(name, folders["abc".index(name)]) for name in "ac"]
    error = server.error()
    assert isinstance(error, ProtocolError)
    assert "party 'b'" in str(error)
    assert "not a valid ristretto255 point" in str(error)
    assert all(role.error() is not None for role in (bad, *roles))


def test_an_alignment_continues_after_a_party_was_restarted(cluster, folders):
    class Dying(PartyPerformer):
        def __call__(self, request):
            if isinstance(request, Send) and request.message.key.round == 2:
                raise Killed
            return super().__call__(request)

    server = cluster.serve_alignment()
    roles = [cluster.align_with(name, folders["abc".index(name)]) for name in "ab"]
    killed = cluster.align_with("c", folders[2], performer=Dying)
    assert isinstance(killed.error(), Killed)
    roles.append(cluster.align_with("c", folders[2]))
    assert {role.outcome().common for role in roles} == {server.outcome().common}
    assert len({read_party(folder).ids_digest() for folder in folders}) == 1


def test_the_kit_of_another_party_is_refused(kits, folders):
    options = JoinOptions(kit=open_kit(kits / "a", "party"), server="localhost:1", out=folders[1])
    with pytest.raises(ConfigError, match="data belongs to party 'b' and the kit to party 'a'"):
        AlignmentParty(options)
