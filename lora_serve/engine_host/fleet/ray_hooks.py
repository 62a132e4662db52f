"""Functions that Ray calls in processes of its own: a hook into `ray start`, and the number of replicas that a fleet's
load needs, for a range of --replicas: by tokens to compute, not by requests.

Ray Serve calls `replicas_wanted` each second in its controller, which has pickled it, with this module, by value.
"""

from __future__ import annotations

import math
from typing import Any

START_HOOK = f"{__name__}.without_client_server"
LOAD = "tokens"  # the figure of each replica
TOKENS_PER_REPLICA = 4096  # at which another replica pays
_ROW_TOKENS = 64  # of each row, running or waiting: the steps that it will yet take part in


def load(num_waiting_tokens: int, num_rows: int) -> dict[str, float]:
    """A replica's figure: tokens of prompts that wait, and its rows."""
    return {LOAD: float(num_waiting_tokens + _ROW_TOKENS * num_rows)}


def replicas_wanted(context: Any) -> tuple[int, dict[str, Any]]:
    """See Ray Serve's custom autoscaling policies. `context`: an AutoscalingContext.

    When fewer were wanted throughout its delay, Serve goes to the number that is wanted at the delay's end, however
    low. So never more than one replica less is wanted.
    """
    loads = (context.aggregated_metrics or {}).get(LOAD, {})
    wanted = math.ceil(sum(loads.values()) / TOKENS_PER_REPLICA)
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    wanted = max(wanted, context.target_num_replicas - 1)
    return max(least, 1, min(wanted, most)), dict(context.policy_state or {})


def without_client_server(parameters: Any, is_head: bool) -> None:
    """RAY_START_HOOK: leaves out the server for `ray://`, a process and a port that no fleet uses. There is no flag."""
    parameters.ray_client_server_port = None
