"""Serve metrics of a running server to Prometheus. The default address is loopback."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from glasu.errors import ConfigError
from glasu.network.options import View
from glasu.report import versions

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

LOOPBACK = "127.0.0.1"
ANYWHERE = {"0.0.0.0", "::"}


def parse_metrics_address(text: str) -> tuple[str, int]:
    """Parse "PORT" or "HOST:PORT"; return host and port."""
    host, _, port = text.rpartition(":")
    if not (port.isdecimal() and int(port) < 65536):
        raise ConfigError(f"--metrics {text}: must be PORT or HOST:PORT, for example 9464.")
    return host.removeprefix("[").removesuffix("]") or LOOPBACK, int(port)


def refuse_shared_address(metrics: str, listen: str) -> None:
    """Refuse a metrics address that equals the address for the parties."""
    (host, port), (other, parties) = parse_metrics_address(metrics), parse_metrics_address(listen)
    if port and port == parties and (host == other or {host, other} & ANYWHERE):
        raise ConfigError(f"--metrics {metrics}: equals --listen ({listen}); choose another port.")


@contextmanager
def serve_metrics(address: tuple[str, int], look: Callable[[], View | None]) -> Iterator[int]:
    """Serve metrics during the block; yield the port.

    Args:
        address: host and port; port 0 chooses a free one.
        look: returns the present state of the server, or None before it has started.
    """
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError("--metrics needs prometheus-client, which is not installed; pip install 'glasu[metrics]'.")
    from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

    registry = CollectorRegistry()
    registry.register(_Collector(look))
    ProcessCollector(registry=registry)
    host, port = address
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"--metrics {host}:{port}: cannot listen here ({error.strerror}); choose another port."
        ) from None
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Collector:
    """Reads the state of the server at each request. Labels contain only names of parties, phases and metrics."""

    def __init__(self, look: Callable[[], View | None]) -> None:
        self._look = look

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics."""
        from prometheus_client.core import GaugeMetricFamily

        info = GaugeMetricFamily("glasu_info", "Always 1; the label has the version.", labels=["version"])
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
    yield GaugeMetricFamily("glasu_rounds_planned", "Greatest number of rounds.", status.num_rounds)
    yield GaugeMetricFamily("glasu_attempt", "Attempt number; it grows when a process restarts.", status.attempt)
    yield GaugeMetricFamily("glasu_finished", "1 when all roles have written their results.", int(view.finished))
    if status.loss is not None:
        yield GaugeMetricFamily("glasu_loss", "Mean training loss of the last reported round.", status.loss)
    connected = GaugeMetricFamily("glasu_party_connected", "1 while a party is connected.", labels=["party"])
    for name, is_connected in view.connected.items():
        connected.add_metric([name], int(is_connected))
    yield connected
    scores = GaugeMetricFamily(
        "glasu_validation", "Scores of the last evaluation on validation nodes.", labels=["metric"]
    )
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
    phases = CounterMetricFamily(
        "glasu_phase_bytes", "Bytes of encoded messages by phase of the run.", labels=["phase"]
    )
    for phase, count in view.traffic.by_phase.items():
        phases.add_metric([phase], count)
    yield phases
    seconds = CounterMetricFamily("glasu_seconds", "Seconds of the server by activity.", labels=["part"])
    for part, spent in view.seconds.parts.items():
        seconds.add_metric([part], spent)
    yield seconds
    yield CounterMetricFamily("glasu_messages", "Messages in both directions.", view.traffic.messages)
    yield CounterMetricFamily("glasu_exchanges", "Round trips between parties and server.", view.traffic.exchanges)
    yield CounterMetricFamily("glasu_refused", "Connections refused after the TLS handshake.", view.refused)
