"""The walks through a client's layers: one forward, one backward. Scripts say what happens where a layer aggregates."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from glasu.protocol.requests import Script

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.model.step import Step
    from glasu.protocol.client import Client

Compute: TypeAlias = "Callable[[int, Any], Script[Tensor]]"
Combine: TypeAlias = "Callable[[int, Tensor], Script[Tensor]]"
Share: TypeAlias = "Callable[[int, Tensor | None], Script[Tensor]]"


def compute_with(step: Step) -> Compute:
    """Return the layers of a step, as `walk_forward` calls them."""

    def compute(layer: int, hidden: Any) -> Script[Tensor]:
        yield from ()  # no request; exact inference reports its progress here
        return step.layer(layer, hidden)

    return compute


def walk_forward(client: Client, hidden: Any, compute: Compute, combine: Combine) -> Script[Tensor]:
    """Compute H_m[L] from H_m[0].

    Args:
        client: the client.
        hidden: H_m[0].
        compute: returns H_m^+[l], given l and H_m[l].
        combine: returns H_m[l+1] where layer l aggregates, given l and H_m^+[l]. Elsewhere H_m[l+1] = H_m^+[l].
    """
    for layer in range(client.config.model.num_layers):
        hidden = yield from compute(layer, hidden)
        if layer in client.config.model.aggregation_layers:
            hidden = yield from combine(layer, hidden)
    result: Tensor = hidden
    return result


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
        gradient = step.back(layer, gradient)
    step.back_to_features(gradient)
    client.learner.optimizer.step(step.pending)
