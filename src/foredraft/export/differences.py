"""Differences between foredraft and other engines, in sentences that several engines share."""

SEEDS = "A seed gives a different text there than here, and a different one with speculation than without; the distribution is the same."
COSTS = "Times differ on another machine and in another program: take the number of draft tokens as a starting point, and measure there."
BATCHES = "Greedy text can depend on the batch there, with or without speculation: rows are not bit-exact."
ALWAYS = (SEEDS, BATCHES)

PER_SERVER = "The method and the number of draft tokens are set for the whole server: a request cannot choose its own."
FIXED = "The number of draft tokens is fixed there: drafting is not switched off where it does not pay."
DRAFTING = (COSTS,)

GREEDY_DRAFTS = (
    "Drafts are greedy there, not sampled: at a temperature above 0 a draft token is accepted with the target's own "
    "probability of it, so fewer are accepted than here."
)
QUANTIZED = (
    "The rounding of weights while they load (quantization) is specific to foredraft and is not exported: give a checkpoint that is "
    "quantized for the engine, or expect the speed of unquantized weights."
)
TREES = "Draft trees are not exported: the drafts are chains."
CONVERTED = "Models are converted, which rounds their weights: do not expect the same text as here."
