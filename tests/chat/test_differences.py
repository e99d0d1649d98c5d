"""Two streams align as a search for longest equal runs would align them, at a cost in proportion to their length."""

from __future__ import annotations

import itertools
from difflib import SequenceMatcher

import pytest
from counted_work import Work
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_chat import END, ToyChat, assistant, chatml, decode, encode, user

from verl_mt.chat import differences, sanity
from verl_mt.chat.differences import Cause, DiffSpan, TurnTexts, canonical_json, causes_of_turn, differing_chunks
from verl_mt.chat.sanity import SanityMode, check


def split_chunks(ids, ends):
    """Half-open ranges that cover `ids`, each ending behind an end-of-turn token (the last one may not)."""
    edges = [0, *(place + 1 for place, token in enumerate(ids) if token in ends)]
    return list(itertools.pairwise(edges if edges[-1] == len(ids) else [*edges, len(ids)]))


def by_longest_runs(recorded, rendered, ends, decode):
    """`difflib` over all chunks, and groups of other numbers of chunks paired by trying every place: quadratic."""
    left = [tuple(recorded[a:b]) for a, b in split_chunks(recorded, ends)]
    right = [tuple(rendered[a:b]) for a, b in split_chunks(rendered, ends)]
    left_edges = [0, *itertools.accumulate(map(len, left))]
    right_edges = [0, *itertools.accumulate(map(len, right))]
    spans = []
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        for i, i_end, j, j_end in pair_everything([decode(c) for c in left[i1:i2]], [decode(c) for c in right[j1:j2]]):
            a, b, c, d = left_edges[i1 + i], left_edges[i1 + i_end], right_edges[j1 + j], right_edges[j1 + j_end]
            if recorded[a:b] != rendered[c:d]:
                spans.append(DiffSpan(a, b, c, d))
    return spans


def pair_everything(left, right):
    pairs, i, j, first, fixed = [], 0, 0, 0, []
    for k, text in enumerate(left):
        for start in range(first, len(right)):
            end, spelled = start, ""
            while end < len(right) and len(spelled) < len(text):
                spelled += right[end]
                end += 1
            if text and spelled == text:
                fixed.append((k, start, end))
                first = end
                break
    for at, start, end in [*fixed, (len(left), len(right), len(right))]:
        if at - i == start - j:
            pairs += [(i + k, i + k + 1, j + k, j + k + 1) for k in range(at - i)]
        else:
            pairs.append((i, at, j, start))
        if at < len(left):
            pairs.append((at, at + 1, start, end))
        i, j = at + 1, end
    return pairs


EDITS = ("as it is", "other text", "other ids", "left out", "added behind", "cut in two")
messages = st.lists(st.tuples(st.sampled_from(EDITS), st.text("abHelo ", max_size=6)), max_size=12)


def edited(conversation):
    """Two streams of one conversation whose messages are told apart by their number."""
    left, right = [], []
    for k, (edit, text) in enumerate(conversation):
        chunk = [*encode(f"{k}:Hello{text}"), END]
        left += chunk
        if edit == "other text":
            right += [*encode(f"{k}!{text}"), END]
        elif edit == "other ids":
            right += [*encode(f"{k}:Hello{text}", merge=False), END]
        elif edit == "added behind":
            right += [*chunk, *encode(f"and {k}"), END]
        elif edit == "cut in two":
            right += [*chunk[:2], END, *chunk[2:]]
        elif edit != "left out":
            right += chunk
    return left, right


@given(messages)
@settings(max_examples=300)
def test_messages_align_as_a_search_for_the_longest_equal_runs_would_align_them(conversation):
    left, right = edited(conversation)
    assert differing_chunks(left, right, {END}, decode) == by_longest_runs(left, right, {END}, decode)


@given(st.lists(st.sampled_from((END, 101, 102)), max_size=24), st.lists(st.sampled_from((END, 101, 102)), max_size=24))
@settings(max_examples=300)
def test_outside_the_differing_chunks_the_streams_are_equal(left, right):
    """Also where messages repeat: no difference is lost, and no chunk is used twice."""
    at = at_right = 0
    for span in differing_chunks(left, right, {END}, lambda ids: ",".join(map(str, ids))):
        assert left[at : span.start] == right[at_right : span.rendered_start]
        assert span.recorded_ids(left) != span.rendered_ids(right)
        at, at_right = span.end, span.rendered_end
    assert left[at:] == right[at_right:]


turns = st.lists(
    st.tuples(
        st.sampled_from(("A1", "<think>r</think>\n\nA", "Hello", " A ", '{"a":1}', "same")),
        st.sampled_from(("U", "Hello", "same", "<|im_end|>x")),
    ),
    min_size=1,
    max_size=6,
)


def rewrites(messages, tools=None, **kw):
    """Strips, drops old reasoning, writes JSON with spaces, and a date in front of the last user message."""
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    shown = []
    for i, m in enumerate(messages):
        text = m["content"].split("</think>")[-1].strip().replace('"a":1', '"a": 1')
        shown.append({**m, "content": f"[today] {text}" if i == last else text})
    return chatml(shown, tools, **kw)


