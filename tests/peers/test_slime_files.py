"""slime's own example files, after the documented replacement: a search agent and a team of agents."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import contextmanager
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from json import dumps, loads
from pathlib import Path
from types import SimpleNamespace

import conformance
import pytest
from command_lab import NO_VALIDATION, metrics_of, rows_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rollout"))

from generate_support import CHAT, EOS, roll_out, rows, runner_of, turn
from tables import newest_first

from verl_mt.algorithms.aggregate import token_weights
from verl_mt.config.compose import compose
from verl_mt.config.schema import Config
from verl_mt.data.batch import build_batch, trajectory_rewards, weighed_together
from verl_mt.data.ledger import TrajectoryRecord
from verl_mt.data.run_files import row_to_trajectory, trajectory_to_row
from verl_mt.data.trajectory import Status, StopReason, Trajectory
from verl_mt.errors import ConfigError, PluginError
from verl_mt.extensions.compat.generate.args import GenerateArgs, flag_defaults
from verl_mt.extensions.compat.generate.returned import place
from verl_mt.extensions.compat.migrate import main
from verl_mt.extensions.compat.migrate.shell import read_script
from verl_mt.extensions.compat.rewards.slime import by_reward_key
from verl_mt.extensions.compat.rollout.custom_generate import GenerateState, generate_turn, get_model_url, post
from verl_mt.extensions.compat.rollout.custom_generate import generate as default_generate
from verl_mt.extensions.compat.slime_sample import Sample
from verl_mt.rewards.contract import InvalidScore
from verl_mt.rollout.context import Limits
from verl_mt.trainer.build import build_trainer

pytestmark = pytest.mark.slow  # real files, whole conversations

REVISIONS = ["2026-06", "2026-08"]
SEARCH = "examples/search-r1"

# The example's own client of a retrieval server lies beside it and is no file of ours; the same request in short.
CLIENT = """
import asyncio, json, urllib.request

