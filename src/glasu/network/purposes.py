"""The purposes of a session. Each purpose is an object that states how the handshake differs for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Purpose:
    """What all roles of a session do together. Only the name is sent (in the facts) and recorded (in the ledgers)."""

    name: str
    finished_answer: str  # the answer to a process that connects when all parties have their results
    absence_error: str | None  # why the parties cannot continue if one is missing; None: this depends on the settings
    states_data: bool = True  # whether a party states facts about its data; False: only the rules for its ids


TRAINING = Purpose(
    name="training",
    finished_answer="this run is finished; --fresh at the server starts another.",
    absence_error="A training run needs all parties.",
)
PREDICTION = Purpose(
    name="prediction",
    finished_answer="this prediction is complete; to predict again, start `glasu serve --predict` and all parties.",
    absence_error=None,
)
ALIGNMENT = Purpose(
    name="alignment",
    finished_answer="this alignment is complete; to align again, start `glasu serve --align` and all parties.",
    absence_error="An alignment needs all parties.",
    states_data=False,
)
DRY_RUN = Purpose(
    name="dry run",
    finished_answer="this dry run is complete; to repeat it, start `glasu doctor` at the server and at all parties.",
    absence_error="A dry run needs all parties.",
)
ALIGNMENT_DRY_RUN = Purpose(
    name="dry run of an alignment",
    finished_answer="this dry run is complete; to repeat it, start `glasu doctor` at the server and at all parties.",
    absence_error="A dry run of an alignment needs all parties.",
    states_data=False,
)
