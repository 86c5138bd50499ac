"""The forward pass and the backward pass through a client's layers; a function treats the aggregation layers.

All passes of a client use these two loops. They differ in the function: JointInference and exact inference exchange
rows with the server, a local update merges stored parts, and a party that computes alone keeps its own part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, cast

from glasu.protocol.requests import Evaluating, Script

if TYPE_CHECKING:
    from torch import Tensor

    from glasu.model.exact import FeatureRows
    from glasu.model.layers import Hidden
    from glasu.model.step import ForwardStep, Step
    from glasu.protocol.client import Client

Combine: TypeAlias = "Callable[[int, Tensor], Script[Tensor]]"
Share: TypeAlias = "Callable[[int, Tensor | None], Script[Tensor]]"


def walk_forward(client: Client, step: ForwardStep, combine: Combine) -> Script[Tensor]:
    """Compute H_m[L], layer by layer. All forward passes use this function.

    Args:
        client: the client.
        step: computes H_m[0], and H_m^+[l] from H_m[l].
        combine: returns H_m[l+1], given l and H_m^+[l], for layers l that aggregate. In other layers H_m[l+1] =
            H_m^+[l].
    """

    def report(share: float) -> Evaluating:
        """Return the progress of a long exact inference."""
        return Evaluating(client.progress.round, share, client.name)

    hidden: Hidden | FeatureRows = step.encode()
    for layer in range(client.config.model.num_layers):
        hidden = yield from step.layer_in_parts(layer, hidden, report)
        if layer in client.config.model.aggregation_layers:
            hidden = yield from combine(layer, hidden)
    return cast("Tensor", hidden)  # only H_m[0] can have another type


def walk_backward(client: Client, step: Step, gradient: Tensor | None, share: Share) -> Script[None]:
    """Back-propagate from H_m[L] to the features, and update the weights. All backward passes use this function.

    Args:
        client: the client.
        step: the step, after its forward pass.
        gradient: the gradient at H_m[L]; None at a client without labels.
        share: returns the gradient at H_m^+[l], given l and the gradient at H_m[l+1], for layers l that aggregate.
    """
    for layer in reversed(range(client.config.model.num_layers)):
        if layer in client.config.model.aggregation_layers:
            gradient = yield from share(layer, gradient)
            gradient = client.release.clip_gradient(step.partials[layer], gradient)
        assert gradient is not None
        gradient = step.backward_layer(layer, gradient)
    step.backward_encoder(gradient)
    client.learner.take_step(step.pending)
