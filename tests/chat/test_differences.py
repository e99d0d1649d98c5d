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


@pytest.mark.slow
@given(messages)
@settings(max_examples=300)
def test_messages_align_as_a_search_for_the_longest_equal_runs_would_align_them(conversation):
    left, right = edited(conversation)
    assert differing_chunks(left, right, {END}, decode) == by_longest_runs(left, right, {END}, decode)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("left", "right", "shared"),
    [
        ("", "", 0),
        ("a", "", 0),
        ("ab", "ab", 2),
        ("abc", "abd", 2),
        ("abc", "ab", 2),
        ("abcdefgh", "abcdeXgh", 5),
        ("xa", "ya", 0),
    ],
)
def test_items_that_two_sequences_begin_with_are_counted(left, right, shared):
    assert differences.common_prefix(left, right) == differences.common_prefix(right, left) == shared
    assert differences.common_prefix(list(left), tuple(right)) == shared


def test_a_core_has_none_of_the_ids_that_both_edges_share():
    recorded, rendered = [9, 1, 2, 3, 4, 5, 9, 9], [8, 1, 2, 7, 7, 7, 5, 8]
    span = DiffSpan(1, 6, 1, 7)
    assert span.core(recorded, rendered) == DiffSpan(3, 5, 3, 6)
    assert span.recorded_ids(recorded) == [1, 2, 3, 4, 5] and span.rendered_ids(rendered) == [1, 2, 7, 7, 7, 5]
    assert DiffSpan(0, 2, 0, 3).core([1, 1], [1, 1, 1]) == DiffSpan(2, 2, 2, 3)


@pytest.mark.parametrize(
    ("rendered", "last_id", "kept"),
    [
        ([5, 6], 6, 2),
        ([5, 1], 1, 2),
        ([5, 1], 6, 1),
        ([5, 1, 0], 1, 2),
        ([5, 0, 1, 0, 2, 0], 1, 3),
        ([5, 0, 1, 0, 2, 0], 2, 5),
        ([5, 0, 1, 0, 2, 0], 3, 3),
        ([5, 0, 1, 0, 2, 0], 6, 2),
        ([1, 5, 0], 1, 3),
        ([1, 0, 2], 2, 3),
        ([0, 0], 1, 2),
        ([], 1, 0),
    ],
)
def test_what_a_template_writes_behind_the_last_turn_is_not_compared(rendered, last_id, kept):
    """Ids 1, 2 and 3 end a turn, 0 is blank."""
    assert differences.end_of_last_turn(rendered, last_id, {1, 2, 3}, lambda token: token == 0) == kept


def text_of(ids):
    return "".join(chr(96 + i) for i in ids)


@pytest.mark.parametrize(
    ("left", "right", "spans"),
    [
        ([2, 1, 3, 1], [2, 1, 3, 1], []),
        ([2, 1, 3, 1], [2, 1, 4, 1], [(2, 4, 2, 4)]),
        ([2, 1, 3], [2, 1, 4], [(2, 3, 2, 3)]),
        ([2, 1], [2, 1, 3, 1], [(2, 2, 2, 4)]),
        ([2, 1, 3, 1], [3, 1], [(0, 2, 0, 0)]),
        ([], [2, 1], [(0, 0, 0, 2)]),
        ([2, 3, 4, 1, 5, 1], [2, 3, 1, 4, 1, 5, 1], [(0, 4, 0, 5)]),
        ([2, 1, 3, 1, 4, 1], [5, 1, 3, 1, 6, 1], [(0, 2, 0, 2), (4, 6, 4, 6)]),
        ([2, 1, 3, 1, 4, 1], [5, 1, 6, 1, 7, 1, 8, 1], [(0, 6, 0, 8)]),
        ([2, 1, 3, 1], [3, 1, 2, 1], [(0, 2, 0, 0), (4, 4, 2, 4)]),
        ([2, 1, 2, 1, 3, 1], [2, 1, 3, 1], [(2, 4, 2, 2)]),
    ],
)
def test_chunks_that_differ_are_paired_in_order(left, right, spans):
    """Id 1 ends a turn."""
    assert differing_chunks(left, right, {1}, text_of) == [DiffSpan(*span) for span in spans]


