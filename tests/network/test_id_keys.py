"""Parties compare their ids by HMACs under keys that the server lacks, and nothing else about the ids is stated."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from glasu.errors import ConfigError, ProtocolError
from glasu.network.facts import collect_party_facts, list_pairs_without_tags, resolve_tags
from glasu.network.id_keys import IdKeys, IdShare
from glasu.network.purposes import TRAINING
from glasu.network.signatures import Signature, make_signer, sign_statement
from glasu.network.training_server import TrainingServer
from glasu.pki.kit import open_kit
from glasu.pki.pins import PINS, add_pins
from support.cluster import Cluster
from support.kits import simulate_with_secrets
from support.tiny import assert_same_end, tiny, tiny_parties

NAMES = "abc"


def replace_ids(parties, **ids):
    """Return the parties with string ids; those in `ids` have other ones."""
    usual = np.array([f"person-{row:03d}" for row in range(parties[0].num_nodes)])
    return [replace(party, ids=ids.get(party.name, usual)) for party in parties]


def make_keys(kits, name):
    """Return the keys of a process of a party."""
    return IdKeys(name, make_signer(open_kit(kits / name)))


def state(kits, parties):
    """Return the facts of all parties after the server has passed the shares on."""
    keys = {party.name: make_keys(kits, party.name) for party in parties}
    shares = {name: own.share for name, own in keys.items()}
    for own in keys.values():
        own.store_shares(shares)
    return {party.name: collect_party_facts(party, TRAINING, keys[party.name]) for party in parties}


def test_equal_ids_become_equal_facts_and_other_ids_or_orders_do_not(kits):
    parties = replace_ids(tiny_parties())
    usual = parties[0].ids
    assert {facts.id_order for facts in resolve_tags(state(kits, parties)).values()} == {"as at a"}
    shuffled = resolve_tags(state(kits, replace_ids(parties, c=usual[::-1])))
    assert [shuffled[name].id_set for name in NAMES] == ["as at a"] * 3
    assert [shuffled[name].id_order for name in NAMES] == ["as at a", "as at a", "as at c"]
    others = resolve_tags(state(kits, replace_ids(parties, b=np.char.add(usual, "x"))))
    assert [others[name].id_set for name in NAMES] == ["as at a", "as at b", "as at a"]


def test_ids_that_were_not_compared_yet_are_listed_and_count_as_equal(kits):
    parties = replace_ids(tiny_parties())
    facts = {party.name: collect_party_facts(party, TRAINING, make_keys(kits, party.name)) for party in parties}
    assert len(list_pairs_without_tags(facts)) == 6
    assert len({each.id_order for each in resolve_tags(facts).values()}) == 1
    assert list_pairs_without_tags(state(kits, parties)) == []
    restarted = {**state(kits, parties), "c": collect_party_facts(parties[2], TRAINING, make_keys(kits, "c"))}
    assert set(list_pairs_without_tags(restarted)) == {("a", "c"), ("b", "c"), ("c", "a"), ("c", "b")}


def test_no_fact_is_a_digest_that_the_server_could_compute_from_a_guess_of_the_list(kits):
    (party, *_) = parties = replace_ids(tiny_parties())
    guesses = {party.ids_digest(), party.set_digest, hashlib.sha256("\n".join(party.ids).encode()).hexdigest()}
    again = [state(kits, parties), state(kits, parties)]
    told = [
        {tag.id_order for tag in facts["a"].id_tags} | {tag.id_set for tag in facts["a"].id_tags} for facts in again
    ]
    assert not told[0] & told[1]  # new keys in every process
    for facts, values in zip(again, told, strict=True):
        assert all((each.id_set, each.id_order) == (None, None) for each in facts.values())
        assert not guesses & values


@pytest.mark.parametrize("share", ["", "00" * 32, "zz", "ab" * 31])
def test_a_share_that_is_no_key_is_refused(share, kits):
    keys = make_keys(kits, "a")
    signature = sign_statement(make_signer(open_kit(kits / "b")), ("share for ids", "b", share))
    keys.store_shares({"a": keys.share, "b": IdShare(share, signature)})
    with pytest.raises(ProtocolError, match="the share of party 'b' is not a valid X25519 key"):
        keys.make_tags(tiny_parties()[0])


def test_a_served_run_of_parties_with_equal_string_ids_sends_no_digest_of_them(kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    parties = replace_ids(parties)
    cluster = Cluster(config, parties, kits, tmp_path)
    served, _ = cluster.run()
    assert_same_end(served, simulate_with_secrets(parties, config).report)
    kept = b"".join(path.read_bytes() for path in (tmp_path / "server").rglob("*") if path.is_file())
    said = "\n".join(line for lines in cluster.lines.values() for line in lines).encode()
    for digest in (parties[0].ids_digest(), parties[0].set_digest, "person-"):
        assert digest.encode() not in kept + said


@pytest.mark.parametrize("order", [True, False], ids=["other order", "other ids"])
def test_the_party_that_came_last_is_refused_if_its_ids_differ(order, kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    parties = replace_ids(parties)
    cluster = Cluster(config, parties, kits, tmp_path)
    server, first = cluster.serve(), [cluster.join(name) for name in "ab"]
    for name in "ab":
        cluster.until("server", f"{name}: prepared")
    usual = parties[2].ids
    wrong = replace(parties[2], ids=usual[::-1] if order else np.char.add(usual, "x"))
    error = cluster.join("c", party=wrong).error()
    assert isinstance(error, ConfigError)
    assert ("the ids are the same, but in another order" if order else "the sets of ids differ") in str(error)
    for role in [*first, cluster.join("c")]:
        role.outcome()
    server.outcome()


class SwappingServer(TrainingServer):
    """Forwards a key of its own in place of the share of party b, with the signature of b."""

    def __init__(self, options):
        super().__init__(options)
        find = self.admission.find_comparison
        key = X25519PrivateKey.generate().public_key().public_bytes_raw().hex()

        def find_and_swap(prepared):
            party, shares = find(prepared) or ("", {})
            swapped = {name: replace(share, key=key) if name == "b" else share for name, share in shares.items()}
            return (party, swapped) if party else None

        self.admission.find_comparison = find_and_swap


@pytest.mark.parametrize("kind", ["kits", "pinned_kits"])
def test_a_share_that_the_server_swapped_is_refused(kind, request, tmp_path):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(config, replace_ids(parties), request.getfixturevalue(kind), tmp_path)
    server, roles = cluster.serve(SwappingServer), {name: cluster.join(name) for name in "abc"}
    errors = {name: str(role.error()) for name, role in roles.items()}
    said = "the share for the comparison of ids of party 'b' has a signature that is not valid for this statement"
    assert any(said in error for error in errors.values())
    assert all("\n" not in error for error in errors.values())
    assert server.error() is not None


def test_a_share_signed_by_another_party_or_not_at_all_is_refused(kits, pinned_kits):
    keys, other = make_keys(kits, "a"), make_keys(kits, "b")
    signer = make_signer(open_kit(kits / "c"))
    forged = IdShare(other.share.key, sign_statement(signer, ("share for ids", "b", other.share.key)))
    with pytest.raises(ProtocolError, match="of party 'b' comes with the certificate of another role or party"):
        keys.store_shares({"b": forged})
    with pytest.raises(ProtocolError, match="of party 'b' is not signed"):
        keys.store_shares({"b": IdShare(other.share.key, Signature("", ""))})
    with pytest.raises(ProtocolError, match="of party 'b' comes with a certificate that the CA of this kit has not"):
        keys.store_shares({"b": make_keys(pinned_kits, "b").share})


def test_a_share_under_another_certificate_of_the_same_ca_is_refused_if_the_kit_pins_the_key(pinned_kits, tmp_path):
    kits = Path(shutil.copytree(pinned_kits, tmp_path / "kits"))
    (kits / "a" / PINS).unlink()
    add_pins(kits / "a", "a", {"b": "0123456789abcdef0123"})
    with pytest.raises(ProtocolError, match="of party 'b' comes with a certificate for a key that is not the pinned"):
        make_keys(kits, "a").store_shares({"b": make_keys(kits, "b").share})
