#!/usr/bin/env bash
# What is left of a run of two cards that is ended or loses one of them, with MODEL, DATA and OUT in
# the environment: SIGTERM after update 6, on from there on one card to update 9 and on two to 12;
# SIGKILL of the second process after update 5 of another run, which is resumed. $OUT/lost.json has a
# line for each: seconds from the signal (or the start) to the end, exit status, updates, checkpoints,
# processes still there, and what was said. BATCH (32): completions of a micro-batch.
set -uo pipefail
out=$OUT/lost
mkdir -p "$out"
: > "$out/lines"
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
starts() {  # PART RUN CARDS UPDATES: gsm8k.py in the background; its launcher's id is `launcher`
  part=$1 name=$2 cards=$3
  local how=(python -m torch.distributed.run --standalone --nproc-per-node "$cards") seen=${CUDA_VISIBLE_DEVICES-0,1}
  if [ "$cards" = 1 ]; then how=(python) seen=${seen%%,*}; fi
  CUDA_VISIBLE_DEVICES=$seen "${how[@]}" benchmarks/gsm8k.py "$MODEL" --data "$DATA" --out "$out" run --name "$name" --no-before \
    --no-after --completions 64 --batch "${BATCH:-32}" --tokens 100 --save 2 --updates "$4" "${@:5}" > "$out/$part.log" 2>&1 &
  launcher=$! since=$(date +%s.%N)
}
reaches() {  # UPDATE: wait until it is logged
  until grep -q "^$1 reward" "$out/$part.log" || ! kill -0 $launcher 2>/dev/null; do sleep .05; done
  processes=$(pgrep -P $launcher)
  since=$(date +%s.%N)
}
ends() {  # wait for it, and write down how it ended
  wait $launcher
  python - "$part" $? "$since" "$out" "$name" $processes <<'END' | tee -a "$out/lines"
import json, os, re, sys, time
part, status, since, out, name, *processes = sys.argv[1:]
text = open(f"{out}/{part}.log").read()
updates = [int(one) for one in re.findall(r"^(\d+) reward", text, re.M)]
saved = [int(one.split("-")[1]) for one in os.listdir(f"{out}/{name}") if re.fullmatch(r"checkpoint-\d+", one)]
said = [line[:300] for line in text.splitlines() if re.search("checkpoint|SIGTERM|Signal|signal", line)]
print(json.dumps(dict(
    part=part, seconds=round(time.time() - float(since), 1), status=int(status),
    updates=[min(updates), max(updates)] if updates else [], checkpoints=sorted(saved),
    alive=[one for one in processes if os.path.exists(f"/proc/{one}")],
    said=list(dict.fromkeys(said)), last=text.splitlines()[-3:],
)))
END
  processes=
}
processes=
starts sigterm ended 2 40; reaches 6; kill $launcher; ends
starts one ended 1 9 --resume; ends
starts two ended 2 12 --resume; ends
starts sigkill killed 2 40; reaches 5
for one in $processes; do tr '\0' '\n' < /proc/$one/environ | grep -qx RANK=1 && kill -9 $one; done
ends
starts again killed 2 8 --resume; ends
python -c 'import json, sys; print(json.dumps([json.loads(line) for line in sys.stdin]))' < "$out/lines" > "$OUT/lost.json"
