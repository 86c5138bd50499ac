"""Drive scripts: requests reach `perform` in order, time is counted, and two scripts can share exchanges."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from glasu.errors import ProtocolError
from glasu.protocol.messages import Agreed, Joint, Losses, Partial, Proposal
from glasu.protocol.requests import (
    Broadcast,
    Evaluating,
    Interleave,
    Receive,
    RoundDone,
    Save,
    Scatter,
    Send,
    Timed,
)
from glasu.runtime.drive import Finished, advance, check_contribution, drive, to_actions
from glasu.runtime.inprocess import ScriptRun
from glasu.runtime.telemetry import TrafficCounter
from glasu.timing import Stopwatch
from glasu.wire.message_key import SERVER, Key, Phase
from support.monolith import run_scripts

RUN = bytes(12)
NO_WATCH = Stopwatch(lambda: 0.0)


def request_all(*requests):
    """Yield requests; return their results."""
    results = []
    for request in requests:
        results.append((yield request))
    return results


# --- one script ---------------------------------------------------------------------------------------------------


def test_advancing_gives_the_next_request_and_at_last_the_result():
    script = request_all("first", "second")
    assert advance(script) == "first"
    assert advance(script, 1) == "second"
    assert advance(script, 2) == Finished([1, 2])


def test_a_script_without_requests_finishes_immediately():
    assert advance(request_all()) == Finished([])


def test_driving_performs_every_request_once_in_order_and_returns_the_result():
    key = Key(RUN, Phase.TRAINING, 0)
    requests = [Send(Losses(key, np.zeros(1))), Receive((Joint,), key), Save("state"), RoundDone(3, 0.5)]
    performed = []

    def perform(request):
        performed.append(request)
        return len(performed)

    assert drive(request_all(*requests), perform, NO_WATCH) == [1, 2, 3, 4]
    assert performed == requests


def test_an_error_of_perform_ends_the_run_and_is_passed_on():
    def fail(request):
        raise ProtocolError("no")

    script = request_all(Save("state"), Save("more"))
    with pytest.raises(ProtocolError, match="no"):
        drive(script, fail, NO_WATCH)


def test_an_error_of_the_script_is_passed_on_and_stops_the_watch():
    watch = Stopwatch(itertools.count().__next__)

    def script():
        yield Save("state")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        drive(script(), lambda request: None, watch)
    assert not watch.running


# --- time ---------------------------------------------------------------------------------------------------------


class Seconds:
    """A clock that moves only when a test advances it."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def spend(self, seconds):
        self.now += seconds


def busy(clock, *seconds):
    """Compute for this number of seconds before each request and before the end."""
    *before, last = seconds
    for each in before:
        clock.spend(each)
        yield Save(each)
    clock.spend(last)
    return sum(seconds)


def test_computing_is_counted_under_the_name_and_performing_is_not():
    clock = Seconds()
    watch = Stopwatch(clock)
    assert drive(busy(clock, 1, 2, 4), lambda request: clock.spend(100), watch, "work") == 7
    assert watch.seconds == {"work": 7}


def test_a_timed_script_is_counted_under_its_own_name_and_its_result_comes_back():
    clock = Seconds()
    watch = Stopwatch(clock)

    def script():
        clock.spend(1)
        inner = yield Timed(busy(clock, 10, 20), "evaluation")
        clock.spend(2)
        return inner

    performed = []
    assert drive(script(), performed.append, watch) == 30
    assert watch.seconds == {"compute": 3, "evaluation": 30}
    assert performed == [Save(10)]  # a runtime sees no Timed


def test_timed_and_interleaved_scripts_may_contain_each_other():
    clock = Seconds()
    watch = Stopwatch(clock)

    def rounds():
        return (yield Timed(busy(clock, 5, 5), "evaluation"))

    def script():
        return (yield Interleave(rounds(), busy(clock, 1)))

    assert drive(request_all(Timed(script(), "window")), lambda request: None, watch) == [(10, 1)]
    assert watch.seconds == {"compute": 0, "window": 1, "evaluation": 10}


def test_resolving_leaves_only_requests_that_a_runtime_performs():
    inner = request_all(RoundDone(0), Timed(request_all(Save("inner")), "x"))
    script = request_all(Timed(inner, "y"), Interleave(request_all(Save("main")), request_all()))
    seen = []
    drive(script, seen.append, NO_WATCH)
    assert seen == [RoundDone(0), Save("inner"), Save("main")]
    assert advance(to_actions(request_all(), NO_WATCH)) == Finished([])


# --- two scripts in the same exchanges ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """One exchange of `main`: its chunks, and whether a message without an answer follows."""

    chunks: int
    loss: bool = False
    event: bool = False


