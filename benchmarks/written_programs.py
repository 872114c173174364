"""Does the tiny model of the page on 2048 write better programs than it was shown? The page's own
cells, for several seeds.

    python benchmarks/written_programs.py --seeds 0 1 2 3 4     some minutes each, on one core
    python benchmarks/written_programs.py --updates 1           to try it out

Each seed has its own programs at random, of which the worse half is shown, its own model, training
and sampling. The table has the progress of the best shown program, of the best that was kept back,
of the likeliest written one and of the best of a hundred written ones: all play the same four
hundred games, which were used for nothing else. Below it are the mean gains over the seeds with
their 95 % intervals (Student's t). JSON comes last.
"""

import argparse
import json
import math
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
PAGE = Path(__file__).resolve().parents[1] / "nbs/tutorials/06_game2048_gpt_oss.ipynb"
LAST = "def held_out("  # the cell that compares; nothing after it is run
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}  # by number of seeds


def sources():
    "The code of the page up to the comparison, without magics and installation."
    for cell in json.loads(PAGE.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and "#| eval: false" not in source:
            yield re.sub(r"^%.*$", "", source, flags=re.M)
            if LAST in source:
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
    return source


def measure(seed, updates=None):
    "Runs the page; a row of the table."
    names = {"__name__": "page"}
    for source in sources():
        if code := changed(source, seed, updates):
            exec(compile(code, PAGE.name, "exec"), names)
    names["pool"].close()
    mean = {name: statistics.mean(names["rivals"][name]) for name in names["rivals"]}
    log = [record for record in names["trainer"].log_history if "reward" in record]
    return dict(
        seed=seed,
        updates=len(log),
        best_shown=mean["best shown"],
        best_kept_back=mean["best kept back"],
        likeliest=statistics.mean(names["likeliest"]),
        chosen=statistics.mean(names["chosen"]),
        drawn_before=float(names["drawn_before"].total.mean()),
        drawn_after=float(names["drawn_after"].total.mean()),
        seconds=log[-1]["seconds"],
        program=names["rules"](names["CHOSEN"]),
    )


COLUMNS = "best_shown best_kept_back likeliest chosen".split()


def table(rows):
    "Lines of a table, and the mean gains."
    lines = [f"{'seed':>4s}" + "".join(f"{name:>16s}" for name in COLUMNS)]
    for row in rows:
        lines.append(f"{row['seed']:4d}" + "".join(f"{row[name]:16.2f}" for name in COLUMNS))
    for one in ("likeliest", "chosen"):
        for other in ("best_shown", "best_kept_back"):
            gains = [row[one] - row[other] for row in rows]
            if len(rows) in T95:
                half = T95[len(rows)] * statistics.stdev(gains) / math.sqrt(len(rows))
                mean = statistics.mean(gains)
                lines.append(f"{one} over {other}: {mean:+.2f} +- {half:.2f}, 95 % over seeds")
    return lines


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--updates", type=int, help="of each training; default: as on the page")
    args = parser.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    rows = [measure(seed, args.updates) for seed in args.seeds]
    print(*table(rows), json.dumps(rows), sep="\n")


if __name__ == "__main__":
    main()