@pytest.mark.parametrize(
    ("left", "right", "pairs"),
    [
        (["a", "b"], ["c", "d"], [(0, 1, 0, 1), (1, 2, 1, 2)]),
        (["a", "b"], ["c"], [(0, 2, 0, 1)]),
        (["x", "ab", "y"], ["a", "b", "z"], [(0, 1, 0, 0), (1, 2, 0, 2), (2, 3, 2, 3)]),
        (["x", "ab"], ["z", "ab"], [(0, 1, 0, 1), (1, 2, 1, 2)]),
        (["ab", "ab"], ["a", "b", "ab"], [(0, 1, 0, 2), (1, 2, 2, 3)]),
        (["ab"], ["abc"], [(0, 1, 0, 1)]),
        (["abc"], ["ab"], [(0, 1, 0, 1)]),
        (["", "a"], ["a"], [(0, 1, 0, 0), (1, 2, 0, 1)]),
        (["b", "a"], ["a", "b"], [(0, 0, 0, 1), (0, 1, 1, 2), (1, 2, 2, 2)]),
        (["x" * 300, "y"], ["z", "x" * 150, "x" * 150], [(0, 0, 0, 1), (0, 1, 1, 3), (1, 2, 3, 3)]),
        (["x" * 300], ["x" * 299 + "y"], [(0, 1, 0, 1)]),
    ],
)
def test_a_chunk_that_others_spell_together_is_paired_with_all_of_them(left, right, pairs):
    assert [pair for pair in differences._paired(left, right) if pair[0] < pair[1] or pair[2] < pair[3]] == pairs


@pytest.mark.parametrize(
    ("left", "right", "fixed"),
    [
        ("abc", "abc", [(0, 0), (1, 1), (2, 2)]),
        ("aab", "ba", [(2, 0)]),
        ("aa", "aa", [(0, 0), (1, 1)]),
        ("abcd", "cdab", [(2, 0), (3, 1)]),
        ("ab", "cd", []),
        ("xay", "bac", [(1, 1)]),
    ],
)
def test_fixed_points_are_chunks_that_both_sides_hold_equally_often(left, right, fixed):
    sides = [[c.encode() for c in "q" + side] for side in (left, right)]
    window = (1, 1 + len(left), 1, 1 + len(right))
    assert differences._fixed_points(*sides, window) == [(i + 1, j + 1) for i, j in fixed]


def test_large_gaps_without_fixed_points_are_one_difference():
    left, right = [b"a", b"b"] * 16, [b"b", b"a", b"a"] * 11
    for count, gaps in ((31, 2), (32, 1)):
        found = list(differences._gaps(left[:32], right[: count + 1], (0, 32, 0, count + 1)))
        assert (len(found) == 1) == (gaps == 1)
    assert list(differences._gaps([b"a", b"x", b"c"], [b"a", b"y", b"c"], (0, 3, 0, 3))) == [(1, 2, 1, 2)]
    assert list(differences._gaps([b"a"], [b"a"], (0, 1, 0, 1))) == []


@pytest.mark.parametrize(
    ("recorded", "rendered", "difference"),
    [
        ("abc", "abd", (2, "c", "d")),
        ("abc", "abc", (3, "", "")),
        ("aXc", "aYYc", (1, "X", "YY")),
        ("a<|end|>", "a<|return|>", (1, "<|end|>", "<|return|>")),
        ("<a>x", "<b>x", (0, "<a>", "<b>")),
        ("1</a>", "2</a>", (0, "1", "2")),
        ("<xa>", "<ya>", (0, "<xa>", "<ya>")),
        ("x<a>", "x<a>y", (4, "", "y")),
        ("[INST]a", "[INST]b", (6, "a", "b")),
        ("[/INST]", "[INST]", (0, "[/INST]", "[INST]")),
        ("aa", "a", (1, "a", "")),
        ("", "a", (0, "", "a")),
    ],
)
def test_a_difference_never_begins_or_ends_in_the_middle_of_a_tag(recorded, rendered, difference):
    assert differences.differing_text(recorded, rendered) == difference


S, T, D, W = Cause.STRIPPED_REASONING, Cause.TURN_SEPARATOR, Cause.TEMPLATE_DEFAULT_TEXT, Cause.REWRITES_HISTORY
A = Cause.RESERIALIZED_ARGUMENTS


