"""The planner in JavaScript beside the planner: thousands of random settings, their advice, and
configurations of transformers' own classes."""

import json
import random
import runpy
from dataclasses import asdict
from pathlib import Path

import pytest
from node import run_module
from transformers import AutoConfig

from grpo_nb.model.memory_bytes import MODELS, read_shape
from grpo_nb.model.memory_fit import ALL, CARDS, Card
from grpo_nb.planning.plan import advise, fitting, plan, plan_of, setup_of, standard

ROOT = Path(__file__).resolve().parents[2]
PLANNER = ROOT / "grpo_nb/widgets/js/planner.js"
RUN = """
const load = (name) => import(new URL(name, `file://${process.argv[1]}`));
Promise.all([load("planner_data.js"), load("planner.js")]).then(async ([data, js]) => {
  const { CARDS, MODELS } = data;
  let given = "";
  for await (const part of process.stdin) given += part;
  const shape = (name) => js.shapeOf(MODELS[name]);
  const setup = ({ model, card, context, ...rest }) => js.setupOf({
    shape: shape(model),
    card: CARDS[card],
    ...rest,
    ...js.lengthsOf(context, rest.prompt_length ?? null),
  });
  const told = ({ room, moments, host, rows, slice_tokens, peak, worst, fits }) =>
    ({ room, moments, host, rows, slice_tokens, peak, worst, fits });
  const asked = {
    shapes: () => Object.keys(MODELS).map(shape),
    plans: (all) => all.map((one) => [
      told(js.planOf(setup(one))), told(js.standard(setup(one))), js.planOf(setup(one)).load,
    ]),
    fittings: (all) => all.map((one) => {
      const found = js.fitting(js.planOf(setup(one)));
      return found && { ...told(found.plan), changes: found.changes, advice: found.advice.map(
        ({ changes, cost, saves }) => [changes, cost, saves]) };
    }),
    longest: (all) => all.map((one) => js.longestContext(setup(one))),
    problems: (all) => all.map((one) => js.setupProblem(setup(one))),
    terms: (all) => all.map((one) => {
      const plan = js.planOf(setup(one));
      return Object.entries({ load: plan.load, ...plan.moments }).flatMap(([moment, parts]) =>
        Object.entries(parts).map(
          ([part, size]) => [moment, part, size, js.explain(plan, moment, part)]));
    }),
    configs: (all) => all.map((one) => {
      try { return js.readShape(one); } catch (error) { return error.message; }
    }),
    rounds: () => Object.keys(MODELS).map((name) => js.shapeOf(js.shortShape(shape(name)))),
  };
  const [name, cases] = JSON.parse(given);
  process.stdout.write(JSON.stringify(asked[name](cases)));
});
"""


def browser_says(name, cases=()):
    return json.loads(run_module(RUN, PLANNER, json.dumps([name, list(cases)])))


def one_setting(draw):
    "Settings as `plan` takes them, among them those that exclude each other."
    model, card = draw.choice(list(MODELS)), draw.choice(list(CARDS))
    adapters = draw.random() < 0.85
    held = ["bf16", "fp16", "fp32"] + ["nf4", "nf4", "nf4", "fp8"] * adapters
    if MODELS[model].sinks and adapters:
        held += ["mxfp4", "mxfp4+nf4"] * 2
    checkpointing = draw.random() < 0.8
    pictures = draw.choice([0, 60, 900]) if MODELS[model].tower else 0
    seen = dict(picture_tokens=pictures, prompt_length=draw.choice([pictures, pictures + 63]))
    if draw.random() < 0.5:
        seen["train_parts"] = draw.choice([["text"], ["text", "tower"], ["tower", "projector"]])
    return (seen if pictures else {"prompt_length": draw.choice([None, None, 0, 63])}) | dict(
        model=model,
        card=card,
        weights=draw.choice(held),
        double_quant=draw.random() < 0.2,
        context=draw.choice(
            [64, 777, 1024] * (not pictures) + [4096, 8192, 20_480, 65_536, 131_072]
        ),
        num_generations=draw.randint(2, 16),
        generation_batch_size=draw.choice([1, 8, 24, 64, 600]),
        per_device_train_batch_size=draw.choice([1, 1, 2, 3, 8]),
        gradient_accumulation_steps=draw.choice([1, 1, 4]),
        lora_r=draw.choice([1, 8, 16, 64]) if adapters else 0,
        lora_targets=draw.choice([["attention"], ["attention", "mlp"], ["mlp"]]),
        share_prompt=draw.random() < 0.3,
        mini_batch=draw.choice([1, 1, 2, 3]),
        logit_chunk_multiplier=draw.choice([None, None, 1, 7]),
        gradient_checkpointing=checkpointing,
        slice_tokens=draw.choice([None, None, ALL, 4096, 100]),
        offload_embedding=draw.random() < 0.3 and not MODELS[model].tied,
        offload_activations=draw.random() < 0.4 and checkpointing,
        offload_hidden=draw.random() < 0.2,
        reference=draw.random() < 0.2,
        sampler=draw.choice(["engine", "engine", "vllm", "vllm_sleep", "server"]),
        attention=draw.choice(["auto", "auto", "auto", "eager", "sink_key"]),
        optim=draw.choice(["adamw_torch", "adamw_torch_fused", "adamw_8bit", "adafactor", "sgd"]),
    )


def settings(count, seed):
    draw = random.Random(seed)
    return [one_setting(draw) for _ in range(count)]


def of_planner(case):
    "The same as a setup of the planner."
    return setup_of(**case)


