"""What a tutorial says before it starts, and after an error: on machines that are pretended (no
card, a P100, a T4, an L4), and for failures that are forced."""

import json
import os
import re
import types
from configparser import ConfigParser
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
import torch
from packaging.requirements import Requirement

from grpo_nb import GRPOConfig, GRPOTrainer, load_model, ready, script, tiny_gpt_oss
from grpo_nb.environments.gsm8k import gsm8k
from grpo_nb.model.limits import choose_kernel
from grpo_nb.model.loading import choose_dtype
from grpo_nb.model.memory_bytes import GiB
from grpo_nb.model.memory_fit import find_card
from grpo_nb.rollout import engine
from grpo_nb.script import KNOWN, machine, next_cell, version_doubts

ROOT = Path(__file__).resolve().parent.parent
CARDS = {  # name, capability, GiB: as CUDA reports them
    "none": None,
    "P100": ("Tesla P100-PCIE-16GB", (6, 0), 15.89),
    "T4": ("Tesla T4", (7, 5), 14.74),
    "L4": ("NVIDIA L4", (8, 9), 22.16),
}
QWEN = "Qwen/Qwen2.5-1.5B-Instruct"
PAGES = {  # page -> (what its MODEL is set to, what it then takes on a T4)
    "01_first_run": ("Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
    "02_gpt_oss_20b_t4": (None, "openai/gpt-oss-20b"),
    "03_gsm8k": (None, QWEN),
    "08_from_unsloth_qwen3": ("Qwen/Qwen3-4B-Base", "Qwen/Qwen3-4B-Base"),
    "11_qlora": ("Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-3B-Instruct"),
}


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    "A function: give this process another card, memory, disk, Hub."
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "find_spec", lambda name: True)  # bitsandbytes is there

    def pretended(card="T4", host=11.0, disk=70.0, hub=""):
        found, cuda = CARDS[card], torch.cuda
        monkeypatch.setattr(cuda, "is_available", lambda: found is not None)
        if found:
            name, able, room = found
            monkeypatch.setattr(cuda, "get_device_name", lambda *_: name)
            monkeypatch.setattr(cuda, "get_device_capability", lambda *_: able)
            free = int((room - 0.3) * GiB), int(room * GiB)
            monkeypatch.setattr(cuda, "mem_get_info", lambda *_: free)
            monkeypatch.setattr(cuda, "is_bf16_supported", lambda **_: able >= (8, 0))
        there = types.SimpleNamespace(available=host * GiB, total=12.7 * GiB)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: there)
        room = types.SimpleNamespace(free=disk * 1e9)
        monkeypatch.setattr(script.shutil, "disk_usage", lambda place: room)
        monkeypatch.setattr(script, "unreachable", lambda name: hub)

    return pretended


def switch_of(page, model):
    "The cells of a page from its imports to its switch, run; what they made."
    cells = json.loads((ROOT / f"nbs/tutorials/{page}.ipynb").read_text())["cells"]
    sources = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    sources = [re.sub(r"(?m)^%.*$", "", s) for s in sources if "#| eval: false" not in s]
    names = {"__name__": "page"}
    for source in sources:
        if model:
            source = source.replace('MODEL = "tiny"', f"MODEL = {model!r}")
        exec(source, names)
        if "ready(" in source:
            return names


@pytest.mark.parametrize("page", PAGES)
def test_each_tutorial_takes_what_the_card_has_room_for(page, pretend, capsys):
    model, taken = PAGES[page]
    for card in ("T4", "L4", "P100", "none"):
        pretend(card)
        names = switch_of(page, model)
        here, said = names["HERE"], capsys.readouterr().out
        if card == "T4":  # float16 alone
            assert names.get("DTYPE", torch.float16) is torch.float16
            assert names.get("OLD", True) and not names.get("BF16", False)
        assert here["model"] == (taken if card in ("T4", "L4") else "tiny"), said
        if card == "P100":
            assert re.search(
                f"not {taken}.*: Tesla P100-PCIE-16GB is too old for the kernels: on C", said
            )
        if card == "none":
            assert re.search(
                f"not {taken}.*: no GPU: on Colab choose Runtime, Change runtime", said
            )
        assert card in ("T4", "L4") or "run the page from its first cell" in said
        assert said.endswith(f"taken: {here['model']}\n")
        assert (here["folder"].parts[0] == "runs") == (here["model"] != "tiny")


