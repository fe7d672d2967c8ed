"""Cuts texts into parts whose ids, joined, are those of the text: hub.py looks them up, since words repeat.

In: the content of a tokenizer.json, and texts. Out: the parts of a text; None where parts may depend on each other.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

SPACE_MARK = "\u2581"  # sentencepiece and Metaspace write it for the blank before a word
_LOCAL = {"NFC", "NFD", "Lowercase", "StripAccents"}  # change no blank, and nothing across one
_COMPATIBLE = {"NFKC", "NFKD", "Precompiled"}  # change no printable ASCII; what they make of others may have blanks
# The parts into which GPT-2's pattern (ByteLevel's) cuts ASCII without blanks that follow each other or end it.
_GPT2_PARTS = r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^A-Za-z0-9\s]+"
_BECOME_ASCII = "\u037e\u1fef"  # by a normalizer
# These form one character with the blank after them.
_PREPENDED = re.compile(
    "[\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2\u0d4e\U000110bd\U000110cd\U000111c2\U000111c3"
    "\U0001193f\U00011941\U00011a3a\U00011a84-\U00011a89\U00011d46\U00011f02]"
)


def pre_tokenizers(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The pre-tokenizers of a tokenizer.json, in order."""
    rule = content["pre_tokenizer"]
    return rule.get("pretokenizers", [rule]) if rule else []


class TextCutter(NamedTuple):
    """Cuts a text at its blanks; of ASCII, also where GPT-2's pattern does.

    Attributes:
      blank: what a word after a blank is read with: the blank, or nothing.
      pattern: the parts of words of ASCII, as GPT-2's pattern has them once they are normalized; None = whole words.
      prefix: what a text that does not begin with a blank is read with.
      ascii_only: no other texts are cut.
      marked: texts that hold SPACE_MARK, which would be taken for a blank, are not cut.
      uncut: texts with one of these characters, which may belong to an added token, are not cut.
    """

    blank: str
    pattern: re.Pattern | None = None
    prefix: str = ""
    ascii_only: bool = False
    marked: bool = False
    uncut: re.Pattern | None = None

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self | None:
        """None where no text may be cut."""
        added = [entry["content"] for entry in content["added_tokens"] if not entry["special"]]
        added = [token for token in added if token == " " or token.strip(" ")]  # several blanks are never cut
        if any(token[0].isalnum() or token[0] == " " for token in added):
            return None
        begins = "".join(re.escape(token[0]) for token in added)
        uncut = re.compile(f"[{_BECOME_ASCII}{begins}]") if added else None
        rule = content["normalizer"] or {"type": "NFC"}
        normalizers = {step["type"] for step in rule.get("normalizers", [rule])}
        steps = pre_tokenizers(content)
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"] and steps[0].get("use_regex", True) and normalizers <= _LOCAL:
            pattern = re.compile(_GPT2_PARTS, re.IGNORECASE if "Lowercase" in normalizers else 0)
            return cls(" ", pattern, prefix=" " if steps[0]["add_prefix_space"] else "", uncut=uncut)
        if kinds[-1:] != ["Metaspace"] or not steps[-1].get("split", True) or not normalizers <= _LOCAL | _COMPATIBLE:
            return None
        scheme = steps[-1].get("prepend_scheme")
        if kinds == ["WhitespaceSplit", "Metaspace"] and scheme == "always":
            return cls("", uncut=uncut)
        if kinds == ["Metaspace"] and scheme in ("always", "first", "never"):
            blank = " " if scheme == "never" else ""
            return cls(blank, ascii_only=not normalizers <= _LOCAL, marked=True, uncut=uncut)
        return None

    def __call__(self, text: str) -> list[str] | None:
        """The parts; None where the text is to be read as a whole."""
        if not text or (self.uncut and self.uncut.search(text)):
            return None
        if text.isascii():
            if "  " in text or text[-1] == " " or not text.isprintable():
                return None
            if self.pattern:
                return self.pattern.findall(text if text[0] == " " else self.prefix + text)
        elif (
            self.ascii_only
            or text.removeprefix(" ").split(" ") != text.split()  # other blanks, or several
            or (self.marked and SPACE_MARK in text)
            or _PREPENDED.search(text)
        ):
            return None
        first, *others = text.split(" ")
        words = [self.prefix + first] if first else []
        words += [self.blank + word for word in others]
        if not self.pattern:
            return words
        parts: list[str] = []
        for word in words:
            parts += self.pattern.findall(word) if word.isascii() else [word]
        return parts
