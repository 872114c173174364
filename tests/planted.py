"""Small faults that the tests have to find: `python tests/planted.py [WORD ...]` plants each, or
those whose module or line holds a word, in a copy, and says which are found by its module's tests.

A fault that nothing finds is a hole in the tests. About ten seconds each.
"""

import importlib
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FAULTS = [  # module, its line, what stands there instead; the tests are those of the module's name
    # algorithm
    ("algorithm.advantages", "/ (count - 1).clamp(min=1)", "/ count.clamp(min=1)"),
    ("algorithm.advantages", "max ** 0.5 / 1000", "max ** 0.5 * 1000"),
    ("algorithm.advantages", "torch.where(scored, rewards - mean, 0.0)", "rewards - mean"),
    ("algorithm.advantages", "rewards.isnan().all(-1), math.nan", "rewards.isnan().any(-1), 0.0"),
    ("algorithm.advantages", "idle = (values == 0).all(1)", "idle = (values == 0).any(1)"),
    ("algorithm.losses", "-torch.min(unclipped", "-torch.max(unclipped"),
    ("algorithm.losses", "max=epsilon_high).detach() * adv", "max=epsilon_high) * adv"),
    ("algorithm.losses", "\n    d = ref_logps - logps", "\n    d = logps - ref_logps"),
    ("algorithm.losses", "* 4 / tau * advantages", "* 4 * advantages"),
    (
        "algorithm.losses",
        "sequence_mean(gap, mask) <= threshold",
        "gap.sum(1)[:, None] <= threshold",
    ),
    ("algorithm.losses", "is not None and loss_of_tokens is not vespo_loss:", "is not None:"),
    ("algorithm.losses", "tokens / num_items if reduction is window_token_mean else 1.0", "1.0"),
    ("algorithm.batching", "cycle %= cycles_per_epoch", "pass"),
    ("algorithm.batching", "cycle, seed, offset=process)", "cycle, seed)"),
    (
        "algorithm.batching",
        "% self.micro_batches_per_cycle == 0",
        ">= self.micro_batches_per_cycle",
    ),
    ("algorithm.logprobs", "masked_fill(~there, vocab)", "masked_fill(~there, 0)"),
    # sampling
    ("rollout.sampling", "cumsum(-1) <= 1 - p", "cumsum(-1) < 1 - p"),
    ("rollout.sampling", "logits < threshold", "logits <= threshold"),
    (
        "rollout.sampling",
        "torch.where(logits < 0, logits * pen",
        "torch.where(logits > 0, logits * pen",
    ),
    ("rollout.sampling", "(positions.long() + 1) * GOLDEN", "(positions.long() + 2) * GOLDEN"),
    ("rollout.sampling", "isfinite().sum(-1) > room", "isfinite().sum(-1) >= room"),
    ("rollout.sampling", "min(params.top_k + TIES if", "min(params.top_k if"),
    ("rollout.sampling", "return keys + GOLDEN * torch.tensor", "return keys + torch.tensor"),
    # collector
    (
        "training.collect",
        " & ~(rollout.truncated[:, None] & self.config.mask_truncated_completions)",
        "",
    ),
    ("training.collect", "if scores.isnan().all() else 0", "if scores.isnan().any() else 0"),
    ("training.collect", "len(rounds) <= config.dynamic", "len(rounds) < config.dynamic"),
    ("training.collect", "groups,\n            weights=config.reward_weights,", "groups,"),
    ("training.collect", " + sum(map(len, rollout.prompt_ids))", ""),
    ("training.collect", "whole.rows(self.order(state.cycle, len(drawn.rows)))", "whole"),
    # update
    ("training.policy_update", "return steps / float(self.micro_batches)", "return 1.0"),
    ("training.policy_update", "        if math.isfinite(norm):\n", "        if norm > 0:\n"),
    (
        "training.policy_update",
        "if self.corrects or not self.layout.on_policy:",
        "if self.corrects:",
    ),
    ("training.policy_update", "number % config.ref_model_sync_steps == 0", "number == 0"),
    ("training.policy_update", "window.steps if whole_window", "1.0 if whole_window"),
    (
        "training.policy_update",
        "self.layout.steps_per_generation / self.layout.gradient_accumulation_steps\n",
        "1.0\n",
    ),
    ("training.policy_update", "logits[mask.flatten()] for", "logits for"),
    ("training.policy_update", "loss_mask & (advantages != 0)", "loss_mask & (advantages > 0)"),
    # checkpoint
    ("training.checkpoint", '"should_save": False', '"should_save": True'),
    ("training.checkpoint", 'split("-")[1]) > after', 'split("-")[1]) >= after'),
    ("training.checkpoint", "if best and old.resolve() == Path(best).resolve():", "if False:"),
    ("training.checkpoint", 'json.loads(line)["step"] <= step', 'json.loads(line)["step"] < step'),
    ("training.checkpoint", "if found[name] != entry:", "if False:"),
    ("training.checkpoint", '"tokens": 0 if number else total', '"tokens": total'),
    ("training.checkpoint", "in reversed(self.own):", "in self.own:"),
]
BESIDE = {  # tests of other names
    "training.checkpoint": [
        "tests/training/test_going_on.py",
        "tests/training/test_damaged_checkpoints.py",
    ],
    "training.collect": ["tests/training/test_prompt_choice.py"],
}


def copied(home: Path) -> Path:
    "The repository with a library and tests of its own; the rest are links."
    for path in ROOT.iterdir():
        if path.name in ("grpo_nb", "tests"):
            shutil.copytree(path, home / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.name != ".git":
            (home / path.name).symlink_to(path)
    return home


def tests_of(module: str) -> list[str]:
    "The test files of a module."
    room, name = module.split(".")
    return [f"tests/{room}/test_{name}.py", *BESIDE.get(module, [])]


def outcome(home: Path, module: str) -> tuple[int, str]:
    "Exit status and output of a module's tests, in a child that has the slow imports already."
    said = home / "said"
    if not (child := os.fork()):
        os.chdir(home)
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        sys.path.insert(0, str(home))
        # runs that are killed at random moments find little, and take long
        words = [
            "-x",
            "-q",
            "-n0",
            "-pno:cacheprovider",
            "-mnot (full or gpu or browser)",
            "-knot random_moments",
        ]
        status = pytest.main([*words, *tests_of(module)])
        sys.stdout.flush()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said.read_text()


def finder(home: Path, module: str, there: str, instead: str) -> str | None:
    "The first test that fails with a fault; None: all pass."
    path = home / "grpo_nb" / f"{module.replace('.', '/')}.py"
    right = path.read_text()
    assert right.count(there) == 1, f"{module} has {there!r} {right.count(there)} times"
    path.write_text(right.replace(there, instead))
    status, said = outcome(home, module)
    path.write_text(right)
    assert status in (0, 1), said
    failed = re.findall(r"^(?:FAILED|ERROR) \S*::(.*?)(?: - .*)?$", said, re.M)
    return failed[0] if status else None


def main(words: list[str]) -> int:
    "Plant them one by one; the exit status is the number of those not found."
    chosen = [f for f in FAULTS if not words or any(w in f[0] or w in f[1] for w in words)]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
        for name in ("torch", "transformers", "peft", "trl", "datasets", "hypothesis"):
            importlib.import_module(name)
        home = copied(Path(folder))
        for module, there, instead in chosen:
            test = finder(home, module, there, instead)
            missed += test is None
            print(f"{test or 'NOT FOUND':60.60} {module}: {there.strip()}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} found")
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
