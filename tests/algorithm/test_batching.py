"""The batch layout against TRL: its sampler, its config, its helpers and a real run of its
trainer."""

import math
import re

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import BatchSampler
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler, shuffle_sequence_dict, split_tensor_dict

from grpo_nb.algorithm.batching import (
    BatchLayout,
    completion_order,
    cycles_in_epoch,
    nearest_legal,
    prompt_order,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore:You are using 'rollout_func'"
)
few = settings(deadline=None, max_examples=100)
NAMES = (
    "per_device_train_batch_size",
    "num_generations",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_iterations",
    "num_processes",
)


def make(values):
    values = dict(values)
    return BatchLayout(
        values.pop("per_device_train_batch_size"), values.pop("num_generations"), **values
    )


def random_settings():
    sizes = st.integers(1, 6)
    return st.fixed_dictionaries(
        {
            "per_device_train_batch_size": sizes,
            "num_generations": st.integers(2, 8),
            "gradient_accumulation_steps": sizes,
            "steps_per_generation": st.one_of(st.none(), sizes),
            "num_iterations": st.integers(1, 3),
            "num_processes": st.integers(1, 4),
        }
    )


@st.composite
def random_layouts(draw):
    values = draw(random_settings())
    factors = (
        values["per_device_train_batch_size"]
        * values["num_processes"]
        * (values["steps_per_generation"] or values["gradient_accumulation_steps"])
    )
    legal = [g for g in range(2, factors + 1) if factors % g == 0]
    if not legal:
        values["per_device_train_batch_size"], legal = (
            values["per_device_train_batch_size"] * 4,
            [2, 4],
        )
    return make(values | {"num_generations": draw(st.sampled_from(legal))})


def trl_sampler(layout, num_rows, shuffle, seed):
    return RepeatSampler(
        range(num_rows),
        layout.num_generations,
        layout.prompts_per_generation,
        layout.num_iterations * layout.steps_per_generation,
        shuffle,
        seed,
    )


# ---- the documents' tables
# -------------------------------------------------------------------------------------------
TABLES = {
    (3, 3, 4, 2): ["000 111* 222 333*", "444 555* 666 777*"],
    (3, 3, 4, 4): ["000 111 222 333*", "444 555 666 777*"],
    (3, 4, 4, 4): [
        "000 011 112 222*",
        "333 344 445 555*",
    ],  # printed with prompt 2 left out: 000 011 113 333*, 444 455 556 666*
    (6, 3, 2, 2): ["000111 222333*", "444555 666777*"],
}


@pytest.mark.parametrize("parameters", TABLES)
def test_the_four_tables(parameters):
    per_device, G, steps, accumulation = parameters
    layout = BatchLayout(
        per_device, G, steps_per_generation=steps, gradient_accumulation_steps=accumulation
    )
    got = [[], []]
    for batch in layout.schedule():
        assert batch.step == len(got[batch.cycle]) and batch.process == 0
        got[batch.cycle].append("".join(map(str, batch.prompts)) + "*" * batch.update)
    assert [" ".join(cycle) for cycle in got] == TABLES[parameters]


def test_the_printed_third_table_skips_a_prompt():
    printed = "000 011 113 333 444 455 556 666".replace(" ", "")
    right = "".join(
        "".join(map(str, b.prompts))
        for b in BatchLayout(3, 4, gradient_accumulation_steps=4).schedule()
    )
    ids = sorted(set(printed))
    assert (
        printed.translate({ord(p): str(i) for i, p in enumerate(ids)}) == right and "2" not in ids
    )


