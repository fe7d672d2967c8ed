"""Text <-> token ids: WordPiece as the original BERT, sentencepiece models, vocabulary training."""

from bertjax.tokenization.loading import check_casing_matches_name, load_tokenizer
from bertjax.tokenization.wordpiece import WordPieceTokenizer, unknown_rate

__all__ = ["WordPieceTokenizer", "check_casing_matches_name", "load_tokenizer", "unknown_rate"]
