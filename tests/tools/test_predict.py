"""predict with files: read as in training, answered in the form in which they came."""

import csv
import json
import os
import types

import pytest

from bertjax import inference, prediction
from bertjax.tasks.conll import read_tagged
from bertjax.tasks.inputs import read_inputs, read_texts
from bertjax.tasks.make import Remembered
from bertjax.tools import evaluate, features, predict, train_vocab

REVIEWS = {"task": "table", "options": {"text": "review", "label": "sentiment", "files": {"train": "train.csv"}}}


class Tokenizer:
    def encode(self, text):
        return text.split()


@pytest.fixture
def model(monkeypatch):
    """A model that answers what it is told, and keeps what it was asked."""
    made = types.SimpleNamespace(
        settings={"architectures": ["BertModel"]}, kind="huggingface", asked=[], tokenizer=Tokenizer(), labels=()
    )
    made.model = types.SimpleNamespace(num_labels=2)
    answers = {"classify": lambda text: {"bad": 0.25, "good": 0.75}, "tag_words": lambda words: ["B-X"] * len(words)}

    def answer(name):
        def asked(loaded, inputs, *_):
            loaded.asked += inputs
            return [answers[name](given) for given in inputs]

        return asked

    def spans(loaded, questions, contexts, **_):
        loaded.asked += zip(questions, contexts, strict=True)
        return [inference.Answer(c[:3], 0, 3, 1.5) for c in contexts]

    monkeypatch.setattr(predict, "load_model", lambda *_: made)
    for module in (predict, prediction):
        monkeypatch.setattr(module, "open_source", lambda _: made)
    for name in answers:
        monkeypatch.setattr(inference, name, answer(name))
    monkeypatch.setattr(inference, "answer", spans)
    return made


def run(path, text, *flags):
    path.write_bytes(text.encode())
    predict.main(["--model=m", f"--file={path}", *flags])


CSV = 'id,review,sentiment\n7,"so ""good"",\nreally",good\n8,bad,bad\n'