@given(turns, st.sampled_from((SanityMode.STRICT, SanityMode.IGNORE_STRIPPABLE)))
@settings(max_examples=100)
def test_findings_are_those_of_the_search_for_longest_runs(talk, mode):
    said, token_ids, sampled = [], [], []
    for k, (answer, question) in enumerate(talk):
        said += [user(f"{k}{question}"), assistant(f"{k}{answer}")]
        for text, bit in (
            ("\n" * bool(k) + chatml([user(f"{k}{question}")], add_generation_prompt=True), 0),
            (f"{k}{answer}<|im_end|>", 1),
        ):
            ids = encode(text, merge=k % 2 == 0)
            token_ids, sampled = token_ids + ids, sampled + [bit] * len(ids)

    def found():
        return check(ToyChat(rewrites), messages=said, tools=None, token_ids=token_ids, sampled=sampled, mode=mode)

    fast = found()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sanity, "differing_chunks", by_longest_runs)
        assert found() == fast


CALL = "ok <f a=1/>"


@pytest.mark.parametrize(
    ("rendered", "call_starts_at", "cause"),
    [
        ("ok <f a='1'/>", 2, Cause.RESERIALIZED_ARGUMENTS),
        ("ok <f a='1'/>", 8, Cause.RESERIALIZED_ARGUMENTS),
        ("ok <f a='1'/>", 9, Cause.REWRITES_HISTORY),
        ("ok <f a='1'/>", None, Cause.REWRITES_HISTORY),
        ("OK <f a=1/>", 2, Cause.REWRITES_HISTORY),
        ("OK <f a='1'/>", 2, Cause.REWRITES_HISTORY),
        ("ok", 2, Cause.REWRITES_HISTORY),
        ("ok ", 2, Cause.REWRITES_HISTORY),
    ],
)
def test_a_change_inside_the_call_is_reserialized_arguments_and_others_rewrite_history(rendered, call_starts_at, cause):
    assert causes_of_turn(TurnTexts(CALL, rendered, call_starts_at=call_starts_at)) == [cause]


def test_json_behind_broken_openings_is_found_within_the_read_budget(monkeypatch):
    assert canonical_json("") == "" and canonical_json("x") == "x"
    nowhere, object_, written = f"[{'1,' * 1000}x] ", '{"b": 1, "a": 2}', '{"a":2,"b":1}'
    assert canonical_json(nowhere + object_) == nowhere + written
    text = "[1, x]" * 2 + object_  # four characters are read in each list before it breaks
    for reads in (0, 1):
        monkeypatch.setattr(differences, "_MAX_READS", reads)
        for budget, found in ((8, object_), (9, written)):
            monkeypatch.setattr(differences, "_MAX_NESTED", budget - reads * len(text))
            assert canonical_json(text) == "[1, x]" * 2 + found


def every_message_differs(num, text=""):
    left = [i for k in range(num) for i in (*encode(f"{k} said {text}"), END)]
    right = [i for k in range(num) for i in (*encode(f"{k}  said {text}"), END)]
    return left, right, {END}, decode


def every_second_message_repeats(num):
    left = [i for k in range(num) for i in (*encode(f"{k} said"), END, *encode("ok"), END)]
    right = [i for k in range(num) for i in (*encode(f"{k}  said"), END, *encode("ok"), END)]
    return left, right, {END}, decode


def messages_are_left_out(num):
    left = [i for k in range(num) for i in (*encode("ok"), END, *encode(f"{k} said"), END)]
    right = [i for k in range(num) for i in (*encode("ok" if k % 3 else "no"), END, *encode(f"{k} wrote"), END)]
    return left, right, {END}, decode


@pytest.mark.slow  # long conversations
@pytest.mark.parametrize("case", [every_message_differs, every_second_message_repeats, messages_are_left_out])
def test_four_times_the_messages_are_about_four_times_the_work(case):
    """Sixteen times, where it is quadratic."""
    assert Work().of(differing_chunks, *case(1600)) < 6 * Work().of(differing_chunks, *case(400))


@pytest.mark.slow  # long texts
@pytest.mark.parametrize("text", ['{"a": [' * 20_000, "[" * 500 + "1, " * 5_000], ids=["too deep", "never closed"])
def test_openings_that_lead_nowhere_are_not_read_to_the_end_again_and_again(text, monkeypatch):
    read, decoder = 0, differences._DECODER

    class Decoder:
        def raw_decode(self, text, start):
            nonlocal read
            try:
                return decoder.raw_decode(text, start)
            except ValueError as error:
                read += error.pos - start
                raise
            except RecursionError:
                read += differences._MAX_NESTED
                raise

    monkeypatch.setattr(differences, "_DECODER", Decoder())
    assert canonical_json(text) == text
    assert 0 < read <= (differences._MAX_READS + 1) * len(text)
    assert canonical_json('f[i] {x} {"b":1,"a":2}') == 'f[i] {x} {"a":2,"b":1}'


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("<think>\n\n</think>\n\nanswer\n\n", "answer\n\n"),
        ("\n<think></think>answer", "answer"),
        ("<think>\nno\n</think>\n\nanswer", "<think>\nno\n</think>\n\nanswer"),
        ("\nanswer\n", "\nanswer\n"),
    ],
)
def test_only_an_empty_reasoning_block_at_the_beginning_is_left_out(text, rest):
    assert differences.without_empty_reasoning(text) == rest


def test_fixed_points_are_the_longest_sequence_that_rises_on_both_sides():
    left, right = [b"a", b"b", b"c", b"d"], [b"b", b"a", b"c", b"d"]
    assert differences._fixed_points(left, right, (0, 4, 0, 4)) == [(1, 0), (2, 2), (3, 3)]
