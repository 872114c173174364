"Programs of the user's inside of a run, reward functions, tools and samplers, move nothing of it."

import io
import os
import random
import signal
import sys
import threading
import time
import warnings

import numpy
import pandas
import pytest
import torch
from small_runs import CLOCKS, digits, one_thread, small_trainer, weights_of  # noqa: F401

from grpo_nb.training.state import Surroundings, own_numbers, random_state

HELD = [{"prompt": "3+4=", "answer": "7"}, {"prompt": "8+1=", "answer": "9"}]


@pytest.fixture(autouse=True)
def put_back(monkeypatch):
    "Whatever a failing test leaves behind."
    here, flag = os.getcwd(), torch.is_grad_enabled()
    stops = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    streams = sys.stdout, sys.stderr
    yield
    sys.stdout, sys.stderr = streams
    for number, handler in stops.items():
        signal.signal(number, handler)
    for device in ("cpu", "cuda"):
        torch.set_autocast_enabled(device, False)
    os.chdir(here)
    torch.set_grad_enabled(flag)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False


def reseed():
    random.seed(0), numpy.random.seed(0), torch.manual_seed(0)


def move_all(model, folder):
    "What a program may do to its process and to the model."
    reseed()
    with torch.enable_grad():
        sum(weight.sum() for weight in model.parameters() if weight.requires_grad).backward()
    os.chdir(folder)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(3)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = True
    torch.set_autocast_enabled("cpu", True)
    sys.stdout = sys.stderr = io.StringIO()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    model.eval().requires_grad_(False)


def finish(trainer):
    "What a run leaves: its numbers without clocks, and its weights."
    trainer.train()
    records = [{k: v for k, v in r.items() if k not in CLOCKS} for r in trainer.log_history]
    return records, weights_of(trainer.model)


def same(one, other):
    assert one[0] == other[0]
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


@pytest.mark.parametrize("kind", ["plain", "async", "raises"])
def test_a_reward_that_moves_everything_moves_nothing(kind, tmp_path, monkeypatch):
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = dict(eval_strategy="steps", eval_steps=1, num_generations_eval=2, max_steps=2)
    settings |= dict(arguments={"eval_dataset": HELD})
    quiet = finish(small_trainer("quiet", digits, **settings))
    model = []

    def rude(completions, **columns):
        move_all(model[0], tmp_path / "away")
        if kind == "raises":
            with torch.device("cpu"):
                raise OSError("the judge is gone")
        return digits(completions)

    async def rude_later(completions, **columns):
        return rude(completions)

    rude.__name__ = rude_later.__name__ = "digits"
    trainer = small_trainer("rude", rude_later if kind == "async" else rude, **settings)
    model.append(trainer.model)
    with pytest.warns(UserWarning, match="^reward function 'digits' changed") as told:
        if kind == "raises":
            with pytest.raises(RuntimeError, match="the judge is gone"):
                trainer.train()
        else:
            same(quiet, finish(trainer))
    (said,) = [str(one.message) for one in told if "changed" in str(one.message)]
    for word in (
        "which weights train",
        "gradients that",
        "folder",
        "default number format",
        "cuDNN",
        "output goes",
    ):
        assert word in said
    # each thread's own, and what the main thread alone may set
    for word in ("keeps gradients", "default device", "torch's threads", "autocast", "Ctrl-C"):
        assert (word in said) == (kind != "async")
    assert os.getcwd() == str(tmp_path) and torch.is_grad_enabled()
    assert all(weight.requires_grad for weight in trainer.model.parameters())
    assert not list((tmp_path / "away").iterdir())
    trainer.save_model()
    assert (tmp_path / "rude" / "config.json").is_file()


