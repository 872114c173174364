"""Runs that wait for cards: a line of a file is started when as many cards as it asks for are free.

    python benchmarks/on_cards.py benchmarks/gsm8k_runs.txt --out DIR --minutes 28 \\
        MODEL=/path/to/model DATA=/path/to/gsm8k
        on every card of this machine, or those of CUDA_VISIBLE_DEVICES; what is in DIR already
        (NAME.json) is not run again, and nothing is started that would not end in time

A line is `CARDS MINUTES NAME: COMMAND`. In COMMAND $OUT is DIR, $NAME the name, and others are what
the command line sets. A name that waits for another one's result is written NAME<OTHER. What a
command prints is in DIR/NAME.log.
"""

import argparse
import os
import re
import subprocess
import time
from pathlib import Path

LINE = re.compile(r"(\d+)\s+([\d.]+)\s+([\w.-]+)(?:<([\w.-]+))?:\s*(.+)")


def read(path):
    "(cards, minutes, name, the name that it waits for or None, command) of each line."
    lines = [line.strip() for line in Path(path).read_text().splitlines()]
    found = []
    for line in filter(None, (line.split("#")[0].strip() for line in lines)):
        match = LINE.fullmatch(line)
        if not match:
            raise SystemExit(f"{line!r} is not `CARDS MINUTES NAME: COMMAND`")
        cards, minutes, name, first, command = match.groups()
        found.append((int(cards), float(minutes), name, first, command))
    return found


def start(command, name, cards, out, values):
    "The process, in a shell, with the cards that it has."
    there = dict(os.environ, **values, OUT=str(out), NAME=name)
    here = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = here.split(",") if here else range(max(cards) + 1)
    there["CUDA_VISIBLE_DEVICES"] = ",".join(str(names[card]) for card in cards)
    with open(out / f"{name}.log", "w") as log:
        return subprocess.Popen(command, shell=True, env=there, stdout=log, stderr=log)


def over(name, running, out):
    "Whether a run has ended and left its result."
    return name not in running and (out / f"{name}.json").exists()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument("values", nargs="*", help="NAME=VALUE, for $NAME in commands")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cards", type=int, help="how many (default: all)")
    parser.add_argument("--minutes", type=float, default=1e9, help="until all have to be over")
    parser.add_argument("--only", nargs="*", help="names")
    arguments = parser.parse_intermixed_args()
    out, began = arguments.out.absolute(), time.time()
    out.mkdir(parents=True, exist_ok=True)
    count = arguments.cards
    if count is None:
        import torch

        count = torch.cuda.device_count()
    values = dict(one.split("=", 1) for one in arguments.values)
    waiting = [
        run
        for run in read(arguments.runs)
        if not (out / f"{run[2]}.json").exists()
        and (not arguments.only or run[2] in arguments.only)
    ]
    free, running, failed = set(range(count)), {}, set()
    while waiting or running:
        left = arguments.minutes - (time.time() - began) / 60
        for run in list(waiting):
            cards, minutes, name, first, command = run
            if cards > count or minutes > left or first in failed:
                waiting.remove(run)
                print(f"{name}: left out ({cards} card(s), {minutes:g} minutes)", flush=True)
            elif cards <= len(free) and (first is None or over(first, running, out)):
                given = sorted(free)[:cards]
                free -= set(given)
                waiting.remove(run)
                running[name] = start(command, name, given, out, values), given, time.time()
                print(f"{name}: on card {', '.join(map(str, given))}", flush=True)
        for name, (process, given, since) in list(running.items()):
            if process.poll() is not None:
                free |= set(given)
                del running[name]
                failed |= {name} if process.returncode else set()
                told = "done" if process.returncode == 0 else f"failed ({process.returncode})"
                print(f"{name}: {told} after {time.time() - since:.0f} s", flush=True)
        blocked = {run[3] for run in waiting} - set(running) - {run[2] for run in waiting}
        failed |= {name for name in blocked if name and not (out / f"{name}.json").exists()}
        time.sleep(0.2)


if __name__ == "__main__":
    main()
