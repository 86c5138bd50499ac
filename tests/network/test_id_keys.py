"""Parties compare their ids by HMACs under keys that the server lacks, and nothing else about the ids is stated."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from glasu.errors import ConfigError, ProtocolError
from glasu.network.facts import collect_party_facts, list_pairs_without_tags, resolve_tags
from glasu.network.id_keys import IdKeys
from support.cluster import Cluster
from support.kits import simulate_with_secrets
from support.tiny import assert_same_end, tiny, tiny_parties

NAMES = "abc"


def named(parties, **ids):
    """Return the parties with string ids; those in `ids` have other ones."""
    usual = np.array([f"person-{row:03d}" for row in range(parties[0].num_nodes)])
    return [replace(party, ids=ids.get(party.name, usual)) for party in parties]


def state(parties):
    """Return the facts of all parties after the server has passed the shares on."""
    keys = {party.name: IdKeys() for party in parties}
    shares = {name: own.share for name, own in keys.items()}
    for name, own in keys.items():
        own.store_shares(name, shares)
    return {party.name: collect_party_facts(party, "training", keys[party.name]) for party in parties}


def test_equal_ids_become_equal_facts_and_other_ids_or_orders_do_not():
    parties = named(tiny_parties())
    usual = parties[0].ids
    assert {facts.id_order for facts in resolve_tags(state(parties)).values()} == {"as at a"}
    shuffled = resolve_tags(state(named(parties, c=usual[::-1])))
    assert [shuffled[name].id_set for name in NAMES] == ["as at a"] * 3
    assert [shuffled[name].id_order for name in NAMES] == ["as at a", "as at a", "as at c"]
    others = resolve_tags(state(named(parties, b=np.char.add(usual, "x"))))
    assert [others[name].id_set for name in NAMES] == ["as at a", "as at b", "as at a"]


def test_ids_that_were_not_compared_yet_are_listed_and_count_as_equal():
    parties = named(tiny_parties())
    facts = {party.name: collect_party_facts(party, "training", IdKeys()) for party in parties}
    assert len(list_pairs_without_tags(facts)) == 6
    assert len({each.id_order for each in resolve_tags(facts).values()}) == 1
    assert list_pairs_without_tags(state(parties)) == []
    restarted = {**state(parties), "c": collect_party_facts(parties[2], "training", IdKeys())}
    assert set(list_pairs_without_tags(restarted)) == {("a", "c"), ("b", "c"), ("c", "a"), ("c", "b")}


def test_no_fact_is_a_digest_that_the_server_could_compute_from_a_guess_of_the_list():
    (party, *_) = parties = named(tiny_parties())
    guesses = {party.ids_digest(), party.set_digest, hashlib.sha256("\n".join(party.ids).encode()).hexdigest()}
    again = [state(parties), state(parties)]
    told = [
        {tag.id_order for tag in facts["a"].id_tags} | {tag.id_set for tag in facts["a"].id_tags} for facts in again
    ]
    assert not told[0] & told[1]  # new keys in every process
    for facts, values in zip(again, told, strict=True):
        assert all((each.id_set, each.id_order) == (None, None) for each in facts.values())
        assert not guesses & values


@pytest.mark.parametrize("share", ["", "00" * 32, "zz", "ab" * 31])
def test_a_share_that_is_no_key_is_refused(share):
    keys = IdKeys()
    keys.store_shares("a", {"a": keys.share, "b": share})
    with pytest.raises(ProtocolError, match="the share of party 'b' is not a valid X25519 key"):
        keys.make_tags(tiny_parties()[0])


def test_a_served_run_of_parties_with_equal_string_ids_sends_no_digest_of_them(kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    parties = named(parties)
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
    parties = named(parties)
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
