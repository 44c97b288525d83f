#!/bin/sh
# An EAGLE-3 head for SmolLM2-135M-Instruct, trained on its answers to questions of many kinds (chat_questions.py).
#
#   recipes/smollm2-head.sh SMOLLM2 OUT [BUDGET [CHATS]]
#
# SMOLLM2: the file that `make models` fetches, or any other form of the model. CHATS: how many questions it answers first, each once
# however often the run is interrupted. BUDGET: how long to train once they are written. More of both is what raises acceptance. Give
# the same command again to go on after a kill. The head is in OUT.
set -eu
target=$1 out=$2 budget=${3:-80m} chats=${4:-7200}
questions=$out/questions.txt

mkdir -p "$out"
python "$(dirname "$0")/chat_questions.py" 12000 > "$questions"
exec foredraft train head --target "$target" --out "$out" --kind eagle3 \
    --chats "$chats" --prompts "$questions" --only-generations --temperature 0 --temperature 0.8 \
    --draft-vocab-size 8192 --share-lm-head --unroll 3 \
    --context 512 --batch-size 4 --budget "$budget" --dtype auto --quantization int8
