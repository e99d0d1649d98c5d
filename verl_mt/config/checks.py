"""What no single knob can know: combinations across sections. All problems of a configuration in one error."""

from __future__ import annotations

import re
from collections.abc import Iterator

from verl_mt.config.algorithm_checks import algorithm
from verl_mt.config.correction_checks import corrections
from verl_mt.config.policy_losses import read_policy_loss
from verl_mt.config.schema import Config
from verl_mt.errors import ConfigError
from verl_mt.plugins import names_code

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_TRACKERS = ("console", "file", "tensorboard", "wandb", "mlflow")


def check(config: Config) -> None:
    """Verify everything that involves more than one knob.

    Raises:
        ConfigError: lists every problem with its keys, what was got and what to do.
    """
    groups = (
        _multi_turn,
        _sampling,
        _batches,
        _lengths,
        algorithm,
        _losses,
        corrections,
        _adapters,
        _engine,
        _placement,
    )
    problems = [text for group in (*groups, _run, _numbers) for text in group(config)]
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError(f"{len(problems)} problems in the configuration:\n" + "\n".join(f"  - {p}" for p in problems))


def _multi_turn(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    turns, tools = rollout.multi_turn, rollout.tool_kwargs.tools_config_file
    given = {
        "tool_kwargs.tools_config_file": tools,
        "interaction_config_file": rollout.interaction_config_file,
    }
    for key, file in given.items():
        if file is not None and turns.enable is False:
            yield (
                f"{_ROLLOUT}.{key} is {file!r} but {_ROLLOUT}.multi_turn.enable is False: "
                "switch multi-turn on, or leave the file out (=null)"
            )
    yield from _scheduler(config)
    yield from _generate_function(config)
    data = config.data
    if turns.use_inference_chat_template and not data.filter_overlong_prompts and data.truncation != "error":
        yield (
            f"{_ROLLOUT}.multi_turn.use_inference_chat_template shows what production shows, never a cut prompt; "
            f"data.truncation is {data.truncation}: set data.filter_overlong_prompts=True or data.truncation=error"
        )
    if tools is not None and turns.max_assistant_turns == 1:
        yield (
            f"{_ROLLOUT}.multi_turn.max_assistant_turns is 1 but tools are given ({tools}): no call could be answered; "
            "set it to 2 or more, or to null"
        )


def _generate_function(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    key, turns = f"{_ROLLOUT}.custom_generate_function_path", rollout.multi_turn
    if rollout.custom_generate_function_path is None:
        if rollout.custom_generate_kwargs:
            yield f"{_ROLLOUT}.custom_generate_kwargs are given, but {key} is null: name the function too"
        return
    decided_by_it = {
        "interaction_config_file": rollout.interaction_config_file,
        "multi_turn.use_inference_chat_template": turns.use_inference_chat_template or None,
        "multi_turn.loss_scale": turns.loss_scale,
        "multi_turn.train_prompt_assistants": turns.train_prompt_assistants or None,
        "multi_turn.enable=False": None if turns.enable is not False else False,
    }
    for name, value in decided_by_it.items():
        if value is not None:
            yield (
                f"{_ROLLOUT}.{name} does not go with {key}={rollout.custom_generate_function_path!r}: the function "
                "decides itself what the model is answered and what is trained (sample.loss_mask); leave it out"
            )


def _scheduler(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    turns, function = rollout.multi_turn, rollout.custom_generate_function_path
    key = f"{_ROLLOUT}.multi_turn.scheduler"
    if turns.scheduler is None:
        if turns.scheduler_kwargs:
            yield f"{key}_kwargs is {turns.scheduler_kwargs} but {key} is null: name the scheduler, or leave them out"
    else:
        if turns.enable is False:
            yield f"{key} is {turns.scheduler!r} but {_ROLLOUT}.multi_turn.enable is False: switch it on"
        if rollout.interaction_config_file is not None:
            yield (
                f"{key} is {turns.scheduler!r} and {_ROLLOUT}.interaction_config_file is given: a scheduler decides "
                "itself what the model is answered; leave one of them out"
            )
        if function is not None:
            yield f"{key} is {turns.scheduler!r} and {_ROLLOUT}.custom_generate_function_path is {function!r}: give one"
    yield from _agent(config)
    if rollout.mode == "sync" and function is not None:
        yield (
            f"{_ROLLOUT}.mode=sync waits until every conversation asks for a turn, which agents that wait for each "
            "other never do: use mode=async with a custom generate function"
        )


def _agent(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.agent_function_path is None:
        return
    key = f"{_ROLLOUT}.agent_function_path is {rollout.agent_function_path!r}"
    others = {
        "multi_turn.scheduler": rollout.multi_turn.scheduler,
        "custom_generate_function_path": rollout.custom_generate_function_path,
        "interaction_config_file": rollout.interaction_config_file,
        "tool_kwargs.tools_config_file": rollout.tool_kwargs.tools_config_file,
    }
    for name, value in others.items():
        if value is not None:
            yield (
                f"{key} and {_ROLLOUT}.{name} is {value!r}: an agent brings its own tools and decides what comes next; "
                "leave one of them out (=null)"
            )
    if rollout.multi_turn.enable is False:
        yield f"{key} but {_ROLLOUT}.multi_turn.enable is False: switch it on, or leave it out"
    if rollout.mode == "sync":
        yield f"{key} with {_ROLLOUT}.mode=sync: agents ask when they like; use mode=async"


def _sampling(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.val_kwargs.top_p == 0 or rollout.top_p == 0:
        yield f"{_ROLLOUT}: top_p is 0, must be above 0 (1 = off)"
    for name, top_k in (("top_k", rollout.top_k), ("val_kwargs.top_k", rollout.val_kwargs.top_k)):
        if top_k == 0 or top_k < -1:
            yield f"{_ROLLOUT}.{name} is {top_k}, must be -1 (off) or at least 1"
    if "" in rollout.stop:
        yield f"{_ROLLOUT}.stop is {rollout.stop}: an empty string would end every turn at once; leave it out"
    if config.trainer.val_only:
        return
    filters = {"top_p": (rollout.top_p, 1.0), "top_k": (rollout.top_k, -1), "min_p": (rollout.min_p, 0.0)}
    for name, (value, off) in filters.items():
        if value != off:
            yield (
                f"{_ROLLOUT}.{name} is {value}: training needs the full distribution, because the trainer's log-probs "
                f"are over the whole vocabulary; set it to {off} (validation may use val_kwargs.{name})"
            )
    if rollout.temperature == 0:
        yield f"{_ROLLOUT}.temperature is 0: greedy samples of a group are all alike; training needs more than 0"


def _batches(config: Config) -> Iterator[str]:
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if mini is not None and batch % mini:
        yield (
            f"{_ACTOR}.ppo_mini_batch_size ({mini}) does not divide data.train_batch_size ({batch}); "
            f"both count prompts: choose {_divisors(batch)}"
        )
        return
    ranks = config.trainer.nnodes * config.trainer.n_workers_per_node
    sequences = (mini or batch) * config.actor_rollout_ref.rollout.n
    makes_more = config.actor_rollout_ref.rollout.custom_generate_function_path is not None
    if sequences < ranks and not makes_more:
        yield (
            f"{sequences} sequences per optimizer step ({mini or batch} prompts x {_ROLLOUT}.n) are fewer than "
            f"{ranks} ranks (trainer.nnodes x trainer.n_workers_per_node): some would never train"
        )


def _divisors(number: int) -> str:
    every = [str(d) for d in range(1, number + 1) if number % d == 0]
    return ", ".join(every if len(every) < 10 else [*every[:3], "...", *every[-4:]])


def _lengths(config: Config) -> Iterator[str]:
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    prompt = config.data.max_prompt_length
    if rollout.max_model_len is not None and rollout.max_model_len <= prompt:
        yield (
            f"{_ROLLOUT}.max_model_len ({rollout.max_model_len}) leaves no room after a prompt of "
            f"data.max_prompt_length ({prompt}) tokens"
        )
        return
    longest = min(prompt + rollout.response_length, rollout.max_model_len or prompt + rollout.response_length)
    if rollout.custom_generate_function_path is not None:  # it may write longer prompts of its own
        longest = rollout.max_model_len or longest
    passes = {f"{_ACTOR}.ppo_max_token_len": actor.ppo_max_token_len if actor.ppo_micro_batch_size is None else longest}
    of_ref, of_critic = config.actor_rollout_ref.ref.log_prob_max_token_len, config.critic.ppo_max_token_len
    if of_critic is not None and config.critic.ppo_micro_batch_size is None:
        passes["critic.ppo_max_token_len"] = of_critic
    if (actor.use_kl_loss or config.algorithm.use_kl_in_reward) and of_ref is not None:
        passes["actor_rollout_ref.ref.log_prob_max_token_len"] = of_ref
    for key, limit in passes.items():
        if limit < longest:
            yield f"{key} ({limit}) is less than the longest sequence ({longest} = prompt + response tokens): raise it"


def _losses(config: Config) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    try:
        chosen = read_policy_loss(actor.policy_loss)
    except ConfigError as error:
        yield str(error)
        return
    clips = {"clip_ratio_low": actor.clip_ratio_low, "clip_ratio_high": actor.clip_ratio_high}
    for key, value in clips.items():
        if not chosen.loss.clips and value is not None:
            yield f"{_ACTOR}.{key} is {value}, but policy_loss.loss_mode={chosen.name} clips nothing: leave it out"


def _adapters(config: Config) -> Iterator[str]:
    model = config.actor_rollout_ref.model
    given = {"lora_alpha": (model.lora_alpha, 16), "lora_target_modules": (model.lora_target_modules, ["all-linear"])}
    for key, (value, default) in given.items():
        if value != default and not model.lora_rank:
            yield (
                f"actor_rollout_ref.model.{key} is {value}, but lora_rank is 0 and all weights are trained: give a "
                "rank (8 to 64), or leave it out"
            )


def _engine(config: Config) -> Iterator[str]:
    rollout, name = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.name
    if name == "sglang":
        yield from _sglang(config)
    if name == "sglang" or names_code(name):
        return
    only_sglang = {
        "tensor_model_parallel_size": (rollout.tensor_model_parallel_size, 1),
        "engine_kwargs": (rollout.engine_kwargs, {}),
        "gpu_memory_utilization": (rollout.gpu_memory_utilization, 0.5),
        "free_cache_engine": (rollout.free_cache_engine, True),
        "servers": (rollout.servers, []),
        "launch_servers": (rollout.launch_servers, 0),
        "weight_transport": (rollout.weight_transport, "auto"),
        "weight_sync_dir": (rollout.weight_sync_dir, None),
        "update_weights_bucket_megabytes": (rollout.update_weights_bucket_megabytes, 512),
    }
    for key, (value, default) in only_sglang.items():
        if value != default:
            yield f"{_ROLLOUT}.{key} is {value}, which only rollout.name=sglang understands; the engine is {name}"


def _sglang(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.servers and rollout.launch_servers:
        yield f"{_ROLLOUT}.servers and .launch_servers are both given: name running servers, or have some launched"
    if rollout.servers:
        started_with = {
            "tensor_model_parallel_size": (rollout.tensor_model_parallel_size, 1),
            "engine_kwargs": (rollout.engine_kwargs, {}),
            "gpu_memory_utilization": (rollout.gpu_memory_utilization, 0.5),
        }
        for key, (value, default) in started_with.items():
            if value != default:
                yield f"{_ROLLOUT}.{key} is {value}, but the servers run already: give it to them when they are started"
    for url in rollout.servers:
        if not url.startswith(("http://", "https://")):
            yield f"{_ROLLOUT}.servers: {url!r} is no URL; write http://host:port"
    if rollout.weight_transport == "broadcast" and not rollout.servers and not rollout.launch_servers:
        yield f"{_ROLLOUT}.weight_transport=broadcast needs servers; the colocated engine shares memory: use tensors"
    if rollout.weight_sync_dir is not None and rollout.weight_transport != "disk":
        yield f"{_ROLLOUT}.weight_sync_dir needs weight_transport=disk (it is {rollout.weight_transport})"


def _placement(config: Config) -> Iterator[str]:
    trainer = config.trainer
    ranks = {"trainer.nnodes": trainer.nnodes, "trainer.n_workers_per_node": trainer.n_workers_per_node}
    for key, number in ranks.items():
        if number > 1 and trainer.placement != "ray":
            yield f"{key} is {number}, which needs trainer.placement=ray (it is {trainer.placement})"


def _run(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        yield "trainer.resume_mode=resume_path needs trainer.resume_from_path"
    if trainer.resume_from_path is not None and trainer.resume_mode in ("auto", "disable"):
        yield f"trainer.resume_from_path is given with trainer.resume_mode={trainer.resume_mode}: set it to resume_path"
    if trainer.val_only and config.data.val_files is None:
        yield "trainer.val_only needs data.val_files"
    if trainer.debug_rollout_data is not None and "{rollout_id}" not in trainer.debug_rollout_data:
        yield f"trainer.debug_rollout_data is {trainer.debug_rollout_data!r}: write {{rollout_id}} into it"
    if trainer.debug_mode == "train_only" and (trainer.debug_rollout_data is None or trainer.val_only):
        yield (
            "trainer.debug_mode=train_only trains on saved rollouts and samples nothing: it needs "
            "trainer.debug_rollout_data, and does not go with trainer.val_only"
        )
    for name in trainer.logger:
        # A plug-in may register one; those are known when plug-ins are imported.
        if name not in _TRACKERS and not config.external_plugins and not re.search("[.:]", name):
            yield (
                f"trainer.logger: unknown tracker {name!r}; known: {', '.join(_TRACKERS)}, and the dotted path or "
                "file.py:Name of one of your own"
            )
    if config.reward.name is not None and config.reward.path is None:
        yield f"reward.name is {config.reward.name!r} without reward.path: name the file or module too"
    if config.data.sampler is None and config.data.sampler_kwargs:
        yield "data.sampler_kwargs are given without data.sampler"


def _numbers(config: Config) -> Iterator[str]:
    """-1 or a positive number."""
    counts = {
        "trainer.test_freq": config.trainer.test_freq,
        "trainer.save_freq": config.trainer.save_freq,
        "data.train_max_samples": config.data.train_max_samples,
        "data.val_max_samples": config.data.val_max_samples,
    }
    for key, number in counts.items():
        if number == 0 or number < -1:
            yield f"{key} is {number}, must be -1 or at least 1"
    betas = config.actor_rollout_ref.actor.optim.betas
    if len(betas) != 2 or not all(0 <= b < 1 for b in betas):
        yield f"{_ACTOR}.optim.betas is {betas}: expected two numbers in [0, 1)"
