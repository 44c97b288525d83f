#!/bin/sh
# A head for the embedded target that begins as its draft model and reads hidden states of the target besides (EAGLE-1), trained on
# texts of the target's own.
#
#   recipes/embedded-eagle1.sh CORPUS OUT [BUDGET [GENERATIONS]]
#
# CORPUS: the folder with cpython311_stdlib, thealgorithms, keon_algorithms and tinystories_train (.txt.gz), and the held-out
# heldout_code and tinystories_val, which are kept out of training. BUDGET: how long to train once the GENERATIONS texts are
# written. Give the same command again to go on after a kill. The head is in OUT.
set -eu
. "$(dirname "$0")/embedded_corpus.sh"
corpus=$1 out=$2 budget=${3:-60m} generations=${4:-24000}
embedded=$(dirname "$0")/../src/foredraft/embedded

train_on_corpus "$corpus" head --target "$embedded/target" --out "$out" --kind eagle1 --draft-model "$embedded/draft" \
    --generations "$generations" --only-generations --temperature 0 --temperature 0.8 \
    --unroll 4 --context 512 --batch-size 8 --budget "$budget" --dtype auto --muon-learning-rate 0.004 --learning-rate 0.0005
