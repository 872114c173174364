#!/usr/bin/env bash
# One card trains and the other draws: one_draws.sh vllm|ours STALENESS, with CUDA_VISIBLE_DEVICES=A,B
# and MODEL, DATA, OUT, NAME, VLLM (vllm's command) in the environment. How busy both cards were is in
# $OUT/$NAME.csv, every half second.
set -euo pipefail
trains=${CUDA_VISIBLE_DEVICES%%,*} draws=${CUDA_VISIBLE_DEVICES##*,} port=$((8000 + ${CUDA_VISIBLE_DEVICES%%,*}))
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
if [ "$1" = vllm ]; then
  CUDA_VISIBLE_DEVICES=$draws VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 ${VLLM:-vllm} serve "$MODEL" --port $port --enable-lora \
    --max-lora-rank 32 --max-loras 4 --logprobs-mode processed_logprobs --max-model-len 1024 > "$OUT/$NAME.server" 2>&1 &
else
  CUDA_VISIBLE_DEVICES=$draws python -m grpo_nb serve "$MODEL" --port $port --lora-dir "$OUT" > "$OUT/$NAME.server" 2>&1 &
fi
for _ in $(seq 240); do
  if curl -sf --noproxy '*' "http://127.0.0.1:$port/health" > /dev/null; then break; fi
  sleep 1
done
nvidia-smi -i "$trains,$draws" --query-gpu=timestamp,index,utilization.gpu,memory.used --format=csv,noheader,nounits -lms 500 > "$OUT/$NAME.csv" 2>/dev/null &
CUDA_VISIBLE_DEVICES=$trains python benchmarks/gsm8k.py "$MODEL" --data "$DATA" --out "$OUT" run --batch 256 --updates 30 \
  --no-before --no-after --server "http://127.0.0.1:$port" --staleness "$2" --name "$NAME"
