"""glasu provision: make the kits by which server and parties prove who they are.

A private CA signs one certificate for the server and one for each party; KITS/server and KITS/<party> are handed to
those they name, KITS/ca stays here. Nothing is overwritten or deleted: kits that were renewed or removed go to
KITS/retired.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from glasu.cli.arguments import named_path
from glasu.errors import ConfigError

if TYPE_CHECKING:
    from glasu.pki.kit import Kit

EXAMPLE = "glasu provision --parties a,b,c --host localhost --out kits"


def names(text: str) -> list[str]:
    """Read a comma-separated list."""
    return [name.strip() for name in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--parties", type=names, metavar="NAMES", help="make a CA and kits for the server and these")
    action.add_argument("--add", type=names, metavar="NAMES", help="make kits for further parties")
    action.add_argument(
        "--remove", type=names, metavar="NAMES", help="take parties off the roster, and revoke their kits"
    )
    action.add_argument("--renew", type=names, metavar="NAMES", help="new keys and certificates, also for `server`")
    action.add_argument("--revoke", type=names, metavar="NAMES", help="serve no certificate issued to these so far")
    parser.add_argument(
        "--host",
        type=names,
        action="extend",
        default=[],
        metavar="HOST",
        help="a DNS name or IP address of the server; may be given several times, and replaces all at --renew server",
    )
    parser.add_argument("--days", type=int, help="how long the kits are valid, by default 365; the CA is for 3650")
    parser.add_argument("--out", type=named_path, required=True, metavar="KITS", help="folder of the kits' folders")


def run(args: argparse.Namespace) -> None:
    if args.host and not (args.parties or args.renew):
        raise ConfigError(f"--host {args.host[0]}: only --parties and --renew server make a certificate with hosts.")
    if (args.revoke or args.remove) and args.days is not None:
        raise ConfigError(f"--days {args.days}: no kit is made that could expire; leave it out.")

    from glasu.pki import provision
    from glasu.pki.authority import KIT_DAYS
    from glasu.runtime.output_dir import refuse_contents_of_others

    days = KIT_DAYS if args.days is None else args.days
    if args.parties:
        refuse_contents_of_others(args.out, "provision")
        _print(provision.provision(args.out, args.parties, args.host, days=days))
        print(f"{args.out / provision.AUTHORITY}: the CA; keep it here, back it up, and give its key to nobody.")
    elif args.add:
        _print(provision.add(args.out, args.add, days=days))
        print(f"{args.out / 'server' / 'kit.toml'}: lists them now; bring it to the server.")
        print(
            f"A run that has begun without {', '.join(args.add)} cannot go on with this roster, nor its model predict: "
            f"finish it first, or take the names off again with --remove {','.join(args.add)}."
        )
    elif args.remove:
        lists = provision.remove(args.out, args.remove)
        print(f"{', '.join(args.remove)}: off the roster, and every certificate issued so far is revoked.")
        print(f"{lists[-1]} and kit.toml beside it: bring both to the server.")
        print(
            f"A run that has begun with {', '.join(args.remove)} cannot go on with this roster, nor its model predict."
        )
    elif args.renew:
        dropped = provision.find_dropped_hosts(args.out, args.host)
        kits = provision.renew(args.out, args.renew, args.host, days=days)
        _print(kits)
        if dropped:
            print(f"server: no longer names {', '.join(dropped)}, for --host replaces all names.")
        print(f"What they replace is in {args.out / 'retired'}, if it was here.")
        good = provision.find_valid_predecessors(args.out, kits)
        if good:
            print(f"{', '.join(good)}: the former certificate is good, too, until it expires.")
        if gone := [name for name in args.renew if name not in good]:
            print(f"{', '.join(gone)}: no former certificate is served any more.")
    else:
        lists = provision.revoke(args.out, args.revoke)
        print(f"{', '.join(args.revoke)}: every certificate issued so far is revoked; --renew makes a new kit.")
        print(f"{lists[-1]}: the list; bring it to the server as revoked.pem in its kit.")


def _print(kits: list[Kit]) -> None:
    for kit in kits:
        bearer = f"of the server at {', '.join(kit.hosts)}" if kit.role == "server" else f"of party {kit.name}"
        print(f"{kit.folder}: kit {bearer}, expires {kit.expires:%Y-%m-%d}, fingerprint {kit.fingerprint}")
