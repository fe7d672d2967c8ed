"""Arrays in files."""

import resource

import numpy as np
import pytest

from bertjax.formats.arrays import write_safetensors


def test_weights_that_do_not_fit_on_the_disk_are_an_error_of_the_disk_that_names_the_file(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as a disk that is full
    try:
        with pytest.raises(OSError, match="File too large") as refused:
            write_safetensors(tmp_path / "model.safetensors", {"a": np.ones(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused.value.filename == str(tmp_path / "model.safetensors")
