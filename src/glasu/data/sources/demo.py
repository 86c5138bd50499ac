"""The paper's example as random data: three departments of a news service predict the interests of their users.

A user mostly follows people of one profession. Some users (insiders) are interested in the field of these people, the
other users (outsiders) in the opposite field. So an interest depends on a combination of three facts: the followed
users (known to the department "follower"), their professions ("profile"), and how the user reads ("reading"). No
department can learn the interest alone, and an average of the departments' predictions cannot express it. Followed
users do not share the interest of their followers, so smoothing the average over the network does not help.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from glasu.data.graph import Graph
from glasu.data.partition import draw_splits_by_fraction
from glasu.data.party import PartyData
from glasu.data.sources import DataSource, RawData
from glasu.randomness import Stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from glasu.config import RunConfig
    from glasu.data.cache.store import Cache

INTERESTS = ("politics", "business", "culture", "sports")
OPPOSITE = np.array([2, 3, 0, 1])  # politics and culture, business and sports
SURPRISING = 0.08  # the share of users whose interest is independent of all data: no model can classify them
SPLIT = (0.4, 0.2, 0.4)
NUM_COLUMNS = 8  # feature columns of "profile" and of "reading"
CLARITY = 4.0  # distance of the centres of professions and of habits from the origin; noise has variance 1 per column
HINT = 0.6  # distance of the centres of interests from the origin; small, so features reveal little about them
NUM_FOLLOWED = 12.0  # users that a user follows, on average
LOYALTY = 0.85  # the share of followed users drawn from the field that the user follows
TAIL = 1.0  # sigma of the log-normal popularity of users; with this value, some users have hundreds of followers


def draw_news_service(seed: int, num_users: int = 2400) -> list[PartyData]:
    """Return the departments "profile", "follower" and "reading".

    Only "follower" has edges: an edge leads from the followed user to the follower. Its two columns describe the
    accounts and are independent of everything else.
    """
    rng = Stream(seed, "demo users").numpy()
    profession, followed, anything = rng.integers(0, len(INTERESTS), (3, num_users))
    outsider = rng.integers(0, 2, num_users)
    interest = np.where(outsider, OPPOSITE[followed], followed)
    interest = np.where(rng.random(num_users) < SURPRISING, anything, interest)
    graph = _draw_network(profession, followed, Stream(seed, "demo network").numpy())
    no_edges = Graph(np.zeros(num_users + 1, np.int64), np.empty(0, np.int32))
    departments = {
        "profile": (_draw_columns(profession, interest, Stream(seed, "demo profile").numpy()), no_edges),
        "follower": (Stream(seed, "demo accounts").numpy().standard_normal((num_users, 2)), graph),
        "reading": (_draw_columns(outsider, interest, Stream(seed, "demo reading").numpy()), no_edges),
    }
    ids = np.char.add("u", np.char.zfill(np.arange(num_users).astype(str), len(str(num_users - 1))))
    splits = draw_splits_by_fraction(interest, SPLIT, seed)
    return [
        PartyData(name, ids, features, edges, interest, INTERESTS, splits)
        for name, (features, edges) in departments.items()
    ]


def _read(config: RunConfig, cache: Cache) -> RawData:
    return RawData([replace(party, splits=None) for party in draw_news_service(config.data_seed)])


DEMO = DataSource(_read, SPLIT)


def _draw_columns(
    group: NDArray[np.int64], interest: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.float32]:
    """Draw the features of every user: the sum of a centre per group, a weaker centre per interest, and noise."""
    faint = _draw_centres(len(INTERESTS), HINT, rng)
    centres = _draw_centres(len(INTERESTS), CLARITY, rng)
    noise = rng.standard_normal((len(group), NUM_COLUMNS))
    return (centres[group] + faint[interest] + noise).astype(np.float32)


def _draw_centres(count: int, distance: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw points at a distance from the origin, in random directions."""
    points = rng.standard_normal((count, NUM_COLUMNS))
    return np.asarray(points * distance / np.linalg.norm(points, axis=1, keepdims=True))


def _draw_network(profession: NDArray[np.int64], field: NDArray[np.int64], rng: np.random.Generator) -> Graph:
    """Draw the users that each user follows. Popular users are followed more often.

    Most users that a user follows have the profession `field[user]`.
    """
    users = len(profession)
    popularity = rng.lognormal(0.0, TAIL, users)
    links = round(users * NUM_FOLLOWED)
    follower = rng.integers(0, users, links)
    followed = _draw_weighted(popularity, links, rng)
    loyal = rng.random(links) < LOYALTY
    for own in range(len(INTERESTS)):
        members, chosen = np.flatnonzero(profession == own), np.flatnonzero(loyal & (field[follower] == own))
        if len(members):
            followed[chosen] = members[_draw_weighted(popularity[members], len(chosen), rng)]
    return Graph.from_edges(followed, follower, users)


def _draw_weighted(weight: NDArray[np.float64], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw `count` positions in proportion to their weight."""
    heights = np.cumsum(weight)
    return np.asarray(np.searchsorted(heights, rng.random(count) * heights[-1], side="right"))
