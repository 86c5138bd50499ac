"""The party's side of a session over the network: one loop for training, prediction, alignment and the dry run.

A `PartyWork` decides what the party states and computes. `join` connects and runs attempts until the server reports
that every party is finished.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from glasu.config import RunConfig
from glasu.data.party import PartyData
from glasu.data.preprocessing import Preparation
from glasu.errors import ConfigError, ProtocolError, TransportError
from glasu.network.client_session import ClientSession, NewAttempt
from glasu.network.compatibility import refuse_kit
from glasu.network.connection import ConnectOptions
from glasu.network.control import ProposedAttempt
from glasu.network.facts import Facts
from glasu.network.fencing import count_start, describe_process
from glasu.network.handshake import (
    GoodbyePayload,
    HelloPayload,
    Payload,
    ResultPayload,
    StatementPayload,
    WelcomePayload,
    read_payload,
)
from glasu.network.id_keys import IdKeys, IdShare
from glasu.network.options import JoinOptions
from glasu.network.party_setup import limit_messages
from glasu.network.purposes import Purpose
from glasu.network.session_ledger import LedgerScope, SessionLedger
from glasu.network.signatures import make_signer
from glasu.network.state_file import JoiningRecord, StateFile
from glasu.pki.key_signing import KitSigner
from glasu.pki.kit import refuse_data_of_others
from glasu.privacy.ledger import LedgerError
from glasu.protocol.client import Client
from glasu.protocol.limits import Limits
from glasu.protocol.message_bytes import Head
from glasu.protocol.messages import Message
from glasu.protocol.requests import Event, Receive, Save, Script, Send
from glasu.records import to_plain
from glasu.runtime.checkpointing import START
from glasu.runtime.client_ledger import attach_ledger
from glasu.runtime.drive import drive
from glasu.runtime.inprocess import open_client_map
from glasu.runtime.ledger_file import LEDGER
from glasu.runtime.output_dir import JOINING
from glasu.runtime.telemetry import Telemetry
from glasu.secret import Secret

ResultT = TypeVar("ResultT")


class PartyWork(ABC, Generic[ResultT]):
    """The work of a party in a session. By default, it runs no attempts and exchanges no messages."""

    purpose: ClassVar[Purpose]

    def __init__(self, options: JoinOptions, owner: str | None) -> None:
        """Refuse the data of another party.

        Args:
            options: the options of the command.
            owner: the party that the data belongs to; None if the data cannot be read.
        """
        if owner is not None:
            refuse_data_of_others(options.kit, owner)
        self.options, self.signer = options, make_signer(options.kit)
        self.id_keys = IdKeys(options.kit.name, self.signer)

    @abstractmethod
    def hello(self) -> Payload:
        """Return the payload of this process's hello. Called before every connection."""

    def welcome(self, welcome: Payload) -> None:
        """Read and accept the offer of a server process. If this raises GlasuError, the session declines the offer."""
        self.accept(read_payload(WelcomePayload, welcome, "the server's welcome"))

    def store_shares(self, shares: Mapping[str, IdShare]) -> None:
        """Check and store the key shares of all parties. The next statement contains HMACs of the ids for them."""
        self.id_keys.store_shares(shares)

    @abstractmethod
    def accept(self, offered: WelcomePayload) -> None:
        """Check the offer of a server process and prepare for it, or raise GlasuError."""

    @abstractmethod
    def statement(self) -> Payload:
        """Return the statement of this party when it is prepared. Called before every attempt."""

    def check_limits(self, head: Head, size: int) -> None:
        """Check the header and size of a message from the server. Raise ProtocolError if it is too long."""
        raise ProtocolError("the server sent a message, but this session exchanges none.")

    def find_earlier_result(self) -> ResultT | None:
        """Return the result of an earlier process, if the run is finished everywhere."""
        return None

    def start(self) -> None:
        """Record in the folder that a process starts. Called before anything is sent."""

    def run_attempt(
        self, session: ClientSession, attempt: ProposedAttempt, performer: type[PartyPerformer]
    ) -> ProposedAttempt | None:
        """Run one attempt; return the next one, or None when every party is finished."""
        raise ProtocolError("the server proposed an attempt, but this session runs no attempts.")

    @abstractmethod
    def take_goodbye(self, goodbye: Payload) -> None:
        """Process the payload of the server's goodbye."""

    def close(self, *, finished: bool) -> None:
        """Stop threads and close files. `finished` is True if every party is finished."""

    @abstractmethod
    def result(self) -> ResultT | None:
        """Return the results of this party; None until they are complete."""


