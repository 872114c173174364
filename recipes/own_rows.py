"The reward of own_rows.yaml: one point where the last number of an answer is the right one."

import re


def right(completions, answer, **columns):
    "A score for each completion; `answer` and `columns` are the columns of the rows."
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    numbers = [re.findall(r"-?\d+", text)[-1:] for text in texts]
    return [float(found == [str(one)]) for found, one in zip(numbers, answer)]
