"""Text <-> token ids: WordPiece as the original, any tokenizer.json, sentencepiece, training."""

from bertjax.tokenization.loading import check_casing_matches_name, load_tokenizer
from bertjax.tokenization.tokenizer import Layout, Tokenizer, encode_words
from bertjax.tokenization.wordpiece import WordPieceTokenizer

__all__ = ["Layout", "Tokenizer", "WordPieceTokenizer", "check_casing_matches_name", "encode_words", "load_tokenizer"]
