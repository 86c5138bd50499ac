"""Every error that GLASU raises on purpose. The command line prints it as one line and exits with its `exit_code`."""

import copyreg
from typing import Any


class GlasuError(Exception):
    """An error that a user can fix. The message names the value, the rule that it breaks, and the remedy.

    In a network run, the other roles (the server and the other parties) receive `code` and `public_message` and nothing
    else about the error.
    """

    code = "error"  # a code for programs; an instance may have a more precise code
    exit_code = 2
    public_default = ""  # sent instead of a message that may contain ids, values or paths of one party

    def __init__(self, message: str = "", public: str = "", party: str = "", code: str = "") -> None:
        """Store the messages.

        Args:
            message: the message for the user of this role.
            public: the message for all other roles. Default: `public_default` if the class defines it, else `message`.
            party: the party whose message caused the error, if a message did.
            code: the code for programs; by default the code of the class.
        """
        super().__init__(message)
        self._public, self.party, self.code = public, party, code or self.code

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without a call of `__init__`, because the arguments of `__init__` differ between the classes."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    @property
    def public_message(self) -> str:
        """The message for the other roles."""
        return self._public or self.public_default or str(self)


class ConfigError(GlasuError):
    """A setting is unknown, has the wrong type, or conflicts with another setting."""

    code = "invalid_config"


class DataError(GlasuError):
    """The nodes, features, edges, labels or splits of a party are invalid, or a file cannot be read."""

    code = "invalid_data"
    public_default = "its data or a file in its folder cannot be used; see that party's log."


class AlignmentError(GlasuError):
    """The parties do not list the same nodes in the same order."""

    code = "not_aligned"
    public_default = "its nodes or their order differ from the required list of nodes; see that party's log."


class ProtocolError(GlasuError):
    """A message is not the message that the protocol expects now. The fault is the sender's, not the receiver's."""

    code = "invalid_message"
    exit_code = 1


class EquivocationError(ProtocolError):
    """Two messages with the same key have different contents. Waiting cannot resolve this."""

    code = "equivocation"


class TrainingError(GlasuError):
    """The run failed on valid input: the loss is not finite, or another role failed."""

    code = "run_failed"
    exit_code = 1


class CheckpointError(TrainingError):
    """A checkpoint cannot be written or is missing. Earlier checkpoints are intact."""

    code = "checkpoint_failed"


class TransportError(GlasuError):
    """A peer cannot be reached, or its identity cannot be verified."""

    code = "no_connection"


class AbsenceError(TransportError):
    """A role did not connect or reconnect within the time limit."""

    code = "absent"
    exit_code = 1


def get_public_message(error: BaseException) -> str:
    """Return the part of an error that other roles may see.

    For an error of another library, this is its type and the OS error.
    """
    if isinstance(error, GlasuError):
        return error.public_message
    system = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
    return f"{type(error).__name__} in the program{system}"


def get_code(error: BaseException) -> str:
    """Return the code of an error, for the programs of other roles."""
    return error.code if isinstance(error, GlasuError) else "bug"
