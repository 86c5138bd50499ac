"""Use any PyG convolution that accepts a bipartite pair, and the estimator after scikit-learn's conventions."""

from torch_geometric.nn import GATv2Conv

import glasu
from glasu import RunConfig


def convolution(width_in: int, width_out: int) -> GATv2Conv:
    """Build one layer; GLASU's blocks bring the self loops, so the layer must not add its own."""
    return GATv2Conv(width_in, width_out, add_self_loops=False)


def main() -> None:
    config = RunConfig.from_dict({"data": {"name": "demo"}, "train": {"evaluate_every": 5}})
    parties = glasu.load_parties(config)
    model = glasu.GLASUClassifier(
        backbone="custom",
        convolution=convolution,
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
