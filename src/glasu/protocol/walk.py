"""The walks through a client's layers: one forward, one backward. Scripts say what happens where a layer aggregates."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from glasu.protocol.requests import Evaluating, Script

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.model.step import ForwardStep, Step
    from glasu.protocol.client import Client

Combine: TypeAlias = "Callable[[int, Tensor], Script[Tensor]]"
Share: TypeAlias = "Callable[[int, Tensor | None], Script[Tensor]]"


def walk_forward(client: Client, step: ForwardStep, combine: Combine) -> Script[Tensor]:
    """Compute H_m[L].

    Args:
        client: the client.
        step: computes H_m[0], and H_m^+[l] from H_m[l].
        combine: returns H_m[l+1] where layer l aggregates, given l and H_m^+[l]. Elsewhere H_m[l+1] = H_m^+[l].
    """
    hidden: Any = step.encode()
    for layer in range(client.config.model.num_layers):
        hidden = yield from _compute_layer(client, step, layer, hidden)
        if layer in client.config.model.aggregation_layers:
            hidden = yield from combine(layer, hidden)
    result: Tensor = hidden
    return result


def _compute_layer(client: Client, step: ForwardStep, layer: int, hidden: Any) -> Script[Tensor]:
    """Compute H_m^+[l]; a long computation reports its progress."""
    parts = step.layer_in_parts(layer, hidden)
    while True:
        try:
            share = next(parts)
        except StopIteration as done:
            result: Tensor = done.value
            return result
        yield Evaluating(client.progress.round, share, client.name)


def walk_backward(client: Client, step: Step, gradient: Tensor | None, share: Share) -> Script[None]:
    """Go back from H_m[L] to the features, and change the weights.

    Args:
        client: the client.
        step: the step that went forward.
        gradient: the gradient at H_m[L]; None at a client without labels.
        share: returns the gradient at H_m^+[l] as it was sent where layer l aggregates, given l and the gradient at
            H_m[l+1].
    """
    for layer in reversed(range(client.config.model.num_layers)):
        if layer in client.config.model.aggregation_layers:
            gradient = yield from share(layer, gradient)
            gradient = client.release.clip_gradient(step.partials[layer], gradient)
        assert gradient is not None
        gradient = step.backward_layer(layer, gradient)
    step.backward_encoder(gradient)
    client.learner.optimizer.step(step.pending)
