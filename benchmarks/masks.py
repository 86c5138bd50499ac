"""What do masks and encryption cost in accuracy (paired by seed), in bytes, and in CPU time per hidden tensor?

    python benchmarks/masks.py --datasets cora,citeseer,pubmed --seeds 5 --jobs 2
    python benchmarks/masks.py --datasets cora --modes stale --seeds 1 --rounds 10 --jobs 1 \
        --kinds "masks fp32,ckks fp32,masks int8,ckks int8"

The modes are those of `compression.py`: stale updates, exact gradients, and labels at one party. A kind is a
protection and a precision, such as "masks int8" or "plain fp32". Paired runs have the same data, split, initial weights
and dropout. Every kind is compared with the plain run at the same precision and with plain fp32. The first comparison
shows the cost of the protection; the second also includes the cost of the precision. The script adds these plain runs
to --kinds. Runs that are in the output folder are not repeated.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
import torch

from compression import MODES, PRECISIONS, results_of
from glasu.config import RunConfig
from glasu.experiments.plan import Run, read_settings
from glasu.experiments.reproduce import run_missing
from glasu.experiments.results import RunResult
from glasu.experiments.tables import format_spread, list_percentages
from glasu.privacy.column_grids import ColumnGrids
from glasu.privacy.encryption import CkksCipher, CkksEncryption
from glasu.privacy.masking import PairwiseMasks, RunningHash
from glasu.wire.ciphertexts import Ciphertexts
from glasu.wire.message_key import Key, Phase
from glasu.wire.ring import Ring
from glasu.wire.tensor_kinds import REPRESENTATION
from tables import markdown

KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> wire.precision and keys of [privacy]
    **{f"plain {precision}": (precision, {}) for precision in PRECISIONS},
    **{f"masks {precision}": (precision, {"secure_aggregation": "masks"}) for precision in PRECISIONS},
    "ckks fp32": ("fp32", {"secure_aggregation": "ckks"}),
    "ckks int8": ("int8", {"secure_aggregation": "ckks"}),
}
EXACT = "plain fp32"
DEFAULT_KINDS = tuple(kind for kind in KINDS if not kind.startswith("ckks"))
HEADINGS = ("mode", "kind", "test %", "against plain", "against fp32", "bytes / plain", "bytes / fp32", "seconds")
ALLOWED_LOSS = 0.5  # masks may lose this many points against the plain run at the same precision
KEY = Key(bytes(12), Phase.TRAINING, 0, 0, 1)
ROWS, COLUMNS, CLIENTS, ALLOWED_MS = 500, 256, 3, 2.0


def make_config(dataset: str, mode: str, kind: str, **train: Any) -> RunConfig:
    """Return the settings of a mode on a data set."""
    method, changes = MODES[mode]
    precision, privacy = KINDS[kind]
    config = read_settings(dataset, method).replace(**changes)
    return config.replace(wire={"precision": precision}, privacy=privacy, train=train)


def runs(dataset: str, mode: str, kind: str, seeds: int, keys: dict[str, Any]) -> list[Run]:
    """Return the runs of one table row, one per seed."""
    configs = [make_config(dataset, mode, kind, seed=seed, **keys) for seed in range(seeds)]
    return [Run(dataset, MODES[mode][0], f"{mode} {kind}", config.train.seed, config) for config in configs]


def find_plain(kind: str) -> str:
    """Return the name of the plain kind with the same precision."""
    return f"plain {KINDS[kind][0]}"


def compare_accuracy(results: Sequence[RunResult], others: Sequence[RunResult]) -> str:
    """Return the mean difference of the accuracies over the seeds, in points, with its standard error."""
    gains = [one - other for one, other in zip(list_percentages(results), list_percentages(others), strict=True)]
    error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
    return f"{fmean(gains):+.2f} ± {error:.2f}"


def compare_bytes(results: Sequence[RunResult], others: Sequence[RunResult]) -> str:
    """Return the ratio of the bytes per round. Totals are not comparable, because runs may stop at different rounds."""
    shares = (
        (one.row.bytes / one.row.rounds) / (other.row.bytes / other.row.rounds)
        for one, other in zip(results, others, strict=True)
    )
    return f"{fmean(shares):.3f}"


def row(mode: str, kind: str, found: Mapping[tuple[str, str], Sequence[RunResult]]) -> list[str]:
    """Return a table row that compares a kind with the plain run at the same precision and with plain fp32."""
    results, plain, exact = (found[mode, each] for each in (kind, find_plain(kind), EXACT))
    return [
        mode,
        kind,
        format_spread(list_percentages(results)),
        "-" if kind == find_plain(kind) else compare_accuracy(results, plain),
        "-" if kind == EXACT else compare_accuracy(results, exact),
        compare_bytes(results, plain),
        compare_bytes(results, exact),
        f"{fmean(one.row.cpu_seconds for one in results):.1f}",
    ]


def time_masking(bits: int, repeats: int = 200) -> tuple[float, float]:
    """Return the median CPU milliseconds to round and to mask one tensor."""
    ring, value = Ring(bits, CLIENTS), torch.randn(ROWS, COLUMNS)
    masks = PairwiseMasks(
        own=0,
        pair_keys={1: bytes(32), 2: b"1" * 32},
        group_key=bytes(32),
        contributors=lambda key: range(CLIENTS),
        chunk_rows=4096,
        running_hash=RunningHash(),
    )
    grids, rounding, masking = ColumnGrids(), [], []
    for index in range(repeats):
        key = Key(bytes(12), Phase.TRAINING, 0, index, 1)
        start = time.process_time()
        numbers, _ = grids.to_integers(REPRESENTATION, value, key, ring)
        middle = time.process_time()
        masks(ring.encode(numbers, key), key)
        rounding.append(middle - start)
        masking.append(time.process_time() - middle)
    return 1000 * median(rounding), 1000 * median(masking)


def time_encryption(bits: int, repeats: int = 20) -> list[float]:
    """Return the megabytes of a ciphertext, and the median CPU milliseconds of three operations.

    The operations are to encrypt a tensor, to add the ciphertexts of M clients, and to decrypt the sum.
    """
    encoding, cipher = Ciphertexts(bits, CLIENTS), CkksCipher()
    clients = [
        CkksEncryption(
            own=own,
            cipher=cipher,
            group_key=bytes(32),
            contributors=lambda key: range(CLIENTS),
            chunk_rows=4096,
            running_hash=RunningHash(),
        )
        for own in range(CLIENTS)
    ]
    numbers, _ = ColumnGrids().to_integers(REPRESENTATION, torch.randn(ROWS, COLUMNS), KEY, encoding)
    spent: list[list[float]] = [[], [], []]
    for index in range(repeats):
        key = KEY._replace(round=index)
        others = [each(numbers, key) for each in clients[1:]]
        times = [time.process_time()]
        payload = clients[0](numbers, key)
        times.append(time.process_time())
        (total,) = encoding.combine([payload, *others], 1, [key])
        times.append(time.process_time())
        found = clients[0].prepare_reading(key, numbers.shape, encoding)(total, None)
        times.append(time.process_time())
        assert np.array_equal(found, (CLIENTS * numbers.astype(np.int64)).astype(encoding.number_dtype))
        for each, first, last in zip(spent, times, times[1:], strict=False):
            each.append(1000 * (last - first))
    return [payload.nbytes / 1e6, *map(median, spent)]


def main() -> None:
    """Print the time to hide a tensor, then the accuracies and bytes of every data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default="cora", help="comma-separated; if empty, time only masks and ckks")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--kinds", default=",".join(DEFAULT_KINDS), help=f"comma-separated, of {', '.join(KINDS)}")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, help="number of rounds (default: as in the settings)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/masks"))
    args = parser.parse_args()
    given = args.kinds.split(",")
    if unknown := [kind for kind in given if kind not in KINDS]:
        parser.error(f"--kinds {','.join(unknown)}: choose from {', '.join(KINDS)}")
    wanted = {EXACT, *given, *map(find_plain, given)}
    kinds = [kind for kind in KINDS if kind in wanted]
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    lines = [[f"2^{bits}", *(f"{each:.2f}" for each in time_masking(bits))] for bits in (32, 16, 8)]
    print(f"{ROWS} x {COLUMNS} values, M = {CLIENTS}, CPU milliseconds; limit for both together: {ALLOWED_MS}\n")
    print(markdown(["ring", "rounding", "masks"], lines), flush=True)
    if "ckks" in args.kinds:
        lines = [[f"2^{bits}", *(f"{each:.1f}" for each in time_encryption(bits))] for bits in (32, 16, 8)]
        plain = f"{ROWS * COLUMNS * 4 / 1e6} MB in fp32"
        print(f"\nckks, the same values ({plain}), CPU milliseconds; a party encrypts and decrypts, the server adds\n")
        print(markdown(["ring", "MB", "encrypt", f"add {CLIENTS}", "decrypt"], lines), flush=True)
    keys = {} if args.rounds is None else {"num_rounds": args.rounds}
    for dataset in filter(None, args.datasets.split(",")):
        planned = {
            (mode, kind): runs(dataset, mode, kind, args.seeds, keys)
            for mode in args.modes.split(",")
            for kind in kinds
        }
        run_missing(args.out, [run for some in planned.values() for run in some], args.jobs)
        found = {cell: results_of(args.out, some) for cell, some in planned.items()}
        listed = [row(*cell, found) for cell in found]
        print(f"\n{dataset}, {args.seeds} seeds; masks may lose at most {ALLOWED_LOSS} points against plain\n")
        print(markdown(HEADINGS, listed), flush=True)


if __name__ == "__main__":
    main()
