"""What no plan can beat: perfect balance, only the bytes that must move, and all of them hidden."""

from __future__ import annotations

import math
from typing import NamedTuple

from sim.batches.batch import Batch
from sim.batches.planned import require_ranks
from sim.batches.statistics import TokenBytes
from sim.schedule.ir.masks import count_pairs


class LowerBound(NamedTuple):
    """What the busiest rank of any plan does at least."""

    pairs: float
    """That it attends at least: an equal share."""
    received_bytes: float
    """That it receives at least, of keys, values and queries."""

    def seconds(self, seconds_per_pair: float, bytes_per_s: float) -> float:
        """Return the least time of attention at these rates, per direction, with transfers hidden wholly."""
        return max(self.pairs * seconds_per_pair, self.received_bytes / bytes_per_s)


def lower_bound(batch: Batch, num_ranks: int, per_token: TokenBytes, tokens_per_rank: int | None = None) -> LowerBound:
    """Return what the busiest rank of any plan must do that puts at most ``tokens_per_rank`` tokens on one rank (by
    default an equal share).

    Some rank attends W/P of W pairs or more. With n queries and m keys there it has at most n·m pairs, of which r each
    are its own: it receives at least the least of q·(n - r) + kv·(m - r) bytes with n·m >= W/P. Partial outputs that
    it sends back are left out, and so is the mask: under a causal one half of n·m is none of its pairs, so this may be
    half of what must move.
    """
    require_ranks(num_ranks)
    own = -(-batch.num_tokens // num_ranks) if tokens_per_rank is None else tokens_per_rank
    pairs = sum(count_pairs(one.band, one.queries, one.keys) for one in batch.rectangles) / num_ranks
    if pairs <= own * own:
        return LowerBound(pairs, 0.0)
    # q·n + kv·pairs/n is least at the square root of kv·pairs/q, between r queries and r keys.
    queries = min(max(math.sqrt(per_token.kv * pairs / per_token.query), own), pairs / own)
    return LowerBound(pairs, per_token.query * (queries - own) + per_token.kv * (pairs / queries - own))
