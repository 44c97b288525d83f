#!/bin/sh
# Train an EAGLE-3 head for SmolLM2-135M-Instruct on its answers to questions of many kinds (chat_questions.py).
#
#   recipes/smollm2-head.sh SMOLLM2 OUT [BUDGET [WIDE_BUDGET [COPYING_BUDGET [OWN_BUDGET [MORE_BUDGET [AGAIN_BUDGET [LAST_BUDGET]]]]]]]
#
# SMOLLM2: the file that `make models` fetches, or any other format of the model. The head is trained for BUDGET on answers to 7,200
# questions of 80 kinds, then for WIDE_BUDGET on these and on 8,800 of three times as many kinds. Then it gets induction heads, so that it
# can copy, and is trained for COPYING_BUDGET on answers to 2,176 other questions, half of them with further requests, and for OWN_BUDGET
# on answers to 4,600 questions that the model asks itself and to 2,000 others, and for MORE_BUDGET on answers to 5,500 more of its own.
# It is trained twice more on answers to these questions, each time for AGAIN_BUDGET; the second time two of three are greedy. The average
# of the result and of the head before is trained for LAST_BUDGET on answers to 5,600 new questions, and averaged with both again.
# The answers are written first, each only once even if a run is interrupted. More answers and more training raise acceptance. Repeat the
# same command to resume an interrupted run. The head is saved in OUT/head.
set -eu
target=$1 out=$2 budget=${3:-80m} wide_budget=${4:-95m} copying_budget=${5:-90m} own_budget=${6:-42m} more_budget=${7:-42m}
again_budget=${8:-60m} last_budget=${9:-35m}
narrow=$out/narrow.jsonl wide=$out/wide.jsonl copying=$out/copying.jsonl own=$out/own.jsonl others=$out/others.jsonl more=$out/more.jsonl
last=$out/last.jsonl last_others=$out/last_others.jsonl
here=$(dirname "$0")
questions="python $here/chat_questions.py"

train() {
    foredraft train head --target "$target" --kind eagle3 --only-generations --temperature 0 --temperature 0.8 \
        --share-lm-head --unroll 3 --context 512 --batch-size 4 --dtype auto "$@"
}

own_questions() {
    if [ ! -f "$3" ]; then
        python "$here/own_questions.py" "$target" "$1" "$2" > "$3.part"
        mv "$3.part" "$3"
    fi
}

mkdir -p "$out"
$questions 7200 > "$narrow"
{ cat "$narrow" && $questions 14000 "$target"; } > "$wide"
train --out "$out/narrow" --chats 7200 --prompts "$narrow" --draft-vocab-size 8192 --budget "$budget"
train --out "$out/wide" --chats 16000 --prompts "$wide" --init "$out/narrow" --loss kl+tv --kl-until 0.4 \
    --muon-learning-rate 0.012 --learning-rate 0.0012 --budget "$wide_budget" --quantization int8
$questions 9000 "$target" 7 constrained > "$copying"
if [ ! -f "$out/induction/config.json" ]; then
    python "$here/add_induction_heads.py" "$out/wide" "$target" "$out/wide/chats.jsonl" "$out/induction" 128
fi
train --out "$out/copying" --chats 2176 --prompts "$copying" --init "$out/induction" --budget "$copying_budget" --quantization int8
own_questions 5000 21 "$own"
$questions 2000 "$target" 11 constrained > "$others"
train --out "$out/own" --chats 6600 --prompts "$own" --prompts "$others" --init "$out/copying" --budget "$own_budget" --quantization int8
own_questions 6000 22 "$more"
train --out "$out/more" --chats 5500 --prompts "$more" --init "$out/own" --budget "$more_budget" --quantization int8
train --out "$out/again" --chats 12100 --prompts "$own" --prompts "$others" --prompts "$more" --init "$out/more" \
    --budget "$again_budget" --quantization int8
train --out "$out/greedy" --chats 9100 --prompts "$own" --prompts "$others" --prompts "$more" --temperature 0 --init "$out/again" \
    --muon-learning-rate 0.008 --learning-rate 0.00096 --budget "$again_budget" --quantization int8
python "$here/average_heads.py" "$target" "$out/average" "$out/more" "$out/greedy"
own_questions 3600 31 "$last"
$questions 2400 "$target" 31 constrained > "$last_others"
train --out "$out/last" --chats 5600 --prompts "$last" --prompts "$last_others" --temperature 0 --init "$out/average" \
    --budget "$last_budget" --quantization int8
python "$here/average_heads.py" "$target" "$out/head" "$out/more" "$out/greedy" "$out/last"
