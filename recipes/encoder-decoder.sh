#!/bin/sh
# Train a T5 of 14 million parameters, and two draft models for it: a one-layer decoder over its encoder, and a small T5.
#
#   recipes/encoder-decoder.sh translation PARALLEL OUT [TARGET_BUDGET [DRAFT_BUDGET]]
#   recipes/encoder-decoder.sh summarisation CORPUS OUT [TARGET_BUDGET [DRAFT_BUDGET]]
#
# translation: English to German, Tatoeba's sentences in groups of one to six. PARALLEL: the folder with tatoeba_en_de_train.tsv.gz, and
# _val and _test (Tatoeba, CC BY 2.0 FR). summarisation: a Python function to the first sentence of its docstring. CORPUS: the folder
# with cpython311_stdlib, thealgorithms, keon_algorithms, sympy and networkx (.txt.gz). Budgets are training times, such as 40m; the
# defaults take an hour on two idle cores. Repeat the same command to resume an interrupted run. Writes OUT/data (pairs, tokenizer,
# architectures), OUT/target, OUT/decoder and OUT/draft. The draft models are trained on the target's own output.
set -eu
task=$1 data=$2 out=$3 target_budget=${4:-40m} draft_budget=${5:-6m}
here=$(dirname "$0")

case $task in
    translation) name=tatoeba licence="CC BY 2.0 FR" context=160 ;;
    summarisation) name=functions licence="PSF-2.0, MIT and BSD-3-Clause" context=384 ;;
    *) echo "$task: the tasks are translation and summarisation" >&2 && exit 2 ;;
esac

if [ ! -d "$out/data/tokenizer" ]; then
    python "$here/pairs.py" "$task" "$data" "$out/data"
fi

train() {
    command=$1
    shift
    foredraft train "$command" --pairs "$out/data/train.jsonl" --licence "train.jsonl=$licence" \
        --validation "$name=$out/data/val.jsonl" --context "$context" --batch-size 32 --dtype auto "$@"
}

# T5 does not scale its attention scores: at Muon's usual rate for new models they grow until the model stops learning.
rate="--muon-learning-rate 0.005"
train lm $rate --architecture "$out/data/target.json" --tokenizer "$out/data/tokenizer" --out "$out/target" \
    --budget "$target_budget"
train head --kind decoder --target "$out/target" --out "$out/decoder" --budget "$draft_budget" \
    --generations 3000 --only-generations --temperature 0 --temperature 1
train distill $rate --target "$out/target" --architecture "$out/data/draft.json" --out "$out/draft" \
    --budget "$draft_budget" --temperature 0 --temperature 1
