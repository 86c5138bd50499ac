"""Attack a recorded run as the server or as a party. Compare each score with chance and with a baseline.

The caller has the data of all parties, as in a simulation. An attack reads only the messages and data of its role, and
the part of the target's data that the attacker is assumed to know. The guesses are scored on the rest of this data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from glasu.config import RunConfig
from glasu.data.methods import apply_method
from glasu.data.party import PartyData, Splits
from glasu.data.sources.catalog import load_parties
from glasu.errors import ConfigError
from glasu.model.split import draw_classifier
from glasu.model.task import make_task, measure_ranking
from glasu.privacy.attacks import edges, features, labels, membership
from glasu.privacy.attacks.result import AttackResult, Classes, Values
from glasu.protocol.learner import make_classifier_stream
from glasu.protocol.messages import Partial
from glasu.report import align_columns
from glasu.runtime.observation import NodeRows, Observation
from glasu.runtime.split_view import attack_by_splitting
from glasu.runtime.trained_model import TrainedModel
from glasu.runtime.transcript import TRANSCRIPT, RecordedRun
from glasu.wire.message_key import Phase

MANY_WORDS = 0.2  # features with a smaller share of nonzero values are scored as bags of words
KNOWN_SHARE = 0.5  # share of the nodes whose features the attacker knows
SEED = 0  # seed of the attacker's draws
KNOWN_LABELS = (1, 4)  # known labels per class, for model completion
RESULT_HEADINGS = ("attack", "role", "target", "measure", "score", "chance", "own data")
LABEL_SHARE, EDGE_SHARE, PART_R2 = "share of labels", "share of edges", "R2 of the part"


@dataclass(frozen=True)
class Attacker:
    """One role, its view, and the party that it attacks."""

    role: str
    seen: Observation
    parties: Sequence[PartyData]
    target: int

    @property
    def own(self) -> PartyData | None:
        """The attacker's own data; None at the server."""
        return None if self.seen.is_server else self.parties[self.seen.view.index]

    @property
    def victim(self) -> PartyData:
        return self.parties[self.target]

    def report(
        self, attack: str, measure: str, score: float, chance: float, baseline: float, detail: str = ""
    ) -> AttackResult:
        """Return a result with the names of this attacker and its target."""
        return AttackResult(attack, self.role, self.victim.name, measure, score, chance, baseline, detail)


def attack_folder(folder: Path, roles: Sequence[str] | None = None) -> list[AttackResult]:
    """Attack the run in the output folder of `glasu train --transcript`. The data is read again to score the guesses.

    In one attack the server splits the view, which means that it sends different aggregates to different parties. The
    transcript contains no such messages, so this attack repeats the first round; see `attack_split_view`.

    Args:
        folder: the output folder of the run.
        roles: the attackers; None: the server and the last party.
    """
    transcript = RecordedRun(folder / TRANSCRIPT)
    prepared = apply_method(transcript.config, load_parties(transcript.config))
    parties, probabilities = prepared.parties, None
    if (folder / "model").is_dir():
        model = TrainedModel.load(folder)
        probabilities = model.predict_proba(parties) if model.classes else None
    found = attack_run(transcript, parties, roles, probabilities=probabilities)
    if "server" in (roles or ("server",)) and transcript.manifest.final_config is not None:
        found += attack_split_view(prepared.config, parties)
    return found


def attack_split_view(config: RunConfig, parties: Sequence[PartyData]) -> list[AttackResult]:
    """Repeat the first round with a server that attacks by splitting the view.

    The target is the label owner, or the first party if there is no label owner. The folder of a run does not contain
    its secrets, so the repeated round derives secrets from the seed.

    Args:
        config: the settings of the finished run, in which no key is left to a preset.
        parties: the data of all parties, as the run read them.

    Returns:
        The results of `attack_by_splitting`. The list is empty if the run has only one party, or fewer than two layers
        that aggregate.
    """
    if len(parties) < 2 or len(config.model.aggregation_layers) < 2:
        return []
    names = [party.name for party in parties]
    owner = config.train.label_owner
    return attack_by_splitting(parties, config, owner if owner in names else names[0])


def list_result_cells(result: AttackResult) -> tuple[str, ...]:
    """Return a result as a table row, in the order of RESULT_HEADINGS. The last cell is the score without messages."""
    numbers = (f"{number:.3f}" for number in (result.score, result.chance, result.baseline))
    return result.attack, result.role, result.target, result.measure, *numbers


def format_results(results: Sequence[AttackResult]) -> str:
    """Return the results as a text table."""
    return "\n".join(align_columns([RESULT_HEADINGS, *map(list_result_cells, results)]))


