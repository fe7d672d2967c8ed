"""Any BERT in, any BERT out: Hugging Face, Google's TF1 checkpoints, StableHLO."""

from bertjax.formats.arrays import LoadError
from bertjax.interop.loaded import LoadedModel
from bertjax.interop.loading import TASKS, check_pretrained, check_vocabulary, load_model, load_pretrained_params
from bertjax.interop.source import open_source
