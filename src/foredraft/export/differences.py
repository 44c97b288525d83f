"""Differences between foredraft and other engines, in sentences that several engines share."""

SEEDS = "A seed gives another text there than here, and with speculation another than without; the distribution is the same."
COSTS = (
    "Times are another machine's and another program's: take the number of draft tokens as a start, and measure there."
)
BATCHES = "Greedy text can change with the batch there, with speculation and without: rows are not bit-exact."
ALWAYS = (SEEDS, BATCHES)

PER_SERVER = "Method and number of draft tokens are the server's: a request cannot choose its own."
FIXED = "The number of draft tokens is fixed there: nothing switches drafting off where it does not pay."
DRAFTING = (COSTS,)

GREEDY_DRAFTS = (
    "Drafts are greedy there, not sampled: at a temperature above 0 a draft token stands with the target's own probability of "
    "it, so that fewer stand than here."
)
QUANTIZED = (
    "The rounding of weights while they load (quantization) is foredraft's own and is not exported: give a checkpoint that is "
    "quantized for the engine, or expect its speed unquantized."
)
TREES = "Trees of drafts are not exported: the drafts are chains."
CONVERTED = "Models are converted, which rounds their weights: the same text as here is not to be expected."
