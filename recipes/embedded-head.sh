#!/bin/sh
# An EAGLE-3 head for the embedded target, trained on texts of the target's own.
#
#   recipes/embedded-head.sh CORPUS OUT [BUDGET [GENERATIONS]]
#
# CORPUS: the folder with cpython311_stdlib, thealgorithms, keon_algorithms and tinystories_train (.txt.gz), and the held-out
# heldout_code and tinystories_val, which are kept out of training. BUDGET: how long to train once the GENERATIONS texts are
# written. Give the same command again to go on after a kill. The head is in OUT. It drafts all 4,096 ids with the target's
# lm_head, which is neither trained nor saved.
set -eu
corpus=$1 out=$2 budget=${3:-70m} generations=${4:-24000}
target=$(dirname "$0")/../src/foredraft/embedded/target

exec foredraft train head --target "$target" --out "$out" --kind eagle3 \
    --data "$corpus/cpython311_stdlib.txt.gz" --licence cpython311_stdlib.txt.gz=PSF-2.0 \
    --data "$corpus/thealgorithms.txt.gz" --licence thealgorithms.txt.gz=MIT \
    --data "$corpus/keon_algorithms.txt.gz" --licence keon_algorithms.txt.gz=MIT \
    --data "$corpus/tinystories_train.txt.gz" --licence tinystories_train.txt.gz=CDLA-Sharing-1.0 \
    --separator-line "# ===== file: " --exclude "$corpus/heldout_code.txt.gz" \
    --validation "code=$corpus/heldout_code.txt.gz" --validation "stories=$corpus/tinystories_val.txt.gz" \
    --generations "$generations" --only-generations --temperature 0 --temperature 0.8 \
    --share-lm-head --unroll 5 --context 512 --batch-size 8 --budget "$budget" --dtype auto
