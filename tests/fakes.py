"""What the tokenizers of tests have in common with those of the package."""

from bertjax.tokenization import Layout, Tokenizer


class FakeTokenizer:
    """Subclasses have `encode_batch` and the ids of special tokens; texts are laid out as BERT's."""

    word_prefix = ""
    encode_flat = Tokenizer.encode_flat

    @property
    def layout(self):
        return Layout.bert(self.cls_id, self.sep_id)
