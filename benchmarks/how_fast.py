"""Every table of docs/how_fast.md, one after the other, on the card that is here.

    python benchmarks/how_fast.py                     all of ours, about an hour on an H200
    python benchmarks/how_fast.py --only decode lora  some of them
    python benchmarks/how_fast.py --sites DIR --vllm-python PY
        with the peers that are installed: DIR/site-unsloth, a Python that has vLLM
    python benchmarks/how_fast.py --list              the commands, and nothing is run

Each script prints ours beside the peer from the same run; what it printed is kept in OUT/NAME.txt,
and its table is what the page holds. A script that fails is named at the end, and the next one
runs.
"""

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def commands(args):
    "Name of the table -> the script and its arguments."
    python, decode, replayed, sites, dense = args.vllm_python, "", "", "", ""
    if args.sites:
        site, sites = shlex.quote(args.sites), f"--sites {shlex.quote(args.sites)}"
        decode = f"--vllm --vllm-site {site}/site-vllm"
        replayed = f"--only replayed modules generate unsloth {sites}"
        dense = f"--only own trl unsloth --trl-site {site}/site-trl --vllm-site {site}/site-vllm"
        dense = f"{dense} {sites}"
    return {
        "decode": f"decode.py --ours --ours-mxfp4 {decode}",
        "adapters": f"decode.py --ours-mxfp4 --adapters all {decode}",
        "nf4": f"decode_modules.py --models Qwen2.5-1.5B:nf4 --rows 1 8 32 {replayed}",
        "rollouts": "rows.py --parts first,company,rows",
        "filters": "rows.py --parts kernels,filters",
        "lora": f"train_step.py {sites}",
        "short": "train_step.py --record --only bf16 mxfp4 dense --lengths 2048",
        "first": "grpo_step.py --only mxfp4 --steps 3",
        "step": f"grpo_step.py {sites}",
        "sampler": f"server.py --vllm-python {shlex.quote(python)}"
        if python
        else "server.py --only own",
        "dense": f"dense_step.py {dense}",
        "length": "context.py",
    }


def run(name, command, out):
    "Run one script, show what it prints and keep it; its exit status."
    print(f"== {name}: python benchmarks/{command}", flush=True)
    began = time.time()
    with (
        (out / f"{name}.txt").open("w") as kept,
        subprocess.Popen(
            [sys.executable, "-u", str(FOLDER / command.split()[0]), *shlex.split(command)[1:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        for line in process.stdout:
            kept.write(line)
            print(line, end="", flush=True)
    print(f"== {name}: {time.time() - began:.0f} s, exit status {process.returncode}", flush=True)
    return process.returncode


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="names of tables, as --list prints them")
    parser.add_argument("--list", action="store_true", help="print the commands")
    parser.add_argument("--sites", help="a folder with site-unsloth and the like")
    parser.add_argument("--vllm-python", help="a Python that has vLLM")
    parser.add_argument("--out", type=Path, default=Path("how_fast"), help="a folder for the logs")
    args = parser.parse_args()
    todo = commands(args)
    if unknown := set(args.only or ()) - todo.keys():
        parser.error(f"no table {', '.join(sorted(unknown))}; there are {', '.join(todo)}")
    todo = {name: " ".join(todo[name].split()) for name in args.only or todo}
    if args.list:
        print("\n".join(f"{name}: python benchmarks/{c}" for name, c in todo.items()))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    failed = [name for name, command in todo.items() if run(name, command, args.out)]
    if failed:
        print(f"failed: {', '.join(failed)}; {args.out} holds what they printed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
