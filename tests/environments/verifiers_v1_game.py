"""A taskset of verifiers 0.4, as its users write it, and the parts of a run."""

from __future__ import annotations

import verifiers.v1 as vf

from verl_mt.extensions.environments.verifiers import parts


class WordData(vf.TaskData):
    word: str


class WordTask(vf.Task[WordData]):
    @vf.reward
    async def says(self, trace: vf.Trace) -> float:
        return float(self.data.word in (trace.last_reply or ""))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class Words(vf.Taskset[WordTask, vf.TasksetConfig]):
    def load(self):
        for word in ("a", "b", "c", "d"):
            yield WordTask(WordData(prompt=f"Say {word}.", system_prompt="Be short.", word=word), self.config.task)


run, reward, rows = parts(Words(vf.TasksetConfig()))
