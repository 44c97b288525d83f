#!/bin/sh
# An EAGLE-3 head for SmolLM2-135M-Instruct, trained on conversations that the model has with itself.
#
#   recipes/smollm2-head.sh SMOLLM2 OUT [CHATS [EPOCHS]]
#
# SMOLLM2: the file that `make models` fetches, or any other form of the model. CHATS: how many conversations it writes first,
# each once however often the run is interrupted; more of them is what raises acceptance. Give the same command again to go on
# after a kill. The head is in OUT.
set -eu
target=$1 out=$2 chats=${3:-2400} epochs=${4:-2}

exec foredraft train head --target "$target" --out "$out" --kind eagle3 \
    --chats "$chats" --only-generations --temperature 0 --temperature 0.8 \
    --draft-vocab-size 16384 --share-lm-head --unroll 5 \
    --context 512 --batch-size 4 --epochs "$epochs" --dtype auto