@pytest.mark.parametrize(
    ("recorded", "rendered", "more", "causes"),
    [
        ("<think>\nA", "A", {}, [S]),
        ("A", "<think>\n\n</think>\n\nA", {}, [D]),
        ("<think>r</think>A", "A", {}, [S]),
        ("<think>r</think>A", "<think>q</think>A", {}, [S]),
        ("A", "<think>q</think>A", {}, [W]),
        ("<think>r</think>A", "B", {}, [S, W]),
        ("<think>r</think>A ", "A", {}, [S]),
        ("[THINK]r[/THINK]A", "A", {}, [S]),
        ("<think>r", "<think>r</think>", {}, [D]),
        ("A", "A ", {}, [W]),
        ("\nA", "\n\nA", {"given": lambda: "\n"}, [T]),
        ("\nA", "A", {"given": lambda: "\n"}, [T]),
        (" A", "  A", {"given": lambda: ""}, [W]),
        ("hA ", "hA", {"given": lambda: "h"}, [W]),
        ("hA", "h A", {"given": lambda: "h"}, [T]),
        ("h A", "hA", {"given": lambda: "h"}, [W]),
        ('{"a":1}', '{"a": 1}', {}, [A]),
        ('<think>r</think>{"a":1}', '{"a": 1}', {}, [S, A]),
        ('{"a":1,"b":2}', '{"b":2,"a":1}', {}, [A]),
        ("A<e>", "A", {"ends": ("<e>",)}, [T]),
        ("A", "A<e> <f>", {"ends": ("<e>", "<f>")}, [T]),
        ("A<e>", "A<g>", {"ends": ("<e>",)}, [W]),
        ("A", "A extra", {}, [D]),
        ("A", "A extra", {"known": differences.KnownTexts(("some extra text",))}, [W]),
        ("A", "A extra!", {"known": differences.KnownTexts(("extra",))}, [W]),
        ("A", "A extra", {"known": differences.KnownTexts(("other",))}, [D]),
        ("A extra", "A", {}, [W]),
        ("A", "B", {}, [W]),
    ],
)
def test_each_difference_of_a_turn_has_its_causes(recorded, rendered, more, causes):
    assert causes_of_turn(TurnTexts(recorded, rendered, **more)) == causes


@pytest.mark.parametrize(
    ("recorded", "rendered", "cause"),
    [("A ", "A", T), ("A<e>", "A", T), ("A", "A more", D), ("A", "B", W), ("A\n", "\tA", T)],
)
def test_given_text_differs_by_blanks_or_by_what_the_template_writes(recorded, rendered, cause):
    assert differences.cause_of_given(TurnTexts(recorded, rendered, ends=("<e>",))) is cause


def test_texts_of_messages_explain_parts_and_wholes_but_nothing_across_two():
    known = differences.KnownTexts(("abcd", "efgh"))
    assert [known.explain(text) for text in ("bc", "efgh", "xabcdx", "de", "x")] == [True, True, True, False, False]
    assert not differences.KnownTexts().explain("x")


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [
        ("a<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"),
        ("a</think>", "</think>"),
        ("a<think>x</think>", "</think>"),
        ("<think>a", ""),
        ("a<|channel>thought\n<channel|>", "<|channel>thought\n<channel|>"),
        ("", ""),
    ],
)
def test_the_reasoning_that_a_generation_prompt_closes_is_found_at_its_end(prompt, opening):
    assert differences.closed_opening(prompt) == opening


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ('x {"b": 1, "a": [ 2 ]} y', 'x {"a":[2],"b":1} y'),
        ('{"a": "{\\"c\\": 1, \\"b\\": 2}"}', '{"a":{"b":2,"c":1}}'),
        ('{"a": "[1, 2]", "b": "{x", "c": "x"}', '{"a":[1,2],"b":"{x","c":"x"}'),
        ('["{\\"a\\": 1}"]', '[{"a":1}]'),
        ("{&quot;a&quot;: 1}", '{"a":1}'),
        ("[x] [1, 2]", "[x] [1,2]"),
        ("{}[]", "{}[]"),
        ("é [ 1 ]é", "é [1]é"),
        ("[" * 3000, "[" * 3000),
    ],
)
def test_json_is_written_in_one_form_and_other_text_stays(text, canonical):
    assert canonical_json(text) == canonical
    assert differences._json_texts('a {"b": 1} [x] [2]"') == ['{"b": 1}', "[2]"]