def main_client(client, plans):
    """Send and receive tensors in chunks; return the received sums."""
    received, key = [], Key(RUN, Phase.TRAINING, client)
    for layer, plan in enumerate(plans):
        for chunk in range(plan.chunks):
            yield Send(Partial(key.at(layer, chunk), np.full((1, 1), 10.0 * layer + chunk)))
        for chunk in range(plan.chunks):
            answer = yield Receive((Joint,), key.at(layer, chunk))
            received.append(answer.value.item())
        if plan.loss:
            yield Send(Losses(key._replace(round=layer + 1), np.full(1, 0.5)))
        if plan.event:
            yield Evaluating(0, 0.5, "a")
    return received


def main_server(plans):
    """Answer with sums; return the number of messages received."""
    count, key = 0, Key(RUN, Phase.TRAINING, SERVER)
    for layer, plan in enumerate(plans):
        for chunk in range(plan.chunks):
            messages = yield Receive((Partial,), key.at(layer, chunk))
            count += len(messages)
            yield Broadcast(Joint(key.at(layer, chunk), sum(message.value for message in messages)))
        if plan.loss:
            count += len((yield Receive((Losses,), key._replace(round=layer + 1))))
        if plan.event:
            yield RoundDone(layer)
    return count


def rider_client(client, chunks_of):
    """In each exchange, propose one node per chunk; return the agreed sets."""
    agreed, key = [], Key(RUN, Phase.SAMPLING, client)
    for layer, chunks in enumerate(chunks_of):
        for chunk in range(chunks):
            nodes = np.array([100 * layer + 10 * chunk + client], np.int32)
            yield Send(Proposal(key.at(layer, chunk), (nodes,)))
        for chunk in range(chunks):
            agreed.append((yield Receive((Agreed,), key.at(layer, chunk))).node_sets[0].tolist())
    return agreed


def rider_server(chunks_of, *, scatters=False):
    count, key = 0, Key(RUN, Phase.SAMPLING, SERVER)
    for layer, chunks in enumerate(chunks_of):
        for chunk in range(chunks):
            messages = yield Receive((Proposal,), key.at(layer, chunk))
            union = np.concatenate([message.node_sets[0] for message in messages])
            answer = Agreed(key.at(layer, chunk), (union,))
            yield Scatter((answer,) * len(messages)) if scatters else Broadcast(answer)
            count += len(messages)
    return count


def together(main, rider):
    return (yield Interleave(main, rider))


def expected_results(plans, chunks_of, clients):
    sums = [clients * (10.0 * layer + chunk) for layer, plan in enumerate(plans) for chunk in range(plan.chunks)]
    sets = [
        [100 * layer + 10 * chunk + client for client in range(clients)]
        for layer, chunks in enumerate(chunks_of)
        for chunk in range(chunks)
    ]
    return sums, sets


all_plans = st.lists(st.builds(Plan, st.integers(1, 3), st.booleans(), st.booleans()), max_size=5)
all_riders = st.lists(st.integers(1, 3), max_size=5)


@hypothesis_settings(deadline=None, max_examples=200)
@given(all_plans, all_riders, st.integers(1, 3), st.booleans())
def test_two_scripts_meet_in_order_in_the_same_exchanges(plans, chunks_of, clients, scatters):
    meter, server_result = TrafficCounter(), []

    def server():
        rider = rider_server(chunks_of, scatters=scatters)
        server_result.append((yield Interleave(main_server(plans), rider)))

    scripts = [together(main_client(client, plans), rider_client(client, chunks_of)) for client in range(clients)]
    found = run_scripts(server(), scripts, meter=meter)
    assert found == [expected_results(plans, chunks_of, clients)] * clients
    sums, sets = expected_results(plans, chunks_of, clients)
    losses = sum(plan.loss for plan in plans)
    assert server_result == [(clients * (len(sums) + losses), clients * len(sets))]
    # The exchanges of the rider cost nothing while main has exchanges. A loss without an answer carries one, too,
    # unless it is followed by an exchange of main, which then belongs to the same bundle.
    assert meter.exchanges_by_phase["training"] == len(plans)
    carried = len(plans) + (1 if plans and plans[-1].loss else 0)
    assert meter.exchanges_by_phase["sampling"] == max(0, len(chunks_of) - carried)


@hypothesis_settings(deadline=None, max_examples=25)
@given(all_plans, all_riders)
def test_two_scripts_do_not_wait_for_each_other_for_ever_over_queues(plans, chunks_of):
    to_server, to_client, results = queue.Queue(), queue.Queue(), {}

    def perform_client(request):
        if isinstance(request, Send):
            return to_server.put(request.message)
        if not isinstance(request, Receive):
            return None
        answer = to_client.get(timeout=10)
        request.check(type(answer), answer.key)
        return answer

    def perform_server(request):
        if isinstance(request, Receive):
            return [check_contribution(request, to_server.get(timeout=10), 0, "a")]
        return to_client.put(request.message) if isinstance(request, Broadcast) else None

    def run_client():
        script = together(main_client(0, plans), rider_client(0, chunks_of))
        results["client"] = drive(script, perform_client, Stopwatch(lambda: 0.0))

    thread = threading.Thread(target=run_client)
    thread.start()
    counts = drive(together(main_server(plans), rider_server(chunks_of)), perform_server, Stopwatch(lambda: 0.0))
    thread.join(timeout=20)
    sums, sets = expected_results(plans, chunks_of, 1)
    assert results == {"client": (sums, sets)}
    assert counts == (len(sums) + sum(plan.loss for plan in plans), len(sets))
    assert to_server.empty()
    assert to_client.empty()


