"""What stored answers say beyond a mean, for gsm8k.py and programs.py: intervals, pass@k, maj@k,
problems that were never solved before, and words of doubt."""

import math
import random
import re

Z = 1.959964  # of 95 %


def wilson(count, of):
    "A share's 95 % interval (Wilson's), which stays between 0 and 1 for small counts too."
    share, spread = count / of, Z * Z / of
    middle = share + spread / 2
    half = Z * math.sqrt((share * (1 - share) + spread / 4) / of)
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def bootstrap(values, draws=2000):
    "The mean of problems' values, and 95 % by a bootstrap over problems."
    rng, count = random.Random(0), len(values)
    means = sorted(sum(rng.choices(values, k=count)) / count for _ in range(draws))
    return sum(values) / count, means[draws // 40], means[-draws // 40 - 1]


def interval(marks, before, draws=2000):
    "Points gained over `before`: the mean, and 95 % by a bootstrap over problems and seeds."
    rng, count = random.Random(0), len(before)
    gains = [[(a == "r") - (b == "r") for a, b in zip(run, before)] for run in marks]
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
