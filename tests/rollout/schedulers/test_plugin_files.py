"""Plug-in files: written in ms-swift's manner, imported by `external_plugins`, used by name."""

from __future__ import annotations

import multiprocessing
import re

import pytest
from scheduler_lab import CHAT, converse, ids_of, prompt_of, response, said, trained

from verl_mt.config.compose import compose
from verl_mt.errors import ConfigError, PluginError
from verl_mt.extensions.compat.rollout.scheduler import load_scheduler, multi_turns, orms
from verl_mt.extensions.compat.schedulers.shipped import schedulers
from verl_mt.plugins import import_plugins
from verl_mt.rewards.base import load_reward
from verl_mt.rollout.drivers import DriverParts, build_driver

# What the authors of such files import; the one line that changes is the line of imports.
THEIR_IMPORTS = {
    "3.6": "from swift.plugin import ORM, multi_turns, orms, MultiTurnScheduler, RolloutInferRequest, "
    "RolloutResponseChoice",
    "3.8": "from swift.plugin import ORM, MultiTurnScheduler, RolloutOutput, multi_turns, orms",
}
OURS = (
    "from verl_mt.rollout.scheduler import (\n"
    "    ORM, ChatCompletionResponseChoice, MultiTurnScheduler, RolloutInferRequest, RolloutOutput,\n"
    "    RolloutResponseChoice, multi_turns, orms,\n"
    ")"
)

OLDER_FORM = '''
{imports}
from typing import Optional


class CheckAgain(MultiTurnScheduler):
    """`step` returns the request itself."""

    def __init__(self, max_turns: Optional[int] = None, *args, **kwargs):
        super().__init__(max_turns, *args, **kwargs)

    def step(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> RolloutInferRequest:
        infer_request.messages.append(dict(role='user', content='Please check: ' + infer_request.data_dict['problem']))
        return infer_request

    def check_finished(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> bool:
        if infer_request.data_dict['solution'] in result.message.content:
            return True
        return super().check_finished(infer_request, result, current_turn)


class SolutionInLastAnswer(ORM):

    def __call__(completions, **kwargs):
        messages = kwargs.get('messages')
        assert len(messages) == len(completions)
        return [1.0 if s in c else 0.0 for c, s in zip(completions, kwargs['solution'])]


multi_turns['check_again'] = CheckAgain
orms['solution_in_last_answer'] = SolutionInLastAnswer
'''

DICT_FORM = '''
{imports}
import re


class Adder(MultiTurnScheduler):
    """Continuation, with ids and mask of the turn; the sum is appended to the same message."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.pattern = re.compile(r'add\\((\\d+),(\\d+)\\)')

    def check_finished(self, infer_request, response_choice, current_turn):
        if not self.pattern.search(response_choice.message.content):
            return True
        return super().check_finished(infer_request, response_choice, current_turn)

    def step(self, infer_request, response_choice, current_turn):
        a, b = self.pattern.search(response_choice.message.content).groups()
        text = f' = {{int(a) + int(b)}}. '
        token_ids = response_choice.token_ids
        loss_mask = [1] * len(token_ids)
        infer_request.messages[-1]['content'] += text
        tokenizer = self.infer_engine.default_template.tokenizer
        extra = tokenizer.encode(text, add_special_tokens=False)
        token_ids.extend(extra)
        loss_mask.extend([0] * len(extra))
        return {{
            'infer_request': infer_request,
            'response_token_ids': token_ids,
            'response_loss_mask': loss_mask,
            'rollout_infos': {{'sums': [int(a) + int(b)], 'num_turns': current_turn}},
        }}


class SumReward(ORM):

    def __call__(self, completions, **kwargs):
        infos = kwargs.get('rollout_infos', {{}})
        return [float(sum(info.get('sums', []))) for info in infos]


multi_turns['adder'] = Adder
orms['sum_reward'] = SumReward
'''

