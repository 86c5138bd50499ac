"""Control messages: one table of dataclasses, strict reading, a code in every last word, and printable text."""

from __future__ import annotations

import dataclasses

import pytest

from glasu import errors
from glasu.errors import ConfigError, GlasuError, ProtocolError, get_code
from glasu.network.control import (
    CONTROLS,
    PROTOCOL,
    Confirmation,
    Declined,
    Failed,
    Goodbye,
    Hello,
    Notice,
    PartyResult,
    ProposedAttempt,
    Refused,
    Statement,
    StatementRequest,
    Stopped,
    StreamEnd,
    Welcome,
    describe_start,
    pack_control,
    read_control,
)
from glasu.network.frames import CONTROL_BYTES, MAX_PIECE
from glasu.network.handshake import Code, GoodbyePayload, ResultPayload
from glasu.network.id_keys import IdKeys, IdTag
from glasu.network.signatures import SignedHead, make_signer, sign_statement
from glasu.pki.identity import MAX_PARTIES, check_roster
from glasu.pki.kit import open_kit
from glasu.privacy.ledger import LedgerHead
from glasu.protocol.state import Progress, Race
from glasu.records import to_plain
from support import controls
from support.kits import make_kits

MESSAGES = [
    Hello(process="p", received=3, payload={"x": [1, None]}, server="s"),
    Hello(process="p", received=0, payload={}),
    Welcome(run="ab", server="s", resumed=True, received=2, payload={"y": 1.5}),
    Statement({"rounds": {}}),
    StatementRequest(),
    ProposedAttempt(3, 7, ("a", "c"), "ab"),
    ProposedAttempt(1, 0, ("a",)),
    Confirmation(3, "ab"),
    PartyResult(3, ResultPayload(weights_sha256="ab")),
    Goodbye({}),
    Notice("a: connected."),
    Failed("invalid_data", "its data cannot be used"),
    Declined("different_settings", "they differ", ("a  b", "1  2")),
    Refused("replaced", "a newer process", run="ab"),
    Stopped("party_failed", "party 'a' failed"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_control_message_keeps_its_fields(message):
    assert read_control(pack_control(message), CONTROL_BYTES) == message


def test_every_kind_is_a_frozen_dataclass_and_is_tried_here():
    assert {type(message) for message in MESSAGES} == set(CONTROLS.values())
    for message in MESSAGES:
        assert controls.read_control(pack_control(message)).kind == type(message).__name__
        with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
            message.anything = 1


@pytest.mark.parametrize("kind", CONTROLS)
def test_every_kind_refuses_an_unknown_field_and_names_itself(kind):
    with pytest.raises(ProtocolError, match=f"^control message '{kind}': .*unknown key 'else'"):
        read_control(controls.pack_control(kind, protocol=PROTOCOL, **{"else": 1}), CONTROL_BYTES)


@pytest.mark.parametrize("cls", [cls for cls in CONTROLS.values() if issubclass(cls, StreamEnd)])
def test_every_last_word_needs_a_code_and_is_printable_and_short(cls):
    kind = cls.__name__
    with pytest.raises(ProtocolError, match="code: is missing"):
        read_control(controls.pack_control(kind, reason="x"), CONTROL_BYTES)
    text = "\x1b[2J\n" + "x" * 5000
    body = controls.pack_control(kind, code=text, reason=text, table=[text] * 60)
    for word in (read_control(body, 1 << 20), cls(text, text, (text,) * 60)):  # received, and sent
        assert len(word.table) == 50
        for line in (word.code, word.reason, *word.table):
            assert line.isprintable()
            assert len(line) <= 1200


def test_every_error_has_a_code_of_its_own_and_a_refusal_has_one_of_the_list():
    kinds = [found for found in vars(errors).values() if isinstance(found, type) and issubclass(found, GlasuError)]
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert get_code(ZeroDivisionError("x")) == "bug"
    assert len({str(code) for code in Code}) == len(Code)


def test_a_run_at_its_beginning_does_not_continue():
    assert describe_start(None) == "starting"  # a prediction or an alignment has no rounds
    assert describe_start(Progress()) == "starting with the first round"
    assert describe_start(Progress(round=4)) == "continuing after round 4"


def test_a_run_that_continues_in_a_race_names_the_candidate():
    racing = Progress(round=2, race=Race((1, 0, 2), finished=1), earlier_rounds=7)
    assert describe_start(racing) == "continuing after round 2 of candidate 2 of 3 in the race"
    decided = Progress(round=9, race=Race((1, 0, 2), finished=2, chosen=0), earlier_rounds=21)
    assert describe_start(decided) == "continuing after round 9"


def test_signed_statements_of_the_most_parties_with_the_longest_names_fit_into_a_frame(tmp_path):
    long_name = "\u00e9" * 100  # six bytes per character in JSON, and in the certificate
    make_kits(tmp_path, [long_name], ["localhost"])
    signer = make_signer(open_kit(tmp_path / long_name))
    ends = [chr(0xE0 + index // 8) + chr(0xE0 + index % 8) for index in range(MAX_PARTIES)]
    names = tuple(long_name[2:] + end for end in ends)
    check_roster(names)
    head = LedgerHead(ledger="f" * 64, length=2**53, chain="f" * 64)
    heads = dict.fromkeys(names, SignedHead(head, sign_statement(signer, ["x"])))
    proposal = ProposedAttempt(2**31 - 1, 2**32 - 1, names, "f" * 64, heads)
    assert read_control(pack_control(proposal), MAX_PIECE) == proposal
    assert len(pack_control(Goodbye(to_plain(GoodbyePayload(ledgers=heads))))) <= MAX_PIECE
    shares = dict.fromkeys(names, IdKeys(long_name, signer).share)
    assert len(pack_control(StatementRequest(shares))) <= MAX_PIECE
    tags = [to_plain(IdTag(name, "f" * 64, "f" * 64, "f" * 64)) for name in names[1:]]
    stated = Statement({"facts": {"id_tags": tags}, "ledger": to_plain(heads[names[0]])})
    assert len(pack_control(stated)) + 4096 <= CONTROL_BYTES  # the other facts need less than 4 KiB


def test_more_parties_than_fit_are_refused_when_kits_are_made():
    with pytest.raises(ConfigError, match=f"{MAX_PARTIES + 1} are too many for one run; name at most {MAX_PARTIES}"):
        check_roster([f"p{index}" for index in range(MAX_PARTIES + 1)])
