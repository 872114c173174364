"""Each setting of GRPOConfig is read by the module that its row names."""

import ast
import inspect
import textwrap
from pathlib import Path

import pytest
import transformers.trainer
import transformers.trainer_callback
import transformers.trainer_optimizer

import grpo_nb
from grpo_nb.algorithm.losses import grpo_loss
from grpo_nb.training import config as room
from grpo_nb.training.config import GRPOConfig
from grpo_nb.training.policy_update import LOSS_SETTINGS

THEIRS = (
    transformers.trainer.Trainer.get_optimizer_cls_and_kwargs,
    transformers.trainer_callback,
    transformers.trainer_optimizer,
)
FILES = {path.stem: path for path in Path(grpo_nb.__path__[0]).rglob("*.py")}
SPECS = GRPOConfig.specs


def names_read(tree):
    "Attributes that are read, and texts that are no docstring: getattr(config, name) takes these."
    found = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    return found | {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}


def methods_of_config():
    "What each method of the settings reads, also through others of them; checks are no readers."
    tree = ast.parse(inspect.getsource(room))
    bodies = {
        one.name: one
        for group in tree.body
        if isinstance(group, ast.ClassDef)
        for one in group.body
        if isinstance(one, ast.FunctionDef)
        and one.name not in ("check", "doubts", "cautions", "derived", "describe", "changed")
        and not one.name.startswith(("__", "to_"))
    }
    constants = {
        target.id: names_read(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    reads = {}
    for name, body in bodies.items():
        used = {n.id for n in ast.walk(body) if isinstance(n, ast.Name)}
        reads[name] = names_read(body).union(*(constants.get(one, ()) for one in used))
    for _ in reads:
        reads = {n: one.union(*(reads[m] for m in one & reads.keys())) for n, one in reads.items()}
    return reads


def read_in(reader):
    "The settings that a module reads, itself or by a method of the settings that it calls."
    if reader == "transformers":
        return set().union(
            *(names_read(ast.parse(textwrap.dedent(inspect.getsource(one)))) for one in THEIRS)
        )
    if reader == "losses":
        return LOSS_SETTINGS & inspect.signature(grpo_loss).parameters.keys()
    direct = names_read(ast.parse(FILES[reader].read_text()))
    methods = methods_of_config()
    return direct.union(*(methods[name] for name in direct & methods.keys()))


@pytest.mark.parametrize("reader", sorted({spec.reader or "" for spec in SPECS.values()}))
def test_a_setting_is_read_by_its_reader(reader):
    assert reader, [name for name, spec in SPECS.items() if not spec.reader]
    mine = {name for name, spec in SPECS.items() if spec.reader == reader}
    assert not mine - read_in(reader)


def test_a_setting_that_nothing_reads_is_found():
    "The check is one: it does not find a name in a module that reads it nowhere."
    assert not {"guard_every", "hub_token", "adam_beta1"} & read_in("micro_batches")
    assert "epsilon" not in read_in("optimizer") and "warmup_ratio" in read_in("optimizer")
