"A run in one of several processes, which prints what it drew: started by test_prompt_choice."

import json
import sys
from pathlib import Path

from small_runs import ROWS, small_trainer


def right(prompts, completions, **columns):
    "Rows with 12+ are solved every other time, the others never."
    return [float(prompt.startswith("12+") and i % 2) for i, prompt in enumerate(prompts)]


if __name__ == "__main__":
    rows = [{"prompt": f"12+{n}=", "answer": str(n)} for n in range(2, 20)] + ROWS
    made = small_trainer(
        sys.argv[1],
        [right],
        rows=rows,
        dynamic_sampling="right",
        dynamic_sampling_rounds=6,
        curriculum="right",
        per_device_train_batch_size=8,
        use_cpu=True,
        max_steps=3,
    )
    made.train()
    rank = made.accelerator.process_index
    told = {
        "rates": sorted(made.collector.curriculum.rates.items()),
        "prompts": [sample["prompt"] for sample in made.samples],
        "idle": [r["dynamic_sampling/idle_after"] for r in made.log_history],
        "rounds": [r["dynamic_sampling/rounds"] for r in made.log_history],
    }
    Path(sys.argv[1], f"told-{rank}.json").write_text(json.dumps(told))
