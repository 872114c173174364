"""The policy that learns in the page, beside the library and torch: advantages, loss, gradient,
the cut of the gradient and AdamW on a thousand random batches, in float32."""

import base64
import json
import random
from pathlib import Path

import pytest
import torch
from node import run_module

from grpo_nb.algorithm.advantages import group_advantages
from grpo_nb.algorithm.losses import grpo_loss
from grpo_nb.widgets.figures import joined

FOLDER = Path(__file__).resolve().parents[2] / "grpo_nb/widgets/js"
LETTERS, LENGTH, BATCHES, PROMPTS = 8, 4, 1000, 3
RUN = """
Promise.all(["policy.js", "arithmetic.js", "learner_start.js"].map(
  (name) => import(process.argv[1] + "/" + name),
)).then(async ([P, A, S]) => {
  let text = "";
  for await (const part of process.stdin) text += part;
  const packed = (x) => Buffer.from(x.buffer, x.byteOffset, x.byteLength).toString("base64");
  const numbers = (x) => new Float32Array(Uint8Array.from(Buffer.from(x, "base64")).buffer);
  const start = S.startWeights();
  const policy = P.policyOf(start); // the optimizer's averages go on from batch to batch
  const random = P.randomOf(1);
  const told = JSON.parse(text).map((one) => {
    policy.weights = start.map((w) => w + 0.1 * (random() - 0.5));
    const [prompts, answers] = [one.prompts, one.answers].map((x) => Uint8Array.from(x.flat()));
    const { values } = A.groupAdvantages(one.rewards, one.group);
    const before = packed(policy.weights);
    const now = P.score(policy.weights, prompts, answers, one.temperature);
    const [old, ref] = [one.old, one.ref].map((x) => numbers(x).map((d, i) => now.logps[i] + d));
    const said = P.grpoLoss(now.logps, old, ref, values, one);
    const { slope, loss } = said;
    const gradient = P.backward(policy.weights, prompts, answers, one.temperature, now, slope);
    const raw = packed(gradient);
    const norm = P.clipNorm(gradient, 1);
    P.adamw(policy, gradient, one.rate);
    const [logps, after] = [packed(now.logps), packed(policy.weights)];
    return { before, values, logps, loss, raw, norm, after, old: packed(old), ref: packed(ref) };
  });
  process.stdout.write(JSON.stringify({ shapes: P.SHAPES, told }));
});
"""


def batches(seed=0):
    "Prompts, answers, rewards, distances of the old and the reference's log-probs, settings."
    dice, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(BATCHES):
        group = dice.randint(2, 5)
        count = PROMPTS * group
        asked = [dice.sample(range(LETTERS), LENGTH) for _ in range(PROMPTS)]
        reward = dice.choice(
            [lambda: dice.randint(-128, 128) / 64, lambda: float(dice.random() < 0.3)]
        )
        spread = torch.randn(2, count * LENGTH, generator=noise) * dice.choice([0.02, 0.3])
        yield dict(
            group=group,
            prompts=[prompt for prompt in asked for _ in range(group)],
            answers=[[dice.randrange(LETTERS) for _ in range(LENGTH)] for _ in range(count)],
            rewards=[reward() for _ in range(count)],
            old=base64.b64encode(spread[0].numpy().tobytes()).decode(),
            ref=base64.b64encode(spread[1].numpy().tobytes()).decode(),
            clip=dice.choice([0.1, 0.2, 0.5]),
            beta=dice.choice([0.0, 0.04, 0.5]),
            temperature=dice.choice([0.5, 1.0, 1.6]),
            rate=dice.choice([0.0002, 0.002, 0.02]),
        )


def numbers(text):
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32)


def policy_logps(flat, shapes, prompts, answers, temperature):
    "The network of policy.js in torch: log-probs (B, T)."
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    parts = dict(zip(shapes, flat.split(sizes)))
    embedding, mixing, head = (
        parts[name].view(shapes[name]) for name in ("embedding", "mixing", "head")
    )
    slots = torch.full((len(prompts), LENGTH, 2 * LENGTH - 1), LETTERS)  # (B, T, S)
    slots[:, :, :LENGTH] = prompts[:, None]
    for t in range(LENGTH):
        slots[:, t, LENGTH : LENGTH + t] = answers[:, :t]
    hidden = torch.einsum("btsd,sdh->bth", embedding[slots], mixing) + parts["bias"]
    logits = hidden.relu() @ head / temperature  # (B, T, V)
    return logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0]


def far(a, b):
    "The distance of two tensors, relative to the second one."
    return ((a - b).norm() / b.norm().clamp(min=1e-12)).item()


