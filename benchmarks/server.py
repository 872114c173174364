"""GRPO of gpt-oss-20b (random weights, full size, MXFP4, adapters on attention and experts) with a
stock vLLM as the sampler, and with the own engine: seconds and GiB of each part, and how far the
two sides' log-probs are apart at each update.

    python benchmarks/server.py --vllm-python /path/to/venv/bin/python
        three runs on one card, one after the other: the own engine; a server that keeps its share
        of the card; a server that the trainer starts and puts to sleep while it trains
    python benchmarks/server.py --only server --url http://127.0.0.1:8000
        a server that runs already, on this card or another one, with the checkpoint that
        --checkpoint names (written if it is not there)
    python benchmarks/server.py --cpu --only server
        the same with a tiny model and `grpo-nb serve`, to try it out

The table has a row an update, printed when it is made: seconds of drawing, training and publishing,
the mean gap of log-probs (sampler against trainer, nats a token), and the slope of the adapter's
effect as the guard measures it: 1 where the server draws with exactly this adapter. The last line
is JSON.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch
from grpo_step import letters_reward, prompts_of
from train_step import (
    FULL,
    SMALL,
    arguments,
    clear,
    device_of,
    gpt_oss,
    peaks,
    tell,
    versions,
    word_tokenizer,
)

RUNS = ("own", "server", "colocate")
RANK = 8


def write_base(args, sizes):
    "The random model in the released layout, with its tokenizer, unless it is there."
    from grpo_nb.model.export import save_mxfp4

    folder = Path(args.checkpoint)
    if (folder / "config.json").exists():
        return
    model = gpt_oss(sizes, "mxfp4", args.prompt + args.new, r=0)
    save_mxfp4(model, folder, tokenizer=word_tokenizer(sizes), quiet=True)
    del model
    clear()


def load_policy(args):
    "The checkpoint with adapters on attention and experts, as the trainer gets it."
    from grpo_nb import load_model

    return load_model(
        args.checkpoint,
        max_seq_length=args.prompt + args.new,
        load_in_4bit=True,
        lora_r=RANK,
        lora_targets="all",
        quiet=True,
    )


def card_gib():
    "GiB of the card that all processes together hold."
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return round((total - free) / 2**30, 1)


# the server


def serve_command(args):
    "vLLM's own server, or the stand-in on a CPU."
    if args.cpu:
        serve = [sys.executable, "-m", "grpo_nb", "serve", args.checkpoint]
        return [*serve, "--port", str(args.port), "--lora-dir", tempfile.gettempdir()]
    return [
        *(args.vllm_python, "-m", "vllm.entrypoints.cli.main", "serve", args.checkpoint),
        *("--host", "127.0.0.1", "--port", str(args.port)),
        *("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2"),
        *("--logprobs-mode", "processed_logprobs", "--max-model-len", "4096"),
        *("--gpu-memory-utilization", str(args.share)),
    ]


def wait_until_it_answers(url, process, seconds=400):
    "Until /health says 200; RuntimeError with the end of the log if the process ends before."
    began = time.time()
    ask = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.time() - began < seconds:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        try:
            with ask.open(f"{url}/health", timeout=2):
                return round(time.time() - began, 1)
        except OSError:
            time.sleep(1)
    raise RuntimeError(f"the server did not answer within {seconds} s")


def start_server(args):
    "The process and its address."
    log = open(args.log, "w")  # noqa: SIM115  the server's, for as long as it lives
    process = subprocess.Popen(
        serve_command(args),
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1"}
        | ({"OMP_NUM_THREADS": "1"} if args.cpu else {}),
    )
    return process, f"http://127.0.0.1:{args.port}"


# a run


def settings_of(args, run, url):
    "What differs between the three."
    if run == "own":
        return {}
    if run == "server":
        return dict(use_vllm=True, vllm_mode="server", vllm_server_base_url=url)
    return dict(
        use_vllm=True,
        vllm_mode="colocate",
        vllm_python=args.vllm_python,
        vllm_gpu_memory_utilization=args.share,
        vllm_enable_sleep_mode=True,
    )


def timed_sleep():
    """Lists that fill while a server is sent to sleep and woken: seconds of each, and GiB of the
    card while it sleeps."""
    from grpo_nb.serving.colocated import ColocatedVLLM

    found = {"falling asleep, s": [], "waking, s": [], "card while asleep, GiB": []}

    def timed(name, part):
        function = getattr(ColocatedVLLM, name)

        def call(server):
            before, start = server.asleep, time.perf_counter()
            function(server)
            if server.asleep != before:
                found[part].append(round(time.perf_counter() - start, 3))
                if server.asleep:
                    found["card while asleep, GiB"].append(card_gib())

        setattr(ColocatedVLLM, name, call)

    timed("rest", "falling asleep, s")
    timed("wake", "waking, s")
    return found


def train(args, sizes, run, url=None):
    "One run: a record of each update."
    from grpo_nb import GRPOConfig, GRPOTrainer

    sleep = timed_sleep() if run == "colocate" else {}
    model, tokenizer = load_policy(args)
    drawn, began = args.prompts * args.completions, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=args.updates,
            num_generations=args.completions,
            per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=drawn // args.batch,
            max_completion_length=args.new,
            learning_rate=args.learning_rate,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            guard_every=1,
            guard_max_gap=args.max_gap,
            **settings_of(args, run, url),
        )
        trainer = GRPOTrainer(
            model,
            letters_reward,
            config,
            prompts_of(sizes, args.prompts, args.prompt),
            processing_class=tokenizer,
        )
        ready = time.perf_counter() - began
        trainer.add_callback(rows_as_they_come(run))
        trainer.train()
        history = trainer.log_history
    return dict(ready=round(ready, 1), held=card_gib(), **peaks(), sleep=sleep, updates=history)


NUMBERS = {  # of a row: the names under which the log may have it
    "sample": ("seconds/sample",),
    "train": ("seconds/train",),
    "publish": ("seconds/publish",),
    "gap": ("guard/gap_mean", "sampling/gap_mean"),
    "largest": ("guard/gap_max", "sampling/gap_max"),
    "slope": ("guard/slope",),
}


def numbers_of(record):
    "A row's numbers; nan where the log has none."
    return {
        name: next((record[key] for key in keys if key in record), float("nan"))
        for name, keys in NUMBERS.items()
    }


def rows_as_they_come(run):
    "A callback that prints each update when it is logged: a run that is cut off loses no row."
    from transformers import TrainerCallback

    class Rows(TrainerCallback):
        def on_train_begin(self, *_, **__):
            print(f"\n{run}: update " + " ".join(f"{name:>8}" for name in NUMBERS), flush=True)

        def on_log(self, args, state, control, logs=None, **_):
            numbers = numbers_of(logs or {})
            if numbers["train"] == numbers["train"]:
                row = " ".join(f"{x:8.4f}" for x in numbers.values())
                print(f"{state.global_step:>{len(run) + 8}} " + row, flush=True)

    return Rows()


def summary(run, result):
    "Medians of the updates but the first, and what is known of the whole run."
    numbers = [numbers_of(record) for record in result["updates"]]
    numbers = [row for row in numbers if row["train"] == row["train"]]
    numbers = numbers[1:] or numbers
    medians = {name: statistics.median(row[name] for row in numbers) for name in NUMBERS}
    print(f"{run}: medians: " + ", ".join(f"{name} {x:.3f}" for name, x in medians.items()))
    for part, values in result["sleep"].items():
        print(f"{run}: {part}: {values}")
    print(f"{run}: ready after {result['ready']} s; GiB {result['peak']}, card {result['held']}")


def main():
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--vllm-python", default=sys.executable, help="a Python that has vLLM")
    parser.add_argument("--url", help="of a server that runs already")
    parser.add_argument("--share", type=float, default=0.35, help="of the card, for vLLM")
    parser.add_argument(
        "--max-gap",
        type=float,
        default=5.0,
        help="nats a token at which the guard stops a run; a random model turns rounding into "
        "other experts, so its gap is far above a trained one's (default: %(default)s)",
    )
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=1e-4,
        help="at 1e-3 the adapter soon moves log-probs further than rounding does, which shows "
        "its slope (default: %(default)s)",
    )
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--log", default="/tmp/vllm_serve.log", help="of the server")
    for name, value in (
        *(("updates", 20), ("prompts", 8), ("completions", 8)),
        *(("prompt", 128), ("new", 256), ("batch", 16)),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    sizes = SMALL if args.cpu else FULL
    if args.cpu:  # the server has the other cores
        torch.set_num_threads(1)
    write_base(args, sizes)
    tell(base=args.checkpoint, device=str(device_of(args)), **versions())
    results, failed = {}, False
    for run in args.only:
        process, url = None, args.url
        try:
            if run == "server" and not url:
                process, url = start_server(args)
                tell(server=url, seconds=wait_until_it_answers(url, process))
            results[run] = train(args, sizes, run, url)
            summary(run, results[run])
        except Exception as error:
            failed = True
            tell(run=run, error=f"{type(error).__name__}: {str(error)[:600]}")
        finally:
            if process is not None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(30)
        clear()
    print(json.dumps(results))
    sys.exit(failed)


if __name__ == "__main__":
    main()
