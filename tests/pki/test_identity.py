from __future__ import annotations

import string
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glasu.data.party import Graph, PartyData
from glasu.data.party_name import check_party_name
from glasu.errors import ConfigError, DataError
from glasu.pki.authority import issue, make_authority
from glasu.pki.certificate import read_certificate
from glasu.pki.identity import SERVER_NAME, check_roster, make_identity_uri, parse_hosts, read_name
from glasu.pki.kit import encode_pem

NOW = datetime(2026, 1, 1, tzinfo=UTC)
AUTHORITY = make_authority(NOW)
quick = settings(deadline=None)
CHARACTERS = st.one_of(st.sampled_from(string.ascii_letters + " -_.%:@,=~"), st.characters(codec="utf-8"))


def legal(name: str) -> bool:
    """An independent statement of the rule for names in file names and logs."""
    return (
        1 <= len(name) <= 100
        and len(name.encode(errors="replace")) <= 200
        and all(character.isprintable() and character not in "/\\" for character in name)
        and name[0] != "."
    )


names = st.text(CHARACTERS, min_size=1, max_size=60).filter(legal)


@quick
@given(names)
def test_a_certificate_gives_back_the_name_it_was_issued_for(name):
    certificate = issue(AUTHORITY, name, ["localhost"], NOW, 1).certificate
    found = read_certificate(encode_pem(certificate))
    assert found is not None
    assert found.name == name
    assert found.role == ("server" if name == SERVER_NAME else "party")


@quick
@given(names, names)
def test_two_names_never_share_a_uri_and_every_uri_is_ascii(first, second):
    assert (make_identity_uri(first) == make_identity_uri(second)) == (first == second)
    assert make_identity_uri(first).isascii()


@quick
@given(st.one_of(st.text(), st.text(string.printable).map("glasu:party:".__add__)))
def test_only_one_spelling_of_a_uri_names_a_party(uri):
    name = read_name(uri)
    assert name is None or make_identity_uri(name) == uri


@pytest.mark.parametrize(
    "uri", ["", "glasu:", "glasu:party", "glasu:party:a b", "glasu:party:%61", "GLASU:party:a", "glasu:party:%ff", "a"]
)
def test_other_spellings_name_no_party(uri):
    assert read_name(uri) is None


def test_a_party_cannot_take_the_name_of_the_server_by_its_uri():
    assert read_name("glasu:party:server") is None
    assert read_name("glasu:server") == SERVER_NAME


@quick
@given(st.text(st.characters(), max_size=120))
def test_the_data_and_the_roster_obey_one_rule_for_names(name):
    if name.casefold() in ("ca", "server", "retired"):
        return
    graph = Graph.from_edges(np.array([], int), np.array([], int), 1)
    for check in (
        lambda: check_party_name(name),
        lambda: check_roster([name]),
        lambda: PartyData(name, np.arange(1), np.ones((1, 1), np.float32), graph),
    ):
        if legal(name):
            check()
        else:
            with pytest.raises(DataError, match="the name is used in file names"):
                check()


@quick
@given(st.text(CHARACTERS, min_size=1, max_size=100))
def test_a_legal_name_is_one_file_in_its_folder_and_one_line_of_a_log(name):
    try:
        check_party_name(name)
    except DataError:
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"{name}-20260101T000000Z").mkdir()
        (Path(folder) / f"{name}.safetensors").touch()
        assert len(list(Path(folder).iterdir())) == 2
    assert len(name.splitlines()) == 1


@pytest.mark.parametrize(
    ("roster", "said"),
    [
        ([], "at least one"),
        (["a", "ca"], "'ca'"),
        (["server"], "'server'"),
        (["Retired"], "'Retired'"),
        (["a", "b", "a"], "'a' and 'a'"),
        (["a", "A"], "'a' and 'A'"),
        (["\u00e9", "e\u0301"], "differ by more than case"),  # composed and decomposed: one folder on some systems
        ([""], "the name is used in file names"),
        (["x" * 101], "1 to 100"),
        (["\u4e2d" * 67], "200 bytes"),
        (["a\nb"], r"'a\\nb'"),
    ],
)
def test_a_roster_that_folders_or_people_would_confuse_is_refused(roster, said):
    with pytest.raises((ConfigError, DataError), match=said):
        check_roster(roster)


@pytest.mark.parametrize(
    ("host", "kind", "value"),
    [
        ("localhost", "DNSName", "localhost"),
        ("GLASU.example.org", "DNSName", "glasu.example.org"),
        ("xn--bcher-kva.example", "DNSName", "xn--bcher-kva.example"),
        ("glasu_server", "DNSName", "glasu_server"),
        ("192.0.2.7", "IPAddress", "192.0.2.7"),
        ("::1", "IPAddress", "::1"),
        ("[2001:db8::1]", "IPAddress", "2001:db8::1"),
    ],
)
def test_hosts_become_dns_names_or_ip_addresses(host, kind, value):
    (found,) = parse_hosts([host])
    assert (type(found).__name__, str(found.value)) == (kind, value)


@pytest.mark.parametrize(
    "host",
    [
        *("", " ", "a b", "a\n", "-a", "a-", "a..b", "a.", "x" * 64, ".".join(["x" * 60] * 5)),
        *("localhost:9443", "[::1]:9443", "https://x", "*.example.org", "b\u00fccher.example"),
        *("256.1.1.1", "1.2.3", "0.0.0.0", "::", "fe80::1%eth0"),
    ],
)
def test_what_is_no_host_is_refused(host):
    with pytest.raises(ConfigError, match="--host"):
        parse_hosts([host])


def test_a_host_named_twice_stands_once():
    assert len(parse_hosts(["localhost", "127.0.0.1", "localhost"])) == 2
