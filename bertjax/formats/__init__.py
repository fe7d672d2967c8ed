"""Bytes and files: atomic files, protocol buffers, TFRecords."""
