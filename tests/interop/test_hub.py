"""Models by name, fetched and pushed, with the real client against a server on this machine."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from etils import epath

from bertjax.config import Config
from bertjax.formats import hub as bertjax_hub
from bertjax.run.run import push
from bertjax.tools import convert
from tests.fakes import SPECIALS
from tests.interop.hub_server import HubServer, person

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
    from bertjax.model.heads import BertForPreTraining, shared_init
    from bertjax.model.presets import BertConfig

    directory = tmp_path / "model"
    pieces = [*SPECIALS, *(f"w{i}" for i in range(1000))]
    config = BertConfig(
        vocab_size=len(pieces),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    model = BertForPreTraining(config)
    write_directory(directory, config, shared_init(model, jax.random.key(0)), "BertForPreTraining")
    (directory / "vocab.txt").write_text("\n".join(pieces))
    (directory / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    (directory / "onnx").mkdir()
    (directory / "onnx" / "model.onnx").write_bytes(b"x" * 100_000)
    (directory / "pytorch_model.bin").write_bytes(b"x" * 100_000)
    return directory


@pytest.fixture
def hub(model_directory, tmp_path):
    server = HubServer(
        {"someone/small-bert": {"main": model_directory, "v1": model_directory}}, storage=tmp_path / "pushed"
    )
    server.people = {
        "hf_writer": person("writer", lab="contributor", library="read"),
        "hf_reader": person("writer", role="read"),
    }
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
        ("someone/small-bert", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "cannot be reached, and the cache"),
        ("/nowhere/at/all", {}, "/nowhere/at/all does not exist: .* nor the name of a model"),
    ],
    ids=["revision", "model", "offline", "no network", "path"],
)
def test_what_cannot_be_had_is_an_error_that_says_both(hub, tmp_path, name, environment, reason):
    began = time.monotonic()
    code, _, last = load(hub, tmp_path / "home", name, **environment)
    assert time.monotonic() - began < 20  # huggingface_hub may try for half a minute
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


# --------------------------------------------------------------------------------------------- pushed


@pytest.fixture
def client(hub, monkeypatch, tmp_path):
    """The client in this process asks the server, with a token that may write."""
    hub.serve_this_process(monkeypatch, tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_writer")
    return hub


def uploads(hub):
    return [method for method, path, _ in hub.requests if path.startswith("/lfs/")]


def test_the_model_of_a_run_is_pushed_with_its_card_and_report(client, model_directory, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(model_directory, run / "model")
    (run / "report.html").write_text("<html>")
    (run / "model" / "README.md").write_text('from_pretrained("DIRECTORY")')
    (run / "model" / ".cache").mkdir()
    (run / "model" / ".cache" / "lock").write_text("")
    convert.main([f"--from={run}", "--push=writer/mine", "--private"])
    assert f"{client.url}/writer/mine" in capsys.readouterr().out
    pushed = client.repositories["models"]["writer/mine"]["main"]
    names = {str(path.relative_to(pushed)) for path in pushed.rglob("*") if path.is_file()}
    mine = {str(path.relative_to(run / "model")) for path in (run / "model").rglob("*") if path.is_file()}
    assert names == mine - {".cache/lock"} | {"report.html"}
    weights = "model.safetensors"
    assert (pushed / weights).read_bytes() == (run / "model" / weights).read_bytes()
    assert (pushed / "README.md").read_text() == 'from_pretrained("writer/mine")'
    assert client.private == {"writer/mine"}
    assert uploads(client) == ["PUT"]
    client.requests.clear()
    convert.main([f"--from={run}/model", "--push=writer/mine"])
    assert uploads(client) == []  # the server has the weights


def test_what_was_converted_is_pushed_and_read_by_its_name(client, model_directory, tmp_path):
    convert.main([f"--from={model_directory}", f"--out={tmp_path}/out", "--push=lab/converted"])
    code, fetched_to, _ = load(client, tmp_path / "home", "lab/converted")
    assert code == 0
    for name in ("config.json", "model.safetensors", "vocab.txt"):
        assert pathlib.Path(fetched_to, name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_an_upload_that_was_cut_is_tried_again(client, model_directory):
    client.cut_after = 20_000
    bertjax_hub.push(model_directory, "writer/cut")
    pushed = client.repositories["models"]["writer/cut"]["main"] / "model.safetensors"
    assert pushed.read_bytes() == (model_directory / "model.safetensors").read_bytes()
    assert uploads(client) == ["PUT", "PUT"]


def test_a_failed_push_says_where_the_model_is_and_the_command_that_tries_again(client, model_directory):
    client.uploads_fail = True
    with pytest.raises(SystemExit) as left:
        convert.main([f"--from={model_directory}", "--push=writer/full", "--private"])
    assert "storage quota is used up" in str(left.value)
    again = f"python -m bertjax.tools.convert --from={model_directory} --push=writer/full --private"
    assert str(left.value).endswith(again)
    job = SimpleNamespace(workdir=model_directory.parent)
    job.config = Config().replace({"export.push": "writer/full", "export.private": True})
    failed = push(job, SimpleNamespace(directory=model_directory.parent, message=print))
    assert str(failed).endswith(f"Push it by: {again}")
    job.workdir = epath.Path("gs://bucket/run")  # which convert does not read
    remote = push(job, SimpleNamespace(directory=model_directory.parent, message=print))
    assert "the model is in gs://bucket/run/model" in str(remote)
    assert str(remote).endswith("Push it by: the command of this run")
    client.uploads_fail = False
    convert.main(again.split()[3:])
    assert (client.storage / "writer/full/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "token", "reason"),
    [
        ("small-bert", "hf_writer", "--push=small-bert is not the name of a model .* give USER/MODEL"),
        ("writer/..", "hf_writer", "is not the name of a model"),
        ("writer/new", "", "needs a token that may write: make one at .*/settings/tokens, and log in with `hf auth"),
        ("writer/new", "hf_other", "does not know the token of HF_TOKEN"),
        ("writer/new", "hf_reader", "the token of writer may only read"),
        ("someone/new", "hf_writer", "writer may not write to someone/, only to lab/, writer/"),
        ("library/new", "hf_writer", "writer may not write to library/"),
    ],
)
def test_a_place_that_may_not_be_written_is_refused_before_the_work(
    client, model_directory, tmp_path, monkeypatch, name, token, reason
):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(SystemExit) as left:
        convert.main([f"--from={model_directory}", f"--out={tmp_path}/out", f"--push={name}"])
    assert re.search(reason, str(left.value)), left.value
    assert "\n" not in str(left.value)
    assert not (tmp_path / "out").exists()
    assert not uploads(client)


def test_a_private_push_to_a_public_model_is_refused(client, model_directory):
    bertjax_hub.push(model_directory, "writer/public")
    with pytest.raises(ValueError, match="it is there already and public"):
        bertjax_hub.check_push("writer/public", True, "config.export.push")
    bertjax_hub.check_push("writer/public", False, "config.export.push")


def test_a_token_that_may_not_write_to_a_model_is_refused(client, model_directory):
    bertjax_hub.push(model_directory, "lab/shared")
    client.read_only.add("lab/shared")
    with pytest.raises(ValueError, match="the token of HF_TOKEN or `hf auth login` may not write"):
        bertjax_hub.check_push("lab/shared", False, "config.export.push")


def test_without_a_connection_a_push_is_refused_with_the_command_for_later(client):
    client.close()
    with pytest.raises(ValueError, match="cannot be asked .* push the model later: python -m bertjax.tools.convert"):
        bertjax_hub.check_push("writer/new", False, "config.export.push")


def test_a_directory_without_a_model_is_not_pushed(client, tmp_path):
    with pytest.raises(SystemExit, match="holds no model in Hugging Face's layout"):
        convert.main([f"--from={tmp_path}/home", "--push=writer/none"])
    with pytest.raises(SystemExit) as left:
        convert.main([f"--from={tmp_path}", "--push=writer/none", "--add_vocab=words.txt"])
    assert left.value.code == 2
