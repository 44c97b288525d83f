#!/bin/sh
# Train the draft model of the embedded pair: distil the target on its own texts, starting from a plain draft model.
#
#   recipes/embedded-draft.sh CORPUS PLAIN_DRAFT OUT [FIRST_STEPS [SECOND_STEPS]]
#
# CORPUS: the folder with cpython311_stdlib, thealgorithms, keon_algorithms and tinystories_train (.txt.gz), and heldout_code and
# tinystories_val, which are kept out of training. Repeat the same command to resume an interrupted run.
# The first run takes an hour on one core. The second continues from its result with other texts, a larger share of them sampled, and
# takes 80 minutes on two cores, of which the target's writing takes half an hour (bfloat16 products). The draft model is in OUT/second.
set -eu
. "$(dirname "$0")/embedded_corpus.sh"
corpus=$1 plain=$2 out=$3 first_steps=${4:-2445} second_steps=${5:-5745}
target=$(dirname "$0")/../src/foredraft/embedded/target

distill() (
    train_on_corpus "$corpus" distill --target "$target" \
        --only-generations --dtype bfloat16 --loss tv --batch-size 8 --muon-learning-rate 0.01 --learning-rate 0.001 "$@"
)

mkdir -p "$out"
distill --init "$plain" --own-head --out "$out/first" --steps "$first_steps" --generations 18000 \
    --temperature 0 --temperature 0.8 --temperature 0.8
distill --init "$out/first" --out "$out/second" --steps "$second_steps" --generations 36000 --seed 1 \
    --temperature 0 --temperature 0.8 --temperature 0.8 --temperature 0.8
