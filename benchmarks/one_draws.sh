#!/usr/bin/env bash
# One card trains and the other draws: one_draws.sh vllm|ours STALENESS..., with CUDA_VISIBLE_DEVICES=A,B
# and MODEL, DATA, OUT, VLLM (vllm's command) in the environment; UPDATES of each (30). One server
# draws for all of them: give each number more than once, in turn (0 1 2 0 1 2). `killed` in place of
# a number comes last: the server is killed at its fifth update.
# Run N leaves $OUT/WHO_STALENESS_N.json and, every half second, how busy both cards were in .csv.
set -euo pipefail
who=$1; shift
trains=${CUDA_VISIBLE_DEVICES%%,*} draws=${CUDA_VISIBLE_DEVICES##*,} port=$((8000 + ${CUDA_VISIBLE_DEVICES%%,*}))
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
answers() { curl -sf --noproxy '*' "http://127.0.0.1:$port/health" > /dev/null; }
serve() {  # in a process group of its own, so that all of it can be ended
  if [ "$who" = vllm ]; then
    CUDA_VISIBLE_DEVICES=$draws VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 setsid ${VLLM:-vllm} serve "$MODEL" --port $port --enable-lora \
      --max-lora-rank 32 --max-loras 4 --logprobs-mode processed_logprobs --max-model-len 1024 > "$OUT/$1.server" 2>&1 &
  else
    CUDA_VISIBLE_DEVICES=$draws setsid python -m grpo_nb serve "$MODEL" --port $port --lora-dir "$OUT" > "$OUT/$1.server" 2>&1 &
  fi
  server=$!
  for _ in $(seq 240); do answers && return; kill -0 $server || exit 1; sleep 1; done
  echo "no answer at port $port after 240 s: see $OUT/$1.server"; exit 1
}
if answers; then echo "something answers at port $port already: end it first"; exit 1; fi
serve "$who"
number=0
for staleness; do
  number=$((number + 1)) name=${who}_${staleness}_$number
  nvidia-smi -i "$trains,$draws" --query-gpu=timestamp,index,utilization.gpu,memory.used --format=csv,noheader,nounits -lms 500 > "$OUT/$name.csv" 2>/dev/null & watch=$!
  CUDA_VISIBLE_DEVICES=$trains python benchmarks/gsm8k.py "$MODEL" --data "$DATA" --out "$OUT" run --batch 256 --updates "${UPDATES:-30}" --no-before --no-after \
    --server "http://127.0.0.1:$port" --staleness "${staleness/killed/1}" --name "$name" > "$OUT/$name.log" 2>&1 & run=$!
  if [ "$staleness" = killed ]; then
    until grep -q '^5 reward' "$OUT/$name.log" || ! kill -0 $run 2>/dev/null; do sleep .2; done
    kill -9 -- -$server
  fi
  wait $run || [ "$staleness" = killed ]
  kill $watch 2>/dev/null || true
done
kill -9 -- -$server 2>/dev/null || true
