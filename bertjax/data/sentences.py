"""Sentence segmentation: a paragraph of prose in, its sentences out. No model, no download.

The segmenter is `sentencex` (Wikimedia's rule-based library, in Rust, 244 languages with fall backs), the fastest of
five that were measured; docs/design.md has the numbers. Its errors are mostly a stray closing quote or bracket as a
sentence of its own: those are joined to the sentence before them.
"""

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import sentencex

# Function words by which languages in Latin script are told apart; all are frequent in any text.
_WORDS = {
    "en": "the of and to in is was that for with it as on be at by this which are from",
    "de": "der die und das den von zu mit sich des auf ist nicht ein eine dem im für wurde auch",
    "fr": "le la les des et un une du dans que est pour qui il sur au par plus avec pas",
    "es": "el la los las del y que en un una por con para se su al es como más fue",
    "it": "il di che la e un una per con del della si in non sono al nel da le gli",
    "pt": "o de que e do da em um uma para com não os as no na por se mais foi",
    "nl": "de het een van en in is dat op te zijn met voor niet aan er door ook als werd",
    "pl": "w i na z się do nie że jest to od przez po jak był oraz dla które za ze",
    "da": "og i det at en den til er af på de med for ikke der han som et var blev",
    "sv": "och i att det en som är av på för med den till inte han de ett var om har",
    "fi": "ja on ei se hän oli että mutta kun myös joka ovat sekä tai niin jossa mukaan vuonna",
    "cs": "a se na v je že z do to o s i za jako by pro byl ve po není",
    "sk": "a sa na v je že z do to o s aj za ako by pre bol vo po nie",
    "ca": "el la els les de i que en un una per amb del al és no va com més són",
    "ro": "și de în a la cu din pe că este un o nu care pentru fost mai prin sau ale",
    "hu": "a az és hogy is nem egy volt meg ez csak de el van már mint ki ha kell vagy",
    "tr": "ve bir bu da de için ile olarak çok daha olan gibi kadar sonra ne her ama o en oldu",
    "id": "yang dan di dengan untuk dari pada ini itu adalah dalam tidak ke oleh sebagai juga akan",
    "vi": "và của là có trong được cho một các với không người những đã này khi từ ở về đến",
}
# First and last letter (their code points) of scripts that are mostly of one language, and that language.
_SCRIPTS = dict(
    pair.split("=")
    for pair in (
        "ru=400-52f el=370-3ff hy=530-58f he=590-5ff ar=600-6ff hi=900-97f bn=980-9ff pa=a00-a7f gu=a80-aff "
        "ta=b80-bff te=c00-c7f kn=c80-cff ml=d00-d7f si=d80-dff th=e00-e7f lo=e80-eff bo=f00-fff my=1000-109f "
        "ka=10a0-10ff am=1200-137f km=1780-17ff ja=3040-30ff zh=3400-9fff ko=ac00-d7a3"
    ).split()
)
# Languages without spaces between words. Not Chinese, of which the original's tokenizer makes a word of each character.
UNSPACED = dict(th="Thai", lo="Lao", km="Khmer", my="Burmese", bo="Tibetan", ja="Japanese")
_LONGEST_WORDS = 15  # characters a word, mean: with more, what stands between blanks is no word
# Runs without a space, as of Chinese, are cut after so many characters, where a sentence ends.
_RUN_CHARACTERS = 2000
_LONG_RUNS = re.compile(rf"(?<!\S)\S{{{_RUN_CHARACTERS},}}")
_END = re.compile(
    "[!?\u3002\uff61\uff0e\uff01\uff1f\u104a\u104b\u1362\u1367\u06d4\u061f\u0964\u0965\u0589]+"
    "[\u300d\u300f\u201d\u2019\uff09\u300b\"')]*"
)
# ISO 639-1.
LANGUAGES = frozenset(
    "aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el "
    "en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu "
    "ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na "
    "nb nd ne ng nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si sk sl sm sn "
    "so sq sr ss st su sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh "
    "zu".split()
)
_NAMES = dict(
    pair.split("=")
    for pair in (
        "afrikaans=af albanian=sq amharic=am arabic=ar armenian=hy basque=eu belarusian=be bengali=bn bulgarian=bg "
        "burmese=my catalan=ca chinese=zh croatian=hr czech=cs danish=da deutsch=de dutch=nl english=en espanol=es "
        "estonian=et finnish=fi francais=fr french=fr galician=gl georgian=ka german=de greek=el gujarati=gu "
        "hebrew=he hindi=hi hungarian=hu icelandic=is indonesian=id irish=ga italian=it japanese=ja kannada=kn "
        "kazakh=kk khmer=km korean=ko lao=lo latin=la latvian=lv lithuanian=lt macedonian=mk malay=ms malayalam=ml "
        "marathi=mr mongolian=mn nepali=ne norwegian=no persian=fa polish=pl portuguese=pt punjabi=pa romanian=ro "
        "russian=ru serbian=sr sinhala=si slovak=sk slovenian=sl spanish=es swahili=sw swedish=sv tamil=ta telugu=te "
        "thai=th tibetan=bo turkish=tr ukrainian=uk urdu=ur vietnamese=vi welsh=cy deu=de ger=de eng=en fra=fr fre=fr "
        "spa=es ita=it por=pt nld=nl rus=ru ukr=uk jpn=ja jp=ja zho=zh chi=zh cn=zh kor=ko kr=ko ara=ar hin=hi tha=th "
        "gr=el cz=cs dk=da se=sv"
    ).split()
)