RUN_FORM = '''
{imports}
from copy import deepcopy


class EachTurnAlone(MultiTurnScheduler):
    """A loop of its own; every turn is returned as a record."""

    async def run(self, infer_request, request_config, **kwargs):
        outputs = []
        current_turn = 1
        while True:
            messages = infer_request.messages
            response = await self.infer_engine.infer_async(infer_request, request_config, **kwargs)
            response_choice = response.choices[0]
            completion = response_choice.message.content
            messages.append({{'role': 'assistant', 'content': completion}})
            outputs.append(RolloutOutput(
                response=response,
                messages=deepcopy(messages),
                response_token_ids=response_choice.token_ids,
                rollout_infos={{'num_turns': current_turn}}))
            if self.check_finished(infer_request, response_choice, current_turn):
                break
            messages[-1]['content'] = completion.split('</think>')[-1]
            messages.append({{'role': 'user', 'content': 'More.'}})
            current_turn += 1
        return outputs


class LastTurn(ORM):

    def __call__(self, completions, **kwargs):
        trajectories = kwargs.get('trajectory_inputs')
        rewards = []
        for request_id in kwargs.get('request_id'):
            last = trajectories[request_id][-1]
            rewards.append(float(last['messages'][-1]['content'] == last['solution']))
        return rewards


multi_turns['each_turn_alone'] = EachTurnAlone
orms['last_turn'] = LastTurn
'''


@pytest.fixture(autouse=True)
def registries():
    """What a test registers is gone after it."""
    before = dict(multi_turns), dict(orms)
    yield
    for registry, items in zip((multi_turns, orms), before, strict=True):
        for name in set(registry) - set(items):
            del registry[name]


def written(text: str, version: str, folder) -> str:
    """A file as its author wrote it, then its import line replaced."""
    theirs = text.format(imports=THEIR_IMPORTS[version])
    assert theirs.count("swift") == 1
    file = folder / f"plugin_{version.replace('.', '_')}_{len(text)}.py"
    file.write_text(re.sub(r"^from swift.*$", OURS, theirs, flags=re.MULTILINE))
    return str(file)


@pytest.mark.cap("C3", "C12", "C35", "C36", "C39", "C87")
def test_a_file_in_the_older_form_runs_after_its_import_line_is_changed(tmp_path):
    import_plugins([written(OLDER_FORM, "3.6", tmp_path)])
    run = converse(
        load_scheduler("check_again", max_turns=5), [said("3"), said("it is 4")],
        prompt=prompt_of(problem="2+2", solution="4"), reward=orms["solution_in_last_answer"](),
    )  # fmt: skip
    assert [m["content"] for m in run.trajectory.messages[1:]] == ["3", "Please check: 2+2", "it is 4"]
    assert run.trajectory.reward == 1.0


@pytest.mark.cap("C12", "C23", "C25", "C32", "C39")
def test_a_file_that_returns_ids_and_masks_runs_after_its_import_line_is_changed(tmp_path):
    import_plugins([written(DICT_FORM, "3.8", tmp_path)])
    run = converse(load_scheduler("adder", max_turns=5), [said("add(1,2)"), said("done")], reward=orms["sum_reward"]())
    assert run.trajectory.messages[-1]["content"] == "add(1,2) = 3. done"
    ids, mask, _ = response(run.record)
    assert CHAT.decode(ids) == "add(1,2) = 3. done<|im_end|>"
    assert mask == [1] * 8 + [0] * 6 + [1] * 5
    assert run.trajectory.reward == 3.0


@pytest.mark.cap("C9", "C12", "C22", "C39")
def test_a_file_with_a_run_of_its_own_runs_after_its_import_line_is_changed(tmp_path):
    import_plugins([written(RUN_FORM, "3.8", tmp_path)])
    run = converse(
        load_scheduler("each_turn_alone", max_turns=2), [said("<think>a</think>b"), said("yes")],
        prompt=prompt_of(solution="yes"), reward=orms["last_turn"](),
    )  # fmt: skip
    assert [CHAT.decode(trained(r)) for r in run.trajectory.records] == [
        "<think>a</think>b<|im_end|>", "yes<|im_end|>",
    ]  # fmt: skip
    assert run.trajectory.reward == 1.0
    assert ids_of("<think>")[0] not in run.engine.requests[1].input_ids


