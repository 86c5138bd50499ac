"""ClientModel: the layers W_m[0..L-1] of one client and, if it has labels, its head.

The head is the classifier W_m[L]. With `model.owner_layers`, the head also has dense layers before the classifier.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from glasu import registry
from glasu.config import ModelConfig
from glasu.model.aggregation import make_aggregation
from glasu.model.backbones import find_backbone
from glasu.model.blocks import Block
from glasu.model.dropout import ENCODER, Dropout
from glasu.model.layers import Hidden, Layer, Projection, ResidualLayer
from glasu.model.seeding import seed_torch_generator
from glasu.randomness import TORCH_GENERATOR, Stream

TYPICAL_NORM = 3.0  # mean length of a feature row after scaling with input_scale = "auto"


class ClientModel(nn.Module):
    """The part of the split network that one client owns and trains."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_clients: int,
        num_features: int,
        num_outputs: int | None,
        stream: Callable[[str, int], Stream],
    ) -> None:
        """Create the layers with weights drawn from `stream(purpose, layer)`.

        Args:
            config: the shape of the network.
            num_clients: M. The width after `concat` depends on it.
            num_features: d_m.
            num_outputs: the width of the classifier, or None for a client without labels.
            stream: returns the random stream for some initial weights. The stream for the purpose "classifier" is equal
                at all clients with labels.
        """
        super().__init__()
        self.config = config
        self.backbone = find_backbone(config)(config)
        self.aggregation_layers = frozenset(config.aggregation_layers)
        wide = config.hidden * make_aggregation(config, num_clients).widening
        widths = [config.hidden if self.backbone.has_encoder else num_features]
        widths += [wide if layer in self.aggregation_layers else config.hidden for layer in range(config.num_layers)]
        # Layers of other libraries draw their weights from torch's global generator. So it is seeded before each layer.
        # A lock prevents clients in several threads from building layers at the same time.
        with TORCH_GENERATOR, torch.random.fork_rng(devices=[]):
            seed_torch_generator(stream("weights", ENCODER))
            self.encoder = Projection(num_features, config.hidden) if self.backbone.has_encoder else None
            self.layers = nn.ModuleList()
            for layer in range(config.num_layers):
                seed_torch_generator(stream("weights", layer))
                inner, residual = self.backbone.build_layer(layer, widths[layer]), config.residual
                registry.check_instance(inner, Layer, f"model.backbone={config.backbone!r}: the result of build_layer")
                self.layers.append(ResidualLayer(inner, widths[layer], config.hidden) if residual else inner)
            self.head = nn.ModuleList()
            width = widths[-1]
            for layer in range(config.owner_layers if num_outputs is not None else 0):
                seed_torch_generator(stream("head", layer))
                self.head.append(Projection(width, config.hidden))
                width = config.hidden
            seed_torch_generator(stream("classifier", config.num_layers))
            self.classifier = None if num_outputs is None else Projection(width, num_outputs)
        normalized, read = config.normalization == "layer", widths[1:] if num_outputs is not None else widths[1:-1]
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in read) if normalized else None
        self.activation: Callable[[Tensor], Tensor] = self.backbone.activation

    def encode(self, features: Hidden, dropout: Dropout) -> tuple[Hidden, Tensor | None]:
        """Return H_m[0] and, with an encoder, the initial representation H_m^0 = ReLU(Linear(X_m)) at the same rows."""
        if self.encoder is None:
            return features, None
        initial = nn.functional.relu(self.encoder(dropout(features, ENCODER)))
        return initial, initial

    def layer_input(self, layer: int, hidden: Hidden, dropout: Dropout) -> Hidden:
        """Apply normalisation and dropout to the input of layer l (l = L is the classifier)."""
        if self.norms is not None and layer > 0:
            hidden = self.norms[layer - 1](hidden)
        return dropout(hidden, layer)

    def sublayer(self, layer: int, hidden: Hidden, initial: Tensor | None, block: Block, dropout: Dropout) -> Tensor:
        """Compute H_m^+[l] = activation(layer_l(block, H_m[l])), shape (|S[l+1]|, hidden).

        Args:
            layer: l.
            hidden: H_m[l], rows S_m[l].
            initial: H_m^0 at the rows S_m[l+1]; None without an encoder.
            block: A restricted to S_m[l+1] x S_m[l].
            dropout: the masks of this step.
        """
        module, hidden = self.layers[layer], self.layer_input(layer, hidden, dropout)
        if self.backbone.uses_torch_generator:
            with torch.random.fork_rng(devices=[]):
                dropout.fork(layer)
                return self.activation(module(hidden, initial, block))
        return self.activation(module(hidden, initial, block, partial(dropout.attention, layer=layer)))

    def classify(self, hidden: Tensor, dropout: Dropout) -> Tensor:
        """Return the logits f_m(H[L], W_m[L]): Z = ReLU(Linear(Z)) for each layer of the head, then the classifier."""
        assert self.classifier is not None
        read = self.layer_input(self.config.num_layers, hidden, dropout)
        for layer, dense in enumerate(self.head, start=self.config.num_layers + 1):
            read = dropout(nn.functional.relu(dense(read)), layer)
        logits: Tensor = self.classifier(read)
        return logits


def draw_classifier(stream: Stream, width: int, num_outputs: int) -> Projection:
    """Return the initial classifier as `ClientModel` draws it. With a public seed, any role can compute it."""
    with TORCH_GENERATOR, torch.random.fork_rng(devices=[]):
        seed_torch_generator(stream)
        return Projection(width, num_outputs)


def find_input_scale(config: ModelConfig, mean_length: float) -> float:
    """Return the factor for the features. With "auto", the mean length of the nonzero rows becomes TYPICAL_NORM."""
    if config.input_scale != "auto":
        return config.input_scale
    return TYPICAL_NORM / mean_length if mean_length else 1.0


def digest_weights(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the weights, sorted by name, in hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(np.ascontiguousarray(weights[name].detach().numpy()).tobytes())
    return digest.hexdigest()