# ---- TRL's sampler and helpers
# ---------------------------------------------------------------------------------------
@few
@given(random_layouts(), st.integers(1, 3), st.booleans(), st.integers(0, 2**31 - 1))
def test_schedule_is_what_trl_would_train_on(layout, cycles, shuffle, seed):
    """Sampler -> batches of one process each -> accelerate's shards -> permutation -> slices,
    replayed."""
    sampler = trl_sampler(layout, cycles * layout.prompts_per_generation, shuffle, seed)
    batches = BatchSampler(sampler, layout.completions_per_process, drop_last=False)
    schedule = layout.schedule(cycles, shuffle, seed)
    for process in range(layout.num_processes):
        rng_before = torch.get_rng_state()
        torch.manual_seed(seed + process)  # TRL: set_seed(seed, device_specific=True)
        expected = []
        for step, mine in enumerate(BatchSamplerShard(batches, layout.num_processes, process)):
            if step % layout.micro_batches_per_cycle == 0:
                generation = {"prompt": torch.tensor(mine)}
                slices = split_tensor_dict(
                    shuffle_sequence_dict(generation) if shuffle else generation,
                    layout.steps_per_generation,
                )
            expected.append(slices[step % layout.steps_per_generation]["prompt"].tolist())
        torch.set_rng_state(rng_before)
        if shuffle:  # a sampler object draws its next epoch's order at each use
            batches = BatchSampler(
                trl_sampler(layout, cycles * layout.prompts_per_generation, shuffle, seed),
                layout.completions_per_process,
                drop_last=False,
            )
        assert [b.prompts for b in schedule if b.process == process] == expected


@few
@given(
    st.integers(1, 40),
    st.integers(1, 9),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 2**31 - 1)),
    st.integers(1, 4),
)
def test_prompt_order_is_repeat_sampler_over_epochs(num_rows, prompts, shuffle, seed, epochs):
    if num_rows < prompts:
        assert (
            len(list(RepeatSampler(range(num_rows), 1, prompts, shuffle=shuffle, seed=seed))) == 0
        )
        with pytest.raises(ValueError, match=f"at least {prompts} rows"):
            prompt_order(num_rows, prompts, 0, shuffle, seed)
        return
    sampler = RepeatSampler(range(num_rows), 1, prompts, shuffle=shuffle, seed=seed)
    expected = sum([list(sampler) for _ in range(epochs)], [])
    cycles = range(epochs * cycles_in_epoch(num_rows, prompts))
    assert (
        sum([prompt_order(num_rows, prompts, cycle, shuffle, seed) for cycle in cycles], [])
        == expected
    )
    assert len(expected) == len(sampler) * epochs


def test_prompt_order_needs_no_history():
    forwards = [prompt_order(11, 3, c, True, 5) for c in range(9)]
    assert [prompt_order(11, 3, c, True, 5) for c in reversed(range(9))] == forwards[::-1]
    assert forwards[0] != forwards[3] and completion_order(12, 3, 0, True, 5) != completion_order(
        12, 3, 1, True, 5
    )


def test_nothing_draws_from_the_global_generator():
    before = torch.get_rng_state()
    BatchLayout(3, 4, gradient_accumulation_steps=4).schedule(shuffle=True, seed=1)
    assert torch.equal(before, torch.get_rng_state())


# ---- a real run of TRL's trainer
# -------------------------------------------------------------------------------------
def run_trl(layout, num_rows, epochs, seed, folder):
    """[(updates so far, prompts of the micro-batch)] of every step, and the number of updates; only
    TRL's permutation draws random numbers."""
    words = Tokenizer(
        models.WordLevel(
            {"<pad>": 0, "<eos>": 1} | {str(i): i + 2 for i in range(60)}, unk_token="<pad>"
        )
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )
    seen, generator_state = [], torch.Generator().manual_seed(seed).get_state()

    class Recorder(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            result = super()._generate_and_score_completions(inputs)
            assert ("old_per_token_logps" in result) == (not layout.on_policy)
            torch.set_rng_state(generator_state)
            return result

        def _prepare_inputs(self, inputs):
            nonlocal generator_state
            draws = self._step % layout.micro_batches_per_cycle == 0
            result = super()._prepare_inputs(inputs)
            generator_state = torch.get_rng_state() if draws else generator_state
            seen.append((self.state.global_step, (result["prompt_ids"][:, -1] - 2).tolist()))
            return result

    def rollout(prompts, trainer):
        return {
            "prompt_ids": [tokenizer(p)["input_ids"] for p in prompts],
            "completion_ids": [[5, 1]] * len(prompts),
            "logprobs": [[-1.0, -1.0]] * len(prompts),
        }

    args = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=layout.per_device_train_batch_size,
        num_generations=layout.num_generations,
        gradient_accumulation_steps=layout.gradient_accumulation_steps,
        steps_per_generation=layout.steps_per_generation,
        num_iterations=layout.num_iterations,
        seed=seed,
        num_train_epochs=epochs,
        report_to=[],
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        max_completion_length=4,
    )
    trainer = Recorder(
        model=model,
        args=args,
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(num_rows)]}),
        rollout_func=rollout,
    )
    rng = torch.get_rng_state()
    trainer.train()
    torch.set_rng_state(rng)
    return seen, trainer.state.global_step