def on_the_page(card):
    return {name: getattr(card, name) for name in ("name", "usable", "capability")}


def told(made):
    names = "room moments host rows slice_tokens peak worst fits".split()
    found = {name: getattr(made, name) for name in names}
    return found | {
        "host": {k: v for k, v in made.host.items() if k != "the model until it is cut"}
    }


def test_the_data_is_what_the_library_knows():
    made = runpy.run_path(str(ROOT / "tools/planner_data.py"))
    assert made["OUT"].read_text() == made["made"](), "run python tools/planner_data.py"
    shapes = json.loads(json.dumps([asdict(shape) for shape in MODELS.values()]))
    assert browser_says("shapes") == shapes == browser_says("rounds")


def some_and_many(some, many, seed):
    "The same settings, as many as a moment allows and, marked `long`, all of them."
    return pytest.mark.parametrize(
        "cases",
        [
            pytest.param(settings(some, seed), id=str(some)),
            pytest.param(settings(many, seed)[some:], id=str(many), marks=pytest.mark.long),
        ],
    )


@some_and_many(150, 2000, seed=0)
def test_every_plan_is_the_planners(cases):
    for case, (ours, usual, load) in zip(cases, browser_says("plans", cases)):
        made = plan_of(of_planner(case))
        assert ours == told(made), case
        rest = ("weights", "adapters")
        assert {name: load[name] for name in rest} == {n: made.moments["rollout"][n] for n in rest}
        assert usual == told(standard(made.setup)), case


@some_and_many(12, 60, seed=1)
def test_the_nearest_that_fits_is_the_planners(cases):
    found = 0
    for case, said in zip(cases, browser_says("fittings", cases)):
        made = plan_of(of_planner(case))
        ours = fitting(made)
        assert (said is None) == (ours is None), case
        if ours is None:
            continue
        changes = {n: on_the_page(v) if isinstance(v, Card) else v for n, v in ours[1].items()}
        assert said["changes"] == json.loads(json.dumps(changes)), case
        advice = [[a.changes, a.cost, a.saves] for a in advise(made)]
        assert said["advice"] == json.loads(json.dumps(advice)), case
        assert said["moments"] == ours[0].moments
        found += bool(changes)
    assert found > len(cases) / 3


def test_the_longest_context_is_the_planners():
    cases = settings(60, seed=2)
    ours = [of_planner(case).longest_context() for case in cases]
    assert browser_says("longest", cases) == ours and any(ours)


def test_a_block_s_terms_add_up_to_it():
    for blocks in browser_says("terms", settings(400, seed=3)):
        for moment, part, size, terms in blocks:
            assert sum(bytes_ for _, bytes_ in terms) == size, (moment, part, terms)
            assert all(words and bytes_ > 0 for words, bytes_ in terms), (moment, part, terms)


@pytest.mark.parametrize(
    "changes",
    [
        dict(model="Llama-3.1-8B", weights="mxfp4"),
        dict(model="Qwen3-4B", weights="nf4", offload_embedding=True),
        dict(model="Qwen3-4B", weights="nf4", lora_r=0),
        dict(gradient_checkpointing=False, offload_activations=True),
        dict(model="Qwen3-4B", picture_tokens=1024, prompt_length=2000),
        dict(model="Qwen3-VL-4B", picture_tokens=1024, prompt_length=1000),
    ],
)
def test_what_excludes_each_other_is_refused_in_the_planner_s_words(changes):
    case = {"model": "gpt-oss-20b", "card": "T4", "context": 8192, **changes}
    with pytest.raises(ValueError) as refused:
        plan(**case)
    assert browser_says("problems", [case]) == [str(refused.value)]


KINDS = """llama mistral mixtral qwen2 qwen3 qwen3_moe phi3 gemma2 gemma3_text gpt_oss smollm3
olmo2 olmoe granite cohere2 deepseek_v3 gpt_neox mamba stablelm glm4""".split()
ROPES = [
    {},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "longrope", "original_max_position_embeddings": 4096},
    {"full_attention": {"rope_type": "longrope"}, "sliding_attention": {"rope_type": "default"}},
]


def configs():
    "What transformers' classes write by default, and some of what people change."
    for kind in KINDS:
        yield json.loads(json.dumps(AutoConfig.for_model(kind).to_dict(), default=str))
    plain = dict(
        model_type="qwen3",
        num_hidden_layers=4,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        vocab_size=100,
        max_position_embeddings=40_960,
    )
    yield plain
    for rope in ROPES:
        yield plain | {"rope_scaling": rope}
    yield plain | {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
    yield plain | {"layer_types": ["linear_attention", "full_attention"] * 2}
    yield plain | {"sliding_window": 16, "use_sliding_window": False}
    yield plain | {"model_type": "gemma2", "sliding_window": 16, "attention_bias": True}
    yield plain | {"num_attention_heads": None}
    yield {"text_config": plain, "model_type": "seer"}


def test_a_dropped_configuration_is_read_as_the_library_reads_it():
    cases, read = list(configs()), 0
    for case, said in zip(cases, browser_says("configs", cases)):
        try:
            ours = asdict(read_shape(case))
        except ValueError as error:
            assert said == str(error), case.get("model_type")
            continue
        if isinstance(said, str):  # the planner refuses those too, once it has counted
            assert "layers with a state of their own" in said, said
            continue
        assert said["shape"] == json.loads(json.dumps(ours)) | {"name": said["shape"]["name"]}
        read += 1
    assert read > 20
