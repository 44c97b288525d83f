#!/bin/sh
# The draft of the embedded pair: distilled from its target on texts of the target's own, begun from a plain draft.
#
#   recipes/embedded-draft.sh CORPUS PLAIN_DRAFT OUT [STEPS]
#
# CORPUS: the folder with cpython311_stdlib, thealgorithms, keon_algorithms and tinystories_train (.txt.gz), and the held-out
# heldout_code and tinystories_val, which are kept out of training. Give the same command again to go on after a kill.
# An hour on one core with bfloat16 products, of which the target's writing takes ten minutes.
set -eu
corpus=$1 plain=$2 out=$3 steps=${4:-2445}
target=$(dirname "$0")/../src/foredraft/embedded/target

exec foredraft train distill --target "$target" --init "$plain" --own-head --out "$out" --steps "$steps" \
    --data "$corpus/cpython311_stdlib.txt.gz" --licence cpython311_stdlib.txt.gz=PSF-2.0 \
    --data "$corpus/thealgorithms.txt.gz" --licence thealgorithms.txt.gz=MIT \
    --data "$corpus/keon_algorithms.txt.gz" --licence keon_algorithms.txt.gz=MIT \
    --data "$corpus/tinystories_train.txt.gz" --licence tinystories_train.txt.gz=CDLA-Sharing-1.0 \
    --separator-line "# ===== file: " --exclude "$corpus/heldout_code.txt.gz" \
    --validation "code=$corpus/heldout_code.txt.gz" --validation "stories=$corpus/tinystories_val.txt.gz" \
    --generations 18000 --only-generations --temperature 0 --temperature 0.8 --temperature 0.8 \
    --dtype bfloat16 --loss tv --batch-size 8 --muon-learning-rate 0.01 --learning-rate 0.001
