"""Draw the data of the convergence and traffic benchmarks: three departments, each with features and a network.

The data of a department separates some of its users' interests and confuses others. No two departments confuse the same
interests, so together they can separate all of them. The networks follow the same pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from glasu.data.graph import Graph
from glasu.data.partition import draw_splits_by_fraction
from glasu.data.party import PartyData
from glasu.randomness import Stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

INTERESTS = ("politics", "business", "culture", "sports", "travel", "science")
SURPRISING = 0.08  # share of users whose data is independent of their interest, so no model can classify them
SPLIT = (0.1, 0.2, 0.5)  # labels are scarce: one user in ten is a training node


@dataclass(frozen=True)
class Department:
    """The data of one department: groups of interests, and how clearly features and network show a user's group."""

    name: str
    groups: tuple[int, ...]  # the group of each interest; the data does not separate interests of the same group
    num_features: int
    separation: float  # distance of the group centres from the origin; noise has variance 1 per column
    average_degree: float
    homophily: float  # the share of links within the group
    tail: float  # sigma of the log-normal popularity of users; 0: all are equally popular
    directed: bool = False


DEPARTMENTS = (
    Department("professional", (0, 0, 1, 2, 2, 3), 32, 1.6, 6.0, 0.7, 0.3),
    Department("personal", (3, 0, 1, 1, 2, 3), 24, 1.6, 8.0, 0.6, 0.5),
    Department("follower", (0, 1, 1, 2, 3, 3), 40, 1.5, 12.0, 0.6, 1.3, directed=True),
)


def three_networks(seed: int, num_users: int) -> list[PartyData]:
    """Return the departments "professional", "personal" and "follower".

    An edge of the follower network leads from the followed user to the follower.
    """
    rng = Stream(seed, "demo interests").numpy()
    labels, anyone = rng.integers(0, len(INTERESTS), (2, num_users))
    shown = np.where(rng.random(num_users) < SURPRISING, anyone, labels)
    splits = draw_splits_by_fraction(labels, SPLIT, seed)
    ids = np.char.add("u", np.char.zfill(np.arange(num_users).astype(str), len(str(num_users - 1))))
    parties = []
    for client, department in enumerate(DEPARTMENTS):
        groups = np.asarray(department.groups)[shown]
        rng = Stream(seed, "demo department", client=client).numpy()
        features = _draw_features(department, groups, rng)
        graph = _draw_network(department, groups, rng)
        parties.append(PartyData(department.name, ids, features, graph, labels, INTERESTS, splits))
    return parties


def _draw_features(department: Department, groups: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.float32]:
    """Draw a group centre plus noise for every user."""
    centres = rng.standard_normal((max(department.groups) + 1, department.num_features))
    centres *= department.separation / np.linalg.norm(centres, axis=1, keepdims=True)
    noise = rng.standard_normal((len(groups), department.num_features))
    return (centres[groups] + noise).astype(np.float32)


def _draw_network(department: Department, groups: NDArray[np.int64], rng: np.random.Generator) -> Graph:
    """Draw other users for every user in proportion to their popularity, mostly within the user's group."""
    users = len(groups)
    popularity = rng.lognormal(0.0, department.tail, users)
    links = round(users * department.average_degree / (1 if department.directed else 2))
    reader = rng.integers(0, users, links)
    followed = _draw_weighted(popularity, links, rng)
    near = rng.random(links) < department.homophily
    for group in range(max(department.groups) + 1):
        members, chosen = np.flatnonzero(groups == group), np.flatnonzero(near & (groups[reader] == group))
        if len(members):
            followed[chosen] = members[_draw_weighted(popularity[members], len(chosen), rng)]
    if department.directed:
        return Graph.from_edges(followed, reader, users)
    return Graph.from_edges(np.concatenate([followed, reader]), np.concatenate([reader, followed]), users)


def _draw_weighted(weight: NDArray[np.float64], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw `count` positions in proportion to their weight."""
    heights = np.cumsum(weight)
    return np.asarray(np.searchsorted(heights, rng.random(count) * heights[-1], side="right"))
