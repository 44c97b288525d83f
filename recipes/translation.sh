#!/bin/sh
# English to German: a T5 of 14 million parameters on Tatoeba's sentences in groups of one to six, and two drafts for it: a decoder
# of one layer over its encoder, and a small T5.
#
#   recipes/translation.sh PARALLEL OUT [TARGET_BUDGET [DRAFT_BUDGET]]
#
# PARALLEL: the folder with tatoeba_en_de_train.tsv.gz, and _val and _test (Tatoeba, CC BY 2.0 FR). Budgets: of training, as 40m; the
# defaults take an hour on two quiet cores. Give the same command again to go on after a kill. Writes OUT/data (pairs, tokenizer,
# architectures), OUT/target, OUT/decoder and OUT/draft. Drafts learn what the target itself answers.
set -eu
data=$1 out=$2 target_budget=${3:-40m} draft_budget=${4:-6m}
here=$(dirname "$0")

if [ ! -d "$out/data/tokenizer" ]; then
    python "$here/pairs.py" translation "$data" "$out/data"
fi

train() {
    command=$1
    shift
    foredraft train "$command" --pairs "$out/data/train.jsonl" --licence "train.jsonl=CC BY 2.0 FR" \
        --validation "tatoeba=$out/data/val.jsonl" --context 160 --batch-size 32 "$@"
}

train lm --architecture "$out/data/target.json" --tokenizer "$out/data/tokenizer" --out "$out/target" \
    --budget "$target_budget"
train head --kind decoder --target "$out/target" --out "$out/decoder" --budget "$draft_budget" \
    --generations 3000 --only-generations --temperature 0 --temperature 1
train distill --target "$out/target" --architecture "$out/data/draft.json" --out "$out/draft" \
    --budget "$draft_budget" --temperature 0 --temperature 1
