"""What the roles of a run see, as a table for docs/threat-model.md: from message definitions and recorded runs."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from glasu.config import RunConfig
from glasu.profiles import PROFILES
from glasu.protocol.fields import BytesField, FlagField, NodeSetsField, NumbersField, TensorField
from glasu.protocol.messages import MESSAGES, Message
from glasu.runtime.transcript import RecordedRun
from glasu.wire.encodings import make_encodings
from glasu.wire.message_key import SERVER
from support.tiny import simulate, tiny_parties

TEXTS = {  # of bytes, by their tag
    "keys": "public keys, signed",
    "sealed": "ciphertext",
    "decision": "HMAC or ciphertext",
    "proof": "HMAC",
}


def record(profile: str, owner: str | None) -> set[tuple[type[Message], bool]]:
    """Return the kinds of messages of small runs, each with whether the server sends it."""
    config, found = make_config(profile, owner), set()
    configs = [config]
    if owner is None and not config.train.releases_once:
        configs.append(config.replace(train={"warm_start": 1}))
    for each in configs:
        with TemporaryDirectory() as folder:
            simulate(tiny_parties(owner=owner), each, transcript=Path(folder))
            messages = [entry for entry in RecordedRun(Path(folder)).entries if not entry.is_clear]
            found |= {(entry.kind, entry.sender == SERVER) for entry in messages}
    return found


def make_config(profile: str, owner: str | None) -> RunConfig:
    """Return settings of a small run with a profile, with labels at all parties or at one."""
    train = {"num_rounds": 2, "evaluate_every": 1, "labels": owner or "all"}
    return RunConfig.from_dict({"train": train, "privacy": {"profile": profile}})


def describe_content(kind: type[Message], config: RunConfig) -> str:
    """Return what the server reads in a message."""
    found = []
    for content in kind.contents().values():
        if isinstance(content, TensorField):
            hidden = make_encodings(config)[content.kind].is_hidden
            found.append("uniform numbers" if hidden else f"**{content.kind} in clear**")
        elif isinstance(content, NodeSetsField):
            found.append("**node numbers**")
        elif isinstance(content, NumbersField):
            found.append(f"**{content.tag}**")
        elif isinstance(content, FlagField):
            found.append("flags")
        elif isinstance(content, BytesField):
            found.append(TEXTS[content.tag])
    return ", ".join(dict.fromkeys(found)) or "nothing"


def make_table(owner: str | None) -> list[str]:
    """Return the rows of the table: a message per row, a profile per column."""
    profiles = [profile for profile in PROFILES if profile != "dp" or owner is None]  # dp needs labels at all parties
    seen = {profile: record(profile, owner) for profile in profiles}
    lines = [
        f"| message | sender | {' | '.join(f'`{profile}`' for profile in profiles)} |",
        "|---|---|" + "---|" * len(profiles),
    ]
    for kind in MESSAGES:
        for by_server in (False, True):
            cells = [
                describe_content(kind, make_config(profile, owner)) if (kind, by_server) in seen[profile] else "-"
                for profile in profiles
            ]
            if set(cells) != {"-"}:
                sender = "server" if by_server else "client"
                lines.append(f"| `{kind.__name__}` | {sender} | {' | '.join(cells)} |")
    return lines


READ_BY_CLIENTS = {  # of bytes, by their tag
    "keys": "public keys of all parties, signed",
    "sealed": "keys, or the label owner's gradient, decrypted",
    "decision": "HMAC of the scores, or the label owner's verdict, decrypted",
    "proof": "HMACs of all parties",
}


def describe_answer(kind: type[Message], config: RunConfig) -> str:
    """Return what a client reads in an answer of the server."""
    found = []
    for content in kind.contents().values():
        if isinstance(content, TensorField):
            noise = ", with noise" if config.privacy.adds_noise else ""
            found.append(f"**{content.kind}: the aggregate{noise}**")
        elif isinstance(content, NodeSetsField):
            found.append("**node numbers**")
        elif isinstance(content, NumbersField):
            found.append(content.tag)
        elif isinstance(content, FlagField):
            found.append("flags")
        elif isinstance(content, BytesField):
            found.append(READ_BY_CLIENTS[content.tag])
    return ", ".join(dict.fromkeys(found))


def make_client_table(owner: str | None) -> list[str]:
    """Return the rows of the table of a client's view: an answer per row, a profile per column."""
    profiles = [profile for profile in PROFILES if profile != "dp" or owner is None]
    seen = {profile: record(profile, owner) for profile in profiles}
    lines = [f"| answer | {' | '.join(f'`{profile}`' for profile in profiles)} |", "|---|" + "---|" * len(profiles)]
    for kind in MESSAGES:
        cells = [
            describe_answer(kind, make_config(profile, owner)) if (kind, True) in seen[profile] else "-"
            for profile in profiles
        ]
        if set(cells) != {"-"}:
            lines.append(f"| `{kind.__name__}` | {' | '.join(cells)} |")
    return lines