@pytest.mark.parametrize(
    "layout, num_rows",
    [
        (BatchLayout(3, 4, gradient_accumulation_steps=4), 7),  # the window is the cycle
        (
            BatchLayout(
                2, 2, gradient_accumulation_steps=3, steps_per_generation=4, num_iterations=2
            ),
            9,
        ),  # windows over two cycles, cut by the end of the epoch
        (
            BatchLayout(2, 4, gradient_accumulation_steps=6, steps_per_generation=2),
            4,
        ),  # one window over several cycles, cut
        (
            BatchLayout(4, 2, gradient_accumulation_steps=1, steps_per_generation=2),
            8,
        ),  # several updates a cycle
    ],
)
def test_a_real_run_of_trl(layout, num_rows, tmp_path):
    epochs, seed = 2, 3
    seen, updates = run_trl(layout, num_rows, epochs, seed, tmp_path)
    per_epoch, done, expected = layout.cycles_per_epoch(num_rows), 0, []
    for cycle in range(epochs * per_epoch):
        batch = [
            row
            for row in prompt_order(num_rows, layout.prompts_per_generation, cycle, True, seed)
            for _ in range(layout.num_generations)
        ]
        order = completion_order(layout.completions_per_process, cycle, 0, True, seed)
        for step, rows in enumerate(layout.micro_batches(order)):
            expected.append((done, [batch[i] for i in rows]))
            done += layout.update_follows(cycle, step, per_epoch)
    assert seen == expected
    assert updates == done == epochs * layout.updates_per_epoch(num_rows)


# ---- invariants ----------------------------------------------------------------------------------
# --------------------
@few
@given(random_layouts(), st.integers(1, 4), st.booleans(), st.integers(0, 999))
def test_invariants(layout, cycles, shuffle, seed):
    schedule = layout.schedule(cycles, shuffle, seed)
    steps = layout.steps_per_generation * layout.num_iterations
    assert (
        layout.generation_batch_size
        == layout.per_device_train_batch_size * layout.num_processes * layout.steps_per_generation
    )
    assert layout.prompts_per_generation * layout.num_generations == layout.generation_batch_size
    assert (
        layout.effective_batch_size
        == layout.per_device_train_batch_size
        * layout.num_processes
        * layout.gradient_accumulation_steps
    )
    assert layout.optimizer_steps_per_generation == steps / layout.gradient_accumulation_steps
    assert [(b.cycle, b.step, b.process) for b in schedule] == [
        (c, s, p) for c in range(cycles) for s in range(steps) for p in range(layout.num_processes)
    ]
    assert all(len(b.prompts) == layout.per_device_train_batch_size for b in schedule)
    for cycle in range(cycles):
        for iteration in range(layout.num_iterations):
            trained = sum(
                [
                    b.prompts
                    for b in schedule
                    if b.cycle == cycle and b.step // layout.steps_per_generation == iteration
                ],
                [],
            )
            assert (
                sorted(map(trained.count, set(trained)))
                == [layout.num_generations] * layout.prompts_per_generation
            )
    assert sorted({p for b in schedule for p in b.prompts}) == list(
        range(cycles * layout.prompts_per_generation)
    )
    assert sum(b.update for b in schedule) == layout.num_processes * (
        cycles * steps // layout.gradient_accumulation_steps
    )
    # between two updates lie exactly effective_batch_size completions
    last = [i for i, b in enumerate(schedule) if b.update and b.process == layout.num_processes - 1]
    assert all(
        (j - i) * layout.per_device_train_batch_size == layout.effective_batch_size
        for i, j in zip([-1] + last, last)
    )


