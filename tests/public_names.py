"""What people's scripts may import, with signatures. `python tests/public_names.py` records it.

That is what `grpo_nb` itself gives, and whatever README, docs, recipes and pages import. A record
keeps what it holds: a module that moves leaves its old path behind for one release.
"""

import ast
import dataclasses
import importlib
import inspect
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
RECORD = ROOT / "tests" / "data" / "public_names.json"
PROMISED = """
algorithm.batching: BatchLayout
algorithm.advantages: group_advantages Advantages
algorithm.logprobs: selective_log_softmax chunked_hidden_states_selective_log_softmax
algorithm.losses: grpo_loss rollout_correction LossOutput
model.masks: attention_mask block_mask
model.attention: sink_attention
model.mxfp4: quantize dequantize
model.loading: load_model
model.tiny: tiny_gpt_oss
model.export: save_merged save_mxfp4 save_adapter
compat.fast: FastLanguageModel
rollout.sampling: SamplingParams
rollout.engine: RolloutEngine
rollout.rollout: Rollout
rollout.sampler: Sampler
serving.server: VLLMServer
serving.stream: RolloutStream
environments.sandbox: run_python SandboxPool SandboxResult check_only_stdlib_imports
environments.sandbox: create_locked_down_function execute_with_time_limit Benchmarker
environments.gsm8k: correctness_reward_func int_reward_func soft_format_reward_func
environments.gsm8k: strict_format_reward_func xmlcount_reward_func
training.config: GRPOConfig
training.trainer: GRPOTrainer
"""
FENCE = re.compile(r"```(?:python|py)\n(.*?)```", re.DOTALL)


def shown_code():
    "The Python of README, docs, recipes and of the pages that export nothing."
    for path in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        yield from FENCE.findall(path.read_text())
    yield from (path.read_text() for path in ROOT.glob("recipes/*.py"))
    for path in ROOT.glob("nbs/**/*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "code" and "#| export" not in text:
                yield "".join(
                    line
                    for line in text.splitlines(keepends=True)
                    if not line.lstrip().startswith(("%", "!"))
                )


def imported(code):
    "The paths of ours that a piece of code imports, as `grpo_nb.module:name`."
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "grpo_nb":
            yield from (f"{node.module}:{one.name}" for one in node.names if one.name[0] != "_")


def optional(field) -> bool:
    "Whether a field need not be given."
    given = field.default, field.default_factory
    return any(value is not dataclasses.MISSING for value in given)


def signature(thing) -> str:
    "How it is called, without annotations; fields where it is a record; empty for a value."
    if dataclasses.is_dataclass(thing):
        fields = [field for field in dataclasses.fields(thing) if field.init]
        said = {one.name: one.name + ("=..." if optional(one) else "") for one in fields}
        placed = [said[one.name] for one in fields if not one.kw_only]
        named = [said[one.name] for one in fields if one.kw_only]
        return f"({', '.join([*placed, *(['*', *named] if named else [])])})"
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in found.parameters.values()]
    said = str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return re.sub(r"<function .*? at 0x[0-9a-f]+>", "<function>", said)


def described(path) -> dict[str, str]:
    "The signature of what stands at a path, and those of its public methods."
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    thing = getattr(found, name, None) or importlib.import_module(f"{module}.{name}")
    members = inspect.getmembers(thing, inspect.isfunction) if inspect.isclass(thing) else []
    methods = {f".{key}": signature(value) for key, value in members if key[0] != "_"}
    return {"": signature(thing) if callable(thing) else "", **methods}


def arguments(said: str):
    "([(name, default)] of what has a place, {name: default} of the rest) of a signature's text."
    tree = ast.parse(f"lambda {re.sub('<.*?>', '...', said)[1:-1]}: 0", mode="eval").body.args
    plain = [None if one is None else ast.unparse(one) for one in tree.defaults + tree.kw_defaults]
    placed = [one.arg for one in tree.posonlyargs + tree.args]
    defaults = [None] * (len(placed) - len(tree.defaults)) + plain[: len(tree.defaults)]
    named = dict(zip([one.arg for one in tree.kwonlyargs], plain[len(tree.defaults) :]))
    for one in (tree.vararg, tree.kwarg):
        named |= {"*" + one.arg: ""} if one else {}
    return list(zip(placed, defaults)), named


def as_before(
    old: dict[str, str],  # what `described` gave
    new: dict[str, str],  # and gives
) -> bool:
    "Whether every call of the old goes on meaning the same: what is added may be left out."
    for name, said in old.items():
        if said == new.get(name):
            continue
        if not said or not new.get(name):
            return False
        (placed, named), (now, named_now) = arguments(said), arguments(new[name])
        added = [*now[len(placed) :], *(named_now.items() - named.items())]
        kept = now[: len(placed)] == placed and named.items() <= named_now.items()
        if not kept or any(default is None for _, default in added):
            return False
    return True


def main():
    import grpo_nb

    paths = {f"grpo_nb:{name}" for name in grpo_nb.__all__}
    for module, _, names in (line.partition(": ") for line in PROMISED.split("\n") if line):
        paths.update(f"grpo_nb.{module}:{name}" for name in names.split())
    paths.update(path for code in shown_code() for path in imported(code))
    if RECORD.exists():
        paths |= set(json.loads(RECORD.read_text()))
    record = {path: described(path) for path in sorted(paths)}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
