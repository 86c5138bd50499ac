"""The paper's story as data: a news service, three departments, and what its users are interested in.

Every department confuses some interests and tells the others apart, and no two departments confuse the same ones:
what one of them cannot know, the other two can. The networks follow the same pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from glasu.data.partition import splits_by_fraction
from glasu.data.party import Graph, PartyData
from glasu.randomness import Stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

INTERESTS = ("politics", "business", "culture", "sports", "travel", "science")
SURPRISING = 0.08  # the share of users who behave like anyone, whatever their interest: no model gets them right
SPLIT = (0.1, 0.2, 0.5)  # labels are dear: one user in ten has told


@dataclass(frozen=True)
class Department:
    """What one department knows: a group per interest, and how loudly features and network speak of it."""

    name: str
    groups: tuple[int, ...]  # one per interest; interests of one group look alike here
    num_features: int
    separation: float  # distance of the group centres from the origin, where noise has variance 1 per column
    average_degree: float
    homophily: float  # the share of links within the group
    tail: float  # spread of the users' popularity, as sigma of a log-normal; 0: all alike
    directed: bool = False


DEPARTMENTS = (
    Department("professional", (0, 0, 1, 2, 2, 3), 32, 1.6, 6.0, 0.7, 0.3),
    Department("personal", (3, 0, 1, 1, 2, 3), 24, 1.6, 8.0, 0.6, 0.5),
    Department("follower", (0, 1, 1, 2, 3, 3), 40, 1.5, 12.0, 0.6, 1.3, directed=True),
)


def news_service(seed: int, num_users: int = 3000) -> list[PartyData]:
    """Return the departments "professional", "personal" and "follower" of a news service with these users.

    In the follower network an edge leads from whoever is followed to the follower, who reads from there.
    """
    rng = Stream(seed, "demo interests").numpy()
    labels, anyone = rng.integers(0, len(INTERESTS), (2, num_users))
    shown = np.where(rng.random(num_users) < SURPRISING, anyone, labels)
    splits = splits_by_fraction(labels, SPLIT, seed)
    ids = np.char.add("u", np.char.zfill(np.arange(num_users).astype(str), len(str(num_users - 1))))
    parties = []
    for client, department in enumerate(DEPARTMENTS):
        groups = np.asarray(department.groups)[shown]
        rng = Stream(seed, "demo department", client=client).numpy()
        features = _features(department, groups, rng)
        graph = _network(department, groups, rng)
        parties.append(PartyData(department.name, ids, features, graph, labels, INTERESTS, splits))
    return parties


def _features(department: Department, groups: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.float32]:
    """Draw a group centre plus noise for every user."""
    centres = rng.standard_normal((max(department.groups) + 1, department.num_features))
    centres *= department.separation / np.linalg.norm(centres, axis=1, keepdims=True)
    noise = rng.standard_normal((len(groups), department.num_features))
    return (centres[groups] + noise).astype(np.float32)


def _network(department: Department, groups: NDArray[np.int64], rng: np.random.Generator) -> Graph:
    """Let every user pick others in proportion to their popularity, mostly within the own group."""
    users = len(groups)
    popularity = rng.lognormal(0.0, department.tail, users)
    links = round(users * department.average_degree / (1 if department.directed else 2))
    reader = rng.integers(0, users, links)
    followed = _pick(popularity, links, rng)
    near = rng.random(links) < department.homophily
    for group in range(max(department.groups) + 1):
        members, chosen = np.flatnonzero(groups == group), np.flatnonzero(near & (groups[reader] == group))
        followed[chosen] = members[_pick(popularity[members], len(chosen), rng)] if len(members) else followed[chosen]
    if department.directed:
        return Graph.from_edges(followed, reader, users)
    return Graph.from_edges(np.concatenate([followed, reader]), np.concatenate([reader, followed]), users)


def _pick(weight: NDArray[np.float64], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw `count` positions in proportion to their weight."""
    heights = np.cumsum(weight)
    return np.asarray(np.searchsorted(heights, rng.random(count) * heights[-1], side="right"))