def _ask(url, payload):
    request = urllib.request.Request(url, json.dumps(payload).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["result"][0]

async def local_search(url, query, topk, proxy=None):
    return await asyncio.to_thread(_ask, url, {"queries": [query], "topk": topk, "return_scores": True})
"""


@contextmanager
def retrieval_server():
    """A retrieval server on this machine; yields its URL and the queries that it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.extend(body["queries"])
            found = [{"document": {"contents": '"Paris"\\nParis is the capital.'}, "score": 1.0}]
            answer = dumps({"result": [found for _ in body["queries"]]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/retrieve", asked
    finally:
        server.shutdown()


@contextmanager
def search_r1(revision, tmp_path):
    """The search agent's module, its searches answered on this machine."""
    folder = conformance.copy_replaced("slime", conformance.peer("slime", revision, SEARCH), tmp_path)
    (folder / "local_search_server.py").write_text(CLIENT)
    with conformance.imported(folder / "generate_with_search.py") as module, retrieval_server() as (url, asked):
        module.SEARCH_R1_CONFIGS["local"]["search_url"] = url
        yield module, asked


def search(script, *, revision, tmp_path, label, question="Give <answer> text </answer>"):
    with search_r1(revision, tmp_path) as (module, asked):
        said = iter(script)
        runner = runner_of(
            "generate_with_search.generate", lambda request: next(said), reward="generate_with_search.reward_func"
        )
        [group] = roll_out(runner, rows(question, label=label))
        return group.trajectories[0], asked, module


@pytest.mark.parametrize("revision", newest_first(REVISIONS))
def test_search_r1_runs_unmodified_with_the_engines_ids_and_without_training_what_was_found(revision, tmp_path):
    script = [
        turn("<think>where</think> <search>capital</search>"),
        turn("<think>I know</think> <answer>Paris</answer>"),
    ]
    label = {"ground_truth": {"target": ["Paris"]}}
    trajectory, asked, module = search(script, revision=revision, tmp_path=tmp_path, label=label)
    assert trajectory.error is None and asked == ["capital"]
    record = trajectory.records[0]
    response = CHAT.decode(record.token_ids[record.num_prompt_tokens :])
    assert "<information>" in response and "Paris is the capital." in response
    trained = [i for i, bit in zip(record.token_ids, record.loss_mask) if bit]
    said = [i for ids, *_ in script for i in ids if i != EOS]  # it asks the engine to stop at its tags
    assert trained == said == [i for i, s in zip(record.token_ids, record.sampled) if s]
    assert "information" not in CHAT.decode(trained)
    sample = trajectory.sample
    assert isinstance(sample, Sample) and sample.tokens == record.token_ids
    assert sample.rollout_log_probs == record.rollout_log_probs[record.num_prompt_tokens :]
    score = module.compute_score_em(sample.prompt + sample.response, label["ground_truth"], format_score=0.2)
    assert trajectory.reward == pytest.approx(score) and score > 0.2
    assert sample.status is Status.COMPLETED and sample.rollout_id == sample.index


@pytest.mark.parametrize("revision", newest_first(REVISIONS))
def test_search_r1_tells_of_an_invalid_action_and_a_cut_turn_ends_it(revision, tmp_path):
    script = [turn("hm"), turn("<sea", reason="length")]
    label = {"ground_truth": {"target": ["Paris"]}}
    trajectory, asked, _ = search(script, revision=revision, tmp_path=tmp_path, label=label)
    assert (trajectory.error, asked, trajectory.status) == (None, [], Status.TRUNCATED)
    assert "My previous action is invalid" in trajectory.sample.response
    assert sum(trajectory.records[0].loss_mask) == len(script[0][0]) + len(script[1][0])


def test_args_answer_every_flag_of_slimes_parser_and_refuse_unknown_names():
    config = Config()
    config.actor_rollout_ref.actor.ppo_max_token_len = 4321
    config.data.label_key = "answer"
    args = GenerateArgs(config, None)
    assert not args.partial_rollout and args.reward_key is None and args.ci_test is False
    assert (args.max_tokens_per_gpu, args.label_key) == (4321, "answer")
    for name in flag_defaults():
        getattr(args, name)
    args.train_env_vars["x"] = 1
    assert args.train_env_vars == {}, "a default may be edited without changing the next one"
    with pytest.raises(AttributeError, match=r"partial_rolout.*did you mean 'partial_rollout'"):
        _ = args.partial_rolout


def test_appended_tokens_keep_a_samples_columns_in_step():
    sample = Sample(tokens=[1, 2], prompt="p")
    meta = {"finish_reason": {"type": "length"}, "weight_version": "3", "cached_tokens": 1, "prompt_tokens": 2}
    sample.append_response_tokens(None, tokens=[3, 4], log_probs=[-0.1, -0.2], meta_info=meta, text="ab")
    sample.append_response_tokens(None, tokens=[5], trainable=False)
    assert (sample.tokens, sample.response_length, sample.response) == ([1, 2, 3, 4, 5], 3, "ab")
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 1, 0], [-0.1, -0.2, 0.0])
    assert (sample.status, sample.weight_versions) == (Status.TRUNCATED, ["3"])
    assert sample.prefix_cache_info.prefix_cache_hit_rate == 0.5
    again = Sample.from_dict(sample.to_dict())
    assert again == sample
    for wrong in ({"tokens": [1]}, {"tokens": [1], "log_probs": [0.1, 0.2]}):
        with pytest.raises(ValueError, match="log_probs"):
            sample.append_response_tokens(None, **wrong)
    with pytest.raises(ValueError, match="not trainable"):
        sample.append_response_tokens(None, tokens=[1], log_probs=[0.1], trainable=False)


def test_appended_tokens_reach_a_list_that_the_function_holds_under_a_name_of_its_own():
    sample = Sample(tokens=[1])
    sample.loss_mask = []
    sample.rollout_log_probs = None
    mask = sample.loss_mask
    sample.append_response_tokens(None, meta_info={"finish_reason": {"type": "stop"}})
    assert (sample.loss_mask, sample.rollout_log_probs, sample.status) == ([], None, Status.COMPLETED)
    sample.append_response_tokens(None, tokens=(3, 4), log_probs=[-0.1, -0.2])
    sample.append_response_tokens(None, tokens=[5], log_probs=[0.0], trainable=False)
    assert mask is sample.loss_mask and mask == [1, 1, 0]
    assert Sample.SpecInfo.from_dict(sample.spec_info.to_dict()) == sample.spec_info
    assert Sample.PrefixCacheInfo.from_dict({"cached_tokens": 2}).cached_tokens == 2


def members(*rollout_ids, plan="s1"):
    """Trajectories of two and three tokens in turn, as they come back from a function."""
    found = []
    for k, rollout_id in enumerate(rollout_ids):
        record = TrajectoryRecord()
        record.append_given([1], kind="prompt", turn=0)
        record.append_sampled([2] * (2 + k % 2), [-1.0] * (2 + k % 2), [0] * (2 + k % 2), turn=1)
        trajectory = Trajectory(f"t{k}", f"{plan}.00000", f"{plan}.00000", "e", records=[record], reward=float(k))
        trajectory.stop_reason = StopReason.SCHEDULER
        place(Sample(index=k, rollout_id=rollout_id, status=Status.COMPLETED), trajectory)
        found.append(trajectory)
    return found


def test_samples_of_one_execution_weigh_as_one_as_in_slimes_reducer():
    trajectories = members(7, 7, 8, None)
    batch = build_batch(trajectories, pad_token_id=0)
    weights = token_weights(batch["loss_mask"], weighed_together(batch), mode="seq-mean-token-mean")
    # Each token over the tokens of its execution (2 + 3, 2, 3), and all over three executions.
    assert weights.sum(1).tolist() == pytest.approx([2 / 15, 3 / 15, 1 / 3, 1 / 3])
    alone = build_batch(members(None, None), pad_token_id=0)
    assert "execution_index" not in alone and trajectories[3].sample.rollout_id == 3
    assert trajectory_rewards(batch)[0].tolist() == [0.0, 1.0, 2.0, 3.0], "each is compared with the others by itself"
    again = [row_to_trajectory(trajectory_to_row(t, step=1)) for t in trajectories]
    assert [t.execution_id for t in again] == ["s1/7", "s1/7", "s1/8", None]
    later = members(7, plan="s1.001")
    assert later[0].execution_id != trajectories[0].execution_id, "a step's next rollout numbers its samples anew"


TEAM = "examples/multi_agent"


@contextmanager
def team(tmp_path, monkeypatch):
    """The team's module under the dotted name that its own settings use."""
    source = conformance.peer("slime", "2026-08", TEAM)
    conformance.copy_replaced("slime", source, tmp_path / "examples")
    (tmp_path / "examples" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in sys.modules if n == "examples" or n.startswith("examples.")]:
        monkeypatch.delitem(sys.modules, name)
    try:
        yield "examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents"
    finally:
        for name in [n for n in sys.modules if n == "examples" or n.startswith("examples.")]:
            del sys.modules[name]


def right(args, sample, **kwargs):
    return float("right" in sample.response)


def test_multi_agent_fans_out_into_solvers_rewriters_and_a_selector_with_weighted_rewards(tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *a, **k: CHAT.tokenizer)
    script = [*(turn(f"<think>s{k}</think>{'right' if k < 3 else 'bad'}") for k in range(5))]
    script += [turn("<think>r</think>right")] * 5
    script += [turn("<think>j</think>Judgment: 1")]
    said = iter(script)
    config = Config()
    config.data.apply_chat_template = False
    config.actor_rollout_ref.rollout.max_model_len = 40_000  # the tests' tokens are characters
    limits = Limits(response_length=2000, max_model_len=40_000)
    with team(tmp_path, monkeypatch) as path:
        runner = runner_of(path, lambda request: next(said), config=config, limits=limits, reward=f"{__name__}.right")
        [group] = roll_out(runner, rows("two", label="2"))
    assert [t.error for t in group.trajectories] == [None] * 11
    solved = sorted(round(t.reward, 6) for t in group.trajectories)
    assert solved == [0.0, 0.0, *[1.2] * 9], "all are weighted by the selected answer"
    assert (
        len({t.episode_id for t in group.trajectories}) == 1
        and len({t.sample.rollout_id for t in group.trajectories}) == 1
        and {t.execution_id for t in group.trajectories} == {"s1/0"}
    )
    for trajectory in group.trajectories:
        [record] = trajectory.records
        assert record.loss_mask == record.sampled and sum(record.loss_mask) == trajectory.sample.response_length
        assert trajectory.sample.rollout_log_probs == record.rollout_log_probs[record.num_prompt_tokens :]
    prompts = {CHAT.decode(t.records[0].token_ids[: t.records[0].num_prompt_tokens])[:40] for t in group.trajectories}
    assert len(prompts) == 3, "each role is asked in its own words"


COMMAND = (
    "input_key=prompt", "label_key=label", "rollout_batch_size=2", "n_samples_per_prompt=2", "num_rollout=2",
    "rollout_max_response_len=96", "trainer.num_threads=1", "rollout_temperature=1", "optimizer=adam", "lr=1e-6",
    "actor_rollout_ref.rollout.max_model_len=2048", "data.max_prompt_length=512", "trainer.progress=off",
)  # fmt: skip


def questions(folder, label):
    """A prompt file in slime's manner."""
    file = folder / "train.jsonl"
    lines = [{"prompt": f"What is {k} + 1? Give <answer> number </answer>.", "label": label} for k in range(4)]
    file.write_text("\n".join(map(dumps, lines)))
    return file


def two_steps(run, *overrides):
    """Train twice; the metrics, and every sample's row."""
    build_trainer(compose([*NO_VALIDATION, f"save={run}", *COMMAND, *overrides])).fit()
    lines = metrics_of(run)
    assert len(lines) == 2
    return lines, [row for step in (1, 2) for row in rows_of(run, step)]


@pytest.mark.parametrize("revision", newest_first(REVISIONS))
def test_search_r1_trains_two_steps_with_the_tiny_model(revision, tmp_path):
    data = questions(tmp_path, {"ground_truth": {"target": ["3"]}})
    with search_r1(revision, tmp_path):
        words = (
            f"prompt_data={data}", "apply_chat_template=True", "custom_rm_path=generate_with_search.reward_func",
            "custom_generate_function_path=generate_with_search.generate",
        )  # fmt: skip
        lines, rows_read = two_steps(tmp_path / "run", *words)
    assert [line.get("rollout/failed", 0) for line in lines] == [0, 0]
    assert len(rows_read) == 8 and all(row["stop_reason"] != "error" for row in rows_read)
    for row in rows_read:
        assert all(mask <= sampled for r in row["records"] for mask, sampled in zip(r["loss_mask"], r["sampled"]))


def test_multi_agent_trains_two_steps_with_the_tiny_model(tmp_path, monkeypatch):
    data = questions(tmp_path, "3")
    with team(tmp_path, monkeypatch) as path:
        words = (f"prompt_data={data}", "apply_chat_template=True", f"custom_generate_function_path={path}")
        lines, rows_read = two_steps(tmp_path / "run", *words, f"custom_rm_path={__name__}.right")
    assert [line.get("rollout/failed", 0) for line in lines] == [0, 0]
    episodes = {row["episode_id"] for row in rows_read}
    assert len(episodes) == 8 and len(rows_read) >= 5 * len(episodes), (
        "each episode fans out into five solvers at least"
    )
    assert len({(row["step"], row["execution_id"]) for row in rows_read}) == 8, "each weighs as one"


async def aliased(args, sample, sampling_params):
    """Holds the mask under a name of its own and hands it back, counts its budget itself, posts ids."""
    assert not args.partial_rollout
    sample.rollout_log_probs, sample.rollout_top_p_token_ids, sample.loss_mask = None, None, []
    state, url = GenerateState(args), f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens, mask, ids, response = list(prompt), sample.loss_mask, [], ""
    for turn_number in range(2):
        left = args.rollout_max_context_len - len(prompt) - len(ids)
        params = {**sampling_params, "max_new_tokens": min(sampling_params["max_new_tokens"], left)}
        reply = await post(url, {"input_ids": prompt + ids, "sampling_params": params, "return_logprob": True})
        items = reply["meta_info"]["output_token_logprobs"]
        said = [item[1] for item in items]
        response += state.tokenizer.decode(said)
        ids += said
        sample.append_response_tokens(
            args, tokens=said, log_probs=[i[0] for i in items], trainable=True, meta_info=reply["meta_info"]
        )
        if turn_number == 0:
            observed = state.tokenizer("\n<interpreter>5</interpreter>\n", add_special_tokens=False)["input_ids"]
            ids += observed
            sample.append_response_tokens(args, tokens=observed, trainable=False)
            assert len(ids) == len(sample.rollout_log_probs)
            response += "\n<interpreter>5</interpreter>\n"
    sample.tokens, sample.response_length, sample.response, sample.loss_mask = prompt + ids, len(ids), response, mask
    return sample


async def asks_by_name(args, sample, sampling_params):
    ids = GenerateState(args).tokenizer.encode(sample.prompt, add_special_tokens=False)
    with pytest.raises(PluginError, match="the run has one model"):
        get_model_url(args, "judge")
    payload = {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True}
    items = (await post(get_model_url(args, "default", "/generate"), payload))["meta_info"]["output_token_logprobs"]
    sample.tokens = ids
    sample.append_response_tokens(args, tokens=[i[1] for i in items], log_probs=[i[0] for i in items], text="5")
    return sample


async def by_turns(args, sample, sampling_params):
    """slime's own helper for a turn, and a result between two of them."""
    state = GenerateState(args)
    sample.tokens = state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    output = await generate_turn(args, sample, {**sampling_params, "stop": ["</calc>"]})
    assert output["text"].endswith("</calc>") and sample.status is Sample.Status.COMPLETED
    tokens = state.tokenizer.encode("<result>5</result>", add_special_tokens=False)
    sample.append_response_tokens(args, tokens=tokens, trainable=False, text="<result>5</result>")
    await generate_turn(args, sample, sampling_params)
    return sample


async def step_by_step(args, sample, sampling_params):
    """Returns every turn as a Sample, all that came before it as its prompt."""
    state, url = GenerateState(args), f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    tokens, steps = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"], []
    for number in range(3):
        reply = await post(url, {"input_ids": tokens, "sampling_params": sampling_params, "return_logprob": True})
        items = reply["meta_info"]["output_token_logprobs"]
        step = deepcopy(sample)
        step.tokens, step.response, step.response_length = tokens + [i[1] for i in items], reply["text"], len(items)
        step.loss_mask, step.rollout_log_probs = [1] * len(items), [i[0] for i in items]
        step.reward, step.status, step.rollout_id = float(number), Sample.Status.COMPLETED, sample.index
        steps.append(step)
        tokens = step.tokens + state.tokenizer(f"<obs>{number}</obs>", add_special_tokens=False)["input_ids"]
    return [steps[k] for k in args.kept]


@pytest.mark.parametrize("kept", [[0, 1, 2], [2, 0, 1], [2, 0]])
def test_every_step_of_an_append_only_history_may_be_a_sample_of_its_own(kept):
    config = Config()
    config.actor_rollout_ref.rollout.custom_generate_kwargs = {"kept": kept}
    turns = iter([turn("one"), turn("two"), turn("three")])
    [group] = roll_out(runner_of(f"{__name__}.step_by_step", lambda request: next(turns), config=config), rows("q"))
    parts = sorted(group.trajectories, key=lambda t: t.reward)
    assert [(t.error, t.status, t.reward, t.num_turns) for t in parts] == [
        (None, Status.COMPLETED, float(k), 1) for k in sorted(kept)
    ]
    for part, text in zip(parts, [("one", "two", "three")[k] for k in sorted(kept)]):
        [record] = part.records
        trained = [i for i, bit in zip(record.token_ids, record.loss_mask) if bit]
        assert CHAT.decode(trained) == text + CHAT.decode([EOS]) and part.turn_texts == [text]
        assert [(s.kind, s.turn) for s in record.turns] == [("prompt", 0), ("assistant", 1)] and part.rounds == [0]
        assert record.loss_mask == record.sampled and part.sample.tokens == record.token_ids
        assert part.sample.rollout_log_probs == record.rollout_log_probs[record.num_prompt_tokens :]
    assert parts[-1].records[0].token_ids[: len(parts[0].records[0].token_ids)] == parts[0].records[0].token_ids
    assert len({t.trajectory_id for t in parts}) == len(kept) and {t.execution_id for t in parts} == {"s1/0"}
    assert parts[0].counters.get("discarded_tokens", 0) == (0 if 1 in kept else len("two") + 1)
    batch = build_batch(parts, pad_token_id=0)
    weights = token_weights(batch["loss_mask"], weighed_together(batch), mode="seq-mean-token-mean")
    assert weights.sum().item() == pytest.approx(1.0) and len(set(weights[weights > 0].tolist())) == 1


async def gave_up(args, sample, sampling_params):
    """As functions that fan out say that nothing came of it."""
    sample.tokens, sample.response_length, sample.loss_mask, sample.reward = [0, 0], 1, [0], 0.0
    sample.status = Sample.Status.ABORTED
    return [sample]


@pytest.mark.parametrize(
    ("function", "script", "told"),
    [
        (aliased, ["<code>2+3</code>", "Answer: 5"], "interpreter"),
        (by_turns, ["<calc>2+3</calc>", "5"], "<result>5"),
        (asks_by_name, ["5"], ""),
        (default_generate, ["5"], ""),
    ],
)
def test_functions_in_the_manner_of_its_examples_train_what_was_sampled_and_nothing_else(function, script, told):
    turns = iter([turn(text) for text in script])
    path = (
        f"{__name__}.{function.__name__}"
        if function is not default_generate
        else ("verl_mt.rollout.custom_generate.generate")
    )
    [group] = roll_out(runner_of(path, lambda request: next(turns)), rows("2+3?"))
    [trajectory] = group.trajectories
    assert (trajectory.error, trajectory.status) == (None, Status.COMPLETED)
    record = trajectory.records[0]
    trained = [i for i, bit in zip(record.token_ids, record.loss_mask) if bit]
    assert CHAT.decode([i for i in trained if i != EOS]) == "".join(script)
    assert record.loss_mask == record.sampled and told in trajectory.sample.response
    assert sum(trajectory.sample.loss_mask) == len(trained)


def test_a_list_of_nothing_but_given_up_samples_is_aborted():
    [group] = roll_out(runner_of(f"{__name__}.gave_up", lambda request: turn("x")), rows("q"))
    [trajectory] = group.trajectories
    assert (trajectory.status, trajectory.reward) == (Status.ABORTED, None)


async def keyed(args, sample):
    return {"acc": 1.0, "score": -1.0}


async def scored_itself(args, sample, sampling_params):
    sample = await default_generate(args, sample, sampling_params)
    sample.reward = {"acc": 0.5}
    return sample


def test_reward_key_names_the_entry_of_a_dict_that_is_the_reward():
    config = Config()
    config.actor_rollout_ref.rollout.custom_generate_kwargs = {"reward_key": "acc"}
    own = "verl_mt.rollout.custom_generate.generate"
    found = {}
    for path, reward in ((own, f"{__name__}.keyed"), (f"{__name__}.scored_itself", None)):
        runner = runner_of(path, lambda request: turn("x"), reward=reward, config=deepcopy(config))
        [group] = roll_out(runner, rows("q"))
        found[path] = group.trajectories[0].reward
    assert found == {own: 1.0, f"{__name__}.scored_itself": 0.5}
    args = SimpleNamespace(reward_key="accuracy")
    with pytest.raises(InvalidScore, match=r"without 'accuracy'.*It has acc"):
        by_reward_key({"acc": 1.0}, args)
    assert Sample(reward={"acc": 2.0}).get_reward_value(SimpleNamespace(reward_key="acc")) == 2.0


def test_its_scorers_say_what_its_files_read():
    from verl_mt.extensions.compat.rollout.custom_generate import compute_score, extract_answer, grade_answer_verl

    text = "so\nAnswer: \\boxed{34}"
    assert compute_score(text, "34") == {"score": 1.0, "acc": True, "pred": "34"}
    assert compute_score("none", "34") == {"score": -1.0, "acc": False, "pred": "[INVALID]"}
    assert compute_score(text, "34", strict_box_verify=True)["pred"] == "34"
    assert compute_score(text + " " * 200, "34", strict_box_verify=True)["pred"] is None
    assert extract_answer(text) == "34" and grade_answer_verl(text, "34") and not grade_answer_verl(text, "35")


async def generate_and_rm_group(args, group, sampling_params, evaluation=False):
    return group


def test_what_rolls_out_more_than_a_sample_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"takes group, a group of samples.*reward_func\(args, samples\)"):
        runner_of(f"{__name__}.generate_and_rm_group", lambda request: turn("x"))
    from verl_mt.extensions.compat.rollout.custom_generate import E2BSandbox, RolloutDataSource, generate_rollout  # type: ignore

    for use in (generate_rollout, type("Mine", (RolloutDataSource,), {})):
        with pytest.raises(PluginError, match="a whole rollout cannot be replaced"):
            use(None, 0)
    with pytest.raises(PluginError, match="agent_function_path"):
        E2BSandbox("image")