class PartyScriptWork(PartyWork[ResultT]):
    """Work that runs a script together with the server: training, prediction, alignment.

    It runs the script in attempts, counts its starts for fencing, and exchanges ledger heads with the other parties.
    """

    def __init__(self, options: JoinOptions, owner: str, state_file: str) -> None:
        """Read the state file. Nothing is written before `start`.

        Args:
            options: the options of the command.
            owner: the party that the data belongs to.
            state_file: the name of the state file in the folder.
        """
        super().__init__(options, owner)
        self.state = StateFile(options.out / state_file, JoiningRecord(party=owner))
        self.telemetry = Telemetry(options.clock)
        self.session_ledger = SessionLedger(owner, self.signer)

    @abstractmethod
    def scope(self) -> LedgerScope:
        """Return the run and the training that the ledger entries of this session belong to."""

    @abstractmethod
    def settings(self) -> RunConfig:
        """Return the settings of the run, for this party's statement."""

    @abstractmethod
    def facts(self) -> Facts:
        """Return the facts of this party for the settings of the run."""

    @abstractmethod
    def begin(self, attempt: ProposedAttempt) -> Script[Any]:
        """Restore the checkpoint of an attempt and return the script that continues from it."""

    @abstractmethod
    def finish(self, result: Any) -> ResultPayload:
        """Write the results of this party."""

    def list_checkpoints(self) -> Mapping[int, str]:
        """Return the intact checkpoints of this party and their digests."""
        return {0: START}

    def save(self, state: Any) -> None:
        """Start to write a checkpoint. Work whose script yields `Save` implements this."""
        raise NotImplementedError

    def wait_until_durable(self) -> None:
        """Wait until the last saved state is durable."""

    def observe(self, event: Event) -> None:
        """Pass an event of the script to the observer."""
        self.options.emit(event)

    def start(self) -> None:
        """Count this start of the command, for fencing."""
        count_start(self.state)

    def hello(self) -> Payload:
        """Return the hello of this process. Training also states the run that the folder belongs to."""
        process = describe_process(self.state.value)
        return to_plain(HelloPayload(facts=self.facts(), process=process, rounds=self.list_checkpoints()))

    def statement(self) -> Payload:
        """Return the facts, settings and checkpoints with which this party is ready to run."""
        config = self.settings()
        return to_plain(
            StatementPayload(
                digest=config.digest(),
                settings=config.flatten(),
                rounds=self.list_checkpoints(),
                facts=self.facts(),
                ledger=self.session_ledger.sign_head(self.scope()),
            )
        )

    def open_attempt(self, attempt: ProposedAttempt) -> None:
        """Record the other parties' ledger heads and the start of the run in this party's ledger."""
        self.session_ledger.open_attempt(attempt, self.scope())

    def run_attempt(
        self, session: ClientSession, attempt: ProposedAttempt, performer: type[PartyPerformer]
    ) -> ProposedAttempt | None:
        """Run one attempt; return the next one, or None when every party is finished."""
        perform = performer(session, self)
        try:
            self.open_attempt(attempt)
            script = self.begin(attempt)
            session.confirm(attempt)
            result = drive(script, perform, self.telemetry.watch)
            perform.flush()
            finished = self.finish(result)
            head = self.session_ledger.sign_head(self.scope(), is_last=True)
            session.finish(attempt, dataclasses.replace(finished, ledger=head))
            return session.await_attempt()
        except NewAttempt as proposed:
            return proposed.attempt

    def take_goodbye(self, goodbye: Payload) -> None:
        """Process the payload of the server's goodbye: the last heads of all ledgers."""
        payload = read_payload(GoodbyePayload, goodbye, "the goodbye of the server")
        try:
            self.session_ledger.record_last_heads(payload.ledgers, self.scope())
        except (LedgerError, ProtocolError) as error:  # only a warning, because the results are complete
            self.options.log.warning("%s", error)

    def close(self, *, finished: bool) -> None:
        """Stop threads and close files. `finished` is True if every party is finished."""
        self.session_ledger.close(finished=finished)


