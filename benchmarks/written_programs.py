"""Does the tiny model of the page on 2048 write a better program than the best that it was shown?
The page's own cells, for several seeds.

    python benchmarks/written_programs.py --seeds 0 1 2 3 4     some minutes each, on one core
    python benchmarks/written_programs.py --updates 1           to try it out

Each seed has its own shown programs, model, training and sampling. For each, the table has the
progress of the best shown program and the gain of the likeliest written one over it: both play the
same hundred games, which were used for nothing else. The last line is the mean gain over the seeds
with its 95 % interval (Student's t). JSON comes last.
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
LAST = "def paired("  # the cell that compares; nothing after it is run
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
        source = re.sub(r"max_steps=60,", f"max_steps={updates},", source)
    return source


def measure(seed, updates=None):
    "Runs the page; a row of the table."
    names = {"__name__": "page"}
    for source in sources():
        if code := changed(source, seed, updates):
            exec(compile(code, PAGE.name, "exec"), names)
    names["pool"].close()
    log = [record for record in names["trainer"].log_history if "reward" in record]
    return dict(
        seed=seed,
        updates=len(log),
        best_shown=names["best_shown"],
        gain=names["more"],
        error=names["error"],
        drawn_before=float(names["drawn_before"].total.mean()),
        drawn_after=float(names["drawn_after"].total.mean()),
        seconds=log[-1]["seconds"],
        program=names["rules"](names["after"].program.code),
    )


def table(rows):
    "Lines of a table, and the mean gain."
    lines = [f"{'seed':>4s}{'best shown':>12s}{'gain':>8s}{'+-':>7s}{'points drawn':>18s}"]
    for row in rows:
        drawn = f"{row['drawn_before']:.2f} -> {row['drawn_after']:.2f}"
        lines.append(
            f"{row['seed']:4d}{row['best_shown']:12.2f}{row['gain']:+8.2f}"
            f"{2 * row['error']:7.2f}{drawn:>18s}"
        )
    if len(rows) in T95:
        gains = [row["gain"] for row in rows]
        half = T95[len(rows)] * statistics.stdev(gains) / math.sqrt(len(rows))
        lines.append(f"mean gain {statistics.mean(gains):+.2f} +- {half:.2f}, 95 % over seeds")
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
