"""Do the tiny models of the pages on 2048 and on matrix products write better programs than they
were shown? The pages' own cells, for several seeds.

    python benchmarks/written_programs.py --seeds 0 1 2 3 4     2048, some minutes each, on one core
    python benchmarks/written_programs.py --page matmul --seeds 0 1 2 3 4
    python benchmarks/written_programs.py --updates 1           to try it out

Each seed has its own programs at random, of which the worse half is shown, its own model, training
and sampling. A table has the best shown program, the best that was kept back, the likeliest written
one and the best of a hundred written ones (for matrix products, of a hundred before the training
as well). On 2048 it is their progress: all play the same four
hundred games, which were used for nothing else. For matrix products it is how many times as fast
as the naive loops they are: by the count of instructions that the training pays for, and in a
second table by the clock of the sandbox. Below a table are the mean gains over the seeds with their
95 % intervals (Student's t). JSON comes last.
"""

import argparse
import json
import math
import re
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
PAGES = Path(__file__).resolve().parents[1] / "nbs/tutorials"
LAST = {  # of each page, the cell that compares; nothing after it is run
    "06_game2048_gpt_oss.ipynb": "def held_out(",
    "07_matmul_gpt_oss.ipynb": "def clocked(",
}
NAMES = {"2048": "06_game2048_gpt_oss.ipynb", "matmul": "07_matmul_gpt_oss.ipynb"}
SPEEDS = ("count", "clock")  # by which the page on matrix products measures
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}  # by number of seeds


def sources(page):
    "The code of a page up to the comparison, without magics and installation."
    for cell in json.loads((PAGES / page).read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and "#| eval: false" not in source:
            yield re.sub(r"^%.*$", "", source, flags=re.M)
            if LAST[page] in source:
                return


def changed(source, seed, updates):
    "A cell with another seed and length, trained without a dashboard; None to leave it out."
    if "dashboard.run(" in source:
        return "trainer.log.show = False\noutput = trainer.train()"
    if "await " in source or "dashboard_figure(trainer" in source:
        return None
    source = re.sub(r"^SEED = 0$", f"SEED = {seed}", source, flags=re.M)
    if updates:
        source = re.sub(r"max_steps=100,", f"max_steps={updates},", source)
        source = re.sub(r"^assert not TINY or .*$", "", source, flags=re.M)  # too few to learn
    return source


def compared(names):
    "What a page's last cell has found: measure -> program -> value, the two written ones last."
    if "speeds" in names:
        pairs = names["speeds"].items()
        return {key: {name: pair[at] for name, pair in pairs} for at, key in enumerate(SPEEDS)}
    games = names["rivals"] | {"likeliest": names["likeliest"], "best of 100": names["chosen"]}
    return {"progress": {name: statistics.mean(each) for name, each in games.items()}}


def measure(page, seed, updates=None):
    "Runs the page; a row of the tables."
    names = {"__name__": "page", "display": print}
    start = time.perf_counter()
    for source in sources(page):
        if code := changed(source, seed, updates):
            exec(compile(code, page, "exec"), names)
    names["pool"].close()
    log = [record for record in names["trainer"].log_history if "reward" in record]
    return dict(
        seed=seed,
        updates=len(log),
        **compared(names),
        drawn_before=float(names["drawn_before"].total.mean()),
        drawn_after=float(names["drawn_after"].total.mean()),
        training_s=log[-1]["seconds"],
        page_s=round(time.perf_counter() - start),
        program=names["rules"](names["CHOSEN"]),
    )


def table(rows, key):
    "Lines of a table of one measure, and the mean gains."
    columns = [*rows[0][key]]
    lines = [f"{key:8s}" + "".join(f"{name:>24s}" for name in columns)]
    for row in rows:
        values = "".join(f"{row[key][name]:24.2f}" for name in columns)
        lines.append(f"seed {row['seed']:3d}" + values)
    for one in columns[-2:]:
        for other in columns[:-2]:
            gains = [row[key][one] - row[key][other] for row in rows]
            if len(rows) in T95:
                half = T95[len(rows)] * statistics.stdev(gains) / math.sqrt(len(rows))
                mean = statistics.mean(gains)
                lines.append(f"{one} over {other}: {mean:+.2f} +- {half:.2f}, 95 % over seeds")
    return lines


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--page", choices=NAMES, default="2048")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--updates", type=int, help="of each training; default: as on the page")
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    rows = [measure(NAMES[args.page], seed, args.updates) for seed in args.seeds]
    for key in ("progress", *SPEEDS):
        if key in rows[0]:
            print(*table(rows, key), "", sep="\n")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
