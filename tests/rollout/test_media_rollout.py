"""Images from the row and from tools: one set of tensors from the record to the engine, the batch and the trainer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("PIL")

from scheduler_lab import prompt_of, roll_out, runner_for
from vision_toys import picture, shown, vision_chat, vision_model

from verl_mt.data import batch as columns
from verl_mt.data.batch import RowMedia, build_batch
from verl_mt.data.media import MediaInput, load_image
from verl_mt.data.run_files import row_to_trajectory, trajectory_to_row
from verl_mt.engines.scripted import ScriptedEngine
from verl_mt.errors import ConfigError, DataError, EngineError
from verl_mt.extensions.compat.rollout.scheduler import MultiTurnScheduler
from verl_mt.extensions.multimodal.local_engine import LocalVisionEngine
from verl_mt.modeling.log_probs import forward_log_probs
from verl_mt.modeling.values import hidden_before
from verl_mt.rollout.context import Limits
from verl_mt.rollout.drivers import ToolLoopDriver
from verl_mt.tools.executor import ToolExecutor, ToolLimits
from verl_mt.tools.function_tool import function_tool
from verl_mt.tools.registry import ToolSet
from verl_mt.tools.schemas import ToolResponse
from verl_mt.workers.micro_batch import compute_log_probs
from verl_mt.workers.rank_batch import RankBatch

CHAT = vision_chat()
END = CHAT.tokenizer.eos_token_id
PAD = CHAT.tokenizer.convert_tokens_to_ids("<|image_pad|>")
CALL = '<tool_call>\n{"name": "crop", "arguments": {"size": 8}}\n</tool_call>'


@function_tool
def crop(size: int) -> ToolResponse:
    """Look closer.

    Args:
        size: of the part.
    """
    return ToolResponse(text=f"{size} <|image_pad|>", image=[picture(size, size, (1, 90, 5))])


def executor(media=CHAT.media_kinds) -> ToolExecutor:
    tools = ToolSet([crop])
    return ToolExecutor(tools, ToolLimits(), lambda text: CHAT.encode_text(text, neutral=True), media=media)


def turn(text: str, log_prob: float = -0.5):
    ids = [*CHAT.encode_text(text, neutral=False), END]
    return ids, None, "stop", [log_prob] * len(ids)


def converse(engine, *, images=1, tools=None, n=1, **keys):
    prompt = [shown("what is it?", *[picture(16 + 8 * k, 16) for k in range(images)])]
    runner = runner_for(engine, ToolLoopDriver(), chat=CHAT, tools=tools or executor(), **keys)
    return roll_out(runner, [prompt_of(chat=CHAT, prompt=prompt)], n)


@pytest.mark.cap("V5")
def test_the_engine_and_the_record_get_the_images_of_the_row_and_of_the_tool():
    engine = ScriptedEngine([turn(CALL), turn("yes")])
    (trajectory,) = converse(engine)
    assert trajectory.error is None
    (record,) = trajectory.records
    assert [made.num_tokens for made in record.media] == [4, 1]
    assert [p for made in record.media for p in range(made.start, made.end)] == [
        p for p, token in enumerate(record.token_ids) if token == PAD
    ]
    first, second = (list(r.media["inputs"]) for r in engine.requests)
    assert first == record.media[:1]
    assert second == record.media
    assert trajectory.messages[2]["content"][1] == {"type": "text", "text": "8 <|image_pad|>"}
    assert "8 <|image_pad|>" in CHAT.decode(record.token_ids)
    row = trajectory_to_row(trajectory, step=1)
    assert json.dumps(row)
    again = row_to_trajectory(row).messages
    assert CHAT.prompt_ids(again[:1]) == record.token_ids[: record.num_prompt_tokens]


def test_a_text_engine_leaves_the_note_of_a_dropped_image():
    engine = ScriptedEngine([turn(CALL), turn("yes")])
    (trajectory,) = converse(engine, tools=executor(media=frozenset()))
    assert trajectory.messages[2]["content"].endswith("[1 image cannot be shown: text only]")
    assert trajectory.counters["tools/crop/media_dropped"] == 1
    assert len(trajectory.records[0].media) == 1


def test_an_unreadable_image_of_a_tool_is_the_tool_s_failure():
    @function_tool(name="crop")
    def broken(size: int) -> ToolResponse:
        """Look closer.

        Args:
            size: of the part.
        """
        return ToolResponse(text="x", image=["no.png"])

    tools = ToolExecutor(ToolSet([broken]), ToolLimits(), str.split, media=CHAT.media_kinds)
    (trajectory,) = converse(ScriptedEngine([turn(CALL), turn("yes")]), tools=tools)
    assert "image 'no.png' cannot be read" in trajectory.messages[2]["content"]
    assert trajectory.counters["tools/crop/errors"] == 1


def test_a_model_that_says_the_placeholder_itself_fails_its_trajectory_only():
    ids = [PAD, END]
    (trajectory,) = converse(ScriptedEngine([(ids, None, "stop", [-0.5, -0.5])]))
    assert "the model sampled '<|image_pad|>', which stands for an image" in trajectory.error
    assert not trajectory.trainable


def test_a_prompt_is_refused_by_file_and_row(tmp_path):
    (bad := tmp_path / "bad.png").write_bytes(b"x")
    message = {"role": "user", "content": [{"type": "image", "image": str(bad)}]}
    with pytest.raises(DataError, match=r"toy.jsonl, row 4: image '.*bad.png' is not in a format"):
        prompt_of(chat=CHAT, prompt=[message], index=3)
    with pytest.raises(DataError, match=r"toy.jsonl, row 4: the messages hold 1 image, but this model takes text only"):
        prompt_of(prompt=[message], index=3)


class Zoom(MultiTurnScheduler):
    """Shows a part of its first image, and a part of that."""

    def check_finished(self, infer_request, response_choice, current_turn):
        return current_turn >= 3

    def step(self, infer_request, response_choice, current_turn):
        size = 24 if current_turn == 1 else 8
        infer_request.images.append(load_image(infer_request.images[0]).crop((0, 0, size, size)))
        infer_request.messages.append({"role": "user", "content": self.asks})
        return {"infer_request": infer_request, "rollout_infos": {"images": infer_request.images}}

    asks = "closer: <image>"


def zoom(scheduler, prompt):
    engine = ScriptedEngine([turn("a"), turn("b"), turn("c")])
    runner = runner_for(engine, scheduler, chat=CHAT, media=CHAT.media_kinds)
    return roll_out(runner, [prompt])[0]


@pytest.mark.cap("C24")
def test_a_scheduler_s_crops_are_shown_to_the_model_and_trained_in_the_order_of_the_messages(tmp_path):
    picture(32, 32).save(tmp_path / "a.png")
    path = str(tmp_path / "a.png")
    message = {"role": "user", "content": [{"type": "image", "image": path}, {"type": "text", "text": "q"}]}
    prompt = prompt_of(chat=CHAT, prompt=[message], images=[path])
    trajectory = zoom(Zoom(), prompt)
    assert trajectory.error is None
    (record,) = trajectory.records
    assert [made.num_tokens for made in record.media] == [9, 9, 1]
    assert [made.tensors["image_grid_thw"].tolist() for made in record.media] == [[[1, 6, 6]], [[1, 6, 6]], [[1, 2, 2]]]
    assert len(trajectory.media["images"]) == 3
    kept = zoom(type("Same", (Zoom,), {"step": lambda self, request, *_: {"infer_request": request}})(), prompt)
    assert [len(r.media) for r in kept.records] == [1]
    two = zoom(type("Two", (Zoom,), {"asks": "<image><image>"})(), prompt)
    assert "the messages that were added: 2 places <image> in the text, but images holds 1" in two.error


# ---- the trainer's forward pass


def vision_engine(model, **keys) -> LocalVisionEngine:
    return LocalVisionEngine(model, end_token_ids=[END], decode=CHAT.decode, **keys)


def sampled_batch(model, *, n=3, images=1):
    """Trajectories that the local engine sampled, some with one image and some with more."""
    limits = Limits(response_length=4000, max_model_len=2000, max_tokens_per_turn=8, max_assistant_turns=1)
    trajectories = converse(vision_engine(model), images=images, n=n, limits=limits)
    for trajectory in trajectories:
        assert trajectory.error is None or "the model sampled" in trajectory.error
        trajectory.reward = 1.0
    return trajectories


@pytest.mark.cap("V5")
def test_the_local_engine_and_the_trainer_agree_on_every_log_prob():
    model = vision_model()
    trajectories = sampled_batch(model) + sampled_batch(model, images=2)
    batch = build_batch(trajectories, pad_token_id=0)
    assert len(columns.media_of(batch)) == len(batch) >= 4
    rows = torch.arange(len(batch))
    mask = batch[columns.LOSS_MASK]
    for keys in ({"max_tokens": 10**6}, {"max_tokens": 1}):
        ours = compute_log_probs(model, RankBatch.alone(batch), rows, temperature=1.0, **keys)
        assert (ours - batch[columns.ROLLOUT_LOG_PROBS])[mask].abs().max() < 1e-5


def inverted(made: MediaInput) -> MediaInput:
    return replace(made, tensors=made.tensors | {"pixel_values": -made.tensors["pixel_values"]})


def test_the_log_probs_depend_on_the_pixels():
    model = vision_model()
    batch = build_batch(sampled_batch(model), pad_token_id=0)
    same = compute_log_probs(model, RankBatch.alone(batch), torch.arange(len(batch)), temperature=1.0, max_tokens=10**6)
    darker = [RowMedia(tuple(map(inverted, row.inputs))) for row in columns.media_of(batch)]
    other = forward_log_probs(
        model, batch[columns.INPUT_IDS], batch[columns.ATTENTION_MASK], wanted_BT=batch[columns.LOSS_MASK],
        temperature=1.0, media=darker,
    )  # fmt: skip
    assert (same - other.log_probs_BT)[batch[columns.LOSS_MASK]].abs().max() > 2e-3


def test_rows_of_a_batch_do_not_see_each_other_s_images_and_padding_is_not_seen():
    model = vision_model()
    messages = [[shown(picture(24, 16), "a")], [shown("plain")], [shown("b", picture(8, 8), picture(16, 16))]]
    rows = [[*CHAT.prompt_ids(m), 7, 8, 9] for m in messages]
    media = [RowMedia(tuple(CHAT.media_inputs(m, r))) for m, r in zip(messages, rows)]
    width = max(map(len, rows))
    ids = torch.tensor([r + [0] * (width - len(r)) for r in rows])
    mask = torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows]).bool()
    wanted = torch.zeros_like(mask)
    for k, row in enumerate(rows):
        wanted[k, len(row) - 3 : len(row)] = True
    together = forward_log_probs(model, ids, mask, wanted_BT=wanted, temperature=1.0, media=media).log_probs_BT
    for k, row in enumerate(rows):
        full = model(
            input_ids=ids[k : k + 1, : len(row)],
            **({} if k == 1 else _arguments(model, ids[k : k + 1, : len(row)], media[k])),
        ).logits.log_softmax(-1)
        expected = [full[0, p - 1, row[p]] for p in range(len(row) - 3, len(row))]
        torch.testing.assert_close(together[k, len(row) - 3 : len(row)], torch.stack(expected), atol=1e-5, rtol=0)


def _arguments(model, ids, of_row):
    """As transformers' processor names them."""
    grids = {name: torch.cat([m.tensors[name] for m in of_row.inputs]) for name in of_row.inputs[0].tensors}
    return {**grids, "mm_token_type_ids": (ids == PAD).int()}


