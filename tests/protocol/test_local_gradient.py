from __future__ import annotations

import pytest

from support.monolith import ALL_LAYERS, Monolith, assert_same, gradients, run, settings, tiny_parties

AGGREGATIONS = ["mean", "concat"]
BACKBONES = ["gcn", "gcnii", "sage", "gat"]


def own_gradients(whole, losses):
    """Return dL_m/dW_m for every client m, with the owner's loss where only one has a loss."""
    return [
        whole.gradients(losses[m] if m in losses else next(iter(losses.values())))[m] for m in range(whole.num_clients)
    ]


def layer_of(name):
    """Return the layer that a parameter belongs to: the encoder lies below all, the classifier above."""
    first = name.split(".")[0]
    return {"encoder": -1, "classifier": 99}.get(first) if first != "layers" else int(name.split(".")[1])


def setup(labels, **keys):
    config = settings(labels=labels, **keys)
    parties = tiny_parties(owner=None if labels == "all" else labels)
    done = run(config, parties, scatter=7)
    whole = Monolith(config, parties, done.initial)
    return gradients(done.clients), own_gradients(whole, whole.losses())


@pytest.mark.parametrize("labels", ["all", "b"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_with_one_aggregation_the_first_local_step_is_the_whole_models_own_gradient(backbone, aggregation, labels):
    got, expected = setup(labels, backbone=backbone, aggregation=aggregation, aggregation_layers=(3,))
    assert_same(got, expected)


@pytest.mark.parametrize("labels", ["all", "b"])
@pytest.mark.parametrize("layers", [(1, 3), (2, 3), ALL_LAYERS])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("backbone", ["gcn", "gcnii"])
def test_with_more_aggregations_it_is_that_gradient_above_the_last_but_one_and_differs_below(
    backbone, aggregation, layers, labels
):
    got, expected = setup(labels, backbone=backbone, aggregation=aggregation, aggregation_layers=layers)
    above = [{key for key in own if layer_of(key) > layers[-2]} for own in expected]
    assert_same(
        [{key: own[key] for key in kept} for own, kept in zip(got, above, strict=True)],
        [{key: own[key] for key in kept} for own, kept in zip(expected, above, strict=True)],
    )
    for mine, theirs, kept in zip(got, expected, above, strict=True):
        below = [key for key in mine if key not in kept]
        assert below
        for key in below:
            assert (mine[key] - theirs[key]).norm() > 1e-2 * theirs[key].norm(), key


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_with_one_aggregation_and_labels_at_one_party_local_equals_joint(backbone, aggregation):
    keys = {"backbone": backbone, "aggregation": aggregation, "aggregation_layers": (3,), "labels": "c"}
    parties = tiny_parties(owner="c")
    local = run(settings(backward="local", **keys), parties, scatter=8)
    joint = run(settings(backward="joint", **keys), parties, scatter=8)
    assert_same(gradients(local.clients), gradients(joint.clients))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_with_labels_everywhere_and_equal_classifiers_joint_is_m_times_local_below_them(backbone, aggregation):
    keys = {"backbone": backbone, "aggregation": aggregation, "aggregation_layers": (3,)}
    parties = tiny_parties()
    local = run(settings(backward="local", **keys), parties)  # classifiers start equal
    joint = run(settings(backward="joint", **keys), parties)
    for m, (alone, together) in enumerate(zip(gradients(local.clients), gradients(joint.clients), strict=True)):
        below = [key for key in alone if layer_of(key) < 99]
        assert_same([{key: together[key] for key in below}], [{key: alone[key] for key in below}], scale=3)
        top = ["classifier.weight", "classifier.bias"]
        assert_same([{key: together[key] for key in top}], [{key: alone[key] for key in top}])
        assert max(alone[key].abs().max() for key in below) > 1e-4, f"client {m} learns nothing"


def test_classifiers_start_equal_and_layers_do_not():
    done = run(settings(aggregation_layers=(3,)), tiny_parties(seed=1))
    first, second, third = done.initial
    for key in ("classifier.weight", "classifier.bias"):
        assert first[key].equal(second[key])
        assert first[key].equal(third[key])
    assert not first["layers.1.linear.weight"].equal(second["layers.1.linear.weight"])


@pytest.mark.parametrize("layers", [(1, 3), ALL_LAYERS])
def test_with_mean_and_copies_of_one_client_local_lacks_a_factor_m_for_each_aggregation_below_the_last(layers):
    config = settings(aggregation_layers=layers)
    first = tiny_parties()[0]
    twins = [type(first)(name, *list(vars(first).values())[1:]) for name in "abc"]

    def equal(clients):
        for client in clients[1:]:
            client.learner.model.load_state_dict(clients[0].learner.model.state_dict())

    done = run(config, twins, arrange=equal)
    whole = Monolith(config, twins, done.initial)
    expected = own_gradients(whole, whole.losses())
    for layer in range(4):
        omitted = sum(layer <= aggregated for aggregated in layers) - 1  # aggregations between here and the last
        key = f"layers.{layer}.linear.weight"
        assert_same([{key: gradients(done.clients)[0][key]}], [{key: expected[0][key]}], scale=3.0**-omitted)
