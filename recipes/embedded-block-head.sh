#!/bin/sh
# Train a block drafter for the embedded target: DSpark or DFlash.
#
#   recipes/embedded-block-head.sh CORPUS OUT [KIND [BUDGET [GENERATIONS]]]
#
# CORPUS: the folder with cpython311_stdlib, thealgorithms, keon_algorithms and tinystories_train (.txt.gz), and heldout_code and
# tinystories_val, which are kept out of training. KIND: dspark or dflash. GENERATIONS: the number of texts that the target writes; the
# head is trained only on these. 0 trains on the corpus itself, which saves the time of writing. Repeat the same command to resume an
# interrupted run. The head is saved in OUT. It drafts all 4,096 ids with the target's lm_head, which is neither trained nor saved.
set -eu
. "$(dirname "$0")/embedded_corpus.sh"
corpus=$1 out=$2 kind=${3:-dspark} budget=${4:-60m} generations=${5:-18000}
target=$(dirname "$0")/../src/foredraft/embedded/target

if [ "$generations" = 0 ]; then written=""; else written="--generations $generations --only-generations"; fi
# shellcheck disable=SC2086
train_on_corpus "$corpus" head --target "$target" --out "$out" --kind "$kind" \
    $written --temperature 0.8 --block-size 7 --context 256 --batch-size 4 --budget "$budget"
