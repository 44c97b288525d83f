#!/bin/sh
# A Python function to the first sentence of its docstring: a T5 of 14 million parameters, and two drafts for it: a decoder
# of one layer over its encoder, and a small T5.
#
#   recipes/summarisation.sh CORPUS OUT [TARGET_BUDGET [DRAFT_BUDGET]]
#
# CORPUS: the folder with cpython311_stdlib, thealgorithms, keon_algorithms, sympy and networkx (.txt.gz). Budgets: of training, as
# 40m; the defaults take an hour on two quiet cores. Give the same command again to go on after a kill. Writes OUT/data (pairs,
# tokenizer, architectures), OUT/target, OUT/decoder and OUT/draft. Drafts learn what the target itself answers.
set -eu
data=$1 out=$2 target_budget=${3:-40m} draft_budget=${4:-6m}
here=$(dirname "$0")

if [ ! -d "$out/data/tokenizer" ]; then
    python "$here/pairs.py" summarisation "$data" "$out/data"
fi

train() {
    command=$1
    shift
    foredraft train "$command" --pairs "$out/data/train.jsonl" --licence "train.jsonl=PSF-2.0, MIT and BSD-3-Clause" \
        --validation "functions=$out/data/val.jsonl" --context 384 --batch-size 32 "$@"
}

train lm --architecture "$out/data/target.json" --tokenizer "$out/data/tokenizer" --out "$out/target" \
    --budget "$target_budget"
train head --kind decoder --target "$out/target" --out "$out/decoder" --budget "$draft_budget" \
    --generations 3000 --only-generations --temperature 0 --temperature 1
train distill --target "$out/target" --architecture "$out/data/draft.json" --out "$out/draft" \
    --budget "$draft_budget" --temperature 0 --temperature 1
