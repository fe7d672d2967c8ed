"""Models of the Hugging Face Hub by name, through huggingface_hub: fetched into its cache, and pushed there.

In: 'google-bert/bert-base-uncased' or 'NAME@REVISION'. Out: a local directory. HF_HOME, HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE work as they do everywhere; a download that was cut continues.
"""

import fnmatch
import functools
import inspect
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from bertjax.version import source_version

_TOKENIZER = ("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model")
# The parts of a sentence-transformers model, and what a model of its own says of itself.
_SETTINGS = ("*.json", "*/config.json")
# The first of these that the model has is fetched.
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_NAME = re.compile(r"(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(@(?P<revision>\w[\w./-]*))?")


@functools.cache  # a run opens its model several times, and must get the same revision each time
def fetch(name: str | Path, tokenizer_only: bool = False) -> Path:
    """The directory in the Hub's cache with the files of a model, downloaded if they are not there.

    Args:
      name: USER/MODEL or USER/MODEL@REVISION, a name that is not a file or directory here.
      tokenizer_only: leave the weights.

    Raises:
      FileNotFoundError: it can be no name of a model, the Hub has none of that name or revision, it may not be read,
        or the Hub cannot be reached and the cache does not hold it.
    """
    nowhere = f"{name} does not exist: it is neither a directory nor a file here"
    found = _NAME.fullmatch(str(name))
    if found is None:
        raise FileNotFoundError(f"{nowhere}, nor the name of a model at the Hugging Face Hub (USER/MODEL)")
    import huggingface_hub  # late: half a second
    from huggingface_hub import constants, errors

    failures = network_errors()
    where = constants.ENDPOINT
    model, revision = found["name"], found["revision"]
    try:
        try:
            # Not list_repo_files, which tries for half a minute: a mistyped path looks like a name.
            found_files = huggingface_hub.HfApi().model_info(model, revision=revision).siblings or ()
            listed = [file.rfilename for file in found_files]
        except failures as error:
            if isinstance(error, errors.HfHubHTTPError) and error.response.status_code < 500:
                raise
            listed = None  # as in transformers: without a connection, what the cache holds
        patterns = _patterns(listed or (), tokenizer_only)
        how = dict(revision=revision, allow_patterns=patterns, local_files_only=listed is None)
        return Path(huggingface_hub.snapshot_download(model, **how))
    except errors.GatedRepoError:
        reason = f"{where}/{model} is open only to those who accepted its terms: do so there, and set HF_TOKEN"
    except errors.RevisionNotFoundError:
        reason = f"the model {model} of {where} has no revision {revision!r}"
    except errors.RepositoryNotFoundError:
        reason = f"{where} has no model {model} (or HF_TOKEN, which a private one needs, is not set or is wrong)"
    except errors.LocalEntryNotFoundError:
        reason = (
            f"{where} cannot be reached, and the cache {constants.HF_HUB_CACHE} does not hold it; where there is a "
            f"network, `hf download {model} --local-dir=DIR` makes a directory to copy"
        )
    except failures as error:
        reason = f"it was not downloaded from {where}: {_first_line(error)}. Run the same command again; it continues"
    raise FileNotFoundError(f"{nowhere}, and {reason}")


def _patterns(files: Iterable[str], tokenizer_only: bool) -> list[str]:
    """Patterns of what is needed of a model's files; its weights by their names, for it may have others in folders."""
    if tokenizer_only:
        return [*_TOKENIZER, "config.json"]
    files = list(files)
    names = [name for name in files if "/" not in name]
    weights = next((kept for pattern in _WEIGHTS if (kept := fnmatch.filter(names, pattern))), [])
    layers = [name for name in files if re.match(r"\d+_Dense/", name)]  # of sentence-transformers
    return [*_TOKENIZER, *_SETTINGS, *weights, *layers]


def reachable() -> bool:
    """Whether the Hub answers, asked three times within seconds; its clients alone may ask for half a minute a file."""
    import huggingface_hub
    from huggingface_hub import constants

    for wait in (1, 2, 0):
        if constants.HF_HUB_OFFLINE:
            break
        try:
            huggingface_hub.get_session().head(constants.ENDPOINT, timeout=5)
            return True
        except network_errors():
            time.sleep(wait)
    return False


