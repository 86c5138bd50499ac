"""glasu audit: verify the ledger of a party, and list its releases.

It reads the ledgers in RUN_DIR, which is the output folder of `glasu train` or `glasu join`, or a party's folder after
`glasu align`. It verifies their hash chains, compares them with report.json and with the heads (last hashes) that other
parties recorded, and writes a page for a privacy officer. The exit code is 1 if a check fails. With --attack it also
attacks the messages that `glasu train --transcript` recorded, and prints the share of the data that the server and a
party recover. In one attack, the server sends different aggregates to different parties. The transcript contains no
such messages, so this attack computes the first round again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from glasu.cli.arguments import parse_path

EXAMPLE = "glasu audit runs/a --peers runs/b runs/c"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the folder with the ledgers")
    parser.add_argument(
        "--peers",
        type=Path,
        nargs="+",
        default=(),
        metavar="DIR",
        help="folders of other parties or of the server; the ledgers are compared with the heads in these folders",
    )
    parser.add_argument("--out", type=parse_path, metavar="FILE", help="the page, .html (default: RUN_DIR/audit.html)")
    parser.add_argument(
        "--attack",
        action="store_true",
        help="attack the messages in RUN_DIR/transcript; the data of the run is read again, and if two layers "
        "aggregate, the first round is repeated with a server that sends different aggregates to different parties",
    )
    parser.add_argument(
        "--role",
        action="append",
        metavar="NAME",
        help="with --attack: the attacker, `server` or the name of a party; may be given several times (default: the "
        "server and the last party)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> None:
    import json
    from datetime import UTC, datetime

    from glasu.cli.arguments import make_output_folder
    from glasu.errors import ConfigError
    from glasu.files import write_atomically
    from glasu.privacy.ledger import LedgerError
    from glasu.report import to_json_value
    from glasu.runtime.audit import audit_folder
    from glasu.runtime.audit_page import render_audit_page, render_text
    from glasu.runtime.output_dir import refuse_file_among_others

    if not args.run_dir.is_dir():
        raise ConfigError(f"{args.run_dir}: is not a folder; give the folder with the ledgers.")
    if args.role and not args.attack:
        raise ConfigError(f"--role {args.role[0]}: needs --attack.")
    page = args.run_dir / "audit.html" if args.out is None else args.out
    if page.is_dir():
        raise ConfigError(f"--out {page}: is a folder; give the name of a page, for example audit.html.")
    if page.suffix != ".html":
        raise ConfigError(f"--out {page}: must end with .html.")
    refuse_file_among_others(page, args.run_dir)
    make_output_folder(page.parent)
    audit = audit_folder(args.run_dir, args.peers)
    found, text = dict(to_json_value(audit)), render_text(audit)
    attacks: list[tuple[str, ...]] = []
    if args.attack:
        from glasu.runtime.attack import RESULT_HEADINGS, attack_folder, format_results, list_result_cells

        results = attack_folder(args.run_dir, args.role)
        found["attacks"] = to_json_value(results)
        text = f"{text}\n{format_results(results)}"
        attacks = [RESULT_HEADINGS, *map(list_result_cells, results)]
    write_atomically(page, render_audit_page(audit, datetime.now(UTC), attacks).encode())
    print(json.dumps(found, indent=2) if args.json else f"{text}\n{page}")
    if audit.failures:
        listed = "; ".join(f"{check.check}: {check.text.removesuffix('.')}" for check in audit.failures)
        raise LedgerError(f"{listed}. Ask the party for the original file, and compare with --peers.")
