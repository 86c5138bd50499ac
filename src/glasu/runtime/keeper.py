"""Keep a simulation: the states of all roles after a round become one checkpoint, from which the run can go on."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from glasu.config import RunConfig
from glasu.data.digest import data_digest
from glasu.data.party import PartyData
from glasu.errors import CheckpointError, ConfigError, TrainingError
from glasu.files import hold_folder, write_atomically
from glasu.protocol.state import ClientState, ServerState, is_save_due
from glasu.runtime.checkpoint import SUFFIX, Snapshot, Store
from glasu.runtime.saver import Role, Saver
from glasu.runtime.states import Arrays, Facts, client_from_plain, server_from_plain, to_plain

Tell = Callable[[str], None]
Tally = Callable[[], Facts]
SERVER = "the server"  # the name of its role
RUN_FILE, SPENT_FILE = "run.json", "spent.json"


class Keeper:
    """The checkpoints of one simulation, all roles in one file.

    Every role saves its state after a round, perhaps in its own thread; the last one starts the writing. `settle` is
    called before the next message is sent: the checkpoint is durable when it returns.
    """

    def __init__(
        self, folder: Path, config: RunConfig, parties: Sequence[PartyData], roles: Mapping[str, Role], tally: Tally
    ) -> None:
        """Keep the run of these settings on these data in `folder`.

        Args:
            folder: for the checkpoints and nothing else.
            config: the settings, resolved.
            parties: the data.
            roles: the parties by name, and the server, if there is one, as SERVER.
            tally: returns what was counted so far, as plain values.
        """
        self.folder, self.roles, self.tally, self.train = folder, dict(roles), tally, config.train
        self.run = {"settings": config.comparable(), "data": {party.name: data_digest(party) for party in parties}}
        self.store = Store(folder, f"a run with settings {config.digest()}")
        self._lock = threading.Lock()
        self._noted: dict[str, tuple[Arrays, Facts]] = {}
        self.saver = Saver(self.store)
        self._saved = 0  # the round of the last checkpoint

    def open(self, *, fresh: bool = False, tell: Tell = lambda line: None) -> Facts | None:
        """Bring the roles to where the run goes on, and return what was counted until then; None at the beginning.

        Args:
            fresh: start over, and remove what is there.
            tell: is told in one line what is removed, not used, or continued.
        """
        if fresh:
            removed = self.store.clear()
            (self.folder / SPENT_FILE).unlink(missing_ok=True)
            if removed:
                tell(f"starting over: removed {', '.join(str(path) for path in removed)}.")
        known = self.store.opened(self.train.checkpoint_every, tell) if self._holds_this_run() else {}
        rounds = [index for index in known if index]
        write_atomically(self.folder / RUN_FILE, json.dumps(self.run, indent=1).encode())
        tally: Facts | None = None
        if rounds:
            self._saved = rounds[-1]
            tally = self._restore(self.store.load(self._saved))
            tell(f"going on after round {self._saved} of {self.train.num_rounds}.")
        spent = self._spent()
        if spent is not None and spent["round"] >= self._saved:
            return {**(tally or {}), **spent["tally"]}
        return tally

    def _restore(self, snapshot: Snapshot) -> Facts:
        for name, role in self.roles.items():
            prefix, facts = f"{name}/", snapshot.facts["roles"][name]
            own = {key.removeprefix(prefix): value for key, value in snapshot.arrays.items() if key.startswith(prefix)}
            role.restore(server_from_plain(own, facts) if name == SERVER else client_from_plain(own, facts))
        tally: Facts = snapshot.facts["tally"]
        return tally

    def _holds_this_run(self) -> bool:
        """Tell whether the folder holds this run; refuse to mix it with another one that is not finished."""
        try:
            there = json.loads((self.folder / RUN_FILE).read_bytes())
        except (OSError, ValueError):
            return bool(list(self.folder.glob(f"*{SUFFIX}")))
        differences = [
            f"{name} = {there.get(part, {}).get(name)!r} there, {here.get(name)!r} here"
            for part, here in self.run.items()
            for name in sorted({*here, *there.get(part, {})})
            if here.get(name) != there.get(part, {}).get(name)
        ]
        if not differences:
            return True
        if not list(self.folder.glob(f"*{SUFFIX}")):
            (self.folder / SPENT_FILE).unlink(missing_ok=True)
            return False
        more = f"; and {len(differences) - 4} more" if len(differences) > 4 else ""
        raise ConfigError(
            f"{self.folder}: holds an unfinished run with other settings or data: {'; '.join(differences[:4])}{more}. "
            "Go on with those, choose another --out, or start over with --fresh, which removes its checkpoints."
        )

    def _spent(self) -> Facts | None:
        """Return what an interrupted process had counted beyond its last checkpoint."""
        try:
            spent: Facts = json.loads((self.folder / SPENT_FILE).read_bytes())
        except (OSError, ValueError):
            return None
        return spent

    def after_round(self) -> None:
        """Take the states of all roles, where they have no messages to keep them in step."""
        rounds = [role.progress.round for role in self.roles.values()]
        if max(rounds) > self._saved and any(map(self._due, self.roles.values())):
            for name, role in self.roles.items():
                self.save(name, role.state())
            self.settle()

    def _due(self, role: Role) -> bool:
        return is_save_due(self.train, role.progress.round, stopped=role.progress.stopped)

    def save(self, name: str, state: ClientState | ServerState) -> None:
        """Take a role's state; the last role's starts the writing."""
        with self._lock:
            self._noted[name] = to_plain(state)
            if len(self._noted) < len(self.roles):
                return
            noted, self._noted = self._noted, {}
        arrays = {f"{role}/{key}": value for role, (own, _) in noted.items() for key, value in own.items()}
        facts = {"roles": {role: own for role, (_, own) in noted.items()}, "tally": self.tally()}
        self._saved = state.round
        self.saver.save(self._saved, (arrays, facts))

    def settle(self) -> None:
        """Wait until the last checkpoint is durable; raise where it could not be written."""
        self.saver.settle()

    def keep_spent(self) -> None:
        """Of a run that was interrupted, keep what it used up since its last checkpoint."""
        tally = {key: value for key, value in self.tally().items() if key in ("traffic", "seconds")}
        write_atomically(self.folder / SPENT_FILE, json.dumps({"round": self._saved, "tally": tally}).encode())


@contextmanager
def keeping(keeper: Keeper, tell: Tell = lambda line: None) -> Iterator[None]:
    """Keep what a run used up, if it does not come to its end, and let no thread outlive it.

    A run that diverged would diverge again: its checkpoints are removed, so that other settings can take its place.

    Args:
        keeper: of the run.
        tell: is told in one line what is removed.
    """
    try:
        yield
        keeper.settle()
    except BaseException as error:
        keeper.saver.close()
        with suppress(OSError):  # what broke the run is to be seen, not that its expenses could not be noted
            if isinstance(error, TrainingError) and not isinstance(error, CheckpointError):
                removed = ", ".join(str(path) for path in keeper.store.clear())
                if removed:
                    tell(f"going on would end the same way: removed {removed}; other settings may take their place.")
            else:
                keeper.keep_spent()
        raise
    keeper.saver.close()


@contextmanager
def checkpoint_folder(folder: Path) -> Iterator[Path]:
    """Hold the folder of a run's checkpoints against a second process; without any, it vanishes at the end."""
    with hold_folder(folder):
        try:
            yield folder
        finally:
            if not list(folder.glob(f"*{SUFFIX}")):
                shutil.rmtree(folder, ignore_errors=True)
