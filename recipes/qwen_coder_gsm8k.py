"""The rows and the reward of qwen_coder_gsm8k.yaml: 2,000 problems, 1 for the right number."""

from grpo_nb.environments.gsm8k import gsm8k
from grpo_nb.environments.verifiers import final_number, right_number

BOX = (
    "You are a helpful assistant. Reason step by step, and put your final answer within \\boxed{}."
)


def rows(source="openai/gsm8k"):
    "The first 2,000 training rows; `source` may be a folder with GSM8K's train.jsonl."
    return gsm8k("train", source, system_prompt=BOX).select(range(2_000))


def right(completions, answer, **columns):
    "1 for the right number, in its box or the last of the text; 0 for anything else."
    texts = (c if isinstance(c, str) else c[-1]["content"] for c in completions)
    return [float(final_number(text) == right_number(a)) for text, a in zip(texts, answer)]