def test_placeholders_without_their_images_are_refused_with_both_numbers():
    model, message = vision_model(), [shown(picture(16, 16), "a")]
    ids = torch.tensor([CHAT.prompt_ids(message)])
    made = CHAT.media_inputs(message, ids[0].tolist())[0]
    wanted = torch.zeros_like(ids).bool()
    wanted[0, -1] = True
    keys = {"wanted_BT": wanted, "temperature": 1.0}
    with pytest.raises(DataError, match="row 0: 4 placeholder tokens, but its 1 images and videos have 3"):
        short = MediaInput("image", made.start, 3, made.tensors)
        forward_log_probs(model, ids, torch.ones_like(ids), media=[RowMedia((short,))], **keys)
    with pytest.raises(DataError, match="row 0: 4 placeholder tokens, but its 0 images and videos have 0"):
        forward_log_probs(model, ids, torch.ones_like(ids), **keys)
    with pytest.raises(ConfigError, match="share_trunk: a row holds images or videos, and the critic reads text only"):
        hidden_before(model, ids, torch.ones_like(ids), wanted_BT=wanted)
    from toys import toy_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    text = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(toy_tokenizer()) + 9, hidden_size=8, num_hidden_layers=1))
    with pytest.raises(ConfigError, match="takes text only, but the batch holds images"):
        forward_log_probs(text, ids, torch.ones_like(ids), media=[RowMedia((made,))], **keys)


