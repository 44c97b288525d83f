#!/bin/sh
# Train an EAGLE-3 head for the embedded target on the target's own texts.
#
#   recipes/embedded-head.sh CORPUS OUT [BUDGET [GENERATIONS]]
#
# CORPUS: the folder with cpython311_stdlib, thealgorithms, keon_algorithms and tinystories_train (.txt.gz), and heldout_code and
# tinystories_val, which are kept out of training. BUDGET: the training time after the target has written GENERATIONS texts. Repeat the
# same command to resume an interrupted run. The head is saved in OUT. It drafts all 4,096 ids with the target's lm_head, which is
# neither trained nor saved.
set -eu
. "$(dirname "$0")/embedded_corpus.sh"
corpus=$1 out=$2 budget=${3:-70m} generations=${4:-24000}
target=$(dirname "$0")/../src/foredraft/embedded/target

train_on_corpus "$corpus" head --target "$target" --out "$out" --kind eagle3 \
    --generations "$generations" --only-generations --temperature 0 --temperature 0.8 \
    --share-lm-head --unroll 5 --context 512 --batch-size 8 --budget "$budget" --dtype auto