@few
@given(random_layouts(), st.integers(0, 60))
def test_epochs(layout, extra_rows):
    num_rows = layout.prompts_per_generation + extra_rows
    cycles = layout.cycles_per_epoch(num_rows)
    assert (
        cycles * layout.prompts_per_generation
        <= num_rows
        < (cycles + 1) * layout.prompts_per_generation
    )
    walk = [
        layout.update_follows(c, s, cycles)
        for c in range(2 * cycles)
        for s in range(layout.micro_batches_per_cycle)
    ]
    assert (
        sum(walk) == 2 * layout.updates_per_epoch(num_rows)
        and walk[: len(walk) // 2] == walk[len(walk) // 2 :]
        and walk[-1]
    )


@few
@given(random_layouts())
def test_on_policy_means_no_update_between_drawing_and_last_use(layout):
    # an update before the last micro-batch of any cycle, since that cycle was drawn, makes its rest
    # stale
    stale = any(
        b.update and b.step < layout.micro_batches_per_cycle - 1
        for b in layout.schedule(layout.gradient_accumulation_steps + 1)
    )
    assert layout.on_policy == (not stale)


@few
@given(random_layouts())
def test_the_processes_cover_the_generation_batch(layout):
    covered = [
        list(range(layout.generation_batch_size))[layout.process_slice(p)]
        for p in range(layout.num_processes)
    ]
    assert sum(covered, []) == list(range(layout.generation_batch_size)) and {
        len(c) for c in covered
    } == {layout.completions_per_process}


# ---- what is legal -------------------------------------------------------------------------------
# --------------------
def trl_accepts(values, generation_batch_size=None):
    class Config(GRPOConfig):
        world_size = values["num_processes"]

    try:
        config = Config(
            **{k: v for k, v in values.items() if k != "num_processes"},
            generation_batch_size=generation_batch_size,
            bf16=False,
            use_cpu=True,
            report_to=[],
        )
    except ValueError:
        return None
    return config.steps_per_generation, config.generation_batch_size


@settings(deadline=None, max_examples=60)
@given(random_settings())
def test_legal_where_trl_says_so(values):
    accepted = trl_accepts(values)
    if accepted is None:
        with pytest.raises(ValueError):
            make(values)
    else:
        assert (make(values).steps_per_generation, make(values).generation_batch_size) == accepted


@settings(deadline=None, max_examples=60)
@given(random_settings(), st.integers(1, 60))
def test_generation_batch_size_as_in_trl(values, size):
    values["steps_per_generation"] = None
    accepted = trl_accepts(values, size)
    arguments = {k: v for k, v in values.items() if k != "steps_per_generation"}
    if accepted is not None:
        layout = BatchLayout.from_generation_batch_size(generation_batch_size=size, **arguments)
        assert (layout.steps_per_generation, layout.generation_batch_size) == accepted
        return
    with pytest.raises(ValueError, match="generation_batch_size is") as error:
        BatchLayout.from_generation_batch_size(generation_batch_size=size, **arguments)
    offered = [
        int(n) for n in re.search(r"legal value is (.*)\.$", str(error.value))[1].split(" or ")
    ]
    assert all(trl_accepts(values, s) for s in offered)
    lowest = offered[0] if len(offered) == 2 else 0
    assert lowest < size < offered[-1]
    a_step = values["per_device_train_batch_size"] * values["num_processes"]
    assert all(s % a_step or s % values["num_generations"] for s in range(lowest + 1, offered[-1]))


def legal(values):
    try:
        make(values)
    except ValueError:
        return False
    return True


def divisible(values):
    """The rule in one line, for values that may be too small (`test_legal_where_trl_says_so` holds
    the rule itself)."""
    values = values | {
        "steps_per_generation": values["steps_per_generation"]
        if values["steps_per_generation"] is not None
        else values["gradient_accumulation_steps"]
    }
    size = (
        values["per_device_train_batch_size"]
        * values["num_processes"]
        * values["steps_per_generation"]
    )
    return (
        min(values.values()) >= 1
        and values["num_generations"] >= 2
        and size % values["num_generations"] == 0
    )


@few
@given(random_settings(), st.sampled_from(NAMES), st.integers(-3, 9))
def test_nearest_legal_values_are_the_nearest(values, name, wrong):
    values[name] = wrong
    if legal(values):
        return
    for candidate in NAMES:
        if candidate == "steps_per_generation" and values[candidate] is None:
            continue  # it was not given, so `gradient_accumulation_steps` is what to change
        given_value = values[candidate]
        below = [v for v in range(1, given_value) if divisible(values | {candidate: v})][-1:]
        above = [
            v for v in range(max(given_value, 0) + 1, 1000) if divisible(values | {candidate: v})
        ][:1]
        assert nearest_legal(values, candidate) == below + above


@settings(deadline=None, max_examples=100)
@given(random_settings())
def test_the_sentence_names_legal_changes(values):
    if legal(values):
        return
    with pytest.raises(ValueError) as error:
        make(values)
    changes = dict(re.findall(r"(\w+) to (\d+(?: or \d+)?)", str(error.value)))
    assert changes and "per_device_train_batch_size" in changes
    for name, choices in changes.items():
        assert [int(v) for v in choices.split(" or ")] == nearest_legal(values, name)
        assert all(legal(values | {name: int(v)}) for v in choices.split(" or "))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [0, -1, True, False, 2.0, 2.5, "4", math.nan, math.inf, [2]])
