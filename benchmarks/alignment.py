"""How long does a private alignment of 233,000 ids per party take, and how many bytes does it send?

The script writes one shuffled table of ids per party and aligns the folders in this process. The option --common sets
the share of the ids that all tables contain. Every id becomes a point of an elliptic curve, and every party multiplies
the points of all parties by its secret number. So the seconds grow with the number of ids and with the number of
parties. In a real alignment, the parties compute at the same time on different machines; "alone" is the computing time
of one party, estimated from 2,000 points.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from glasu.data.tables import write_table
from glasu.privacy.blinding import Blinding, hash_ids
from glasu.protocol.requests import Aligning, Event
from glasu.runtime.local_alignment import AlignmentOptions, align_folders
from scale import peak_bytes
from tables import markdown, place, positive, show

SAMPLE = 2000  # number of points that are timed


def write_folders(root: Path, num_parties: int, num_ids: int, common: float) -> list[Path]:
    """Write tables with `num_ids` ids each. All tables share the given fraction of their ids."""
    rng, shared, folders = np.random.default_rng(0), round(num_ids * common), []
    for index in range(num_parties):
        own = [f"person-{number:09d}" for number in range(shared)]
        own += [f"person-{index}-{number:09d}" for number in range(num_ids - shared)]
        folder = root / f"party{index}"
        folder.mkdir()
        write_table({"id": pa.array([own[row] for row in rng.permutation(num_ids)])}, folder / "nodes.parquet")
        write_table(
            {"source": pa.array([], pa.string()), "target": pa.array([], pa.string())}, folder / "edges.parquet"
        )
        (folder / "party.toml").write_text("")
        folders.append(folder)
    return folders


def measure_points() -> tuple[float, float]:
    """Return the seconds to hash one id to a point, and the seconds to multiply one point."""
    blinding, start = Blinding(bytes(32)), time.perf_counter()
    points = hash_ids([f"person-{number}" for number in range(SAMPLE)])
    hashed = time.perf_counter()
    blinding.blind(points)
    return (hashed - start) / SAMPLE, (time.perf_counter() - hashed) / SAMPLE


def report(num_parties: int, num_ids: int, common: float) -> str:
    """Align the tables, and return the table of this benchmark."""
    shown = [time.monotonic()]

    def observe(event: Event) -> None:
        if isinstance(event, Aligning) and time.monotonic() - shown[0] > 10:
            shown[0] = time.monotonic()
            print(event, file=sys.stderr, flush=True)

    hashing, multiplying = measure_points()
    with tempfile.TemporaryDirectory() as root:
        folders = write_folders(Path(root), num_parties, num_ids, common)
        start, busy = time.perf_counter(), time.process_time()
        found = align_folders(folders, AlignmentOptions(observer=observe))
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
    assert found.comparison.common == round(num_ids * common)
    alone = num_ids * (hashing + num_parties * multiplying)
    sent = found.traffic.bytes_to_server / num_parties / 1e6
    head = ["parties", "ids each", "common", "seconds", "CPU seconds", "alone, seconds", "MB sent per party", "peak MB"]
    row = [str(num_parties), str(num_ids), str(found.comparison.common), f"{seconds:.0f}", f"{busy:.0f}"]
    return markdown(head, [[*row, f"{alone:.0f}", f"{sent:.1f}", f"{peak_bytes() / 1e6:.0f}"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parties", type=positive, default=3)
    parser.add_argument("--ids", type=positive, default=233_000, help="of each party (233000)")
    parser.add_argument("--common", type=float, default=0.8, help="share of the ids that all parties have (0.8)")
    parser.add_argument("--quick", action="store_true", help="align 5,000 ids")
    parser.add_argument("--out", type=place, metavar="FILE", help="also write the table to this file")
    args = parser.parse_args()
    show(report(args.parties, 5000 if args.quick else args.ids, args.common), args.out)


if __name__ == "__main__":
    main()
