"""Building the token rows of an attempt, column by column.

It knows neither text nor templates. The one thing that must stay true: the columns of a row grow
together, and only what was sampled gets mask 1.
"""

from __future__ import annotations

from posttrain.core.trajectory import Row, Sampled

EMPTY = Row(ids_T=(), mask_T=(), logprobs_T=(), versions_T=(), kv_versions_T=())


def extended(row: Row, ids: tuple[int, ...]) -> Row:
    """The row with given tokens behind it: mask 0, no log-probability, no version."""
    blank = len(ids) * (-1,)
    return Row(
        ids_T=row.ids_T + ids,
        mask_T=row.mask_T + len(ids) * (False,),
        logprobs_T=row.logprobs_T + len(ids) * (0.0,),
        versions_T=row.versions_T + blank,
        kv_versions_T=row.kv_versions_T + blank,
    )


def with_sampled(row: Row, sampled: Sampled) -> Row:
    """The row with sampled tokens behind it."""
    return Row(
        ids_T=row.ids_T + sampled.ids,
        mask_T=row.mask_T + len(sampled.ids) * (True,),
        logprobs_T=row.logprobs_T + sampled.logprobs,
        versions_T=row.versions_T + sampled.versions,
        kv_versions_T=row.kv_versions_T + sampled.kv_versions,
    )
