"""Sequences of packed documents: every byte once, and nothing across a document's end."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcp import FlexCPError
from flexcp.tools.train import PackedDocuments, TrainConfig, load_corpus
from flexcp.tools.train.data import BEGIN, Document
from flexcp.tools.train.step import masks_of, rank_batch
from flexcp.tools.train.team import Team


def whole(documents):
    return [tuple(d.read(0, d.tokens).tolist()) for d in documents]


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    tokens=st.integers(2, 90),
    longest=st.integers(1, 70),
)
def test_an_epoch_holds_every_token_of_every_document_once(
    tmp_path_factory, sizes, tokens, longest
):
    folder = tmp_path_factory.mktemp("texts")
    for n, size in enumerate(sizes):
        (folder / f"{n}").write_bytes(bytes((31 * n + 5 * i) % 250 + 1 for i in range(size)))
    (folder / "long").write_bytes(b"0123456789" * 9)
    corpus = load_corpus(str(folder), 0, longest=longest)
    documents = corpus.train
    assert all(d.tokens <= max(longest, 2) for d in documents)
    stream = PackedDocuments(documents, seed=3)
    total = stream.epoch_tokens
    parts, at = [], 0
    while at < total:
        row, lengths = stream.sequence(at // tokens, tokens)
        assert sum(lengths) == tokens == len(row)
        parts += row.split(lengths)
        at += tokens
    seen = torch.cat(parts)[:total].tolist()
    assert Counter(seen) == Counter(t for d in whole(documents) for t in d)
    # In order: the stream is the documents one after the other, each once.
    left = Counter(whole(documents))
    while seen:
        first = next(d for d in left if left[d] and tuple(seen[: len(d)]) == d)
        left[first] -= 1
        seen = seen[len(first) :]
    assert not +left


def test_documents_are_cut_only_where_a_sequence_ends(texts):
    stream = PackedDocuments(load_corpus(str(texts), 0, longest=10_000).train, seed=0)
    known = set(whole(stream.documents))
    rest = ()
    for index in range(4):
        row, lengths = stream.sequence(index, 101)
        pieces = [tuple(p.tolist()) for p in row.split(lengths)]
        pieces[0] = rest + pieces[0]
        assert all(p in known for p in pieces[:-1])
        rest = () if pieces[-1] in known else pieces[-1]


def test_what_is_held_out_is_the_rest(texts):
    corpus = load_corpus(str(texts), 1, longest=70)
    every = sorted(p for p in texts.rglob("*") if p.is_file())
    bytes_of = Counter()
    for document in corpus.train + corpus.held_out:
        bytes_of[document.path] += document.stop - document.start
    assert bytes_of == {p: p.stat().st_size for p in every}
    assert not {d.path for d in corpus.train} & {d.path for d in corpus.held_out}


def test_the_end_of_a_single_file_is_held_out(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(range(32, 127)) * 10)
    corpus = load_corpus(str(path), 0, longest=100_000)
    assert corpus.train == (Document(path, 0, 903),)
    assert corpus.held_out == (Document(path, 903, 950),)


def test_documents_begin_with_a_token_of_their_own_where_their_file_begins(texts):
    for document in load_corpus(str(texts), 0, longest=50).train:
        tokens = document.read(0, document.tokens).tolist()
        assert (tokens[0] == BEGIN) == (document.start == 0)
        text = bytes(t for t in tokens if t != BEGIN)
        assert text == document.path.read_bytes()[document.start : document.stop]
        assert BEGIN not in tokens[1:]


def test_a_seed_decides_the_order_and_every_epoch_has_its_own(texts):
    documents = load_corpus(str(texts), 0, longest=1000).train
    size = sum(d.tokens for d in documents)
    first = PackedDocuments(documents, seed=1)
    assert torch.equal(
        first.sequence(0, size)[0], PackedDocuments(documents, 1).sequence(0, size)[0]
    )
    assert not torch.equal(first.sequence(0, size)[0], first.sequence(1, size)[0])
    other = PackedDocuments(documents, seed=2)
    assert not torch.equal(first.sequence(0, size)[0], other.sequence(0, size)[0])


def test_labels_and_attention_stay_within_documents(tiny):
    stream = PackedDocuments(load_corpus(tiny.data, 0, longest=70).train, 0)
    batch = stream.batch(2, 2, 150)
    local = rank_batch(batch, tiny, Team()).local
    mask = masks_of(batch, None)["full"]
    at = torch.arange(150)
    for b, lengths in enumerate(batch.lengths):
        assert len(lengths) > 1
        end = 0
        for length in lengths:
            start, end = end, end + length
            assert local["labels"][b, start : end - 1].equal(batch.tokens[b, start + 1 : end])
            assert local["labels"][b, end - 1] == -100
            assert local["position_ids"][b, start:end].tolist() == list(range(length))
            seen = mask.mask_mod(torch.tensor(b), torch.tensor(0), at[start:end, None], at)
            assert seen.sum() == length * (length + 1) // 2


def test_the_standard_library_is_there_by_default():
    corpus = load_corpus(None, 0, longest=1536)
    assert len(corpus.train) > 1000
    assert all(d.path.suffix == ".py" for d in corpus.train[:50])
    assert not any("site-packages" in d.path.parts for d in corpus.train)


def test_binary_and_hidden_files_are_no_text(texts):
    before = load_corpus(str(texts), 0, longest=70)
    (texts / "picture").write_bytes(b"PNG\0\0")
    (texts / ".hidden").write_text("not for training")
    (texts / "empty").touch()
    assert load_corpus(str(texts), 0, longest=70) == before


def test_data_that_can_not_be_trained_on_is_refused(tmp_path):
    with pytest.raises(FlexCPError, match=r"a file or a folder of text, got .*nowhere"):
        load_corpus(str(tmp_path / "nowhere"), 0, longest=10)
    with pytest.raises(FlexCPError, match=r"text: at least 40 bytes .* got 0 such files"):
        load_corpus(str(tmp_path), 0, longest=10)
    path = tmp_path / "short"
    path.write_text("short")
    with pytest.raises(FlexCPError, match="short, too short"):
        load_corpus(str(path), 0, longest=10)


def test_a_file_that_shrinks_while_training_is_an_error(tmp_path):
    path = tmp_path / "text"
    path.write_text("x" * 100)
    document = Document(path, 0, 100)
    path.write_text("x" * 50)
    with pytest.raises(FlexCPError, match="keep its size during the run"):
        document.read(0, 101)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "--steps to be at least 1, got 0"),
        ({"tokens": 1}, "--tokens to be at least 2"),
        ({"kv_heads": 3}, "a multiple of the 3 key-value heads"),
        ({"dim": 100}, "4 heads divide into even parts, got dim 100"),
        ({"window": 0}, "--window to be at least 1"),
        ({"lr": 0.0}, "--lr to be more than 0"),
        ({"lr": float("nan")}, "--lr to be more than 0"),
        ({"dtype": "int8"}, "--dtype to be float32 or float64"),
        ({"device": "tpu"}, "--device to be cpu or cuda"),
        ({"eval_sequences": -1}, "--eval-sequences to be at least 0"),
        ({"document_tokens": 0}, "--document-tokens to be at least 1"),
    ],
)
def test_settings_that_can_not_be_are_refused_by_name(change, message):
    with pytest.raises(FlexCPError, match=message):
        TrainConfig(**change)


def test_ranks_that_can_not_share_a_run_are_refused():
    with pytest.raises(FlexCPError, match="one token for each of 5 ranks, got sequences of 4"):
        TrainConfig(tokens=4).require_ranks(5)
    with pytest.raises(FlexCPError, match="that the 2 ranks sharing heads divide, got 3"):
        TrainConfig(head_ranks=2).require_ranks(3)
    with pytest.raises(FlexCPError, match="at least 2 ranks to compare with one process"):
        TrainConfig(compare=True).require_ranks(1)
