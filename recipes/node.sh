#!/usr/bin/env bash
# What each node of a run does: its first SERVERS cards draw, the next TRAINERS cards train.
# two_nodes.slurm and two_nodes.yml call it; by hand, on every node with its own NODE:
#
#     HOSTS="10.0.0.1 10.0.0.2" NODE=0 SERVERS=2 TRAINERS=6 RUN=run.yaml \
#     SERVE="vllm serve MODEL --enable-lora ..." VLLM_API_KEY=... bash recipes/node.sh
#
# SERVE is what `grpo-nb plan run.yaml --cards 6 --samplers 2` prints, without the port. The recipe's
# output_dir has to be a folder that every node sees: adapters travel through it.
set -euo pipefail
export VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
read -ra hosts <<< "$HOSTS"
here=${hosts[NODE]} urls=()
for host in "${hosts[@]}"; do
  for ((i = 0; i < SERVERS; i++)); do urls+=("http://$host:$((${PORT:-8000} + i))"); done
done

trap 'kill $(jobs -p) 2> /dev/null || true' EXIT  # the servers end with the trainers
trap : TERM  # which the trainers get as well, and write a checkpoint: this script ends after them
for ((i = 0; i < SERVERS; i++)); do
  CUDA_VISIBLE_DEVICES=$i $SERVE --host "$here" --port $((${PORT:-8000} + i)) --api-key "$VLLM_API_KEY" &
done
CUDA_VISIBLE_DEVICES=$(seq -s, "$SERVERS" $((SERVERS + TRAINERS - 1))) \
torchrun --nnodes "${#hosts[@]}" --node-rank "$NODE" --nproc-per-node "$TRAINERS" \
  --rdzv-endpoint "${hosts[0]}:${MASTER_PORT:-29500}" -m grpo_nb train --config "$RUN" --resume \
  --use_vllm true --vllm_mode server --vllm_server_base_url "$(IFS=,; echo "${urls[*]}")" \
  --vllm_server_api_key "$VLLM_API_KEY" --vllm_server_timeout 1200
