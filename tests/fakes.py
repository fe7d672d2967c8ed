"""What the tokenizers of tests have in common with those of the package."""

from bertjax.tokenization import Layout, Tokenizer

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # with which BERT's vocabularies begin


class FakeTokenizer:
    """Subclasses have `encode_batch` and the ids of special tokens; texts are laid out as BERT's."""

    word_prefix = ""
    encode_flat = Tokenizer.encode_flat

    @property
    def layout(self):
        return Layout.bert(self.cls_id, self.sep_id)
