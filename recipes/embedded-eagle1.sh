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
corpus=$1 out=$2 budget=${3:-60m} generations=${4:-24000}
embedded=$(dirname "$0")/../src/foredraft/embedded

exec foredraft train head --target "$embedded/target" --out "$out" --kind eagle1 --draft-model "$embedded/draft" \
    --data "$corpus/cpython311_stdlib.txt.gz" --licence cpython311_stdlib.txt.gz=PSF-2.0 \
    --data "$corpus/thealgorithms.txt.gz" --licence thealgorithms.txt.gz=MIT \
    --data "$corpus/keon_algorithms.txt.gz" --licence keon_algorithms.txt.gz=MIT \
    --data "$corpus/tinystories_train.txt.gz" --licence tinystories_train.txt.gz=CDLA-Sharing-1.0 \
    --separator-line "# ===== file: " --exclude "$corpus/heldout_code.txt.gz" \
    --validation "code=$corpus/heldout_code.txt.gz" --validation "stories=$corpus/tinystories_val.txt.gz" \
    --generations "$generations" --only-generations --temperature 0 --temperature 0.8 \
    --unroll 4 --context 512 --batch-size 8 --budget "$budget" --dtype auto --muon-learning-rate 0.004 --learning-rate 0.0005
