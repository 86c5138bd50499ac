"""glasu provision: create the kits (keys and certificates) of the server and the parties.

A private CA signs one certificate for the server and one for each party. Nothing is overwritten or deleted: renewed and
removed kits are moved to KITS/retired.

With --parties, all keys are made on one machine. These are trial kits: give KITS/server to the server and KITS/<party>
to that party, and keep KITS/ca here. Otherwise the server and each party make their own keys with `request`, the CA
signs the requests with `sign`, and `pin` records the fingerprints of the peers' keys.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from glasu.cli.arguments import parse_path
from glasu.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from glasu.pki.kit import Kit

ACTIONS = {
    "--parties": "create a CA, and kits for the server and these parties",
    "--add": "create kits for more parties",
    "--remove": "remove parties from the roster and revoke their certificates",
    "--renew": "create new keys and certificates for these parties or `server`",
    "--revoke": "revoke all certificates issued so far to these parties",
}
EXAMPLE = "glasu provision --parties a,b,c --host localhost --out kits"


ROLE_ACTIONS = {  # per action: purpose, details, example
    "request": (
        "at a party or the server: make a key and a signing request",
        "The key stays in KIT. Only KIT/request.pem goes to the CA. The CA returns files that complete the kit; copy\n"
        "them to KIT. At a party, the command also makes the party's secret.",
        "glasu provision request --party clinic --out kits/clinic",
    ),
    "sign": (
        "at the CA: sign the requests of parties and the server",
        "The first call makes the CA and needs --host. The roster lists the parties in the order of their requests;\n"
        "later calls append parties. Send ca.pem, certificate.pem and kit.toml back to each party and to the server,\n"
        "and revoked.pem to the server only.",
        "glasu provision sign server.pem clinic.pem insurer.pem --ca kits --host glasu.example.org",
    ),
    "pin": (
        "record the fingerprints of the peers' keys; without --peers, show them",
        "A pinned peer is refused if it uses another key, even a key that the CA has signed. Compare the fingerprints\n"
        "over the telephone. For masks and ckks, every party must pin all other parties.",
        "glasu provision pin kits/clinic --peers insurer=a2ed-b15b-264f-5f40-f917-fa8d",
    ),
    "secret": (
        "at a party: make the secret of a kit, if it has none",
        "The party's private random draws are derived from the secret. If the secret is missing and the kit is not\n"
        "read-only, `glasu join` makes it. Back up the secret.",
        "glasu provision secret kits/clinic",
    ),
}


def parse_names(text: str) -> list[str]:
    """Parse a comma-separated list."""
    return [name.strip() for name in text.split(",")]


def parse_peer(text: str) -> tuple[str, str]:
    """Parse NAME=FINGERPRINT."""
    name, sign, fingerprint = text.rpartition("=")
    if not (name and sign and fingerprint):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FINGERPRINT")
    return name, fingerprint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_actions(parser)
    action = parser.add_mutually_exclusive_group()
    for option, purpose in ACTIONS.items():
        action.add_argument(option, type=parse_names, metavar="NAMES", help=purpose)
    _add_host(parser, "may be given several times; with --renew server, these names replace all earlier names")
    parser.add_argument("--days", type=int, help="validity of the kits (default: 365); the CA is valid for 3650 days")
    parser.add_argument("--out", type=parse_path, metavar="KITS", help="folder for the kits")


def _add_host(parser: argparse.ArgumentParser, use: str) -> None:
    """Add --host; its help ends with `use`."""
    purpose = f"a DNS name or IP address of the server; {use}"
    parser.add_argument("--host", type=parse_names, action="extend", default=[], metavar="HOST", help=purpose)


def _add_actions(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="action")
    parsers = {
        name: actions.add_parser(
            name,
            help=purpose,
            description=f"{purpose[0].upper()}{purpose[1:]}.\n\n{details}",
            epilog=f"example: {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for name, (purpose, details, example) in ROLE_ACTIONS.items()
    }
    request = parsers["request"]
    owner = request.add_mutually_exclusive_group(required=True)
    owner.add_argument("--party", metavar="NAME", help="the name in party.toml; also creates the party's secret")
    owner.add_argument("--server", action="store_true", help="for the server")
    request.add_argument("--out", type=parse_path, required=True, metavar="KIT", help="folder for the kit")
    sign = parsers["sign"]
    sign.add_argument(
        "requests", type=parse_path, nargs="+", metavar="REQUEST", help="request.pem of a party or the server"
    )
    sign.add_argument("--ca", type=parse_path, required=True, metavar="KITS", help="folder of the CA")
    _add_host(sign, "required for a new CA; with a request from the server, the given names replace earlier names")
    sign.add_argument("--days", type=int, help="validity of the certificates (default: 365)")
    pin = parsers["pin"]
    pin.add_argument("kit", type=parse_path, metavar="KIT", help="the kit of this role")
    pin.add_argument(
        "--peers",
        type=parse_peer,
        nargs="+",
        default=[],
        metavar="NAME=FINGERPRINT",
        help="fingerprints of other parties or `server`, compared over the telephone",
    )
    parsers["secret"].add_argument("kit", type=parse_path, metavar="KIT", help="the kit of this role")


def run(args: argparse.Namespace) -> None:
    options = [option for option in ACTIONS if getattr(args, option.removeprefix("--"), None)]
    if args.action is not None and options:
        raise ConfigError(f"{options[0]}: cannot be combined with `glasu provision {args.action}`; remove one of them.")
    match args.action:
        case "request":
            _request(args)
        case "sign":
            _sign(args)
        case "pin":
            _pin(args.kit, args.peers)
        case "secret":
            _make_secret(args.kit)
        case _:
            _provision(args, options)


def _request(args: argparse.Namespace) -> None:
    from glasu.pki.fingerprint import format_fingerprint
    from glasu.pki.identity import SERVER_NAME, check_roster
    from glasu.pki.request import make_request

    if not args.server:
        check_roster([args.party])
    made = make_request(args.out, SERVER_NAME if args.server else args.party)
    held = "key and request of the server" if args.server else f"key, secret and request of party {made.name}"
    print(f"{args.out}: {held}; only {made.source} leaves this machine.")
    print(f"Send it to the CA, and copy the returned files to {args.out}.")
    readers = "parties" if args.server else "other parties"
    print(f"Fingerprint of the key, to read out to the {readers}: {format_fingerprint(made.fingerprint)}")


def _sign(args: argparse.Namespace) -> None:
    from glasu.pki.authority import KIT_DAYS
    from glasu.pki.fingerprint import format_fingerprint
    from glasu.pki.identity import SERVER_NAME
    from glasu.pki.kit import KEY
    from glasu.pki.signing import sign_requests

    days = KIT_DAYS if args.days is None else args.days
    for each in sign_requests(args.ca, args.requests, args.host, days=days):
        shown = format_fingerprint(each.key_fingerprint)
        owner = "the server" if each.name == SERVER_NAME else f"party {each.name}"
        print(f"{each.folder}: for {owner}, expires {each.expires:%Y-%m-%d}, key {shown}; send it back.")
    server = args.ca / SERVER_NAME
    held = "the kit of the server" if (server / KEY).is_file() else "for the server"
    print(f"{server}: {held}; its kit.toml lists the parties; copy this file to the server.")


def _pin(folder: Path, peers: list[tuple[str, str]]) -> None:
    from cryptography import x509

    from glasu.pki.fingerprint import fingerprint_key, format_fingerprint
    from glasu.pki.identity import SERVER_NAME
    from glasu.pki.kit import MANIFEST, open_kit
    from glasu.pki.pins import add_pins

    kit = open_kit(folder)
    for name, _ in peers:
        if [other for other, _ in peers].count(name) > 1:
            raise ConfigError(f"--peers {name}: is named twice; name it once.")
        if kit.roster and name not in (SERVER_NAME, *kit.roster):
            raise ConfigError(
                f"--peers {name}: {folder / MANIFEST} lists no such party; the parties are {', '.join(kit.roster)}."
            )
    pins = add_pins(folder, kit.name, dict(peers)) if peers else kit.pins
    own = fingerprint_key(x509.load_pem_x509_certificate(kit.certificate_pem).public_key())
    print(f"{kit.name} (this kit): {format_fingerprint(own)}")
    for name, digits in sorted(pins.items()):
        print(f"{name} (pinned): {format_fingerprint(digits)}")


def _make_secret(folder: Path) -> None:
    from glasu.pki.kit import open_kit
    from glasu.pki.secret_file import SECRET, make_secret

    had = open_kit(folder, "party").secret is not None
    make_secret(folder)
    print(f"{folder / SECRET}: {'exists already' if had else 'made; back it up, and never share it'}.")


def _provision(args: argparse.Namespace, options: list[str]) -> None:
    if not options:
        raise ConfigError(f"name an action: {', '.join(ROLE_ACTIONS)}, or one of {', '.join(ACTIONS)}.")
    if args.out is None:
        raise ConfigError(f"{options[0]}: also give --out KITS, the folder for the kits.")
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
        _print_kits(provision.provision(args.out, args.parties, args.host, days=days))
        print(f"{args.out / provision.AUTHORITY}: the CA; keep it here, back it up, and never share its key.")
        print("These are trial kits: this machine made the keys of all parties. See `glasu provision request`.")
    elif args.add:
        _print_kits(provision.add(args.out, args.add, days=days))
        print(f"{args.out / 'server' / 'kit.toml'}: lists the new parties; copy it to the server.")
        print(
            f"A run that started without {', '.join(args.add)} cannot resume with this roster, and its model cannot "
            f"predict. Finish that run first, or undo this with --remove {','.join(args.add)}."
        )
    elif args.remove:
        lists = provision.remove(args.out, args.remove)
        print(f"{', '.join(args.remove)}: removed from the roster; all their certificates are revoked.")
        print(f"{lists[-1]} and kit.toml next to it: copy both to the server.")
        print(
            f"A run that started with {', '.join(args.remove)} cannot resume with this roster, and its model cannot "
            "predict."
        )
    elif args.renew:
        dropped = provision.find_dropped_hosts(args.out, args.host)
        kits = provision.renew(args.out, args.renew, args.host, days=days)
        _print_kits(kits)
        if dropped:
            print(f"server: its certificate no longer names {', '.join(dropped)}, because --host replaces all names.")
        print(f"Any former kits in this folder were moved to {args.out / 'retired'}.")
        good = provision.find_valid_predecessors(args.out, kits)
        if good:
            print(f"{', '.join(good)}: the former certificate stays valid until it expires.")
        if gone := [name for name in args.renew if name not in good]:
            print(f"{', '.join(gone)}: no former certificate is valid any more.")
    else:
        lists = provision.revoke(args.out, args.revoke)
        listed = ", ".join(args.revoke)
        print(f"{listed}: all certificates issued so far are revoked. To make new ones, use --renew or `sign`.")
        print(f"{lists[-1]}: the revocation list; copy it to the server as revoked.pem in its kit.")


def _print_kits(kits: list[Kit]) -> None:
    for kit in kits:
        bearer = f"of the server at {', '.join(kit.hosts)}" if kit.role == "server" else f"of party {kit.name}"
        print(f"{kit.folder}: kit {bearer}, expires {kit.expires:%Y-%m-%d}, fingerprint {kit.fingerprint}")
