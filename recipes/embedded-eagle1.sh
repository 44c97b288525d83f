#!/bin/sh
# Train an EAGLE-1 head for the embedded target on the target's own texts. The head starts as the embedded draft model, and also reads
# the target's hidden states. It is trained three times, each time on other texts; the result of the last two runs is averaged.
#
#   recipes/embedded-eagle1.sh CORPUS OUT [BUDGET [GENERATIONS [SECOND_BUDGET [SECOND_GENERATIONS [THIRD_BUDGET [THIRD_GENERATIONS]]]]]]
#
# CORPUS: the folder with cpython311_stdlib, thealgorithms, keon_algorithms and tinystories_train (.txt.gz), and heldout_code and
# tinystories_val, which are kept out of training. BUDGET: the training time after the target has written GENERATIONS texts. Repeat the
# same command to resume an interrupted run. The head is saved in OUT/head.
set -eu
. "$(dirname "$0")/embedded_corpus.sh"
corpus=$1 out=$2 budget=${3:-60m} generations=${4:-24000} second_budget=${5:-35m} second_generations=${6:-12000}
third_budget=${7:-35m} third_generations=${8:-22000}
embedded=$(dirname "$0")/../src/foredraft/embedded

train() (
    train_on_corpus "$corpus" head --target "$embedded/target" --kind eagle1 --only-generations --temperature 0 --temperature 0.8 \
        --unroll 4 --context 512 --batch-size 8 --dtype auto "$@"
)

train --out "$out/first" --draft-model "$embedded/draft" --muon-learning-rate 0.004 --learning-rate 0.0005 \
    --generations "$generations" --budget "$budget"
train --out "$out/second" --init "$out/first" --muon-learning-rate 0.004 --learning-rate 0.0005 \
    --generations "$second_generations" --budget "$second_budget" --seed 2
train --out "$out/third" --init "$out/second" --muon-learning-rate 0.006 --learning-rate 0.00075 \
    --generations "$third_generations" --budget "$third_budget" --seed 3
python "$(dirname "$0")/average_heads.py" "$embedded/target" "$out/head" "$out/second" "$out/third"
