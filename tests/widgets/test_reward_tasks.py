"""widgets.reward_tasks: of the examples the honest one earns most; a task is checked when it is
made."""

import pytest

from grpo_nb.environments import arithmetic
from grpo_nb.widgets.rewards import TASKS, RewardTask, judge_group, total


@pytest.mark.parametrize(
    "name, best",
    [
        ("sums", "right"),
        ("GSM8K", "right"),
        ("countdown", "right"),
        ("mathematics", "right"),
        ("e-mail", "as wanted"),
        ("2048", "keeps to a corner"),
        ("matrices", "fast"),
    ],
)
def test_of_the_examples_the_honest_one_earns_most(name, best):
    task = TASKS[name]()
    names, completions = list(task.examples), list(task.examples.values())
    judged = judge_group(task, completions, timeout_s=60.0)
    totals = {example: total(said, task.weights) for example, said in zip(names, judged)}
    assert totals[best] == max(totals.values()) and not any(
        one.fault for said in judged for one in said
    )
    assert all(one.why.reason for said in judged for one in said)
    if name != "sums":
        assert all(
            totals[example] < totals[best]
            for example in names
            if example.startswith(("sly", "wrong", "cut off"))
        )  # listing numbers pays where only the last one is read


def test_every_function_of_a_task_is_explained():
    for name in ("sums", "GSM8K", "countdown", "e-mail"):
        task = TASKS[name]()
        for function in task.functions:
            for text in task.examples.values():
                why = function.explain(text, **task.row)
                columns = {column: [value] for column, value in task.row.items()}
                assert why.reason and why.points == function(completions=[text], **columns)[0]


def test_a_task_is_checked():
    one = RewardTask(arithmetic.number_found_reward)
    assert one.weights == [1.0] and one.functions == [arithmetic.number_found_reward]
    with pytest.raises(ValueError, match="2 weights and 1 reward functions"):
        RewardTask(arithmetic.number_found_reward, weights=[1.0, 2.0])
