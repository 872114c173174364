"""What stored answers say beyond a mean, for gsm8k.py and programs.py: intervals, pass@k, maj@k,
problems that were never solved before, and words of doubt."""

import math
import random
import re
import statistics

Z = 1.959964  # of 95 %


def wilson(count, of):
    "A share's 95 % interval (Wilson's), which stays between 0 and 1 for small counts too."
    share, spread = count / of, Z * Z / of
    middle = share + spread / 2
    half = Z * math.sqrt((share * (1 - share) + spread / 4) / of)
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def mean(values):
    return sum(values) / len(values)


def bootstrap(values, draws=2000, of=mean):
    "The mean of problems' values, or `of` them, and 95 % by a bootstrap over problems."
    rng, count = random.Random(0), len(values)
    found = sorted(of(rng.choices(values, k=count)) for _ in range(draws))
    return of(values), found[draws // 40], found[-draws // 40 - 1]


def interval(marks, before, draws=2000):
    """Points gained over `before`, the marks of one model or of one for each seed: the mean, and
    95 % by a bootstrap over problems and seeds."""
    befores = [before] * len(marks) if isinstance(before, str) else before
    rng, count = random.Random(0), len(befores[0])
    gains = [[(a == "r") - (b == "r") for a, b in zip(*pair)] for pair in zip(marks, befores)]
    means, of_runs = [], {}
    for _ in range(draws):
        runs = tuple(sorted(rng.choices(range(len(gains)), k=len(gains))))
        if runs not in of_runs:
            of_runs[runs] = [sum(each) for each in zip(*(gains[run] for run in runs))]
        means.append(100 * sum(rng.choices(of_runs[runs], k=count)) / count / len(runs))
    means.sort()
    mean = 100 * sum(map(sum, gains)) / count / len(gains)
    return mean, means[int(0.025 * draws)], means[int(0.975 * draws)]


def pass_at(k, right_ones, drawn):
    "The chance that one of k answers is right, from `drawn` of which `right_ones` are (unbiased)."
    return 1 - math.comb(drawn - right_ones, k) / math.comb(drawn, k)


def majority_at(k, right_ones, others, silent=0):
    """The chance that most of k answers agree on the right one, over all subsets of those drawn:
    `others` are the counts of the wrong ones, `silent` gave none; a tie is decided by lot."""
    drawn = right_ones + sum(others) + silent
    chance = 0.0
    for votes in range(max(1, k - drawn + right_ones), min(k, right_ones) + 1):
        left = k - votes
        # (answers used, wrong ones with as many votes) -> number of ways
        ways = {(used, 0): math.comb(silent, used) for used in range(min(silent, left) + 1)}
        for count in others:
            longer = {}
            for (used, ties), number in ways.items():
                for taken in range(min(count, votes, left - used) + 1):
                    key = used + taken, ties + (taken == votes)
                    longer[key] = longer.get(key, 0) + number * math.comb(count, taken)
            ways = longer
        won = sum(n / (1 + ties) for (used, ties), n in ways.items() if used == left)
        chance += math.comb(right_ones, votes) * won
    return chance / math.comb(drawn, k)


# the words that the lesson on a real run counts, which are read there
DOUBT = re.compile(r"\b(wait|aha|hmm|actually|however|mistake|re-?check|reconsider)\b", re.I)


def doubts(text):
    "Whether an answer has such a word, which may be meant otherwise."
    return DOUBT.search(text) is not None


def newly_solved(counts, marks):
    "Problems without a right answer before (counts), and how many of them are right now (marks)."
    never = [place for place, count in enumerate(counts) if not count]
    return len(never), sum(marks[place] == "r" for place in never)


BASES = {  # records of one run on several bases, by the first part of their names
    "bf16": "bfloat16",
    "fp8_row": "float8, a scale for a row",
    "fp8_block": "float8, for 128 x 128",
    "nf4": "NF4",
    "mxfp4": "MXFP4's values",
}
SAME = {"bf16_0": "ours_40", "bf16_before": "before"}  # stored under other names


def of_bases(stored, way="after"):
    """(name of a base, marks before training, {seed: record}) of each that was trained, from {name:
    record}; None where it was not judged before."""
    for base in BASES:
        runs, before = {}, stored.get(SAME.get(f"{base}_before", f"{base}_before"), {})
        for seed in range(9):
            record = stored.get(SAME.get(f"{base}_{seed}", f"{base}_{seed}"), {})
            if way in record:
                runs[seed] = record
        if runs:
            yield base, before.get(way, {}).get("marks"), runs


def speed_of(record, first=5):
    "(tokens drawn a second, seconds of an update, mean gap in nats) without the first updates."
    log, drawn = record["log"][first:], record["arguments"]["completions"]
    tokens = drawn * sum(one["completions/mean_length"] for one in log)
    return (
        tokens / sum(one["seconds/sample"] for one in log),
        statistics.median(one["step_time"] for one in log),
        statistics.mean(one["sampling/gap_mean"] for one in log),
    )


def row_of_base(stored, base, before, runs, way="after"):
    """What a table says of a base that was trained: peak GiB, tokens a second, seconds of an
    update, gap, right before and after, points gained, and those over bfloat16 with these seeds."""
    marks = {seed: record[way]["marks"] for seed, record in runs.items()}
    speed = zip(*(speed_of(record) for record in runs.values()))
    tokens, seconds, gap = (statistics.mean(one) for one in speed)
    bf16 = {base: runs for base, _, runs in of_bases(stored, way)}.get("bf16", {})
    both = [seed for seed in marks if seed in bf16 and base != "bf16"]
    points = "{:+.1f} ({:+.1f} to {:+.1f})".format
    over = [bf16[seed][way]["marks"] for seed in both]
    return (
        f"{max(record['peak_gib'] for record in runs.values()):.1f}",
        f"{tokens:,.0f}",
        f"{seconds:.1f}",
        f"{gap:.4f}",
        f"{100 * before.count('r') / len(before):.1f} %" if before else "",
        ", ".join(f"{100 * one.count('r') / len(one):.1f}" for one in marks.values()) + " %",
        points(*interval([*marks.values()], before)) if before else "",
        points(*interval([marks[seed] for seed in both], over)) if both else "",
    )
