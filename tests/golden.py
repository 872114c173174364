"""Five seeded runs on a CPU whose every number is kept: `python tests/golden.py` records them anew.

A commit that only moves code leaves each bit as it is. Processors round differently; the record
says by a probe on which kind it was made, and elsewhere numbers are compared, not bits.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
from peft import LoraConfig

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

from dense_models import dense_model
from small_runs import small_model, small_trainer, weights_of, without_clocks

from grpo_nb.model.packed import pack_experts
from grpo_nb.model.tiny import tiny_tokenizer
from grpo_nb.serving.stand_in import StandIn, serving

RECORD = Path(__file__).parent / "data" / "golden.json"
MATH = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in (7, 12, 345) for b in (1, 20, 6, 99)]
ASKED = [{"prompt": [{"role": "user", "content": f"{i}+1="}]} for i in range(8)]
CALL = '<tool_call>{"name": "times", "arguments": {"a": 2, "b": 3}}</tool_call>'
WRITES_CALLS = (
    "{% if tools %}<|start|>s<|message|>{% for t in tools %}{{ t.function.name }}{% endfor %}"
    "<|end|>{% endif %}{% for m in messages %}<|start|>{{ m.role[0] }}<|message|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>a<|message|>{% endif %}"
)
ATTENTION = LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
EXPERTS = LoraConfig(
    r=2,
    target_modules=["q_proj", "o_proj"],
    target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
)


def times(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


def probe() -> str:
    "What this processor makes of a few products, exponentials and sums."
    x = torch.rand(96, 96, generator=torch.Generator().manual_seed(0))
    y = torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])
    parts = x @ x, y, x.softmax(-1), x.exp().log_softmax(-1), torch.nn.functional.silu(x @ x)
    return digest(parts)


def digest(tensors) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def told(trainer) -> dict:
    "Log, completions and trained weights of a run, as JSON keeps them."
    weights = weights_of(trainer.model)
    records = json.loads(json.dumps(without_clocks(trainer.log_history), default=float))
    return {
        "log": records,
        "completions": [str(one["completion"]) for one in trainer.samples],
        "weights": {name: float(p.double().norm()) for name, p in sorted(weights.items())},
        "bits": digest(p for _, p in sorted(weights.items())),
    }


def run(folder, **given):
    torch.manual_seed(0)  # of the adapters' first values
    trainer = small_trainer(folder, **given)
    trainer.train()
    return told(trainer)


def dense(folder):
    model, tokenizer = dense_model("Qwen2"), small_model()[1]
    return run(folder, model=model, tokenizer=tokenizer, max_steps=3, beta=0.02, num_iterations=2)


def mxfp4(folder):
    sizes = dict(hidden_size=64, intermediate_size=32, num_experts=4, experts_per_token=2)
    model, tokenizer = small_model(**sizes)
    pack_experts(model)
    given = {
        "arguments": {"peft_config": EXPERTS},
        "loss_type": "dapo",
        "mask_truncated_completions": False,
    }
    return run(folder, model=model, tokenizer=tokenizer, max_steps=3, **given)


def tools(folder):
    tokenizer = tiny_tokenizer("".join(map(chr, range(32, 127))))
    tokenizer.add_tokens([CALL])
    tokenizer.chat_template = WRITES_CALLS
    model = small_model(initializer_range=0.5)[0]
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():  # else one token in a hundred would be a call
        head = model.get_output_embeddings().weight
        head.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(0)) / 4)
        head[len(tokenizer) - 1] *= 8
    given = dict(rows=ASKED, max_completion_length=40, max_steps=2, arguments={"tools": [times]})
    return run(folder, model=model, tokenizer=tokenizer, **given)


def resumed(folder):
    given = dict(
        max_steps=4, save_strategy="steps", save_steps=2, arguments={"peft_config": ATTENTION}
    )
    first = run(folder, **given)
    torch.manual_seed(1)
    again = small_trainer(folder, **given)
    again.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2"))
    assert told(again)["bits"] == first["bits"]
    return told(again)


def server(folder):
    "Each request is drawn alone: in the company of others a log-prob is rounded otherwise."
    model, tokenizer = small_model()
    alone = patch("grpo_nb.serving.stand_in.MOST_DRAWN_TOGETHER", 1)
    with alone, serving(StandIn(model, tokenizer, name="small", lora_dir=folder)) as url:
        vllm = dict(use_vllm=True, vllm_mode="server", vllm_server_base_url=url)
        return run(folder, arguments={"peft_config": EXPERTS}, **vllm)


RUNS = {one.__name__: one for one in (dense, mxfp4, tools, resumed, server)}


def main():
    torch.set_num_threads(1)
    found = {"probe": probe(), "torch": torch.__version__}
    for name, one in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = one(folder)
    RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