INDEXED: list[object] = []


async def by_index(args, sample, sampling_params):
    """A function that looks its task up by the number in its row."""
    INDEXED.append(sample.prompt)
    state = GenerateState(args)
    text = f"Task {sample.prompt + 1}: add."
    ids = state.tokenizer(text, add_special_tokens=False)["input_ids"]
    payload = {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True}
    reply = await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", payload)
    items = reply["meta_info"]["output_token_logprobs"]
    sample.tokens = list(ids)
    sample.append_response_tokens(
        args,
        tokens=[i[1] for i in items],
        log_probs=[i[0] for i in items],
        meta_info=reply["meta_info"],
        text=reply["text"],
    )
    return sample


def test_rows_that_hold_a_number_reach_the_function_as_it_is_without_apply_chat_template(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(dumps({"prompt": k, "label": "3"}) for k in range(4)))
    INDEXED.clear()
    words = (
        f"prompt_data={file}",
        f"custom_generate_function_path={__name__}.by_index",
        f"custom_rm_path={__name__}.right",
    )
    lines, rows_read = two_steps(tmp_path / "run", *words)
    assert [line.get("rollout/failed", 0) for line in lines] == [0, 0]
    assert set(INDEXED) <= {0, 1, 2, 3} and len(rows_read) == 8


