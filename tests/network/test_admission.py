"""Admission of processes by the server, and the text of a refusal."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from glasu.network import purposes
from glasu.network.admission import Admission
from glasu.network.admission_policy import Collect, Refuse, ServedRun
from glasu.network.facts import collect_server_facts
from glasu.network.fencing import MAX_STARTS, Fence, count_start, describe_process, note_welcome
from glasu.network.frames import CONTROL_BYTES
from glasu.network.handshake import Code, HelloPayload, Process, RefusalError, StatementPayload
from glasu.network.log_lines import MAX_REASON, make_printable
from glasu.network.purposes import PREDICTION, TRAINING, Purpose
from glasu.network.recorded_heads import RecordedHeads
from glasu.network.run_folder import open_serving
from glasu.records import to_plain
from support.controls import pack_control
from support.joining import open_joining
from support.tiny import tiny

FACTS = collect_server_facts(TRAINING, parties=2)

KNOWN = [known for known in vars(purposes).values() if isinstance(known, Purpose)]
INVENTED = Purpose(name="survey", finished_answer="the survey is over.", absence_error="A survey needs all parties.")


@pytest.fixture
def admission(tmp_path):
    state, served = open_serving(tmp_path), make_served_run()
    return Admission(served, Refuse(served, Fence(state), RecordedHeads(state, served.run)))


def make_served_run(purpose=TRAINING):
    facts = replace(FACTS, purpose=purpose.name)
    return ServedRun(purpose, facts, tiny()[0], ("a", "b"), "00" * 12, lambda: {0: "start"})


def hello(**changes):
    return to_plain(HelloPayload(**{"facts": FACTS, "process": Process(incarnation=1, name="p"), **changes}))


def refusal_of(admission, payload):
    with pytest.raises(RefusalError) as caught:
        admission.admit("a", payload)
    return caught.value


def test_a_process_with_a_common_checkpoint_is_admitted(admission):
    welcome = admission.admit("b", hello(rounds={0: "start", 7: "x"}))
    assert (welcome["index"], welcome["roster"], welcome["run"]) == (1, ["a", "b"], "00" * 12)


DIFFERENCES = {
    "no process": {"process": None},
    "another version": {"facts": replace(FACTS, glasu="0.0.0")},
    "another run": {"run": "11" * 12},
    "another wanted run": {"only": "11" * 12},
    "no common checkpoint": {"rounds": {}},
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_the_policy_refuse_refuses_a_difference_that_the_policy_collect_admits(difference, admission, tmp_path):
    payload = hello(**{"rounds": {0: "start"}, **DIFFERENCES[difference]})
    assert refusal_of(admission, payload).code != Code.OTHER_PURPOSE
    collecting = Admission(make_served_run(), Collect())
    assert collecting.admit("a", payload)["index"] == 0
    other = replace(FACTS, nodes=5, glasu="0.0.0")
    statement = to_plain(StatementPayload(facts=other, digest="of other settings"))  # and without a ledger
    assert collecting.prepare("a", statement) == ()
    assert collecting.statements["a"].facts == other
    assert not any(tmp_path.iterdir())  # neither policy has recorded a process


def test_no_policy_admits_a_process_with_another_purpose(admission):
    payload = hello(facts=replace(FACTS, purpose="prediction"), rounds={0: "start"})
    assert refusal_of(admission, payload).code == Code.OTHER_PURPOSE
    assert refusal_of(Admission(make_served_run(), Collect()), payload).code == Code.OTHER_PURPOSE


@pytest.mark.parametrize("purpose", [*KNOWN, INVENTED], ids=lambda purpose: purpose.name)
def test_a_purpose_says_what_a_late_process_and_an_incomplete_run_are_told(purpose, tmp_path):
    state, served = open_serving(tmp_path), make_served_run(purpose)
    admission = Admission(served, Refuse(served, Fence(state), RecordedHeads(state, served.run)))
    late = hello(facts=served.facts, rounds={0: "start"})
    assert late["facts"]["purpose"] == purpose.name  # only the name travels
    with pytest.raises(RefusalError, match=re.escape(purpose.finished_answer)) as refused:
        admission.admit_finished("a", late)
    assert refused.value.code == Code.RUN_FINISHED
    own = "The model was trained by the parties a, b; got a." if purpose is PREDICTION else purpose.absence_error
    assert own in admission.find_absence_error(["a"])


def test_only_the_policy_refuse_records_the_admitted_process(admission, tmp_path):
    Admission(make_served_run(), Collect()).admit("a", hello(rounds={0: "start"}))
    assert open_serving(tmp_path).value.processes == {}
    admission.admit("a", hello(rounds={0: "start"}))
    assert open_serving(tmp_path).value.processes["a"].name == "p"


def test_only_the_policy_collect_states_the_time_of_the_server(admission):
    assert "now" not in admission.admit("a", hello(rounds={0: "start"}))
    assert Admission(make_served_run(), Collect()).admit("a", hello())["now"] > 0


def test_the_error_of_a_party_without_an_intact_checkpoint_says_that_it_has_none(admission):
    error = refusal_of(admission, hello(rounds={}))
    assert error.code == Code.NO_COMMON_CHECKPOINT
    assert str(error).startswith(
        "it has no intact checkpoint in common with the server (rounds at the party: none; at the server: 0)."
    )


@pytest.mark.parametrize("count", [1, 99, 4_000])
def test_a_refusal_is_short_for_any_number_of_checkpoints_that_a_party_states(count, admission):
    error = refusal_of(admission, hello(rounds={10**9 + index: "x" * 64 for index in range(count)}))
    assert error.code == (Code.NO_COMMON_CHECKPOINT if count < 100 else Code.INVALID_PAYLOAD)
    assert len(str(error)) <= 2 * MAX_REASON
    assert len(make_printable(error.public_message, MAX_REASON)) <= MAX_REASON + 3  # what is sent


def test_the_hello_and_the_statement_of_an_honest_party_are_far_below_the_limit_of_control_messages(tmp_path):
    state, (config, _) = open_joining(tmp_path, "a"), tiny()
    for _ in range(2 * MAX_STARTS):  # as many earlier processes as a party ever lists
        count_start(state)
        note_welcome(state)
    rounds = dict.fromkeys(range(10), "0" * 64)
    said = to_plain(StatementPayload(digest="0" * 64, settings=config.flatten(), rounds=rounds, facts=FACTS))
    greeting = hello(process=describe_process(state.value), rounds=rounds)
    sizes = [len(pack_control(kind, payload=payload)) for kind, payload in (("Hello", greeting), ("Statement", said))]
    assert max(sizes) < CONTROL_BYTES / 4
