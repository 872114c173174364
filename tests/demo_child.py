"""`grpo-nb` with a demo that is short: few sums in a step, a warm-up that ends when it first asks
(and says so on standard output), an answer that is right if its first digit is, and the held-out
accuracy measured at every second update. PAUSE, in the environment: seconds that a measurement
takes besides, so that a test has the time to interrupt it."""

import functools
import os
import sys
import time

from grpo_nb import cli, demo

whole_warm_up = demo.warmed_up_model


def short_warm_up(seed, train, **options):
    print("a warm-up is made", flush=True)
    return whole_warm_up(seed, train, target=0.0, **options)


def begins_alike(text, answer):
    return text[:1] == answer[0]


def first_digit_reward(completions, answer, **others):
    return [float(begins_alike(text, right)) for text, right in zip(completions, answer)]


class Measured(demo.HeldOutAccuracy):
    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        time.sleep(float(os.environ.get("PAUSE", 0)))


SHORTER = {
    "PROMPTS": 8,
    "addition_problems": functools.partial(demo.addition_problems, held_out=100),
    "fine_tune": functools.partial(demo.fine_tune, batch_size=64),
    "warmed_up_model": short_warm_up,
    "exact_match": begins_alike,
    "exact_answer_reward": first_digit_reward,
    "HeldOutAccuracy": functools.partial(Measured, every=2),
}

if __name__ == "__main__":
    vars(demo).update(SHORTER)
    sys.exit(cli.main())