def network_errors() -> tuple[type[BaseException], ...]:
    """What the clients of the Hub raise if they cannot get or put something; errors of files are among it."""
    from huggingface_hub import errors

    return errors.HfHubHTTPError.__bases__  # OSError, and that of the HTTP library that this version uses


def check_push(name: str, private: bool, setting: str) -> None:
    """Checks that `push` may write there, before the work of which the result is pushed.

    Args:
      setting: where the name was given, for the errors.

    Raises:
      ValueError: no name of a model, no token or one that may not write there, a public model where a private one is
        asked for, or no connection.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors, utils

    owner, _, model = name.partition("/")
    try:
        utils.validate_repo_id(name)
    except errors.HFValidationError:
        model = ""
    if not model:
        raise ValueError(f"{setting}={name} is not the name of a model at the Hugging Face Hub: give USER/MODEL")
    where, tokens = constants.ENDPOINT, f"{constants.ENDPOINT}/settings/tokens"
    if huggingface_hub.get_token() is None:
        raise ValueError(
            f"{setting}={name} needs a token that may write: make one at {tokens}, and log in with `hf auth login` or "
            "set HF_TOKEN"
        )
    api = huggingface_hub.HfApi()
    try:
        me = api.whoami()
        there = api.model_info(name) if api.repo_exists(name) else None
        if there and "write" in inspect.signature(api.auth_check).parameters:  # not in earlier versions
            api.auth_check(name, write=True)
    except network_errors() as error:
        status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
        if status == 403:
            raise ValueError(
                f"{setting}={name}: the token of HF_TOKEN or `hf auth login` may not write there"
            ) from None
        if status == 401:
            raise ValueError(
                f"{setting}={name}: {where} does not know the token of HF_TOKEN or `hf auth login`; make one that may "
                f"write at {tokens}"
            ) from None
        raise ValueError(
            f"{setting}={name}: {where} cannot be asked whether it may be written ({_first_line(error)}). Leave the "
            "name out, and push the model later: python -m bertjax.tools.convert --from=MODEL --push=USER/MODEL"
        ) from None
    writable = {me["name"], *(one["name"] for one in me.get("orgs", ()) if one.get("roleInOrg") != "read")}
    if me.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ValueError(f"{setting}={name}: the token of {me['name']} may only read; make one that writes at {tokens}")
    if owner not in writable:
        raise ValueError(
            f"{setting}={name}: {me['name']} may not write to {owner}/, only to {'/, '.join(sorted(writable))}/"
        )
    if private and there and not there.private:
        raise ValueError(f"{setting}={name}: it is there already and public; choose another name, or push in public")


def push(
    directory: Path, name: str, private: bool = False, report: Path | None = None, place: os.PathLike[str] | None = None
) -> str:
    """Uploads the files of a model directory, and the report beside them, in one commit; returns the address.

    The repository is made if it is not there. Other files in it stay. Where the card says "DIRECTORY" it now has the
    name. Raises OSError that says why it was not pushed, whatever that is, where the model is (`place`, if its files
    are only copied to the directory) and how to push it.
    """
    import huggingface_hub

    files = {
        path.relative_to(directory).as_posix(): path
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(directory).parts)
    }
    if report is not None and report.is_file():
        files["report.html"] = report
    contents: dict[str, str | bytes] = {file: str(path) for file, path in files.items()}
    if card := files.get("README.md"):
        contents["README.md"] = card.read_bytes().replace(b'"DIRECTORY"', f'"{name}"'.encode())
    try:
        api = huggingface_hub.HfApi()
        address = api.create_repo(name, private=private or None, exist_ok=True)
        added = [huggingface_hub.CommitOperationAdd(file, content) for file, content in contents.items()]
        api.create_commit(name, added, commit_message=f"Model of bertjax {source_version()}")
    except Exception as error:  # of the client, its HTTP library, its Rust part: the model is not lost by any
        reason = _first_line(type(error) is RuntimeError and error.__cause__ or error)
        again = f"python -m bertjax.tools.convert --from={place or directory} --push={name}" + " --private" * private
        again = "the command of this run" if "://" in str(place) else again  # which finds it finished
        raise OSError(
            f"the model is in {place or directory}, but was not pushed ({reason}). Push it by: {again}"
        ) from error
    return str(address)


def _first_line(error: BaseException) -> str:
    told = getattr(error, "server_message", None) or str(error).strip()
    return told.partition("\n")[0] or type(error).__name__
