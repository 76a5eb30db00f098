#!/usr/bin/env bash
# From nothing to a trained GPT: install, corpus, tokenizer, token files, training on two processes, evaluation,
# checkpoints, curves, a sample.  A second run skips steps that are complete; after Ctrl-C the next run resumes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

out=runs/quickstart
setup_venv
mkdir -p "$out"
python="$VENV/bin/python"

if [ ! -f "$out/corpus.jsonl" ]; then
    step "Corpus: the sources and documentation of Python's standard library"
    "$python" tools/make_corpus.py --output "$out/corpus.jsonl"
fi
if [ ! -f "$out/tokenizer.model" ]; then
    step "Tokenizer: SentencePiece BPE, 2048 tokens"
    "$python" tools/train_tokenizer.py --input "$out/corpus.jsonl" --vocab-size 2048 --output-prefix "$out/tokenizer"
fi
if [ ! -f "$out/corpus_text_document.idx" ]; then
    step "Token files"
    "$python" tools/preprocess_data.py --input "$out/corpus.jsonl" --tokenizer-model "$out/tokenizer.model" \
        --output-prefix "$out/corpus" --append-eod --workers 2
fi

# Two data-parallel processes, or one for a single GPU; bf16 where the device multiplies it natively.
processes=2
precision=(train.precision=fp32)
if has_gpu; then
    processes=$("$python" -c 'import torch; print(min(max(torch.cuda.device_count(), 1), 2))')
    precision=()
elif grep -q -s -w -e avx512_bf16 -e amx_bf16 /proc/cpuinfo; then
    precision=()
fi
step "Training on $processes process(es)"
bash scripts/launch_local.sh "$processes" --config configs/quickstart.yaml "${precision[@]}" ||
    fail "training did not reach its end; what was saved is kept: run this again to go on from there"

step "Curves"
"$python" tools/plot_run.py --load "$out/checkpoints" --output "$out/curves.png" --overwrite
echo "$out/curves.png"

step "A sample"
"$python" tools/generate.py --load "$out/checkpoints" --prompt "def " --max-new-tokens 200 --temperature 0.8

step "Next"
echo "train on your own text (README.md), or longer:
    bash scripts/launch_local.sh $processes --config configs/quickstart.yaml ${precision[*]} train.train_iters=4000 checkpoint.save=runs/longer checkpoint.load=runs/longer"
