"""The approximations that can be allowed by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainverify.approximate.approximation import Approximation
from trainverify.approximate.auxiliary import without_auxiliary_loss
from trainverify.approximate.batch_norm import local_batch_norm
from trainverify.approximate.capacity import capacity
from trainverify.approximate.routing import node_limited_routing

AXES: Final = "mesh axes that cut the batch, A+B for two; by default those of the inputs' layouts"

APPROXIMATIONS: Final[Mapping[str, Approximation]] = {
    a.name: a
    for a in (
        Approximation(
            "local-batch-norm",
            "batch norms take mean and variance over the rows of one rank instead of the whole batch",
            local_batch_norm,
            {"axes": AXES},
        ),
        Approximation(
            "node-limited-routing",
            "the experts of a token are chosen from the best `top` of `groups` groups of adjacent experts",
            node_limited_routing,
            {"groups": "into how many the experts are divided", "top": "how many of them a token may use", "score": "`max` or `top2`"},
        ),
        Approximation(
            "capacity",
            "an expert takes the first `places` tokens of every rank that choose it, and drops the others",
            capacity,
            {
                "places": "tokens that an expert takes",
                "tokens": "of so many adjacent tokens; by default the tokens of one rank",
                "axes": AXES,
            },
        ),
        Approximation(
            "without-auxiliary-loss",
            "metrics are not differentiated: gradients are those of the loss alone, reported values are as before",
            without_auxiliary_loss,
            {"metric": "one metric; by default all that have a weight"},
        ),
    )
}
