"""A party refuses settings that do not fit into its memory, before it builds anything."""

from __future__ import annotations

import pytest

from glasu.config import RunConfig
from glasu.errors import ConfigError
from glasu.network.handshake import RefusalError, WelcomePayload
from glasu.network.party_setup import check_place, resolve_for_party
from support.cluster import Cluster
from support.tiny import tiny, tiny_parties

GIB = 2**30
ABSURD = {
    "hidden": ({"model": {"hidden": 20_000}}, "model.hidden=20000, "),
    "deep": (
        {"model": {"hidden": 10_000, "num_layers": 1000, "aggregation_layers": (999,)}},
        "model.num_layers=1000",
    ),
    "heads": ({"model": {"backbone": "gat", "hidden": 2**30, "heads": 2**30}}, f"model.hidden={2**30}"),
    "local steps": ({"train": {"num_local_steps": 2**31 - 1}}, f"train.num_local_steps={2**31 - 1}"),
    "prefetch": (
        {"train": {"prefetch": 1024, "num_rounds": 4096, "sampler": "neighbor", "batch_size": 0, "fanout": 10**6}},
        r"train\.prefetch=1024, train\.batch_size=0 .*, train\.fanout=1000000: the samples of 2048 rounds need about ",
    ),
}


@pytest.mark.parametrize("name", ABSURD)
def test_settings_that_do_not_fit_into_memory_are_refused_before_anything_is_built(name):
    changes, expected = ABSURD[name]
    parties = tiny_parties(num_nodes=3000, degree=60)
    with pytest.raises(ConfigError, match=f"{expected}.* this party allows 8.0 GiB.*--max-memory"):
        resolve_for_party(RunConfig().replace(**changes), parties[0], 8 * GIB)


@pytest.mark.parametrize("keys", [{"hidden": 64}, {"hidden": 512}, {"sampler": "neighbor", "prefetch": 16}], ids=str)
def test_an_ordinary_model_fits(keys):
    config, parties = tiny(**keys)
    resolve_for_party(config, parties[0], GIB)
    resolve_for_party(config, parties[0], None)


def test_a_party_declines_a_model_above_its_limit_and_takes_part_once_the_limit_is_raised(kits, tmp_path):
    config, parties = tiny(num_rounds=1)
    cluster = Cluster(config, parties, kits, tmp_path)
    server = cluster.serve()
    error = cluster.join("a", max_memory=1000).error()
    assert isinstance(error, ConfigError)
    assert "model.hidden=" in str(error)
    assert "this party allows 1000 bytes." in str(error)
    cluster.until("server", "a: declines to take part: model.hidden=")
    for role in [cluster.join(name, max_memory=GIB) for name in "abc"]:
        role.outcome()
    server.outcome()


@pytest.mark.parametrize(
    ("roster", "labels", "words"),
    [
        (("a", "a", "c"), "all", "lists a party twice"),
        (("a", "\x1b[31mb", "c"), "all", "printable characters"),
        (("a", "../b", "c"), "all", "no slash"),
        (("a", "b", "all"), "all", "party 'all': train.labels = .all. means all parties"),
        (("a", "b", "c"), "d", "train.labels='d': there is no such party"),
    ],
)
def test_a_roster_with_impossible_names_is_refused(roster, labels, words):
    config = RunConfig().replace(data={"num_clients": 3}, train={"labels": labels})
    offered = WelcomePayload(config={}, roster=roster, index=0, run="ab")
    with pytest.raises(RefusalError, match=words) as refusal:
        check_place("a", offered, config)
    assert str(refusal.value).isprintable()
