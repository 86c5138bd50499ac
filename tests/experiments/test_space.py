"""Search spaces: valid files, and every point of a space is a valid config."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from glasu.config import ModelConfig, RunConfig, TrainConfig
from glasu.errors import ConfigError
from glasu.experiments.space import Choices, Range, apply_point, list_built_in_spaces, read_space

EXAMPLES = Path(__file__).parents[2] / "examples"


def space_of(tmp_path: Path, text: str, config: RunConfig | None = None):
    path = tmp_path / "space.toml"
    path.write_text(text)
    return read_space(path, config or RunConfig())


def test_a_list_means_choices_and_a_table_a_range_of_its_bounds_kind(tmp_path):
    space = space_of(
        tmp_path,
        "[model]\naggregation_layers = [[3], [1, 3]]\nhidden = {low = 8, high = 64, log = true}\n"
        "[train]\nlearning_rate = {low = 0.001, high = 0.1, log = true}\nfanout = {low = 2, high = 8, step = 2}",
    )
    assert space.keys == {
        "model.aggregation_layers": Choices(([3], [1, 3])),
        "model.hidden": Range(8, 64, log=True),
        "train.learning_rate": Range(0.001, 0.1, log=True),
        "train.fanout": Range(2, 8, step=2),
    }
    assert [values.is_integer for values in space.keys.values() if isinstance(values, Range)] == [True, False, True]
    assert space.size is None


def test_the_points_of_a_grid_are_all_combinations_once(tmp_path):
    space = space_of(
        tmp_path, "[model]\nhidden = [8, 16, 32]\naggregation_layers = [[3], [1, 3]]\n[train]\nfanout = [1]"
    )
    points = [str(space.point(number)) for number in range(space.size)]
    assert len(points) == 6
    assert set(Counter(points).values()) == {1}


@pytest.mark.parametrize("name", list_built_in_spaces())
def test_every_built_in_space_fits_the_default_settings(name):
    space = read_space(name, RunConfig())
    assert apply_point(RunConfig(), {key: values.ends[0] for key, values in space.keys.items()}) != RunConfig()


def test_the_paper_space_is_the_grid_of_the_papers_table():
    space = read_space("paper", RunConfig.from_toml(EXAMPLES / "paper.toml"))
    assert space.size == 4 * 2 * 5 * 5 * 18
    rates = sorted(factor * power for factor in (1, 2, 3.5, 5, 7, 8) for power in (0.1, 0.01, 0.001))
    assert sorted(space.keys["train.learning_rate"].ends) == pytest.approx(rates, rel=1e-12)
    assert space.point_of(RunConfig.from_toml(EXAMPLES / "paper.toml")) == {
        "model.hidden": 192,
        "train.batch_size": 16,
        "train.fanout": 3,
        "train.num_rounds": 1024,
        "train.learning_rate": 0.5,
    }


def test_a_config_lies_in_a_space_or_outside(tmp_path):
    space = space_of(tmp_path, "[model]\ndropout = {low = 0.0, high = 0.8, step = 0.1}\n[train]\nfanout = [2, 3]")
    at = {"model.dropout": 0.3, "train.fanout": 3}
    assert space.point_of(apply_point(RunConfig(), at)) == at
    assert space.point_of(apply_point(RunConfig(), {**at, "model.dropout": 0.35})) is None
    assert space.point_of(apply_point(RunConfig(), {**at, "model.dropout": 0.9})) is None
    assert space.point_of(apply_point(RunConfig(), {**at, "train.fanout": 4})) is None


def test_steps_are_read_as_decimals():
    steps = Range(0.0, 0.8, step=0.1)
    assert [steps.decode(0.1 * index) for index in range(9)] == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nlerning_rate = [0.1]", ["lerning_rate", "learning_rate"]),
        ("[trian]\nfanout = [1]", ["[trian]", "train"]),
        ("[model]\nhidden = [8, 'wide']", ["model.hidden='wide'", "integer"]),
        ("[model]\nhidden = {low = 8.0, high = 64.0}", ["model.hidden=8.0", "integer"]),
        ("[model]\ndropout = {low = 0.0, high = 1.5}", ["dropout=1.5", "[0, 1)"]),
        ("[model]\nhidden = 8", ["model.hidden=8", "list of choices"]),
        ("[model]\nhidden = {low = 8}", ["model.hidden", "high: is missing"]),
        ("[model]\nhidden = {low = 8, high = 16, setp = 2}", ["setp", "known keys are low, high, log, step"]),
        ("[model]\nhidden = {low = 16, high = 8}", ["low must lie below high"]),
        ("[model]\nhidden = {low = 8, high = 'x'}", ["high='x': must be an integer or a number"]),
        ("[model]\nhidden = {low = 8, high = 17, step = 2}", ["high - low must be a multiple of step"]),
        ("[model]\nhidden = {low = 8, high = 16, step = 0.5}", ["step must be an integer"]),
        ("[model]\ndropout = {low = 0.0, high = 0.5, log = true}", ["above 0"]),
        ("[model]\nhidden = []", ["at least one"]),
        ("[model]\nhidden = [8, 8]", ["twice"]),
        ("[model]\naggregation_layers = [[3], [1]]", ["aggregation_layers=[1]", "end with 3"]),
        ("[model]\nnum_layers = [2, 4]", ["aggregation_layers=[1, 3]", "0..1"]),
        ("[model]\nhidden = [6]\nheads = [3, 4]\nbackbone = ['gat']", ["heads=4", "hidden=6"]),
        ("[data]\nedge_fraction = [0.5, 1.0]", ["data.edge_fraction", "--set"]),
        ("[train]\nseed = [0, 1]", ["train.seed", "--set"]),
        ("hidden = [8]", ["hidden=[8]", "section"]),
        ("", ["has no key that varies"]),
        ("[model\n", ["not valid TOML"]),
    ],
    ids=lambda item: item.replace("\n", " ")[:50] if isinstance(item, str) else "",
)
def test_a_space_that_cannot_be_is_refused_in_one_line(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        space_of(tmp_path, text)
    for word in ["space.toml", *words]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value).replace("\\n", "")


def test_a_space_that_is_valid_for_only_some_runs_is_refused():
    with pytest.raises(
        ConfigError, match=r"space bytes: model.aggregation_layers=\[3\]: must be increasing, lie in 0\.\.1"
    ):
        read_space("bytes", RunConfig(model=ModelConfig(num_layers=2, aggregation_layers=(1,))))
    assert read_space("bytes", RunConfig(train=TrainConfig(backward="joint")))


def test_a_combination_that_cannot_be_is_found_among_thousands(tmp_path):
    lists = "".join(f"{key} = [0.1, 0.2, 0.3, 0.4]\n" for key in ("dropout", "alpha", "theta"))
    rates = f"[train]\nfanout = {list(range(1, 41))}\nlearning_rate = [0.1, 0.2]"
    with pytest.raises(ConfigError, match="must divide"):
        space_of(tmp_path, f"[model]\nbackbone = ['gat']\nheads = [1, 3]\n{lists}{rates}")


def test_an_unknown_space_names_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'paper'"):
        read_space("papr", RunConfig())
    with pytest.raises(ConfigError, match=", ".join(list_built_in_spaces())):
        read_space("zzz", RunConfig())
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        read_space(tmp_path / "none.toml", RunConfig())