# ---- the local engine


def ask(model, request, **keys):
    async def go():
        engine = vision_engine(model, **keys)
        try:
            return await engine.generate(request)
        finally:
            await engine.close()

    return asyncio.run(go())


def test_text_turns_of_the_vision_engine_are_those_of_the_model():
    from verl_mt.data.requests import GenerationRequest, SamplingParams

    model, ids = vision_model(), CHAT.prompt_ids([shown("plain")])
    greedy = SamplingParams(max_new_tokens=6, temperature=0.0)
    output = ask(model, GenerationRequest(ids, greedy, "r", "s"))
    stream = list(ids)
    for token, log_prob in zip(output.token_ids, output.log_probs):
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([stream])).logits[0, -1].log_softmax(-1)
        assert (int(scores.argmax()), float(scores[token])) == (token, pytest.approx(log_prob, abs=1e-5))
        stream.append(token)
    assert output.finish_reason == ("stop" if output.token_ids[-1] == END else "length")
    seeded = GenerationRequest(ids, SamplingParams(max_new_tokens=6, seed=5), "r", "s")
    assert ask(model, seeded).token_ids == ask(model, seeded).token_ids
    late = GenerationRequest(ids, greedy, "r", "s", deadline_s=0.0)
    assert (ask(model, late).finish_reason, ask(model, late).token_ids) == ("abort", [])
    with pytest.raises(EngineError, match="within the vocabulary"):
        ask(model, GenerationRequest([10**6], greedy, "r", "s"))
    with pytest.raises(EngineError, match="leave none to sample within max_model_len=24"):
        ask(model, GenerationRequest(ids, greedy, "r", "s"), max_model_len=len(ids))
