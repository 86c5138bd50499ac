"""Train your own PyG convolution with `GLASUClassifier`, which has the interface of scikit-learn.

The convolution must accept a pair of feature matrices: one for the source nodes, one for the target nodes.
"""

from torch_geometric.nn import GATv2Conv

import glasu
from glasu import RunConfig, registry
from glasu.model.backbones import ConvolutionBackbone


class GATv2(ConvolutionBackbone):
    """A backbone with the attention of Brody et al. (2022)."""

    def convolution(self, width_in: int, width_out: int) -> GATv2Conv:
        """Return one layer. GLASU's blocks already contain self loops, so the layer must not add its own."""
        return GATv2Conv(width_in, width_out, add_self_loops=False)


registry.register("backbone", "gatv2", GATv2)


def main() -> None:
    config = RunConfig.from_dict({"data": {"name": "demo"}, "train": {"evaluate_every": 5}})
    parties = glasu.load_parties(config)
    model = glasu.GLASUClassifier(
        backbone="gatv2",
        num_layers=2,
        aggregation_layers=(0, 1),
        hidden=16,
        num_rounds=15,
        learning_rate=0.01,
        config=config,
    )
    model.fit(parties)
    print(f"test accuracy {model.score(parties):.3f}; classes {', '.join(model.classes_)}")
    print(model.predict_proba(parties)[:2].round(2))


if __name__ == "__main__":
    main()
