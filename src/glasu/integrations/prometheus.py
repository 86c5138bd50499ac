"""Serve metrics of a running server to Prometheus. The default address is loopback."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from glasu import __version__
from glasu.errors import ConfigError
from glasu.network.options import View

if TYPE_CHECKING:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

LOOPBACK = "127.0.0.1"
ANYWHERE = {"0.0.0.0", "::"}


def parse_metrics_address(text: str) -> tuple[str, int]:
    """Parse "PORT" or "HOST:PORT"; return host and port."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) < 65536):
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
        address: host and port; port 0 chooses a free port.
        look: returns the current state of the server, or None before it has started.
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
    """Reads the state of the server at each request. Labels contain only names, as of parties, and the version."""

    def __init__(self, look: Callable[[], View | None]) -> None:
        self._look = look

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics."""
        from prometheus_client.core import CounterMetricFamily as Counter
        from prometheus_client.core import GaugeMetricFamily as Gauge

        yield _label(Gauge, "glasu_info", "Always 1; the label is the version of GLASU.", "version", {__version__: 1})
        view = self._look()
        if view is None:
            return
        status, connected = view.status, {name: int(there) for name, there in view.connected.items()}
        moved = {"to_server": status.bytes_to_server, "to_clients": status.bytes_to_clients}
        yield Gauge("glasu_rounds_done", "Rounds finished so far.", status.round)
        yield Gauge("glasu_rounds_planned", "Maximum number of rounds.", status.num_rounds)
        yield Gauge("glasu_attempt", "Attempt number; it increases when a process restarts.", status.attempt)
        yield Gauge("glasu_finished", "1 when all roles have written their results.", int(view.finished))
        if status.loss is not None:
            yield Gauge("glasu_loss", "Mean training loss of the last reported round.", status.loss)
        yield _label(Gauge, "glasu_party_connected", "1 while a party is connected.", "party", connected)
        scores = "Scores of the last evaluation on validation nodes."
        yield _label(Gauge, "glasu_validation", scores, "metric", view.scores)
        yield _label(Counter, "glasu_bytes", "Bytes of encoded messages.", "direction", moved)
        phases = "Bytes of encoded messages by phase of the run."
        yield _label(Counter, "glasu_phase_bytes", phases, "phase", view.traffic.by_phase)
        yield _label(Counter, "glasu_seconds", "Time that the server spent, by activity.", "part", view.seconds.parts)
        yield Counter("glasu_messages", "Messages in both directions.", view.traffic.messages)
        yield Counter("glasu_exchanges", "Round trips between parties and server.", view.traffic.exchanges)
        yield Counter("glasu_refused", "Connections refused after the TLS handshake.", view.refused)


def _label(
    family: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    about: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    """Return a metric with one value per label."""
    metric = family(name, about, labels=[label])
    for key, value in values.items():
        metric.add_metric([key], value)
    return metric