def attack_run(
    transcript: RecordedRun,
    parties: Sequence[PartyData],
    roles: Sequence[str] | None = None,
    *,
    only: Sequence[str] = ("",),
    probabilities: Values | None = None,
) -> list[AttackResult]:
    """Carry out every attack that the recorded run allows.

    Args:
        transcript: the transcript of the run.
        parties: the data of all parties, in client order, as the run read them.
        roles: the attackers; None: the server and the last party. The target of an attack is the label owner. If the
            label owner is the attacker, or lacks the data to attack (edges, or features that vary), the target is the
            first other party that has this data.
        only: the attacks whose names start with one of these words; by default all.
        probabilities: the class probabilities of all nodes, which a party can request after the run; None: predictions
            are not attacked.
    """
    names = transcript.manifest.parties
    if [party.name for party in parties] != list(names):
        raise ConfigError(f"the transcript has the parties {', '.join(names)}; pass their data in this order.")
    labelled = next((party for party in parties if party.splits is not None), None)
    owner = transcript.config.train.label_owner
    found: list[AttackResult] = []
    for role in roles or ("server", names[-1]):
        others = [name for name in names if name != role]
        order = [owner, *others] if owner in others else others or list(names)
        seen = Observation(transcript.view(role), None if labelled is None else labelled.splits)
        for name, attack in ATTACKS.items():
            if any(name.startswith(word) or word.startswith(name) for word in only):
                has_data = HAS_DATA.get(name)
                suited = [each for each in order if has_data is None or has_data(parties[names.index(each)])]
                target = (suited or order)[0]
                found += attack(Attacker(role, seen, parties, names.index(target)))
    if probabilities is not None and labelled is not None and labelled.splits is not None:
        found.append(attack_predictions(probabilities, labelled.splits))
    return [each for each in found if each.attack.startswith(tuple(only))]


def attack_edges(attacker: Attacker) -> Iterator[AttackResult]:
    """Infer edges from index sets."""
    count = attacker.seen.num_nodes
    truth = _list_edges(attacker.victim)
    if not len(truth):
        return
    own = np.empty(0, np.int64)
    if attacker.own is not None:
        own = _list_edges(attacker.own)
    draws = attacker.seen.list_draws(attacker.target)
    chance = len(truth) / (count * (count - 1) / 2)
    baseline = max(chance, edges.measure_edge_share(own, truth))
    ranked = edges.put_first(own, edges.rank_pairs(draws, count))
    score = edges.measure_edge_share(ranked, truth) if draws else baseline
    detail = f"{len(draws[0].drawn)} rounds" if draws else "no index set was sent"
    yield attacker.report("edges from index sets", EDGE_SHARE, score, chance, baseline, detail)


def attack_labels(attacker: Attacker) -> Iterator[AttackResult]:
    """Infer the labels of the label owner from H[L] and from the gradient at H[L]."""
    seen, known = attacker.seen, attacker.victim.labels
    is_owner = seen.config.train.label_owner == attacker.victim.name
    if not is_owner or known is None or known.ndim > 1 or known.dtype.kind not in "iu":
        return
    gradients, joints = seen.list_gradients(attacker.target), seen.list_joints()
    if not (gradients or joints):  # the role reads neither gradients nor H[L]
        return
    nodes, classes = (
        np.unique(np.concatenate([each.nodes for each in gradients or joints])),
        len(attacker.victim.classes),
    )
    truth, known = known[nodes].astype(np.int64), known.astype(np.int64)
    own = np.empty((len(nodes), 0)) if attacker.own is None else _smooth_features(attacker.own)[nodes]
    chance = labels.match_classes(labels.shuffle_labels(truth, SEED), truth, classes)
    alone = labels.match_classes(labels.cluster_rows(own, classes, SEED), truth, classes) if own.size else 0.0
    baseline = max(chance, alone, float(np.bincount(truth).max() / len(truth)))

    def report(name: str, guesses: Classes, nodes: Classes) -> AttackResult:
        score = labels.match_classes(guesses, known[nodes], classes)
        return attacker.report(f"labels: {name}", LABEL_SHARE, score, chance, baseline, f"{len(nodes)} nodes")

    def cluster(rows: Values) -> Classes:
        return labels.cluster_rows(labels.normalize_rows(rows), classes, SEED)

    inputs: list[Values] = []
    if gradients:
        first, summed = gradients[0], _sum_directions(gradients, nodes)
        yield report("k-means of G, first round", cluster(first.rows), first.nodes)
        yield report("k-means of G, all rounds", cluster(summed), nodes)
        inputs.append(labels.normalize_rows(summed))
        joint = next((each for each in joints if each.round == first.round), None)
        if joint is not None:
            matched = labels.match_gradients(first.rows, joint.rows, classes, SEED)
            yield report("gradient matching, first round", matched, first.nodes)
            solved, right = _solve_with_public_seed(attacker, first, joint, classes), known[first.nodes]
            most = float(np.bincount(right).max() / len(right))
            score = float((solved == right).mean())
            yield attacker.report("labels: classifier of the public seed", LABEL_SHARE, score, 1 / classes, most)
    if joints:
        last = joints[-1]
        yield report("k-means of H[L], last round", cluster(last.rows), last.nodes)
        if np.array_equal(last.nodes, nodes):
            inputs.append(last.rows / max(float(np.abs(last.rows).mean()), 1e-30))
    yield from _complete(attacker, truth, inputs, own)


