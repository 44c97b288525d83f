# Other recipes source this file with `.`: train_on_corpus CORPUS COMMAND OPTION... replaces the shell with `foredraft train COMMAND` on
# the texts that the embedded pair was trained on. CORPUS: the folder with cpython311_stdlib, thealgorithms, keon_algorithms and
# tinystories_train (.txt.gz), and heldout_code and tinystories_val, which are kept out of training.

train_on_corpus() {
    corpus=$1
    shift
    exec foredraft train "$@" \
        --data "$corpus/cpython311_stdlib.txt.gz" --licence cpython311_stdlib.txt.gz=PSF-2.0 \
        --data "$corpus/thealgorithms.txt.gz" --licence thealgorithms.txt.gz=MIT \
        --data "$corpus/keon_algorithms.txt.gz" --licence keon_algorithms.txt.gz=MIT \
        --data "$corpus/tinystories_train.txt.gz" --licence tinystories_train.txt.gz=CDLA-Sharing-1.0 \
        --separator-line "# ===== file: " --exclude "$corpus/heldout_code.txt.gz" \
        --validation "code=$corpus/heldout_code.txt.gz" --validation "stories=$corpus/tinystories_val.txt.gz"
}
