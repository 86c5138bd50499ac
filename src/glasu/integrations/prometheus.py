"""Figures of a running server for Prometheus, read when they are asked for; on loopback unless told otherwise."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from glasu.errors import ConfigError
from glasu.network.status import View
from glasu.report import versions

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

LOOPBACK = "127.0.0.1"
ANYWHERE = {"0.0.0.0", "::"}


def metrics_address(text: str) -> tuple[str, int]:
    """Return host and port of "PORT" or "HOST:PORT"."""
    host, _, port = text.rpartition(":")
    if not (port.isdecimal() and int(port) < 65536):
        raise ConfigError(f"--metrics {text}: must be a port, or host:port, for example 9464.")
    return host.removeprefix("[").removesuffix("]") or LOOPBACK, int(port)


def refuse_where_parties_come(metrics: str, listen: str) -> None:
    """Refuse to answer Prometheus at the address at which the parties are to connect."""
    (host, port), (other, parties) = metrics_address(metrics), metrics_address(listen)
    if port and port == parties and (host == other or {host, other} & ANYWHERE):
        raise ConfigError(f"--metrics {metrics}: is the address of --listen, too ({listen}); give another port.")


@contextmanager
def metrics_served(address: tuple[str, int], look: Callable[[], View | None]) -> Iterator[int]:
    """Answer Prometheus while the block lasts; yields the port.

    Args:
        address: host and port; port 0 chooses a free one.
        look: returns the server at this moment, None before it has begun.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError("--metrics needs prometheus-client, which is not installed; pip install 'glasu[metrics]'.")
    from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

    registry = CollectorRegistry()
    registry.register(_Figures(look))
    ProcessCollector(registry=registry)
    host, port = address
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"--metrics {host}:{port}: cannot be listened on ({error.strerror}); choose another port."
        ) from None
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Figures:
    """Makes figures of what is seen at the moment of asking; labels name parties, phases and metrics only."""

    def __init__(self, look: Callable[[], View | None]) -> None:
        self._look = look

    def collect(self) -> Iterable[Metric]:
        """Yield all figures."""
        from prometheus_client.core import GaugeMetricFamily

        info = GaugeMetricFamily("glasu_info", "Always 1; the version is in the label.", labels=["version"])
        info.add_metric([versions()["glasu"]], 1)
        yield info
        view = self._look()
        if view is not None:
            yield from _gauges(view)
            yield from _counters(view)


def _gauges(view: View) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    status = view.status
    yield GaugeMetricFamily("glasu_rounds_done", "Rounds finished so far.", status.round)
    yield GaugeMetricFamily("glasu_rounds_planned", "Rounds at which the run ends at the latest.", status.num_rounds)
    yield GaugeMetricFamily("glasu_attempt", "Rises by one whenever a process was started again.", status.attempt)
    yield GaugeMetricFamily("glasu_finished", "1 when everyone has written its results.", int(view.finished))
    if status.loss is not None:
        yield GaugeMetricFamily("glasu_loss", "Mean training loss of the last round heard of.", status.loss)
    connected = GaugeMetricFamily("glasu_party_connected", "1 while a party has a stream.", labels=["party"])
    for name, there in view.connected.items():
        connected.add_metric([name], int(there))
    yield connected
    scores = GaugeMetricFamily("glasu_validation", "Scores of the last evaluation on validation.", labels=["metric"])
    for name, score in view.scores.items():
        scores.add_metric([name], score)
    yield scores


def _counters(view: View) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily

    status = view.status
    moved = CounterMetricFamily("glasu_bytes", "Bytes of encoded messages.", labels=["direction"])
    moved.add_metric(["to_server"], status.bytes_to_server)
    moved.add_metric(["to_clients"], status.bytes_to_clients)
    yield moved
    phases = CounterMetricFamily("glasu_phase_bytes", "The same bytes by part of the run.", labels=["phase"])
    for phase, count in view.bytes_by_phase.items():
        phases.add_metric([phase], count)
    yield phases
    seconds = CounterMetricFamily("glasu_seconds", "Seconds by what the server spent them on.", labels=["part"])
    for part, spent in view.seconds_by_part.items():
        seconds.add_metric([part], spent)
    yield seconds
    yield CounterMetricFamily("glasu_messages", "Messages in both directions.", view.messages)
    yield CounterMetricFamily("glasu_exchanges", "Round trips that a WAN would pay for.", view.exchanges)
    yield CounterMetricFamily("glasu_refused", "Connections and processes not accepted after TLS.", view.refused)