def test_a_t4_gets_float16_and_no_kernel_of_newer_cards(pretend):
    "The choices, asked with a T4's record; on an L4 they are others."
    chosen = {}
    for card in ("T4", "L4"):
        pretend(card)
        (able,) = {find_card(card).capability, torch.cuda.get_device_capability()}
        lengths = [(1, 4096), (512, 512), (16_384, 16_384)]
        kernels = {
            choose_kernel(capability=able, queries=q, keys=k, window=w, dtype="float16")[0]
            for q, k in lengths
            for w in (None, 128)
        }
        chosen[card] = choose_dtype("auto", torch.device("cuda")), kernels
    assert chosen["T4"] == (torch.float16, {"sdpa_lean"})
    assert chosen["L4"] == (torch.bfloat16, {"triton"})


def test_what_the_pages_ask_for_is_what_the_planner_predicts(pretend):
    "The numbers of the second page stand before its plan, and have to be the plan's."
    from grpo_nb.planning.plan import plan

    pretend("T4")
    names = switch_of("02_gpt_oss_20b_t4", None)
    source = (ROOT / "nbs/tutorials/02_gpt_oss_20b_t4.ipynb").read_text()
    for cell in json.loads(source)["cells"]:
        text = "".join(cell["source"])
        if text.startswith(("STEP = ", "SAVED = ")):
            exec(text.partition("usual = ")[0].partition("T4 = ")[0], names)
    made = plan("gpt-oss-20b", "T4", **names["STEP"], **names["SAVED"])
    assert names["REAL"]["card"] == pytest.approx(made.peak / GiB, abs=0.1)
    assert names["REAL"]["host"] == pytest.approx(sum(made.host.values()) / GiB, abs=0.1)


@pytest.mark.parametrize(
    "short, why",
    [
        (dict(host=1.0), "it needs 3.0, and there are 1.0, GiB of memory: restart the session, "),
        (dict(disk=2.0), "it needs 3.1, and there are 2.0, GB of disk: delete what is not needed"),
        (dict(hub="the Hub did not answer for it: run this cell again"), "the Hub did not answer"),
    ],
)
def test_what_is_short_is_named_and_something_smaller_taken(pretend, capsys, short, why):
    pretend(**short)
    here = switch_of("03_gsm8k", None)["HERE"]
    said = capsys.readouterr().out
    assert re.search(f"not {QWEN}.*: {re.escape(why)}", said)
    smaller = "Qwen/Qwen2.5-0.5B-Instruct" if "disk" in short else "tiny"
    assert here["model"] == smaller and re.search("first cell|this cell again", said)


def test_fewer_completions_then_four_bits_where_a_model_is_large(pretend, capsys, monkeypatch):
    "DeepSeek's 8B has no room in 16 bit; of a card with 10 GiB Qwen3-4B gets two completions."
    pretend()
    large = switch_of("08_from_unsloth_qwen3", "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B")["HERE"]
    assert (large["bits"], large["group"]) == (4, 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (10 * GiB, 10 * GiB))
    few = switch_of("08_from_unsloth_qwen3", "Qwen/Qwen3-4B-Base")
    assert (few["HERE"]["bits"], few["HERE"]["group"], few["GROUP"]) == (16, 2, 2)
    monkeypatch.setattr(script, "find_spec", lambda name: None)
    assert switch_of("11_qlora", "Qwen/Qwen2.5-3B-Instruct")["TINY"]
    assert "%pip install bitsandbytes, and run this cell again" in capsys.readouterr().out


def test_a_folder_with_a_model_is_taken_as_it_is(pretend, tmp_path):
    pretend("none")
    for page in ("01_first_run", "08_from_unsloth_qwen3", "11_qlora"):
        assert switch_of(page, str(tmp_path))["HERE"]["model"] == str(tmp_path)


def test_the_drive_is_one_switch(pretend, monkeypatch, capsys, tmp_path):
    pretend("none")
    outside = ready(dict(model="tiny"), folder="run", drive=True)["folder"]
    assert (
        outside == Path("runs/run") and "no Google Drive outside Colab" in capsys.readouterr().out
    )
    mounted = []
    drive = types.SimpleNamespace(mount=mounted.append)
    for name, module in {"google": {}, "google.colab": {"drive": drive}}.items():
        monkeypatch.setitem(script.sys.modules, name, types.SimpleNamespace(**module))
    inside = ready(dict(model="tiny"), folder="run", drive=True)["folder"]
    assert inside == tmp_path / "drive/MyDrive/run" and mounted == [str(tmp_path / "drive")]


def test_a_drive_that_is_refused(pretend, monkeypatch):
    "As google.colab.drive.mount ends when its dialogue is closed, and when it gives up."
    pretend("none")
    denied = type("MessageError", (Exception,), {})(
        "Error: credential propagation was unsuccessful"
    )
    for error in (denied, ValueError("mount failed")):

        def mount(place, error=error):
            raise error

        drive = types.SimpleNamespace(mount=mount)
        for name, module in {"google": {}, "google.colab": {"drive": drive}}.items():
            monkeypatch.setitem(script.sys.modules, name, types.SimpleNamespace(**module))
        with pytest.raises(type(error)) as met:
            ready(dict(model="tiny"), folder="run", drive=True)
        assert "DRIVE = False" in next_cell(met.value)


