"""Resume scripts, the generators that run a role's algorithm and yield requests. No other module resumes scripts.

The runtimes perform the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from glasu.errors import ProtocolError
from glasu.protocol.messages import Message
from glasu.protocol.requests import (
    Broadcast,
    Event,
    Interleave,
    Receive,
    Request,
    Save,
    Scatter,
    Script,
    Send,
    Timed,
)
from glasu.timing import Stopwatch

Result = TypeVar("Result")
Action = Send | Receive | Broadcast | Scatter | Save | Event  # the requests that a runtime performs
Actions = Generator[Action, Any, Result]
ANSWERS = (Broadcast, Scatter)


@dataclass(frozen=True)
class Finished(Generic[Result]):
    """The end of a script."""

    value: Result


def advance(script: Generator[Any, Any, Result], reply: Any = None) -> Any:
    """Resume a script with the result of its last request; return its next request, or Finished."""
    try:
        return script.send(reply)
    except StopIteration as stop:
        return Finished(stop.value)


def drive(
    script: Script[Result], perform: Callable[[Action], object], watch: Stopwatch, name: str = "compute"
) -> Result:
    """Run a script to its end.

    Args:
        script: the script.
        perform: carries out Send, Receive, Broadcast, Scatter, Save or an event, and returns its result.
        watch: adds up the script's computing time.
        name: the activity to which the time is added; a `Timed` request names its own activity.
    """
    actions = to_actions(script, watch, name)
    action = advance(actions)
    while not isinstance(action, Finished):
        action = advance(actions, perform(action))
    result: Result = action.value
    return result


def to_actions(script: Script[Result], watch: Stopwatch, name: str = "compute") -> Actions[Result]:
    """Yield the actions of a script. This function performs `Interleave` and `Timed` itself and measures the time."""
    reply: Any = None
    measurement = watch.measure(name)
    while True:
        with measurement:
            request: Request | Finished[Result] = advance(script, reply)
        if isinstance(request, Finished):
            return request.value
        if isinstance(request, Timed):
            reply = yield from to_actions(request.script, watch, request.name)
        elif isinstance(request, Interleave):
            reply = yield from interleave(to_actions(request.main, watch, name), to_actions(request.rider, watch, name))
        else:
            reply = yield request


def interleave(main: Actions[Any], rider: Actions[Any]) -> Actions[tuple[Any, Any]]:
    """Run `main`, and combine each of its exchanges with one exchange of `rider` until the rider has finished.

    In a combined exchange, the rider's messages are sent before those of `main`, in both directions. At a client, an
    exchange starts with the first Send after a Receive and ends with a Receive of chunk 0. At the server, an exchange
    starts with the first Receive of chunk 0 after an answer. So both roles combine the same exchanges, and messages
    arrive in the expected order.
    """
    action, riding = advance(main), advance(rider)
    joined = False  # whether the rider has joined the current exchange
    at_server = isinstance(riding, Receive)
    while not isinstance(action, Finished):
        if isinstance(action, Send) and not joined:
            while isinstance(riding, Send):
                riding = advance(rider, (yield riding))
            joined = True
        elif isinstance(action, Receive) and action.key.chunk == 0 and joined is not at_server:
            if isinstance(riding, Receive):
                riding = advance(rider, (yield replace(riding, rides=True)))
            while isinstance(riding, ANSWERS) or (isinstance(riding, Receive) and riding.key.chunk > 0):
                riding = advance(rider, (yield replace(riding, rides=True)))
            joined = at_server
        elif isinstance(action, ANSWERS):
            joined = False
        action = advance(main, (yield action))
    while not isinstance(riding, Finished):  # main had fewer exchanges than the rider
        riding = advance(rider, (yield riding))
    return action.value, riding.value


def check_contribution(request: Receive, message: Message, client: int, party: str) -> Message:
    """Return a message that the server received, or raise ProtocolError if it does not match the request.

    The error names the party.
    """
    try:
        request.check(type(message), message.key)
        if message.key.client != client:
            raise ProtocolError(
                f"expected {request} from client {client}, got {type(message).__name__} for {message.key}."
            )
    except ProtocolError as error:
        raise ProtocolError(f"party {party!r}: {error}", party=party) from None
    return message