def check_language(code: str) -> str:
    """The code, if it is one of ISO 639-1; else ValueError with the nearest one."""
    if code in LANGUAGES:
        return code
    given = code.lower()
    short = given.replace("_", "-").split("-")[0]  # of de-DE and pt_BR
    near = _NAMES.get(given) or (short if short in LANGUAGES else _NAMES.get(short))
    if near is None:
        close = difflib.get_close_matches(given, _NAMES, n=1, cutoff=0.6)
        near = _NAMES[close[0]] if close else None
    raise ValueError(
        f"language {code!r} is not an ISO 639-1 code"
        + (f"; did you mean {near!r}?" if near else " (en, de, ru, zh ...)")
    )


def guess_language(text: str) -> str:
    """ISO 639-1 code of a text, by its script, in Latin script by frequent words; 'en' if unclear.

    Of languages that share a script with a larger one (Ukrainian, Persian, Marathi ...) only Ukrainian is told apart.
    """
    letters = Counter(character for character in text if character.isalpha())
    by_script = {}
    for code, ends in _SCRIPTS.items():
        first, last = (chr(int(end, 16)) for end in ends.split("-"))
        by_script[code] = sum(n for letter, n in letters.items() if first <= letter <= last)
    total = sum(letters.values())
    code = max(by_script, key=by_script.__getitem__)
    if by_script["ja"] * 10 > by_script["zh"] > 0 and by_script["ja"] + by_script["zh"] > total / 2:
        return "ja"  # kana beside Chinese characters
    if by_script[code] > total / 2:
        ukrainian = sum(letters[letter] for letter in "іїєґІЇЄҐ")
        return "uk" if code == "ru" and ukrainian * 50 > by_script["ru"] else code
    words = Counter(re.findall(r"\w+", text.lower()))
    share = {code: sum(words[word] for word in known.split()) / max(words.total(), 1) for code, known in _WORDS.items()}
    best = max(share, key=share.__getitem__)
    return best if share[best] > max(0.05, 1.3 * share["en"]) else "en"


def length_of(texts: Sequence[str]) -> tuple[int, str]:
    """(their words, "word"), or (their characters, "character") in scripts without spaces between words."""
    words, characters = sum(len(text.split()) for text in texts), sum(map(len, texts))
    return (characters, "character") if characters > _LONGEST_WORDS * words else (words, "word")


def split_sentences(paragraph: str, language: str = "en") -> list[str]:
    """Sentences of one paragraph, stripped, without empty ones; `language` is an ISO 639-1 code."""
    sentences: list[str] = []
    for piece in itertools.chain.from_iterable(sentencex.segment(language, part) for part in _parts(paragraph)):
        piece = piece.strip()
        if not piece:
            continue
        if sentences and len(piece) < 4 and not any(map(str.isalnum, piece)):
            sentences[-1] += piece
        else:
            sentences.append(piece)
    return sentences


def _parts(paragraph: str) -> Iterator[str]:
    """The paragraph in pieces of whole sentences: sentencex takes time by the square of a run without spaces."""
    start = 0
    for run in _LONG_RUNS.finditer(paragraph):
        while end := _END.search(paragraph, max(start, run.start()) + _RUN_CHARACTERS, run.end()):
            yield paragraph[start : end.end()]
            start = end.end()
    yield paragraph[start:]