def test_what_is_known_begins_with_what_is_needed():
    settings = ConfigParser(delimiters=["="])
    settings.read(ROOT / "settings.ini")
    asked = map(Requirement, settings["DEFAULT"]["requirements"].split())
    least = {one.name: next(iter(one.specifier)).version for one in asked}
    assert {name: low for name, (low, _) in KNOWN.items()} == {name: least[name] for name in KNOWN}


def test_other_versions_get_a_sentence_with_the_next_cell(monkeypatch):
    other = {"ipywidgets": "7.6.5", "transformers": "6.1.0", "torch": "2.14.1+cu128"}
    monkeypatch.setattr(script, "version", lambda name: other.get(name) or version(name))
    newer, older = version_doubts()
    assert older.startswith("ipywidgets 7.6.5 is older than 7.7.1, which is needed: run %pip inst")
    assert newer.startswith("transformers 6.1.0 is newer than 5.24, and untried. If a cell fails:")
    assert all(
        one.endswith("restart the session, and begin at the first cell") for one in [newer, older]
    )


# the Hub


@pytest.mark.parametrize("fault", ["away", "slow"])
def test_a_hub_that_does_not_answer(fault, monkeypatch):
    "Refused, and silent: the client's own errors, from sockets of this machine."
    import socket

    import huggingface_hub.constants as constants

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        if fault == "slow":
            server.listen()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        api = script.HfApi(endpoint=address)
        asked = api.model_info
        monkeypatch.setattr(api, "model_info", lambda name, timeout: asked(name, timeout=0.2))
        monkeypatch.setattr(script, "HfApi", lambda: api)
        said = script.unreachable("somebody/some-model")
    assert said.startswith("the Hub did not answer for it (") and "run this cell again" in said
    assert ("Timeout" in said) == (fault == "slow")