def _sum_directions(gradients: Sequence[NodeRows], nodes: Classes) -> Values:
    """Return for each node the sum of its gradients, each scaled to length 1."""
    total = np.zeros((len(nodes), gradients[0].rows.shape[1]))
    for each in gradients:
        total[np.searchsorted(nodes, each.nodes)] += labels.normalize_rows(each.rows)
    return total


def _solve_with_public_seed(attacker: Attacker, first: NodeRows, joint: NodeRows, classes: int) -> Classes:
    """Guess the labels, assuming that the classifier was drawn from `train.seed` alone."""
    config = attacker.seen.config
    width = make_task(config.train).head_width(attacker.victim.classes)
    drawn = draw_classifier(
        make_classifier_stream(config.train.seed, attacker.seen.num_layers), joint.rows.shape[1], width
    )
    weight = drawn.weight.detach().numpy().astype(np.float64)
    if width == 1 and classes == 2:  # the only logit belongs to the second class
        weight = np.concatenate([np.zeros_like(weight), weight], axis=1)
    return labels.solve_labels(first.rows, joint.rows, weight, np.zeros(classes))


def _complete(attacker: Attacker, truth: Classes, inputs: Sequence[Values], own: Values) -> Iterator[AttackResult]:
    """Infer labels by model completion, given a few labels of each class. The best score over all inputs counts."""
    for count in KNOWN_LABELS:
        known = labels.choose_labelled(truth, count, SEED)
        if known.all() or len(np.unique(truth[known])) < 2:
            continue
        unknown = truth[~known]

        def score(rows: Values, known: NDArray[np.bool_] = known, unknown: Classes = unknown) -> float:
            return float((labels.complete_model(rows, truth, known) == unknown).mean())

        best = max((score(rows) for rows in inputs), default=0.0)
        most = float(np.bincount(unknown).max() / len(unknown))
        baseline = max(most, score(own)) if own.size else most
        name = f"labels: model completion, {count} known per class"
        yield attacker.report(name, LABEL_SHARE, best, most, baseline)


def attack_features(attacker: Attacker) -> Iterator[AttackResult]:
    """Infer features from the representations in training rounds, in one evaluation, and in all evaluations."""
    evaluations = attacker.seen.list_evaluations(attacker.target)
    nodes = evaluations[0].nodes if evaluations else np.arange(attacker.seen.num_nodes)
    rounds = attacker.seen.average_rounds(attacker.target)
    if rounds.size and rounds.any():
        # If only one layer aggregates, evaluations have rows only for validation nodes, and training rounds have rows
        # only for training nodes.
        seen = nodes if rounds[nodes].any() else np.flatnonzero(rounds.any(axis=1))
        yield from _guess_features(attacker, seen, {"training rounds": [rounds[seen]]})
    variants: dict[str, list[Values]] = {}
    if evaluations:
        variants["one evaluation"] = [evaluations[0].rows]
    if len(evaluations) > 1:
        variants[f"{len(evaluations)} evaluations"] = [each.rows for each in evaluations]
    if len(evaluations) > 1 and attacker.seen.is_server:  # with masks, the server can read only aggregates
        sums = attacker.seen.list_evaluations(attacker.target, aggregates=True)
        variants[f"aggregates of {len(sums)} evaluations"] = [each.rows for each in sums]
    yield from _guess_features(attacker, nodes, variants)


