"""Models by name, with the real client against a server on this machine."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.interop.hub_server import HubServer

LOAD = """
import sys
what, name = sys.argv[1:]
try:
    if what == "model":
        from bertjax.interop.loading import load_model
        print(load_model(name).model.config.hidden_size)
    elif what == "tokenizer":
        from bertjax.tokenization import load_tokenizer
        print(load_tokenizer(name).vocab_size)
    else:
        from bertjax.formats import hub
        print(hub.fetch(name))
except (FileNotFoundError, ValueError) as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.fixture
def model_directory(tmp_path):
    """A small model as transformers would leave it, with files that nobody needs."""
    import jax

    from bertjax.interop.huggingface import write_directory
    from bertjax.model.heads import BertForPreTraining, init_params
    from bertjax.model.presets import BertConfig

    directory = tmp_path / "model"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(1000))]
    config = BertConfig(
        vocab_size=len(pieces),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    model = BertForPreTraining(config)
    write_directory(directory, config, init_params(model, jax.random.key(0)), "BertForPreTraining")
    (directory / "vocab.txt").write_text("\n".join(pieces))
    (directory / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    (directory / "onnx").mkdir()
    (directory / "onnx" / "model.onnx").write_bytes(b"x" * 100_000)
    (directory / "pytorch_model.bin").write_bytes(b"x" * 100_000)
    return directory


@pytest.fixture
def hub(model_directory):
    server = HubServer({"someone/small-bert": {"main": model_directory, "v1": model_directory}})
    yield server
    server.close()


def load(hub, home, name="someone/small-bert", what="fetch", **environment):
    """(exit code, output, last line of errors) of a process of its own, as the client reads its environment once."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = outside | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "JAX_PLATFORMS": "cpu"} | environment
    done = subprocess.run([sys.executable, "-c", LOAD, what, name], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout.strip(), (done.stderr.strip().splitlines() or [""])[-1]


def fetched(hub):
    return {path.rpartition("/")[2] for method, path, _ in hub.requests if method == "GET" and "resolve" in path}


def test_a_model_by_name_fetches_what_is_needed_once(hub, tmp_path):
    assert load(hub, tmp_path / "home", what="model")[:2] == (0, "32")
    assert fetched(hub) == {"config.json", "model.safetensors", "vocab.txt", "tokenizer_config.json"}
    hub.requests.clear()
    assert load(hub, tmp_path / "home", name="someone/small-bert@v1")[0] == 0
    assert "model.safetensors" not in fetched(hub)  # the same content under another revision


def test_the_tokenizer_alone_leaves_the_weights(hub, tmp_path):
    assert load(hub, tmp_path / "home", what="tokenizer")[:2] == (0, "1005")
    assert fetched(hub) == {"config.json", "vocab.txt", "tokenizer_config.json"}


def test_without_a_connection_the_cache_serves(hub, tmp_path):
    assert load(hub, tmp_path / "home")[0] == 0
    hub.requests.clear()
    assert load(hub, tmp_path / "home", HF_HUB_OFFLINE="1")[0] == 0
    assert not hub.requests


def test_a_download_that_was_cut_continues(hub, model_directory, tmp_path):
    (model_directory / "model.safetensors").write_bytes(b"x" * 25_000_000)
    hub.cut_after = 22_000_000  # the client keeps what it has in pieces of 10 MB
    code, _, _ = load(hub, tmp_path / "home")
    if code:  # the client tries again by itself, or the same command does
        assert load(hub, tmp_path / "home")[0] == 0
    ranges = [where for method, path, where in hub.requests if method == "GET" and path.endswith(".safetensors")]
    assert ranges == [None, "bytes=20971520-"]


@pytest.mark.parametrize(
    ("name", "environment", "reason"),
    [
        ("someone/small-bert@v7", {}, "the model someone/small-bert of .* has no revision 'v7'"),
        ("someone/none", {}, "has no model someone/none .or HF_TOKEN, which a private one needs"),
        ("someone/small-bert", {"HF_HUB_OFFLINE": "1"}, "cannot be reached, and the cache .* does not hold it"),
        pytest.param(
            "someone/small-bert",
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            "cannot be reached, and the cache",
            marks=pytest.mark.slow,  # the client tries for half a minute
        ),
        ("/nowhere/at/all", {}, "/nowhere/at/all does not exist: .* nor the name of a model"),
    ],
    ids=["revision", "model", "offline", "no network", "path"],
)
def test_what_cannot_be_had_is_an_error_that_says_both(hub, tmp_path, name, environment, reason):
    code, _, last = load(hub, tmp_path / "home", name, **environment)
    assert code == 1
    assert re.search(reason, last), last
    if name.startswith("someone"):
        assert f"{name} does not exist: it is neither a directory nor a file here, and" in last


def test_a_private_model_needs_the_token(hub, tmp_path):
    hub.token = "hf_secret"
    code, _, last = load(hub, tmp_path / "home")
    assert code == 1
    assert "HF_TOKEN" in last
    assert load(hub, tmp_path / "home", HF_TOKEN="hf_secret")[0] == 0