def test_a_hub_that_falls_silent_later_is_not_waited_for(monkeypatch, pretend):
    "The client's own question has no limit of time; after `ready` it has one."
    import socket

    import huggingface_hub.constants as constants

    pretend("none")
    ready(dict(model="tiny"), folder="run")
    ready(dict(model="tiny"), folder="run")
    hooks = script.get_session().event_hooks["request"]
    assert hooks.count(script.impatient) == 1
    asked, real = [], script.impatient

    def hurried(request):
        real(request)
        asked.append({**request.extensions["timeout"]})
        request.extensions["timeout"] = dict.fromkeys(asked[-1], 0.2)

    hooks[hooks.index(real)] = hurried
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        api = script.HfApi(endpoint=f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(Exception) as met:
            api.model_info("somebody/some-model")
    hooks.remove(hurried)
    assert {20} in [set(limits.values()) for limits in asked]
    assert next_cell(met.value).startswith("Next: with a network, run this cell again")


def test_an_account_is_asked_for_where_its_makers_want_one_alone(monkeypatch, tmp_path):
    told = types.SimpleNamespace(gated="manual")
    api = types.SimpleNamespace(model_info=lambda name, timeout: told)
    monkeypatch.setattr(script, "HfApi", lambda: api)
    monkeypatch.setattr(script, "get_token", lambda: None)
    assert "an account" in script.unreachable("meta-llama/some-model")
    told.gated = False
    assert script.unreachable("Qwen/some-model") == ""
    assert script.unreachable(str(tmp_path)) == ""


@pytest.mark.parametrize("status", [429, 503])
def test_a_hub_that_is_busy(status, monkeypatch):
    "The client's own errors, from a server of this machine."
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    import huggingface_hub.constants as constants

    class Busy(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(status)

        log_message = print

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with HTTPServer(("127.0.0.1", 0), Busy) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        api = script.HfApi(endpoint=f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(Exception) as met:
            api.model_info("somebody/some-model", timeout=5)
        server.shutdown()
    assert next_cell(met.value).startswith("Next: with a network, run this cell again")


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(lambda: load_model("somebody/some-model", max_seq_length=64), id="model"),
        pytest.param(
            lambda: gsm8k("train", "somebody/some-data"), id="data", marks=pytest.mark.long
        ),
    ],
)
def test_a_download_that_fails_is_followed_by_the_next_cell(load, monkeypatch):
    with pytest.raises(Exception) as met:
        load()
    assert next_cell(met.value).startswith("Next: with a network, run this cell again")


# memory


def small_trainer(folder, **settings):
    model, tokenizer = tiny_gpt_oss(seed=0)
    config = GRPOConfig(
        output_dir=folder,
        max_steps=1,
        per_device_train_batch_size=8,
        max_completion_length=4,
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    rows = [{"prompt": "1+1="}] * 4
    trainer = GRPOTrainer(
        model, lambda completions, **_: [float(len(c)) for c in completions], config, rows,
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.log.show = False
    return trainer


def out_of_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_memory_in_drawing(tmp_path, monkeypatch):
    trainer = small_trainer(tmp_path)
    monkeypatch.setattr(engine, "free_memory", lambda device: 1000)
    with pytest.raises(MemoryError) as met:
        trainer.train()
    assert next_cell(met.value).startswith("Next: draw shorter completions (max_completion_length")


def test_memory_in_training(tmp_path):
    trainer = small_trainer(tmp_path)
    trainer.model.model.layers[0].register_full_backward_pre_hook(out_of_memory)
    with pytest.raises(torch.OutOfMemoryError) as met:
        trainer.train()
    assert str(met.value).startswith("memory ran out: train in smaller pieces (mini_batch=8, ")
    assert "vllm_gpu_memory_utilization. CUDA out of memory. Tried" in str(met.value)
    said = next_cell(met.value)
    assert said.startswith("Next: train in smaller pieces (mini_batch=8, ")
    assert "run the page from its first cell. A run whose folder is kept goes on" in said


def test_what_is_advised_for_memory_does_not_forbid_to_go_on(tmp_path):
    "A checkpoint refuses another batch size; it takes the settings that the sentence names."
    small_trainer(tmp_path).train()
    saving = dict(mini_batch=8, gradient_checkpointing=True, offload_activations=True)
    trainer = small_trainer(tmp_path, **saving)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 1


def test_memory_in_loading(tmp_path, monkeypatch):
    model, tokenizer = tiny_gpt_oss(seed=0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(torch.nn.Module, "to", out_of_memory)
    monkeypatch.setattr(torch, "empty", out_of_memory)
    monkeypatch.setattr(torch, "empty_like", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError) as met:
        load_model(tmp_path, max_seq_length=64)
    assert next_cell(met.value).startswith("Next: load a smaller model, or the same one with load_")


def test_memory_of_the_host():
    with pytest.raises(RuntimeError) as met:
        torch.empty(2**50)
    assert next_cell(met.value).startswith("Next: load a smaller model")
    with pytest.raises(MemoryError) as met:
        bytearray(2**60)
    assert next_cell(met.value).startswith("Next: load a smaller model")


@pytest.mark.parametrize(
    "words, begins",
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "load a sm"),
        ("CUDA error: out of memory", "load a sm"),
        ("unable to mmap 709104 bytes from file <a>: Cannot allocate memory (12)", "load a sm"),
        ("CUDA error: no kernel image is available for execution on the device", "on Colab choose"),
    ],
)
def test_words_of_cuda(words, begins):
    "Torch's AcceleratorError, and the RuntimeError of versions before it."
    for kind in (RuntimeError, getattr(torch, "AcceleratorError", RuntimeError)):
        with pytest.raises(RuntimeError) as met:
            raise kind(words)
        assert next_cell(met.value).startswith(f"Next: {begins}")


# the disk, packages, and what is nobody's business


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is full")
def test_a_full_disk():
    with pytest.raises(OSError) as met, open("/dev/full", "w") as file:
        file.write("x")
        file.flush()
    assert "delete what is not needed, then run this cell again" in next_cell(met.value)


def test_a_package_that_is_absent_and_an_error_of_the_readers():
    with pytest.raises(ModuleNotFoundError) as met:
        import no_such_package_anywhere  # noqa: F401
    said = "Next: %pip install no_such_package_anywhere in a cell of its own, then run this cell"
    assert next_cell(met.value) == f"{said} again."
    assert next_cell(ValueError("num_generations is 1")) is None
    assert next_cell(KeyboardInterrupt()) is None


def test_the_sentence_stands_under_the_error_of_a_cell(capsys):
    "In IPython, after the first cell of a page; once, however often that cell is run."
    from IPython.core.interactiveshell import InteractiveShell

    shell, before = InteractiveShell.instance(), os.environ.get("PYTHONPATH")
    try:
        shell.run_cell("import grpo_nb; grpo_nb.open_page(); grpo_nb.open_page()")
        capsys.readouterr()
        shell.run_cell("raise MemoryError('a card')")
        assert capsys.readouterr().out.count("Next: load a smaller model") == 1
        shell.run_cell("1/0")
        assert "Next" not in capsys.readouterr().out
    finally:
        InteractiveShell.clear_instance()
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before


def test_this_machine_is_described(capsys):
    have = machine()
    assert have["host"] > 0 and have["download"] > 0 and len(have["capability"]) == 2
    assert (have["card"] > 0) == torch.cuda.is_available()
