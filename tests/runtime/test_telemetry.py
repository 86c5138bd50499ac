"""Telemetry counts every message once, and a resumed run adds to the figures of earlier processes."""

from __future__ import annotations

import json
import logging

import numpy as np

from glasu.model.task import ACCURACY
from glasu.protocol.message_bytes import encode
from glasu.protocol.messages import Agreed, Joint, JointGradient, Partial
from glasu.protocol.requests import Broadcast, Evaluated, Receive
from glasu.records import read_record, to_plain
from glasu.report import Seconds, Traffic
from glasu.runtime.telemetry import Telemetry, TelemetryState, TrafficCounter
from glasu.timing import Stopwatch
from glasu.wire.message_key import SERVER, Key, Phase


def tensor(kind, client, phase=Phase.TRAINING):
    return kind(key=Key(bytes(12), phase, client, 1, 0), value=np.zeros((3, 2), np.float32))


def validation(round_index, accuracy):
    metrics = {"accuracy": accuracy, "macro_f1": accuracy, "loss": 1 - accuracy}
    return Evaluated(round_index, "validation", metrics, ACCURACY, 0.5, improved=True)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_broadcast_counts_once_per_client_and_an_exchange_once():
    counter = TrafficCounter()
    partial, joint = tensor(Partial, 0), tensor(Joint, SERVER)
    counter.count_to_server(partial)
    counter.count_to_clients(joint, 3)
    counter.exchange(Broadcast(joint))
    traffic = counter.snapshot()
    assert traffic.bytes_to_server == len(encode(partial))
    assert traffic.bytes_to_clients == 3 * len(encode(joint))
    assert (traffic.messages, traffic.exchanges, traffic.exchanges_by_phase) == (4, 1, {"training": 1})
    assert sum(traffic.by_kind.values()) == sum(traffic.by_phase.values()) == traffic.total_bytes


def test_later_chunks_and_riding_answers_start_no_exchange():
    counter, key = TrafficCounter(), Key(bytes(12), Phase.TRAINING, SERVER, 1, 0)
    for chunk in range(3):
        counter.exchange(Receive((Joint,), key.at(0, chunk)))
    counter.exchange(Receive((Agreed,), key._replace(phase=Phase.SAMPLING), rides=True))
    assert counter.snapshot().exchanges_by_phase == {"training": 1}


def test_gradients_count_as_training():
    counter = TrafficCounter()
    counter.exchange(Receive((JointGradient,), Key(bytes(12), Phase.BACKWARD, 0)))
    assert counter.snapshot().exchanges_by_phase == {"training": 1}


def test_the_wire_log_has_one_line_per_message_and_exchange(caplog):
    counter = TrafficCounter()
    with caplog.at_level(logging.DEBUG, "glasu.wire"):
        counter.count_to_server(tensor(Partial, 2))
        counter.count_to_clients(tensor(Joint, SERVER), 2)
        counter.exchange(Broadcast(tensor(Joint, SERVER)))
    size = len(encode(tensor(Partial, 2)))
    about = "phase=training round=1 layer=0 chunk=0"
    assert caplog.messages == [
        f"to=server kind=Partial {about} client=2 bytes={size}",
        f"to=client kind=Joint {about} client=all bytes={size}",
        f"to=client kind=Joint {about} client=all bytes={size}",
        "exchange phase=training",
    ]


def record_telemetry():
    clock = Clock()
    telemetry = Telemetry(clock)
    clock.now = 2.0
    telemetry.traffic.count_to_server(tensor(Partial, 0))
    with telemetry.watch.measure("communication"):
        clock.now = 5.0
    telemetry.observe(validation(1, 0.5))
    return telemetry


def test_a_restored_run_adds_to_the_figures_of_before():
    state = record_telemetry().state()
    clock = Clock()
    resumed = Telemetry(clock)
    resumed.restore(state)
    assert resumed.state() == state
    clock.now = 1.0
    resumed.traffic.count_to_server(tensor(Partial, 0))
    assert resumed.traffic.messages == 2
    assert resumed.seconds() == Seconds(6.0, {"sampling": 0.0, "compute": 0.0, "communication": 3.0, "evaluation": 0.0})


def test_the_state_survives_json():
    state = record_telemetry().state()
    assert read_record(TelemetryState, json.loads(json.dumps(to_plain(state))), "state") == state


def test_rounds_that_are_repeated_lose_their_evaluations_but_not_their_cost():
    telemetry = record_telemetry()
    state = telemetry.state()
    telemetry.observe(validation(2, 0.9))
    telemetry.traffic.count_to_server(tensor(Partial, 0))
    telemetry.rewind(state)
    assert [entry.event.round for entry in telemetry.evaluations] == [1]
    assert telemetry.traffic.messages == 2
    telemetry.rewind(TelemetryState())
    assert telemetry.evaluations == []


def test_the_seconds_of_the_clients_in_this_process_are_added():
    clock = Clock()
    telemetry, watch = Telemetry(clock), Stopwatch(clock)
    telemetry.add_watch(watch)
    for each in (watch, telemetry.watch):
        with each.measure("compute"):
            clock.now += 2.0
    assert telemetry.seconds().parts["compute"] == 4.0


def test_the_figures_of_a_report_can_be_read_like_its_json():
    traffic = Traffic(bytes_to_server=1, by_kind={"tensor": 1})
    assert traffic["bytes_to_server"] == traffic.bytes_to_server == 1
    assert dict(traffic) == traffic.to_dict()
    assert dict(Seconds(2.0, {"waiting": 1.0})) == {"total": 2.0, "waiting": 1.0}
