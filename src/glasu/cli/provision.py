"""glasu provision: create the kits (keys and certificates) of the server and the parties.

A private CA signs one certificate for the server and one for each party. Give KITS/server to the server and
KITS/<party> to that party; keep KITS/ca here. Nothing is overwritten or deleted: renewed and removed kits move to
KITS/retired.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from glasu.cli.arguments import parse_path
from glasu.errors import ConfigError

if TYPE_CHECKING:
    from glasu.pki.kit import Kit

ACTIONS = {
    "--parties": "create a CA, and kits for the server and these parties",
    "--add": "create kits for more parties",
    "--remove": "remove parties from the roster and revoke their certificates",
    "--renew": "create new keys and certificates for these parties or `server`",
    "--revoke": "revoke all certificates issued so far to these parties",
}
EXAMPLE = "glasu provision --parties a,b,c --host localhost --out kits"


def parse_names(text: str) -> list[str]:
    """Parse a comma-separated list."""
    return [name.strip() for name in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = parser.add_mutually_exclusive_group(required=True)
    for option, purpose in ACTIONS.items():
        action.add_argument(option, type=parse_names, metavar="NAMES", help=purpose)
    parser.add_argument(
        "--host",
        type=parse_names,
        action="extend",
        default=[],
        metavar="HOST",
        help="a DNS name or IP address of the server; may be given several times; --renew server replaces all of them",
    )
    parser.add_argument("--days", type=int, help="validity of the kits (365); the CA is valid for 3650 days")
    parser.add_argument("--out", type=parse_path, required=True, metavar="KITS", help="folder for the kits")


def run(args: argparse.Namespace) -> None:
    if args.host and not (args.parties or args.renew):
        raise ConfigError(f"--host {args.host[0]}: only --parties and --renew server use it; remove it.")
    if (args.revoke or args.remove) and args.days is not None:
        raise ConfigError(f"--days {args.days}: this command creates no kit; remove this option.")

    from glasu.pki import provision
    from glasu.pki.authority import KIT_DAYS
    from glasu.runtime.output_dir import refuse_contents_of_others

    days = KIT_DAYS if args.days is None else args.days
    if args.parties:
        refuse_contents_of_others(args.out, "provision")
        _print(provision.provision(args.out, args.parties, args.host, days=days))
        print(f"{args.out / provision.AUTHORITY}: the CA; keep it here, back it up, and never share its key.")
    elif args.add:
        _print(provision.add(args.out, args.add, days=days))
        print(f"{args.out / 'server' / 'kit.toml'}: lists the new parties; copy it to the server.")
        print(
            f"A run that started without {', '.join(args.add)} cannot resume with this roster, and its model cannot "
            f"predict. Finish it first, or undo this with --remove {','.join(args.add)}."
        )
    elif args.remove:
        lists = provision.remove(args.out, args.remove)
        print(f"{', '.join(args.remove)}: removed from the roster; all their certificates are revoked.")
        print(f"{lists[-1]} and kit.toml beside it: copy both to the server.")
        print(
            f"A run that started with {', '.join(args.remove)} cannot resume with this roster, and its model cannot "
            "predict."
        )
    elif args.renew:
        dropped = provision.find_dropped_hosts(args.out, args.host)
        kits = provision.renew(args.out, args.renew, args.host, days=days)
        _print(kits)
        if dropped:
            print(f"server: its certificate no longer names {', '.join(dropped)}, because --host replaces all names.")
        print(f"The former kits are in {args.out / 'retired'}, if they were here.")
        good = provision.find_valid_predecessors(args.out, kits)
        if good:
            print(f"{', '.join(good)}: the former certificate stays valid until it expires.")
        if gone := [name for name in args.renew if name not in good]:
            print(f"{', '.join(gone)}: no former certificate is valid any more.")
    else:
        lists = provision.revoke(args.out, args.revoke)
        print(f"{', '.join(args.revoke)}: all certificates issued so far are revoked; --renew creates a new kit.")
        print(f"{lists[-1]}: the revocation list; copy it to the server as revoked.pem in its kit.")


def _print(kits: list[Kit]) -> None:
    for kit in kits:
        bearer = f"of the server at {', '.join(kit.hosts)}" if kit.role == "server" else f"of party {kit.name}"
        print(f"{kit.folder}: kit {bearer}, expires {kit.expires:%Y-%m-%d}, fingerprint {kit.fingerprint}")
