"""`grpo-nb` with a demo that is short: its warm-up ends at the first right answers (and says so on
standard output), and the held-out accuracy is measured at every second update."""

import functools
import sys

from grpo_nb import cli, demo

whole_warm_up = demo.warmed_up_model


def short_warm_up(seed, train, **options):
    print("a warm-up is made", flush=True)
    return whole_warm_up(seed, train, target=0.01, **options)


SHORTER = {
    "warmed_up_model": short_warm_up,
    "HeldOutAccuracy": functools.partial(demo.HeldOutAccuracy, every=2),
}

if __name__ == "__main__":
    vars(demo).update(SHORTER)
    sys.exit(cli.main())