@pytest.mark.cap("C12")
def test_a_plug_in_file_is_imported_once_however_often_it_is_named(tmp_path):
    file = written(OLDER_FORM, "3.6", tmp_path)
    one, other = import_plugins([file, file])
    assert one is other
    assert multi_turns["check_again"] is one.CheckAgain


@pytest.mark.cap("C12")
def test_a_name_that_is_taken_gets_the_newer_plug_in_with_a_note_and_our_own_registry_refuses_it(
    tmp_path, request, caplog
):
    request.addfinalizer(lambda ours=schedulers["math_tip_trick"]: multi_turns.update(math_tip_trick=ours))
    file = tmp_path / "again.py"
    file.write_text(f"{OURS}\nclass C(MultiTurnScheduler):\n    pass\nmulti_turns['math_tip_trick'] = C\n")
    import_plugins([str(file)])
    assert multi_turns["math_tip_trick"].__name__ == "C" and "takes the place of" in caplog.text
    with pytest.raises(PluginError, match=r"'math_tip_trick' is already registered as .*C"):
        schedulers["math_tip_trick"] = dict


@pytest.mark.cap("C12")
@pytest.mark.parametrize(
    ("text", "line"),
    [("x = 1\nraise RuntimeError('no')\n", "line 2"), ("x = (\n", "line 1"), ("import nope\n", "line 1")],
)
def test_a_file_that_fails_to_import_is_named_with_its_line(text, line, tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(PluginError, match=rf"{re.escape(str(file))} failed to import at {line}"):
        import_plugins([str(file)])


@pytest.mark.cap("C10", "C11")
def test_schedulers_and_rewards_are_chosen_in_the_config(tmp_path):
    config = compose(
        [
            f"external_plugins={written(OLDER_FORM, '3.6', tmp_path)}",
            "actor_rollout_ref.rollout.multi_turn.scheduler=check_again",
            "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
            "reward.path=solution_in_last_answer",
        ]
    )
    import_plugins(config.external_plugins)
    driver = build_driver(config, DriverParts())
    assert type(driver.scheduler).__name__ == "CheckAgain"
    assert driver.scheduler.max_turns == 3
    assert load_reward(config.reward.path) is not None


@pytest.mark.cap("C11")
@pytest.mark.parametrize(
    ("kwargs", "complaint"),
    [({"typo": 1}, "takes no typo"), ({"env_config": 3, "max_turns": 2}, "failed")],
)
def test_arguments_that_a_scheduler_does_not_take_are_named(kwargs, complaint):
    class Strict(multi_turns["math_tip_trick"]):
        def __init__(self, max_turns=None, env_config=None):
            super().__init__(max_turns)
            self.config = dict(env_config or {})

    multi_turns["strict"] = Strict
    with pytest.raises((ConfigError, PluginError), match=complaint):
        load_scheduler("strict", kwargs=kwargs)


def _names_in_a_worker(setup, answers):
    from verl_mt.extensions.compat.rollout.scheduler import multi_turns as there
    from verl_mt.workers.setup import load_workers

    load_workers(setup)
    answers.put(sorted(there))


@pytest.mark.slow
@pytest.mark.cap("C13")
def test_plug_ins_are_known_in_a_spawned_worker(tmp_path, monkeypatch):
    from verl_mt.trainer.build import build_workers
    from verl_mt.workers import worker_group

    seen = []
    monkeypatch.setattr(worker_group, "load_workers", lambda setup: seen.append(setup) or (None, None))
    monkeypatch.setattr(worker_group, "InlineWorkerGroup", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    name = written(OLDER_FORM, "3.6", tmp_path).rpartition("/")[2]
    build_workers(compose([f"external_plugins={name}"]), total_steps=1)
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    monkeypatch.chdir("/")
    worker = spawn.Process(target=_names_in_a_worker, args=(seen[0], answers))
    worker.start()
    try:
        assert "check_again" in answers.get()
    finally:
        worker.join()
    assert "check_again" not in multi_turns
