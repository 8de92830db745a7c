"""Our measured costs as the table that SGLang's DSPARK planner reads (`dspark_sps.py`, `SpsAdditiveCostTable`).

Only where the user switches its ragged verification on (SGLANG_RAGGED_VERIFY_MODE), a cost table is given and the
drafter has a confidence head: otherwise SGLang plans nothing, and verifies whole blocks. Read in 0.5.23, not run: the
planner needs a GPU.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dflash_serve.checkpoint.config import Heads
from dflash_serve.deployment import given_cost

if TYPE_CHECKING:
    from dflash_serve.speculation.costs import CostModel

FILE = "planner.json"  # name of the file that `prepare` writes
MODE, STATIC = "SGLANG_RAGGED_VERIFY_MODE", "static"  # SGLang's environment variable, and its default: whole blocks


def planner_costs(heads: Heads, environment: Mapping[str, str] = os.environ) -> CostModel | None:
    """Costs for the planner; None = it plans nothing.

    Raises:
        UserError: a cost table is given that cannot be read.
    """
    plans = environment.get(MODE, STATIC) != STATIC and heads.markov is not None and heads.confidence is not None
    return given_cost(environment) if plans else None


def planner_table(cost: CostModel, most_rows: int) -> str:
    """JSON: a step of n requests and m rows takes bias + alpha(n) + theta(m), clamped beyond the last probe.

    Args:
        most_rows: of a step: max_batch_size x B.
    """
    rows = sorted({1, most_rows, *(size for size in cost.target if size < most_rows)})
    requests = sorted({1, *cost.draft})
    least = cost.target_seconds(1)
    table = {
        "bias_seconds": least,
        "bs_probes": requests,
        "alpha_seconds": [cost.draft_seconds(count) for count in requests],
        "m_probes": rows,
        "theta_seconds": [cost.target_seconds(count) - least for count in rows],
    }
    return json.dumps(table, indent=1)