def test_what_is_not_a_whole_number_is_refused(name, wrong):
    values = dict(zip(NAMES, (4, 4, 2, 2, 1, 2)))
    with pytest.raises(ValueError, match=f"^{name} is .* must be a whole number"):
        make(values | {name: wrong})
    for value in nearest_legal(values | {name: wrong}, name):
        assert legal(values | {name: value})
    assert nearest_legal(values | {name: wrong}, name)


def test_one_completion_is_no_group_and_two_are():
    with pytest.raises(ValueError, match="num_generations is 1, .* at least 2"):
        BatchLayout(4, 1)
    assert BatchLayout(4, 2).prompts_per_generation == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda: BatchLayout(4, 4).schedule(cycles=0),
        lambda: BatchLayout(4, 4).schedule(cycles=True),
        lambda: BatchLayout(4, 4).schedule(shuffle=True, seed="0"),
        lambda: BatchLayout(4, 4).schedule(shuffle=True, seed=-1),
        lambda: BatchLayout(4, 4).process_slice(1),
        lambda: BatchLayout(4, 4).process_slice(-1),
        lambda: BatchLayout(4, 4).updates_per_epoch(0),
        lambda: BatchLayout.from_generation_batch_size(4, 4, 0),
        lambda: BatchLayout.from_generation_batch_size(4, 4, None),
        lambda: prompt_order(4, 0, 0),
        lambda: prompt_order(4, 4, -1),
        lambda: completion_order(0, 0),
    ],
)
def test_other_arguments_are_refused_in_a_sentence(call):
    with pytest.raises(ValueError, match=r"\.$"):
        call()


def test_unknown_keywords_and_changes_are_refused():
    with pytest.raises(TypeError):
        BatchLayout(4, 4, generation_batch_size=8)
    with pytest.raises(TypeError):
        BatchLayout(4, 4, 2)
    with pytest.raises(AttributeError):
        BatchLayout(4, 4).num_generations = 2


# ---- what people see
# -------------------------------------------------------------------------------------------------
@few
@given(random_layouts(), st.booleans())
def test_the_text_table_says_what_the_schedule_says(layout, shuffle):
    lines = layout.table(2, shuffle, 0).splitlines()[1:]
    schedule = layout.schedule(2, shuffle, 0)
    said = [
        (int(c), int(s), p, eval(prompts), line.endswith("update"))
        for line in lines
        for c, s, *_ in [line.split()]
        for p, prompts in enumerate(re.findall(r"\[.*?\]", line))
    ]
    assert said == [(b.cycle, b.step, b.process, b.prompts, b.update) for b in schedule]
    assert str(layout) == layout.table()