@pytest.mark.parametrize("num_plans", [0, 1, 2])
def test_a_rider_longer_than_main_still_finishes_and_then_pays_for_its_exchanges(num_plans):
    plans, chunks_of, meter = [Plan(2)] * num_plans, [1, 1, 1, 1], TrafficCounter()
    server = together(main_server(plans), rider_server(chunks_of))
    (found,) = run_scripts(server, [together(main_client(0, plans), rider_client(0, chunks_of))], meter=meter)
    assert found == expected_results(plans, chunks_of, 1)
    assert meter.exchanges_by_phase == {
        phase: count for phase, count in {"training": num_plans, "sampling": 4 - num_plans}.items() if count
    }


def test_the_riders_messages_go_first_in_both_directions():
    sent = []

    def carry(message):
        sent.append(type(message))
        return message

    plans, chunks_of = [Plan(2), Plan(1)], [1, 2]
    server = together(main_server(plans), rider_server(chunks_of))
    run_scripts(server, [together(main_client(0, plans), rider_client(0, chunks_of))], carry=carry)
    assert sent == [
        *(Proposal, Partial, Partial, Agreed, Joint, Joint),
        *(Proposal, Proposal, Partial, Agreed, Agreed, Joint),
    ]


def test_only_the_answers_of_the_rider_are_marked_as_riding():
    plans, chunks_of, marks = [Plan(1), Plan(1)], [1, 1, 1], []
    inbox = [Partial(Key(RUN, Phase.TRAINING, 0, layer=layer), np.ones((1, 1))) for layer in range(2)]
    proposals = [Proposal(Key(RUN, Phase.SAMPLING, 0, layer=layer), (np.arange(1),)) for layer in range(3)]

    def perform(request):
        if isinstance(request, Receive):
            return [(inbox if request.kinds == (Partial,) else proposals).pop(0)]
        return marks.append((type(request.message), request.rides))

    drive(together(main_server(plans), rider_server(chunks_of)), perform, NO_WATCH)
    assert marks == [(Agreed, True), (Joint, False)] * 2 + [(Agreed, False)]


# --- received messages ----------------------------------------------------------------------------------------------

ASKED = Key(RUN, Phase.TRAINING, 1, round=2, layer=3)
OTHER_TOPICS = [{"run": bytes(11) + b"1"}, {"phase": Phase.BACKWARD}, {"round": 3}, {"layer": 1}, {"chunk": 1}]


def joint(**change):
    return Joint(ASKED._replace(**{"client": SERVER, **change}), np.ones((1, 1)))


def test_a_message_of_a_requested_kind_about_the_same_topic_is_the_expected_one():
    for message in (joint(), joint(incarnation=4), joint(attempt=2)):
        Receive((Agreed, Joint), ASKED).check(type(message), message.key)


@pytest.mark.parametrize("change", OTHER_TOPICS, ids=str)
def test_a_message_about_another_topic_is_refused(change):
    message = joint(**change)
    with pytest.raises(ProtocolError, match="expected Joint for training round 2 layer 3 chunk 0, got Joint for"):
        Receive((Joint,), ASKED).check(type(message), message.key)


def test_a_message_of_another_kind_is_refused():
    with pytest.raises(ProtocolError, match=r"expected Agreed or Partial for training round 2 .*, got Joint for"):
        Receive((Agreed, Partial), ASKED).check(Joint, joint().key)


def test_a_client_refuses_an_answer_to_another_message():
    client = ScriptRun("a", request_all(Receive((Joint,), ASKED)), NO_WATCH)
    client.run(deque())
    with pytest.raises(ProtocolError, match="got Joint for training round 9"):
        client.run(deque([joint(round=9)]))


@pytest.mark.parametrize("change", [*OTHER_TOPICS, {"client": 0}], ids=str)
def test_a_contribution_to_another_topic_or_of_another_client_is_refused_and_the_party_named(change):
    request = Receive((Partial,), ASKED._replace(client=SERVER))
    good = Partial(ASKED, np.ones((1, 1)))
    assert check_contribution(request, good, 1, "b") is good
    with pytest.raises(ProtocolError, match=r"party 'b': expected Partial for .*, got Partial for") as caught:
        check_contribution(request, Partial(ASKED._replace(**change), good.value), 1, "b")
    assert caught.value.party == "b"


def test_a_contribution_of_another_kind_is_refused():
    request = Receive((Partial,), ASKED._replace(client=SERVER))
    with pytest.raises(ProtocolError, match=r"party 'b': expected Partial for .*, got Losses for"):
        check_contribution(request, Losses(ASKED, np.zeros(1)), 1, "b")
