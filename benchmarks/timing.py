"""Measure the CPU time of functions in alternating turns, and of whole rounds with all parties and the server."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.model.sampler import Sample
from glasu.protocol.client import Client
from glasu.protocol.learner import Batch
from glasu.protocol.requests import Event, RoundDone, Save
from glasu.protocol.training import client_script, server_script
from glasu.runtime.inprocess import ScriptRun, run_together
from glasu.runtime.simulation import make_clients, make_server
from glasu.runtime.telemetry import TrafficCounter
from glasu.timing import Stopwatch
from paper import WINDOW

PHASES = ("sampling", "compute", "communication")
Work = Callable[[], object]


def per_call(work: Work, repeats: int) -> float:
    """Return the CPU seconds per call, measured after one untimed call."""
    work()
    start = time.process_time()
    for _ in range(repeats):
        work()
    return (time.process_time() - start) / repeats


def in_turns(contenders: Mapping[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Call every measurement once per turn, so that changes of the machine's speed affect all measurements alike."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name, measure in contenders.items():
            found[name].append(measure())
    return found


def ratio(others: Sequence[float], own: Sequence[float]) -> float:
    """Divide the other time by our time in each turn, and return the median of these ratios."""
    return statistics.median(other / mine for other, mine in zip(others, own, strict=True))


@dataclass(frozen=True)
class Timing:
    """The cost of the complete windows (`paper.WINDOW`) of a run. The first is a warm-up and does not count."""

    seconds: float  # CPU seconds per round
    shares: dict[str, float]  # phase -> its fraction of the seconds
    bytes: float  # bytes per round
    exchanges: float  # exchanges per round
    batches: tuple[tuple[Batch, ...], ...]  # batches of each client in the first window only, to save memory

    @property
    def rows(self) -> float:
        """Return the mean of |S_m[0]| over clients and rounds."""
        return statistics.fmean(batch.features.shape[0] for own in self.batches for batch in own)

    @property
    def edges(self) -> float:
        """Return the average number of entries in a client's blocks per round."""
        counts = (sum(block.matrix.nnz for block in batch.blocks) for own in self.batches for batch in own)
        return statistics.fmean(counts)


def timed_rounds(parties: Sequence[PartyData], config: RunConfig) -> Timing:
    """Train the complete windows that fit into `train.num_rounds`, and time all windows but the first."""
    clock = time.perf_counter  # a phase is shorter than a read of the CPU clock, which only times all rounds together
    watch, meter, last = Stopwatch(clock), TrafficCounter(), config.train.num_rounds // WINDOW * WINDOW
    marks: list[tuple[float, dict[str, float], int, int]] = []

    def observe(event: Save | Event) -> None:
        if isinstance(event, RoundDone) and event.round + 1 in (WINDOW, last):
            watches = [watch, *(client.watch for client in clients)]
            spent = {name: sum(each.seconds[name] for each in watches) for name in PHASES}
            marks.append((time.process_time(), {**spent, "all": clock()}, meter.total_bytes, meter.exchanges))

    clients = make_clients(config, parties, clock)
    batches = [_record_batches(client) for client in clients]
    server = make_server(config, clients)
    running = [ScriptRun(client.name, client_script(client), client.watch) for client in clients]
    serving = ScriptRun("server", server_script(server), watch, observe, "communication")
    run_together(serving, running, meter)
    (start, before, sent, met), (stop, after, sent_then, met_then) = marks
    count, seconds = last - WINDOW, stop - start
    shares = {name: (after[name] - before[name]) / (after["all"] - before["all"]) for name in PHASES}
    shares["other"] = 1 - sum(shares.values())
    kept = tuple(map(tuple, batches))
    return Timing(seconds / count, shares, (sent_then - sent) / count, (met_then - met) / count, kept)


def _record_batches(client: Client) -> list[Batch]:
    """Record the batches of the client's first window in a list, and return the list before it is filled."""
    gather = client.learner.gather
    noted: list[Batch] = []

    def note(sample: Sample, *, with_labels: bool = True) -> Batch:
        found = gather(sample, with_labels=with_labels)
        # A batch that is gathered early is returned once more in its own round.
        if len(noted) < WINDOW and not (noted and noted[-1] is found):
            noted.append(found)
        return found

    client.learner.gather = note  # type: ignore[method-assign]
    return noted
