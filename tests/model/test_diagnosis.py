"""Unusable checkpoints are refused in one line with the true reason, as target and as draft."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import foredraft
from foredraft import LLM
from foredraft.errors import ModelError
from foredraft.model import LoadOptions, load_model
from foredraft.model.checkpoint import EMBEDDED

Change = Callable[[Path], None]


def weight(key: str, value: float) -> Change:
    """Change one number of a matrix, in a row that few texts use."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        weights = load_file(file)
        weights[key][3, 0] = value
        save_file(weights, file, metadata={"format": "pt"})

    return change


def config(*without: str, **settings: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        found = {key: value for key, value in json.loads(file.read_text()).items() if key not in without}
        file.write_text(json.dumps(found | settings))

    return change


CUSTOM = {
    "model_type": "mine",
    "architectures": ["Mine"],
    "auto_map": {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.Mine"},
}
BROKEN: dict[str, tuple[Change, tuple[str, ...]]] = {
    "NaN": (weight("model.layers.0.mlp.down_proj.weight", float("nan")), ("NaN", "mlp.down_proj", "download")),
    "infinity": (weight("model.layers.0.self_attn.q_proj.weight", float("inf")), ("NaN or infinity", "q_proj")),
    "a NaN embedding": (weight("model.embed_tokens.weight", float("nan")), ("NaN", "embed_tokens")),
    "no hidden_size": (config("hidden_size"), ("config.json does not set hidden_size", "4096")),
    "no vocab_size": (config("vocab_size"), ("config.json does not set vocab_size", "32000")),
    "no intermediate_size": (config("intermediate_size"), ("config.json does not set intermediate_size",)),
    "no num_attention_heads": (config("num_attention_heads"), ("config.json does not set num_attention_heads",)),
    "no num_hidden_layers": (config("num_hidden_layers"), ("lacks", "config.json does not set num_hidden_layers")),
    "another hidden_size": (config(hidden_size=128), ("shape", "[4096, 128]", "download")),
    "a hidden_size of letters": (config(hidden_size="many"), ("config.json", "hidden_size")),
    "no model_type": (config("model_type"), ("model_type",)),
    "an unknown model_type": (config(model_type="zebra"), ("transformers", "'zebra'")),
    "code of its own": (config(**CUSTOM), ("code", "--trust-remote-code", "trust_remote_code=True")),
}


@pytest.mark.parametrize(("change", "words"), BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("role", ["model", "draft_model"])
def test_a_broken_checkpoint_is_refused_with_the_true_reason(
    change: Change, words: tuple[str, ...], role: str, tmp_path: Path
) -> None:
    name = "target" if role == "model" else "draft"
    folder = shutil.copytree(EMBEDDED / name, tmp_path / "broken")
    change(folder)
    with pytest.raises(ModelError) as caught:
        LLM(**{role: folder})
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{folder}: ")
    for word in words:
        assert word in message


def test_layers_missing_from_the_configuration_are_noticed(tmp_path: Path) -> None:
    """If a class's default is fewer layers than the file has, the model would run without the rest."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path / "gpt2"
    GPT2LMHeadModel(GPT2Config(n_layer=13, n_embd=32, n_head=2, vocab_size=64)).save_pretrained(folder)
    config("n_layer")(folder)
    with pytest.raises(ModelError, match="does not set num_hidden_layers"):
        load_model(folder, LoadOptions(device="cpu"))


def test_logits_may_be_minus_infinity(tmp_path: Path) -> None:
    """Some models mask ids that they never write."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(EMBEDDED / "draft")
    original = hf.forward

    def masked(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        out.logits = out.logits.index_fill(-1, torch.tensor([4000]), -torch.inf)
        return out

    hf.forward = masked
    from foredraft.model.input_rounding import never
    from foredraft.model.probe import _references

    _, (logits,) = _references(hf, "masked", [[5, 6]], never)
    assert bool(torch.isneginf(logits).any())


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:3", "meta", "toaster"])
def test_a_missing_device_is_refused_in_one_line(device: str) -> None:
    with pytest.raises(ModelError, match="device") as caught:
        LLM(device=device)
    assert "\n" not in str(caught.value)


def asked(name: str, **environment: str) -> str:
    """The error message of LLM(name) in a process of its own, since huggingface_hub reads its environment once."""
    script = (
        "import sys, foredraft\ntry: foredraft.LLM(sys.argv[1])\nexcept foredraft.ModelError as error: print(error)\n"
    )
    source = str(Path(foredraft.__file__).parents[1])
    own = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", script, name],
        env=own | {"PYTHONPATH": source} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout


@contextmanager
def hub(status: int, code: str) -> Iterator[str]:
    """Run a hub that answers every request with this status. Yields its address."""

    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (404, "RepoNotFound", "no model on the hub has that name"),
        (403, "GatedRepo", "terms"),
        (404, "RevisionNotFound", "no revision"),
        (404, "EntryNotFound", "no config.json"),
    ],
)
def test_the_hubs_error_is_reported(status: int, code: str, words: str, tmp_path: Path) -> None:
    with hub(status, code) as address:
        message = asked("some-org/some-model", HF_ENDPOINT=address, HF_HOME=str(tmp_path))
    assert message.startswith("some-org/some-model: ")
    assert message.count("\n") == 1
    assert words in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "check the network"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
    ],
    ids=["refused", "offline"],
)
def test_an_unreachable_hub_is_reported(environment: dict[str, str], words: str, tmp_path: Path) -> None:
    message = asked("some-org/some-model", HF_HOME=str(tmp_path), **environment)
    assert "the hub cannot be reached" in message
    assert words in message
    assert message.count("\n") == 1


def test_a_head_is_no_model() -> None:
    with pytest.raises(ModelError, match="it is a head, which drafts for another model: give it as draft_model"):
        load_model(EMBEDDED / "smollm2-head", LoadOptions())
