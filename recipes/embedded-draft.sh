#!/bin/sh
# A draft for the embedded target, distilled from it, begun from the plain draft.
#
#   recipes/embedded-draft.sh CORPUS PLAIN_DRAFT OUT [BUDGET]
#
# CORPUS: the folder with cpython311_stdlib, thealgorithms, keon_algorithms and tinystories_train (.txt.gz), and the held-out
# heldout_code and tinystories_val, which are kept out of training. Give the same command again to go on after a kill.
set -eu
corpus=$1 plain=$2 out=$3 budget=${4:-27m}
target=$(dirname "$0")/../src/foredraft/embedded/target

exec foredraft train distill --target "$target" --init "$plain" --own-head --out "$out" --budget "$budget" \
    --data "$corpus/cpython311_stdlib.txt.gz" --licence cpython311_stdlib.txt.gz=PSF-2.0 \
    --data "$corpus/thealgorithms.txt.gz" --licence thealgorithms.txt.gz=MIT \
    --data "$corpus/keon_algorithms.txt.gz" --licence keon_algorithms.txt.gz=MIT \
    --data "$corpus/tinystories_train.txt.gz" --licence tinystories_train.txt.gz=CDLA-Sharing-1.0 \
    --separator-line "# ===== file: " --exclude "$corpus/heldout_code.txt.gz" \
    --validation "code=$corpus/heldout_code.txt.gz" --validation "stories=$corpus/tinystories_val.txt.gz" \
    --temperature 0.8 --loss tv --batch-size 8 --muon-learning-rate 0.005 --learning-rate 0.0006