@pytest.mark.parametrize("task", ["--task=classify", "--task=table", "--task=text-classification", None])
def test_a_csv_table_is_read_as_the_run_read_it_and_comes_back_with_the_answers(model, tmp_path, task):
    model.settings = {"finetuned": REVIEWS}
    run(tmp_path / "in.csv", CSV, f"--out={tmp_path / 'out.csv'}", *([task] if task else []))
    assert model.asked == ['so "good",\nreally', "bad"]  # no header, quotes or gold label
    with open(tmp_path / "out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["review"] for row in rows] == ['so "good",\nreally', "bad"]
    assert rows[0] == {
        "id": "7",
        "review": 'so "good",\nreally',
        "sentiment": "good",
        "prediction": "good",
        "probability": "0.75",
        "probabilities": '{"bad": 0.25, "good": 0.75}',
    }


def test_the_suffix_of_out_says_the_form_and_the_screen_gets_that_of_the_input(model, tmp_path, capsys):
    model.settings = {"finetuned": REVIEWS}
    run(tmp_path / "in.tsv", 'id\treview\n7\tsay "it"\n')
    assert capsys.readouterr().out.splitlines() == [
        "id\treview\tprediction\tprobability\tprobabilities",
        '7\tsay "it"\tgood\t0.75\t{"bad": 0.25, "good": 0.75}',
    ]
    run(tmp_path / "in.jsonl", '{"index": 3, "review": "a\\u2028b"}\n')
    assert json.loads(capsys.readouterr().out) == {
        "id": 3,
        "text": "a\u2028b",
        "labels": {"bad": 0.25, "good": 0.75},
        "label": "good",
    }
    run(tmp_path / "in.csv", CSV, f"--out={tmp_path / 'out'}")
    assert (tmp_path / "out").read_text().startswith("id,review,sentiment,prediction")
    assert f"2 answers written to {tmp_path / 'out'}\n" in capsys.readouterr().err
    run(tmp_path / "in.csv", CSV, f"--out={tmp_path / 'out.jsonl'}")
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["7", "8"]
    run(tmp_path / "in.csv", CSV.replace("id", "ID", 1), f"--out={tmp_path / 'out.jsonl'}")
    assert (tmp_path / "out.jsonl").read_text().splitlines() == lines
    run(tmp_path / "in.txt", "one, two\n", f"--out={tmp_path / 'out.csv'}")
    assert (tmp_path / "out.csv").read_text().splitlines()[1].startswith('"one, two",good,0.75,')
    for out, message in (
        ("o.xlsx", r"written as .jsonl, .csv, .tsv$"),
        ("o.csv.gz", "written as"),
        ("o.tsv", "line 2: column 'review' holds a tab or a line break"),
    ):
        with pytest.raises(SystemExit, match=message):
            run(tmp_path / "in.csv", CSV, f"--out={tmp_path / out}")
        assert not (tmp_path / out).exists()
    for header, twice in (("review,prediction,x", "prediction"), ("x,x,review", "x")):
        with pytest.raises(SystemExit, match=f"the answers would have two columns '{twice}'"):
            run(tmp_path / "p.csv", f"{header}\na,b,c\n")


def test_answers_do_not_take_the_place_of_the_file_that_asked(model, tmp_path):
    model.settings, path = {"finetuned": REVIEWS}, tmp_path / "in.jsonl"
    path.write_text('{"text": "a", "note": "mine"}\n')
    for tool in (predict, features):
        with pytest.raises(SystemExit, match="is the --file that is read, and would be lost"):
            tool.main(["--model=m", f"--file={path}", f"--out={tmp_path}/../{tmp_path.name}/in.jsonl"])
    assert "mine" in path.read_text()


def test_columns_that_nobody_named_are_refused_and_can_be_named(model, tmp_path):
    for name, text in (
        ("in.csv", "review,sentiment\na,good\n"),
        ("dev.tsv", "sentence\tlabel\nit is good\t1\n"),
        ("in.jsonl", '{"review": "a"}\n'),
    ):
        with pytest.raises(SystemExit, match=rf"predict: .*{name}:1: expected .*'?text'?"):
            run(tmp_path / name, text, "--task=classify")
    assert not model.asked
    run(tmp_path / "dev.tsv", "sentence\tlabel\nit is good\t1\n", "--task=classify", "--columns=sentence")
    run(tmp_path / "p.csv", 'a,"b,c"\nx,y\n', "--task=classify", '--columns=a,"b,c"')
    assert model.asked == ["it is good", ("x", "y")]
    model.settings = {"finetuned": REVIEWS}
    with pytest.raises(SystemExit, match="names 2 columns; the model was fine-tuned on 1 .review"):
        run(tmp_path / "p.csv", "a,b\nx,y\n", "--columns=a,b")


def test_texts_on_the_command_line_are_as_many_as_the_model_takes(model):
    model.settings = {"finetuned": {"task": "rte"}}
    with pytest.raises(SystemExit, match="--text:2: classify takes 2 texts a line, found 1: 'c'"):
        predict.main(["--model=m", "--text=a\tb", "--text=c"])
    assert not model.asked
    predict.main(["--model=m", "--text=a\tb"])
    assert model.asked == [("a", "b")]


@pytest.mark.parametrize(
    "task, text, texts",
    [
        ("sst2", "sentence\tlabel\nit is good\t1\n", ["it is good"]),
        ("cola", "gj04\t1\t\tShe left.\n", ["She left."]),  # its files have no header
        ("rte", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tentailment\n", [("a", "b")]),
        ("mrpc", 'Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\ta "b"\tc\n', [('a "b"', "c")]),
    ],
)
def test_the_official_files_of_a_glue_model_are_read_by_their_columns(model, tmp_path, task, text, texts):
    model.settings = {"finetuned": {"task": task}}
    run(tmp_path / "dev.tsv", text)
    assert model.asked == texts


def test_a_text_that_is_not_utf_8_is_refused(model):
    with pytest.raises(SystemExit, match=r"--text='g.udcf6d' is not UTF-8"):
        predict.main(["--model=m", "--task=classify", f"--text={os.fsdecode(b'g' + bytes([0xF6]) + b'd')}"])


def test_plain_lines_of_another_number_of_texts_or_another_format_are_refused(model, tmp_path):
    model.settings = {"finetuned": REVIEWS}
    for name, text, message in (
        ("a.txt", "a\nb\tgood\n", "a.txt:2: classify takes 1 text a line, found 2"),
        ("a.txt", '{"review": "a"}\n', "a.txt:1: looks like JSON lines; call the file .jsonl"),
        ("a.txt", "sentiment,review\n", "a.txt:1: looks like the header of a CSV table"),
        ("a.json", "[]", "a.json: cannot be read for classify; save it as .csv, .tsv"),
        ("a.csv", "review,sentiment\na\n", "a.csv:2: expected 2 columns"),
    ):
        with pytest.raises(SystemExit, match=message):
            run(tmp_path / name, text)
    assert not model.asked
    run(tmp_path / "a.txt", "review\tsentiment\na\tgood\n")  # a table, as in training
    assert model.asked == ["a"]


def test_words_are_read_as_in_training_and_tags_are_no_words(model, tmp_path, capsys):
    model.settings = {"finetuned": {"task": "ner", "options": {"files": {"dev": "eng.testa"}}}}
    model.labels = ("O", "B-X")
    columns = "EU NNP O\nis VBZ O\n\nBonn NNP B-X\n"
    for name in ("a.conll", "eng.testa", "lines.txt"):
        run(tmp_path / name, columns)
        assert model.asked == [("EU", "is"), ("Bonn",)] or model.asked == [["EU", "is"], ["Bonn"]]
        assert capsys.readouterr().out == "EU\tO\tB-X\nis\tO\tB-X\n\nBonn\tB-X\tB-X\n\n"
        model.asked.clear()
    run(tmp_path / "a.jsonl", '{"tokens": ["EU", "null"]}\n', f"--out={tmp_path / 'o.conll'}")
    assert (tmp_path / "o.conll").read_text() == "EU\tB-X\nnull\tB-X\n\n"
    run(tmp_path / "a.txt", "EU is\n", f"--out={tmp_path / 'o.csv'}")
    assert (tmp_path / "o.csv").read_text() == "words,prediction\nEU is,B-X B-X\n"
    with pytest.raises(SystemExit, match="a.csv: cannot be read for ner; save it as .conll"):
        run(tmp_path / "a.csv", "EU,O\n")


def test_words_and_tags_with_blanks_are_told_apart_in_every_form_of_answers(model, tmp_path):
    words = [["New York", "is"], ["big"]]
    lines = "".join(json.dumps({"tokens": sentence}) + "\n" for sentence in words)

    def answers(name):
        run(tmp_path / "in.jsonl", lines, "--task=ner", f"--out={tmp_path / name}")
        return tmp_path / name

    def cells(path):
        with open(path, newline="") as file:
            return [{name: json.loads(cell) for name, cell in row.items()} for row in csv.DictReader(file)]

    tags = [["B-X", "B-X"], ["B-X"]]
    both = [{"words": w, "prediction": t} for w, t in zip(words, tags, strict=True)]
    assert cells(answers("out.csv")) == both
    for name in ("out.conll", "out.jsonl", "out.tsv"):
        read = read_tagged(answers(name))
        assert [(list(s.words), list(s.tags)) for s in read] == list(zip(words, tags, strict=True))
    model.labels = ("O", "first name")
    words = [["a", "b"], ["c"]]
    lines = "".join(json.dumps({"tokens": sentence}) + "\n" for sentence in words)
    assert [row["words"] for row in cells(answers("out.csv"))] == words


@pytest.mark.parametrize(
    "options, asked",
    [({}, [("EU", "is", "Bonn"), ("A",)]), ({"context": "sentence"}, [("EU", "is"), ("Bonn",), ("A",)])],
)
def test_a_document_of_sentences_is_read_as_in_training(model, tmp_path, capsys, options, asked):
    model.settings = {"finetuned": {"task": "ner", "options": options}}
    run(tmp_path / "a.conll", "-DOCSTART- O\n\nEU O\nis O\n\nBonn B-X\n\n-DOCSTART- O\n\nA O\n")
    assert [tuple(words) for words in model.asked] == asked
    assert capsys.readouterr().out == "EU\tO\tB-X\nis\tO\tB-X\n\nBonn\tB-X\tB-X\n\nA\tO\tB-X\n\n"
    run(tmp_path / "a.conll", "-DOCSTART- O\n\nEU O\nis O\n\nBonn B-X\n", f"--out={tmp_path / 'o.csv'}")
    assert (tmp_path / "o.csv").read_text() == "words,prediction\nEU is,B-X B-X\nBonn,B-X\n"


def test_an_empty_context_is_answered_with_nothing_and_the_others_as_ever(model, tmp_path, capsys):
    run(tmp_path / "a.txt", "who?\tBonn is\nwhat?\t\nwhen?\nwhere?\tEU is\n", "--task=qa")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in rows] == ["Bon", "", "", "EU "]
    assert rows[1] == {
        "question": "what?",
        "text": "",
        "start": 0,
        "end": 0,
        "score": None,
        "note": "the context is empty",
    }
    run(tmp_path / "a.csv", "context,question\nBonn is,who?\n,what?\n", "--task=qa")
    assert capsys.readouterr().out == (
        "context,question,prediction,start,end,score\nBonn is,who?,Bon,0,3,1.5\n,what?,,0,0,\n"
    )
    with pytest.raises(SystemExit, match="a.txt:1: qa takes two texts separated by a tab a line"):
        run(tmp_path / "a.txt", "who?\n", "--task=qa")


def test_a_squad_file_is_answered_by_question_id(model, tmp_path):
    qas = [{"id": "q1", "question": "who?", "answers": []}]
    data = {"data": [{"paragraphs": [{"context": "Bonn is", "qas": qas}]}]}
    run(tmp_path / "dev.json", json.dumps(data), "--task=squad2.0", f"--out={tmp_path / 'o.json'}")
    assert json.loads((tmp_path / "o.json").read_text()) == {"q1": "Bon"}
    assert model.asked == [("who?", "Bonn is")]
    rows = '{"id": 7, "question": "who?", "context": "a"}\n{"id": "7", "question": "what?", "context": "b"}\n'
    with pytest.raises(SystemExit, match="several questions have the id '7'"):
        run(tmp_path / "a.jsonl", rows, "--task=qa", f"--out={tmp_path / 'o.json'}")


def test_a_task_has_one_name_in_every_tool_and_others_are_answered_with_it(model):
    assert [
        predict.asked(name, "m")
        for name in (
            "classify",
            "table",
            "SST-2",
            "mnli",
            "sequence_classification",
            "tag",
            "squad-v2",
            "nsp",
            "token-classification",
        )
    ] == [*["classify"] * 5, "ner", "qa", "next-sentence", "ner"]
    for name, message in (
        ("rouge", "unknown task 'rouge'; one of fill-mask, next-sentence, classify, ner, qa, cola"),
        ("fillmask", "unknown task 'fillmask'. Did you mean 'fill-mask'?"),
        ("swag", "answered by bertjax.tools.evaluate"),
        (None, "m does not say what it was fine-tuned for: give --task"),
    ):
        with pytest.raises(ValueError, match=message):
            predict.asked(name, "m")
    model.settings = {"finetuned": {"task": "squad2.0"}}
    assert predict.asked(None, "m") == "qa"


def test_a_model_that_remembers_no_task_is_asked_what_its_head_answers(model):
    for network, task in (
        ("BertForPreTraining", "fill-mask"),
        ("RobertaForMaskedLM", "fill-mask"),
        ("BertForNextSentencePrediction", "next-sentence"),
        ("BertForSequenceClassification", "classify"),
        ("BertForTokenClassification", "ner"),
    ):
        model.settings = {"architectures": [network]}
        assert predict.asked(None, "m") == task


def test_strange_entries_of_a_config_are_refused_by_name(model, tmp_path):
    options = (
        {"text": 5},
        {"text": ["a", 1]},
        {"headerless": "a"},
        {"files": "x"},
        {"files": {"dev": 3}},
        {"separator": 5},
    )
    for entry in ([], "x", {"options": 3}, {"step": "many"}, *({"task": "table", "options": one} for one in options)):
        model.settings = {"finetuned": entry or ["x"]}
        with pytest.raises(SystemExit, match="predict: m: .*'finetuned'"):
            run(tmp_path / "a.txt", "x\n", "--task=classify")
    for entry in ({"task": ["sst2"]}, {"task": 5}, {"task": "table", "options": {"text": None}}):
        model.settings = {"finetuned": entry}
        run(tmp_path / "a.txt", "x\n", "--task=classify")


def test_features_reads_a_table_by_its_columns_too(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('id,text,other\n7,"a, b",c\n')
    assert read_texts(str(path)) == ["a, b"]
    assert read_texts(str(path), "text,other") == [("a, b", "c")]
    path.write_text("review\na\n")
    with pytest.raises(ValueError, match="a.csv:1: expected a header with 'text'.*--columns=NAME"):
        read_texts(str(path))
    lines = tmp_path / "a.txt"
    lines.write_text("a\nb\tc\n\n")
    assert read_texts(str(lines)) == ["a", ("b", "c"), ""]


def test_features_reads_a_table_as_the_model_was_fine_tuned(model, monkeypatch, tmp_path):
    model.settings, asked = {"finetuned": REVIEWS}, []
    monkeypatch.setattr(features, "open_source", lambda _: model)
    monkeypatch.setattr(features, "load_model", lambda *_, **__: model)
    monkeypatch.setattr(features.embeddings, "layer_outputs", lambda loaded, texts, *_: asked.append(texts) or ())
    path = tmp_path / "in.csv"
    path.write_text("id,review,sentiment\n7,so good,good\n")
    for flags in ([], ["--columns=id,review"]):  # others may be named, also more of them
        features.main(["--model=m", f"--file={path}", f"--out={tmp_path / 'out.jsonl'}", *flags])
    assert asked == [["so good"], [("7", "so good")]]
    pairs = Remembered("rte")
    path.write_text("a\nb\tc\n")
    assert read_texts(str(path.rename(tmp_path / "in.txt")), memory=pairs) == ["a", ("b", "c")]


@pytest.mark.parametrize("name, text", [("in.csv", CSV.partition("\n")[0] + "\n"), ("in.txt", ""), ("in.jsonl", "\n")])
def test_a_file_without_inputs_is_answered_by_a_header_alone_and_said(model, tmp_path, name, text, caplog):
    model.settings = {"finetuned": REVIEWS}
    run(tmp_path / name, text, f"--out={tmp_path / 'out.csv'}")
    assert (tmp_path / "out.csv").read_text().startswith(text.strip())
    assert (tmp_path / "out.csv").read_text().endswith(",prediction\n")
    assert [record.getMessage() for record in caplog.records] == [f"{tmp_path / name} holds no inputs"]


@pytest.mark.parametrize(
    "task, text, memory, found",
    [
        ("ner", "EU\tB-X\nrejects\tO\n", Remembered(), ("EU", "rejects")),
        ("classify", "id\treview\n1\tgood\n", Remembered("table", {"text": "review"}), ("good",)),
    ],
)
def test_tagged_words_and_tables_which_a_first_look_tells_may_come_through_a_pipe(task, text, memory, found):
    reader, writer = os.pipe()
    os.write(writer, text.encode())
    os.close(writer)
    assert read_inputs(f"/dev/fd/{reader}", task, memory, labels=("O", "B-X")).texts == [found]
    os.close(reader)


def test_a_dash_is_the_standard_input_and_the_screen(model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reader, writer = os.pipe()
    before = os.dup(0)
    os.write(writer, b"one\ntwo\n")
    os.close(writer)
    os.dup2(reader, 0)
    predict.main(["--model=m", "--task=classify", "--file=-", "--out=-"])
    os.dup2(before, 0)
    assert model.asked == ["one", "two"] and len(capsys.readouterr().out.splitlines()) == 2
    assert not list(tmp_path.iterdir())


def test_what_reads_its_input_again_refuses_the_standard_input_with_the_remedy():
    with pytest.raises(SystemExit, match="'/dev/stdin'; it is a pipe or a device, and a corpus is read more than once"):
        train_vocab.main(["--input=-", "--output=v"])
    with pytest.raises(ValueError, match="--data=- is read more than once, and by its suffix: write it to a file"):
        evaluate._one_file("table", "-", "dev", {})