def test_values_gradients_and_updates_are_the_library_s():
    cases = list(batches())
    said = json.loads(run_module(RUN, FOLDER, json.dumps(cases)))
    worst = dict.fromkeys(("advantages", "logps", "loss", "gradient", "norm", "update"), 0.0)
    weights = numbers(said["told"][0]["before"]).clone().requires_grad_()
    optimizer = torch.optim.AdamW([weights], weight_decay=0.0)
    idle = 0
    for case, told in zip(cases, said["told"]):
        before = numbers(told["before"])
        weights.data.copy_(before)
        B = len(case["rewards"])
        values = group_advantages(torch.tensor(case["rewards"]), case["group"]).values
        prompts, answers = torch.tensor(case["prompts"]), torch.tensor(case["answers"])
        logps = policy_logps(weights, said["shapes"], prompts, answers, case["temperature"])
        old, ref = (numbers(told[name]).view(B, LENGTH) for name in ("old", "ref"))
        loss = grpo_loss(
            logps,
            values,
            torch.ones(B, LENGTH, dtype=torch.bool),
            old_logps=old,
            ref_logps=ref if case["beta"] else None,
            beta=case["beta"],
            epsilon=case["clip"],
            epsilon_high=case["clip"],
            num_items=torch.tensor(B * LENGTH),
        ).loss
        optimizer.zero_grad()
        loss.backward()
        size = max(values.abs().mean().item(), 0.1)
        found = dict(
            advantages=far(torch.tensor(told["values"]), values),
            logps=far(numbers(told["logps"]).view(B, LENGTH), logps.detach()),
            # the terms of a group cancel: the error is measured against their size
            loss=abs(told["loss"] - loss.item()) / max(abs(loss.item()), size),
            gradient=far(numbers(told["raw"]), weights.grad),
        )
        idle += not values.any()
        weights.grad = numbers(told["raw"])  # Adam's first steps make much of the smallest rounding
        norm = torch.nn.utils.clip_grad_norm_([weights], 1.0)
        found["norm"] = abs(told["norm"] - norm.item()) / max(norm.item(), 1e-6)
        optimizer.param_groups[0]["lr"] = case["rate"]
        optimizer.step()
        found["update"] = far(numbers(told["after"]) - before, weights.detach() - before)
        worst = {name: max(worst[name], found[name]) for name in worst}
    assert max(worst.values()) <= 1e-4, worst
    assert 10 < idle < BATCHES / 2  # some batches taught nothing, most something


STEP = """
import(process.argv[1] + "/learner_step.js").then(async (L) => {
  let text = "";
  for await (const part of process.stdin) text += part;
  let said = null;
  try {
    said = L.rewardFrom(text)("dbca", "abcd");
  } catch (error) {
    said = error.message;
  }
  process.stdout.write(JSON.stringify(said));
});
"""


@pytest.mark.parametrize(
    "code, said",
    [
        ("return -2.5;", -2.5),
        ("return answer > prompt;", 0),
        ("return '0.5';", 'returned "0.5", and no number'),
        ("return [];", "returned , and no number"),
        ("return 0 / 0;", "returned NaN, and no number"),
        ("return 1e7;", "returned 10000000, and no number"),
        ("return Symbol('x');", "returned Symbol(x), and no number"),
        ("throw null;", "instead of returning a number: null"),
        ("throw new Error('');", "instead of returning a number: Error"),
        ("throw Object.create(null);", "instead of returning a number: something without words"),
        ("return f(;", "it is no JavaScript: Unexpected token"),
    ],
)
def test_a_reward_is_a_number_or_is_refused_with_a_sentence(code, said):
    found = json.loads(run_module(STEP, FOLDER, code))
    assert said in found if isinstance(said, str) else found == said


ENDS = """
Promise.all(["policy.js", "learner_step.js", "learner_start.js"].map(
  (name) => import(process.argv[1] + "/" + name),
)).then(([P, L, S]) => {
  const start = S.startWeights();
  const policy = P.policyOf(start);
  const code = L.REWARDS.sorted[1];
  const settings = { seed: 1, group: 4, rate: 0.1, beta: 1, temperature: 0.5, clip: 1, code };
  const reports = [1, 2, 3].map(() => L.stepOf(policy, start, settings));
  const finite = policy.weights.every(Number.isFinite);
  process.stdout.write(JSON.stringify({ finite, norms: reports.map((r) => String(r.norm)) }));
});
"""


def test_an_update_whose_gradient_is_not_finite_is_left_out():
    told = json.loads(run_module(ENDS, FOLDER))
    assert told["finite"] and {"NaN", "Infinity"} & {*told["norms"]}


def test_scripts_are_small():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 362_000
    for path in FOLDER.glob("*.js"):  # what one widget loads
        assert len(joined(path.stem).encode()) < 160_000 - len(
            (FOLDER / "widgets.css").read_text()
        ), path
