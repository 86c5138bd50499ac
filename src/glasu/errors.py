"""Every error that GLASU raises on purpose; the command line turns each into one line and an exit code."""


class GlasuError(Exception):
    """Anything a user can mend: the message names the value, the rule it breaks, and the way out."""

    exit_code = 2


class ConfigError(GlasuError):
    """A setting is unknown, of the wrong type, or impossible together with another."""


class DataError(GlasuError):
    """A party's nodes, features, edges, labels or splits cannot be used as they are."""


class AlignmentError(GlasuError):
    """The parties' node lists do not describe the same nodes in the same order."""


class ProtocolError(GlasuError):
    """A message is not the one that the round expects now."""


class TrainingError(GlasuError):
    """The input was good, but the run failed: the loss is not a number any more."""

    exit_code = 1


class CheckpointError(TrainingError):
    """The state of a run cannot be saved; what was saved before is intact."""


class TransportError(GlasuError):
    """A peer cannot be reached, or does not prove who it is."""


class AbsenceError(TransportError):
    """Whoever a run needs has not come, or has not come back, in the time that was given."""

    exit_code = 1
