"""How far back the same two tokens stood together, and the figures of such tokens apart."""

from __future__ import annotations

import math

import torch

from linearize.measure.positions import figures, pair_sums
from linearize.measure.repeats import EDGES, Repeats, tokens_back
from linearize.train.losses import IGNORED, next_token_targets


def by_hand(ids: list[int], wanted: list[int], positions: list[int]) -> list[int]:
    found, seen = [], {}
    for place, (token, target) in enumerate(zip(ids, wanted, strict=True)):
        if positions[place] == 0:
            seen = {}
        found.append(0 if target == IGNORED else place - seen.get((token, target), place))
        seen[token, target] = place
    return found


def test_pairs_are_looked_up_in_their_own_document() -> None:
    torch.manual_seed(0)
    ids = torch.randint(5, (3, 400))
    positions = torch.cat([torch.arange(150), torch.arange(250)]).expand(3, 400)
    wanted = next_token_targets(ids)
    wanted[:, 149] = IGNORED
    wanted[1, ::7] = IGNORED  # such as the tokens of a question
    found = tokens_back(ids, wanted, positions)
    assert found.tolist() == [
        by_hand(*row) for row in zip(ids.tolist(), wanted.tolist(), positions.tolist(), strict=True)
    ]
    assert found.max() > 32  # and not the places beside it alone
    whole = tokens_back(ids, wanted)
    assert whole[0, :149].equal(found[0, :149])
    assert not whole[0, 150:].equal(found[0, 150:])  # one document without positions


def test_figures_of_each_kind_add_up_to_those_of_all() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.randn(2, 2, 600, 7)
    ids = torch.randint(7, (2, 600))
    wanted = next_token_targets(ids)
    back = tokens_back(ids, wanted)
    back[0, :90] = torch.arange(90) * 30  # every kind there is
    found = Repeats()
    for part in (slice(0, 250), slice(250, 600)):
        found.add(ours[:, part], theirs[:, part], wanted[:, part], back[:, part])
    rows = found.rows()
    assert [(row["from"], row["to"]) for row in rows] == [
        (0, 0),
        (1, 32),
        (33, 128),
        (129, 512),
        (513, 2048),
        (2049, None),
    ]
    for row in rows:
        here = (
            (back >= row["from"]) & (back <= (row["to"] if row["to"] is not None else math.inf)) & (wanted != IGNORED)
        )
        assert row["tokens"] == int(here.sum())
        mean = torch.nn.functional.cross_entropy(ours[here], wanted[here])
        assert math.isclose(row["student_ppl"], math.exp(mean), rel_tol=1e-5)
    sums, count = found.totals()
    assert count == 2 * 599 == sum(row["tokens"] for row in rows)
    whole = figures(pair_sums(ours, theirs, wanted), count)
    assert all(math.isclose(figures(sums, count)[key], value, rel_tol=1e-5) for key, value in whole.items())
    assert len(rows) == len(EDGES) + 2