def test_a_reward_cannot_move_the_step_or_what_another_is_given(tmp_path):
    def run(name, rude):
        given = []

        def first(completions, prompts, answer, completion_ids, trainer_state, **columns):
            scores = digits(completions)
            if rude:
                trainer_state.global_step, trainer_state.max_steps = 1_000, 1
                trainer_state.log_history.clear()
                completions[:], answer[:] = ["1"] * len(scores), [""] * len(scores)
                prompts.clear(), completion_ids.clear()
            return scores

        def second(completions, **columns):
            given.append([completions, *(columns[name] for name in ("prompts", "answer"))])
            given.append([columns["completion_ids"], columns["trainer_state"].global_step])
            return [float(len(text)) for text in completions]

        settings = dict(log_completions=True, save_strategy="steps", save_steps=1)
        return *finish(small_trainer(tmp_path / name, [first, second], **settings)), given

    quiet, rude = run("quiet", False), run("rude", True)
    same(quiet, rude)
    assert quiet[2] == rude[2] and quiet[2][1][1] == 0
    assert [p.name for p in sorted((tmp_path / "rude").glob("check*"))] == [
        "checkpoint-1",
        "checkpoint-2",
    ]
    tables = [
        [pandas.read_parquet(p).to_dict("records") for p in sorted((tmp_path / n).rglob("*.parq*"))]
        for n in ("quiet", "rude")
    ]
    assert tables[0] and repr(tables[0]) == repr(tables[1])


def test_a_reward_that_draws_has_a_stream_of_its_own(tmp_path):
    def run(folder, resume=None, **changes):
        drawn = []

        def noisy(completions, **columns):
            drawn.append((random.random(), numpy.random.rand(), torch.rand(()).item()))
            return [score + 0.1 * drawn[-1][2] * i for i, score in enumerate(digits(completions))]

        settings = dict(max_steps=4, save_strategy="steps", save_steps=2, **changes)
        trainer = small_trainer(folder, noisy, **settings)
        trainer.train(resume_from_checkpoint=resume)
        return drawn, weights_of(trainer.model)

    whole, weights = run(tmp_path / "a")
    assert len(whole) == 4 and all(len(set(numbers)) == 4 for numbers in zip(*whole))
    again, resumed = run(tmp_path / "a", str(tmp_path / "a/checkpoint-2"))
    assert again == whole[2:]
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    assert run(tmp_path / "b", seed=7)[0][0] != whole[0]


def test_a_reward_in_a_copy_of_the_process_draws_other_numbers_each_time(tmp_path):
    seen = []

    def noisy(completions, log_metric, **columns):
        log_metric("drawn", random.random())
        return digits(completions)

    trainer = small_trainer(tmp_path, noisy, reward_timeout_s=20.0, max_steps=3)
    trainer.train()
    seen = [record["drawn"] for record in trainer.log_history]
    assert len(set(seen)) == 3


def test_a_rollout_function_may_draw_and_moves_nothing_else(tmp_path):
    def drawn(prompts, trainer, **more):
        ids = torch.randint(10, (len(prompts), 3)).tolist()
        if more:
            torch.set_grad_enabled(False)
            trainer.model.requires_grad_(False)
        prompt_ids = [trainer.tokenizer(prompt).input_ids for prompt in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None}

    def rude(prompts, trainer):
        return drawn(prompts, trainer, rude=True)

    quiet = finish(small_trainer(tmp_path / "a", digits, arguments={"rollout_func": drawn}))
    trainer = small_trainer(tmp_path / "b", digits, arguments={"rollout_func": rude})
    with pytest.warns(UserWarning, match="rollout_func changed which weights train, whether torch"):
        same(quiet, finish(trainer))


def test_numbers_of_their_own():
    before = random_state()
    found = []
    for key in ((1, "a"), (2, "a"), (1, "a\ud800"), (1, "a")):
        with own_numbers(*key):
            found.append((random.random(), numpy.random.rand(), torch.rand(()).item()))
    assert found[0] == found[3] and len({*found}) == 3
    after = random_state()
    assert torch.equal(before["torch"], after["torch"]) and before["python"] == after["python"]
    assert before["numpy"] == after["numpy"]
    torch.rand(1)
    with own_numbers(1, "a"):
        assert torch.rand(()).item() != found[0][2]


def test_a_folder_that_is_gone_is_left(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="the working folder"), Surroundings().kept("a program"):
        os.chdir(gone)
        gone.rmdir()
    assert os.getcwd() == str(tmp_path)


def test_looking_after_a_large_model_takes_less_than_a_millisecond():
    around = Surroundings()
    around.know(torch.nn.ParameterList(torch.zeros(1) for _ in range(2_000)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        times = []
        for call in range(20):
            began = time.perf_counter()
            with around.kept("a program"), own_numbers(call):
                pass
            times.append(time.perf_counter() - began)
    assert sorted(times)[5] < 3e-3  # on a busy machine; .5 ms by itself
