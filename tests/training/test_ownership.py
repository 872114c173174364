"""Who writes what in the trainer: an attribute has one owner, and nothing private is read from
outside."""

import ast
from pathlib import Path

import grpo_nb.training

FILES = sorted(Path(grpo_nb.training.__path__[0]).glob("[a-z]*.py"))
# objects of other libraries, whose protocol is to be written to
FOREIGN = {
    ("p", "grad"),
    ("p", "data"),
    ("module", "p"),
    ("module", "training"),
    ("model", "config"),
    ("control", "should_log"),
    ("handler", "lr_scheduler"),
    ("config", "pad_token_id"),
    ("changed", "exclude_modules"),  # of a copy
    ("entry", "metadata"),
    ("mesh_info", "shard_process_group"),
    ("value", "log_history"),  # of a copy
    ("sys", "stdout"),  # put back
    ("sys", "stderr"),
    ("weight", "grad"),  # which a reward function left
}


def written(path):
    "(class, what stands before the dot, attribute, line) of each assignment to an attribute."
    found = []

    def visit(node, owner):
        if isinstance(node, ast.ClassDef):
            owner = node.name
        targets = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, (ast.For, ast.comprehension)):
            targets = [node.target]
        for target in targets:
            for part in ast.walk(target):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
                    before = part.value
                    name = getattr(before, "id", getattr(before, "attr", "?"))
                    found.append((owner, name, part.attr, part.lineno))
        for child in ast.iter_child_nodes(node):
            visit(child, owner)

    visit(ast.parse(path.read_text()), None)
    return found


OURS = {
    node.name
    for path in FILES
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.ClassDef)
}


def test_an_object_writes_its_own_attributes():
    "`self.x = ...` alone: no class, and no function, writes an attribute of another's."
    own_names = {"self", "batch", "part", "rollout", "cls"}  # a record that the function made
    strangers = [
        f"{path.stem}, line {line}: {name}.{attribute}"
        for path in FILES
        for _, name, attribute, line in written(path)
        if name not in own_names and (name, attribute) not in FOREIGN
    ]
    assert FILES and not strangers


def test_no_class_of_the_trainer_is_a_mixin():
    """Parts stand side by side. What is built in steps is a chain: each class has one base of
    ours, the one before it on the same page, or the last one of another page."""
    last = {
        names[-1]
        for path in FILES
        if (
            names := [
                n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef)
            ]
        )
    }
    for path in FILES:
        if path.stem == "config":
            continue  # settings are written down in groups
        classes = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef)]
        above = []
        for node in classes:
            bases = [name for base in node.bases if (name := getattr(base, "id", "")) in OURS]
            if not node.name.endswith(("Error", "TooLate")):
                goes_on = len(bases) == 1 and bases[0] in last
                assert not bases or bases == above[-1:] or goes_on, f"{path.stem}.{node.name}"
            above.append(node.name)


def test_nothing_private_is_read_from_outside():
    found = [
        f"{path.stem}, line {node.lineno}: {ast.unparse(node)}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and getattr(node.value, "id", "") not in ("self", "cls")
    ]
    foreign = ("config._name_or_path", "config._attn_implementation", "torch._", "os._exit")
    foreign += ("module._parameters", "module._buffers", "unit._get_fsdp_state")  # torch's
    assert not [entry for entry in found if not any(name in entry for name in foreign)]
