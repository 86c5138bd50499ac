"""Every error that GLASU raises on purpose; the command line turns each into one line and an exit code."""

from collections.abc import Sequence


class GlasuError(Exception):
    """Anything a user can mend: the message names the value, the rule it breaks, and the way out.

    Over the network an error at one role is told to all; they read `public`, and no more than that leaves the role.
    """

    exit_code = 2
    said_elsewhere = ""  # of errors whose message may hold what belongs to one party: ids, values, paths

    def __init__(self, message: str = "", public: str = "", party: str = "") -> None:
        """Say what is wrong here and, where that is not for everybody, what the others may know of it.

        Args:
            message: for whoever runs this role.
            public: for everybody.
            party: whose message was the cause, where it was a message.
        """
        super().__init__(message)
        self._public, self.party = public, party

    @property
    def public(self) -> str:
        """What everybody may read."""
        return self._public or self.said_elsewhere or str(self)


class ConfigError(GlasuError):
    """A setting is unknown, of the wrong type, or impossible together with another."""


class SettingsError(ConfigError):
    """The settings of two roles differ."""

    def __init__(self, message: str, table: Sequence[str]) -> None:
        """Say in what, in a sentence and in two columns."""
        super().__init__(message)
        self.table = tuple(table)


class DataError(GlasuError):
    """A party's nodes, features, edges, labels or splits cannot be used as they are."""

    said_elsewhere = "its data, or a file in its folder, cannot be used as it is; it says there why."


class AlignmentError(GlasuError):
    """The parties' node lists do not describe the same nodes in the same order."""

    said_elsewhere = "its nodes are not the ones that are needed, or not in that order; it says there why."


class ProtocolError(GlasuError):
    """A message is not the one that the round expects now: whoever reads it did nothing wrong, but the run fails."""

    exit_code = 1


class EquivocationError(ProtocolError):
    """One key came with two contents: one of them is not what was computed, and no waiting mends that."""


class TrainingError(GlasuError):
    """The input was good, but the run failed: the loss is not a number any more, or another role failed."""

    exit_code = 1


class CheckpointError(TrainingError):
    """The state of a run cannot be saved, or is not there any more; what was saved before is intact."""


class TransportError(GlasuError):
    """A peer cannot be reached, or does not prove who it is."""


class AbsenceError(TransportError):
    """Whoever a run needs has not come, or has not come back, in the time that was given."""

    exit_code = 1


def public_reason(error: BaseException) -> str:
    """Return what everybody may know of an error; of one that is not ours its type, and the system's own words."""
    if isinstance(error, GlasuError):
        return error.public
    system = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
    return f"{type(error).__name__} in the program{system}"