def test_a_prompt_file_without_apply_chat_template_is_shown_as_it_is_only_to_a_generate_function():
    words = ["prompt_data=a.jsonl", "custom_generate_function_path=a.b"]
    assert not compose(words).data.apply_chat_template
    assert compose([*words, "apply_chat_template=True"]).data.apply_chat_template
    assert compose(words[:1]).data.apply_chat_template, "the default loop always renders"


SCRIPTS = sorted(
    (revision.name, str(file.relative_to(revision)))
    for revision in conformance.revisions("slime")
    for file in revision.rglob("*.sh")
)


def test_every_one_of_its_scripts_is_read_whole():
    if not SCRIPTS:
        pytest.skip("no files of slime")
    starting = 0
    for revision, name in SCRIPTS:
        file = conformance.peer("slime", revision, name)
        script = read_script(file.read_text(), file)  # raises where a bracket of it is not understood
        starting += any(word.endswith(("train.py", "train_async.py")) for c in script.commands for word in c.words)
        left = [word for command in script.commands for word in command.words if "seq " in word]
        assert not left, (name, left)
    assert starting >= 10


@pytest.mark.parametrize("name", ["scripts/run-qwen3-32B.sh", "scripts/run-moonlight-16B-A3B.sh"])
def test_a_script_that_counts_in_an_array_is_carried_over_as_far_as_megatron_lets_it(name, capsys):
    assert main([str(conformance.peer("slime", "2026-08", name))]) in (0, 1, 3)
    text = capsys.readouterr().out
    assert "cuda_graph_bs=[1,2,4,8,16,24,32," in text and "is not closed" not in text
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).returncode == 0
