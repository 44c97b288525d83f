#!/bin/sh
# A block drafter for the embedded target: DSpark, or DFlash.
#
#   recipes/embedded-block-head.sh CORPUS OUT [KIND [BUDGET [GENERATIONS]]]
#
# CORPUS: the folder with cpython311_stdlib, thealgorithms, keon_algorithms and tinystories_train (.txt.gz), and the held-out
# heldout_code and tinystories_val, which are kept out of training. KIND: dspark or dflash. GENERATIONS: texts that the target writes,
# on which alone the head is trained; 0: on the corpus itself, for want of the time to write. Give the same command again to go on
# after a kill. The head is in OUT. It drafts all 4,096 ids with the target's lm_head, which is neither trained nor saved.
set -eu
corpus=$1 out=$2 kind=${3:-dspark} budget=${4:-60m} generations=${5:-18000}
target=$(dirname "$0")/../src/foredraft/embedded/target

if [ "$generations" = 0 ]; then written=""; else written="--generations $generations --only-generations"; fi
# shellcheck disable=SC2086
exec foredraft train head --target "$target" --out "$out" --kind "$kind" \
    --data "$corpus/cpython311_stdlib.txt.gz" --licence cpython311_stdlib.txt.gz=PSF-2.0 \
    --data "$corpus/thealgorithms.txt.gz" --licence thealgorithms.txt.gz=MIT \
    --data "$corpus/keon_algorithms.txt.gz" --licence keon_algorithms.txt.gz=MIT \
    --data "$corpus/tinystories_train.txt.gz" --licence tinystories_train.txt.gz=CDLA-Sharing-1.0 \
    --separator-line "# ===== file: " --exclude "$corpus/heldout_code.txt.gz" \
    --validation "code=$corpus/heldout_code.txt.gz" --validation "stories=$corpus/tinystories_val.txt.gz" \
    $written --temperature 0.8 --block-size 7 --context 256 --batch-size 4 --budget "$budget"