class ClientWork(PartyScriptWork[ResultT]):
    """Work for which this party runs a `Client`: training or prediction."""

    def __init__(self, options: JoinOptions, party: PartyData) -> None:
        """Read joining.json. Nothing is written before `start`."""
        super().__init__(options, party.name, JOINING)
        self.party = party
        self._client: Client | None = None
        self._limits: Limits | None = None

    @property
    def client(self) -> Client:
        """This party's client. It exists after `welcome`."""
        assert self._client is not None
        return self._client

    def build_client(
        self,
        config: RunConfig,
        party: PartyData,
        offered: WelcomePayload,
        preparation: Preparation | None = None,
        secret: Secret | None = None,
    ) -> None:
        """Build this party's client for the run that the server offers; see `Client`.

        Raises:
            RefusalError: the run uses secure aggregation, and the kit is a trial kit or does not pin all parties.
        """
        kit = self.options.kit
        refuse_kit(kit, config, offered.roster)
        # Without secure aggregation, the CA's signature is enough to accept a key that is not pinned.
        client = Client(
            config,
            party,
            index=offered.index,
            names=offered.roster,
            watch=self.telemetry.watch,
            preparation=preparation,
            secret=secret,
            signer=KitSigner(kit, requires_pins=config.privacy.hides_parts),
        )
        client.identity.incarnation = self.state.value.incarnation
        attach_ledger(client, self.options.out / LEDGER, self.options.policy)
        self.session_ledger.ledger = client.release.ledger
        self._client, self._limits = client, limit_messages(config, party)

    def settings(self) -> RunConfig:
        """Return the settings as requested, before `train.preset` has chosen one of its candidates."""
        return self.client.requested

    def check_limits(self, head: Head, size: int) -> None:
        """Check the header and size of a message from the server. Raise ProtocolError if it is too long."""
        assert self._limits is not None
        self._limits.check(head, size)


class PartyPerformer:
    """Performs the requests of a party's script over a session.

    A message that is not urgent is sent with the next urgent message, or when the script waits for an answer.
    """

    def __init__(self, session: ClientSession, work: PartyScriptWork[Any]) -> None:
        self.session, self.work = session, work
        self._unsent: list[Message] = []

    def __call__(self, request: Any) -> Any:
        """Perform one request and return its result."""
        work, telemetry = self.work, self.work.telemetry
        if isinstance(request, Receive):
            self.flush()
            return self._receive(request)
        match request:
            case Send(message):
                telemetry.traffic.count_to_server(message)
                self._unsent.append(message)
                if message.is_urgent:
                    self.flush()
            case Save(take_state):
                work.save(take_state())
            case _:
                work.observe(request)
        return None

    def flush(self) -> None:
        """Send the messages that were held back."""
        if self._unsent:
            messages, self._unsent = self._unsent, []
            self.send(messages)

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages. Before that, make the last checkpoint and the ledger entries for the messages durable."""
        self.work.session_ledger.ledger.sync()  # meanwhile, a thread writes the checkpoint
        self.work.wait_until_durable()
        with self.work.telemetry.watch.measure("communication"):
            self.session.send(messages)

    def _receive(self, request: Receive) -> Message:
        telemetry = self.work.telemetry
        with telemetry.watch.measure("communication"):
            message = self.session.receive(request)
        telemetry.traffic.count_to_clients(message)
        telemetry.traffic.exchange(request)
        return message


def join(
    work: PartyWork[ResultT],
    performer: type[PartyPerformer] = PartyPerformer,
    connect_options: ConnectOptions | None = None,
) -> ResultT:
    """Run one session to its end, and return the results of this party.

    Args:
        work: training, prediction, alignment or dry run.
        performer: performs the requests of its script.
        connect_options: how to connect; None: as in the options of `work`.
    """
    options, finished = work.options, False
    connect_options = connect_options or ConnectOptions(options.kit, options.server, options.wait, options.log)
    with open_client_map():
        if (known := work.find_earlier_result()) is not None:
            return known
        work.start()
        try:
            _take_part(work, performer, connect_options)
            finished = True
        except TransportError as error:
            if work.result() is None:
                raise
            options.log.info("%s The results of this party are complete.", error)
        finally:
            work.close(finished=finished)
        if (result := work.result()) is None:
            raise ConfigError("the server ended the session before this party took part; start the command again.")
        return result


def _take_part(work: PartyWork[Any], performer: type[PartyPerformer], connect_options: ConnectOptions) -> None:
    """Run attempts until the server reports that every party is finished."""
    session = ClientSession(connect_options, work)
    try:
        session.open()
        session.prepare(work.check_limits)
        attempt = session.await_attempt()
        while attempt is not None:  # None: every party is finished
            attempt = work.run_attempt(session, attempt, performer)
        work.take_goodbye(session.goodbye)
    except Exception as error:
        session.fail(error)
        raise
    finally:
        session.close()