def _guess_features(
    attacker: Attacker, nodes: edges.NodeIds, variants: Mapping[str, list[Values]]
) -> Iterator[AttackResult]:
    """Guess the target's features at `nodes`, once per variant. A variant is a list of matrices, one row per node."""
    truth = _read_features(attacker.victim)[nodes]
    varies = truth.std(axis=0) > 0
    if not (variants and varies.any()):
        return
    truth = truth[:, varies]
    words = float((truth != 0).mean()) < MANY_WORDS
    known = features.choose_known(len(nodes), KNOWN_SHARE, SEED)
    own = np.empty((len(nodes), 0))
    if attacker.own is not None:
        own = features.join_columns(_read_features(attacker.own), _smooth_features(attacker.own))[nodes]

    def score(*blocks: Values) -> float:
        guesses = features.guess_features(features.join_columns(own, *blocks), truth, known)
        measured = features.measure_word_share if words else features.measure_r2
        return measured(guesses, truth[~known])

    measure = "share of words" if words else "R2 of the columns"
    chance = float((truth != 0).mean()) if words else 0.0
    baseline = score()
    for name, blocks in variants.items():
        detail = f"{int(known.sum())} of {len(nodes)} rows known"
        yield attacker.report(f"features: {name}", measure, score(*blocks), chance, baseline, detail)


def attack_part(attacker: Attacker) -> Iterator[AttackResult]:
    """Infer another party's representation by subtracting the attacker's part from the mean. This is exact if M = 2."""
    if attacker.own is None:
        return
    evaluations = attacker.seen.list_evaluations(attacker.target)
    if not evaluations:
        return
    guessed = evaluations[-1]

    def read_part(party: PartyData) -> Values:
        sent = attacker.seen.view.transcript.view(party.name).matrices(Partial, Phase.EVALUATION)
        place = guessed.round, guessed.layer
        return next(each.rows for each in sent if (each.key.round, each.key.layer) == place)

    truth, own = read_part(attacker.victim), read_part(attacker.own)
    score, baseline = (max(0.0, features.measure_r2(each, truth)) for each in (guessed.rows, own))
    detail = f"M = {attacker.seen.num_clients}"
    yield attacker.report("representation through the mean", PART_R2, score, 0.0, baseline, detail)


def attack_membership(attacker: Attacker) -> Iterator[AttackResult]:
    """Infer the training nodes from index sets."""
    splits, seen = attacker.seen.splits, attacker.seen
    if splits is None:
        return
    members = np.zeros(seen.num_nodes, bool)
    members[splits.train] = True
    batches, proposals = seen.list_batches(), seen.list_proposals()
    if not batches and not seen.is_server:
        return  # every party with labels knows the training nodes
    score, detail = 0.5, "no index set was sent"
    if batches:
        scores = np.bincount(np.concatenate(list(batches.values())), minlength=seen.num_nodes)
        score, detail = _rank_members(scores, members), "batches"
    elif proposals:
        score = _rank_members(membership.count_common(proposals, seen.num_nodes), members)
        detail = f"{len(proposals)} rounds"
    yield attacker.report("training nodes from index sets", "ROC AUC", score, 0.5, 0.5, detail)


def attack_predictions(probabilities: Values, splits: Splits) -> AttackResult:
    """Distinguish training nodes from test nodes by the certainty of predictions."""
    nodes = np.concatenate([splits.train, splits.test])
    members = np.arange(len(nodes)) < len(splits.train)
    score = _rank_members(membership.measure_certainty(probabilities[nodes]), members)
    return AttackResult("training nodes from predictions", "requester", "all", "ROC AUC", score, 0.5, 0.5)


def _rank_members(scores: Values, members: NDArray[np.bool_]) -> float:
    """Return the area under the ROC curve: the probability that a member has a higher score than another node."""
    return measure_ranking(scores, members)["roc_auc"]


def _list_edges(party: PartyData) -> edges.NodeIds:
    source, target = party.graph.edge_index()
    return edges.encode_edges(source, target, party.num_nodes)


def _read_features(party: PartyData) -> Values:
    raw = party.features
    dense: Values = np.asarray(raw.todense() if hasattr(raw, "todense") else raw, np.float64)
    return dense


def _smooth_features(party: PartyData) -> Values:
    """Return the features after two propagation steps, because a party's baseline may also use the party's edges."""
    source, target = party.graph.edge_index()
    shape = (party.num_nodes, party.num_nodes)
    adjacency = sp.csr_array((np.ones(len(source)), (target, source)), shape) + sp.eye_array(party.num_nodes)
    scale = sp.diags_array(1 / adjacency.sum(axis=1))
    smoothed: Values = scale @ adjacency @ (scale @ adjacency @ _read_features(party))
    return smoothed


Attack = Callable[[Attacker], Iterator[AttackResult]]
HAS_DATA: dict[str, Callable[[PartyData], bool]] = {  # can the party be a target? Other attacks fit all parties
    "edges": lambda party: party.graph.num_edges > 0,
    "features": lambda party: bool((_read_features(party).std(axis=0) > 0).any()),
}
ATTACKS: dict[str, Attack] = {  # a key is the start of the attack's name in the results
    "edges": attack_edges,
    "labels": attack_labels,
    "features": attack_features,
    "representation": attack_part,
    "training nodes": attack_membership,
}
