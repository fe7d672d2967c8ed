"""Models of the Hugging Face Hub by name: fetched through huggingface_hub, into its cache.

In: 'google-bert/bert-base-uncased' or 'NAME@REVISION'. Out: a local directory. HF_HOME, HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE work as they do everywhere; a download that was cut continues.
"""

import fnmatch
import functools
import re
from collections.abc import Iterable
from pathlib import Path

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
      name: USER/MODEL or USER/MODEL@REVISION, a name that is no file or directory here.
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

    network_errors = errors.HfHubHTTPError.__bases__  # OSError, and that of the HTTP library that this version uses
    where = constants.ENDPOINT
    model, revision = found["name"], found["revision"]
    try:
        try:
            listed = huggingface_hub.HfApi().list_repo_files(model, revision=revision)
        except network_errors as error:
            if isinstance(error, errors.HfHubHTTPError) and error.response.status_code < 500:
                raise
            listed = None  # as in transformers: without a connection, what the cache holds
        patterns = _patterns(listed or (), tokenizer_only)
        return Path(
            huggingface_hub.snapshot_download(
                model, revision=revision, allow_patterns=patterns, local_files_only=listed is None
            )
        )
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
    except network_errors as error:
        first = str(error).partition("\n")[0]
        reason = f"it could not be downloaded from {where}: {first}. Run the same command again; it continues"
    raise FileNotFoundError(f"{nowhere}, and {reason}")


def _patterns(files: Iterable[str], tokenizer_only: bool) -> list[str]:
    """Patterns of what is needed of a model's files; its weights by their names, for it may have others in folders."""
    if tokenizer_only:
        return [*_TOKENIZER, "config.json"]
    names = [name for name in files if "/" not in name]
    weights = next((kept for pattern in _WEIGHTS if (kept := fnmatch.filter(names, pattern))), [])
    return [*_TOKENIZER, *_SETTINGS, *weights]
