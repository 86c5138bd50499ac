"""Record the outcome of all settings, or of those named: python tests/golden/record.py [NAME...].

Run it after an intended change of traffic, and list the change in CHANGES.md.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from records import FOLDER, read_record, recorded_names, write_record
from runs import differing_fields, run
from settings import SETTINGS


def main(names: list[str]) -> int:
    """Run settings, write their records, and print the fields that changed."""
    for stale in recorded_names() - SETTINGS.keys():
        (FOLDER / f"{stale}.json").unlink()
    for name in names or SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            recorded = run(name, Path(folder).resolve())["recorded"]
        for field, change in differing_fields(read_record(name), recorded).items():
            print(f"{name}: {field}: {change}")
        write_record(name, recorded)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
