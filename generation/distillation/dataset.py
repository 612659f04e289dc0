"""The target's outputs on disk: shards that appear whole or not at all, so that a killed run resumes.

One shard holds a few prompts with all their continuations and the target's top log-probabilities, in one
safetensors file. The folder's ``dataset.json`` says how it was made; a run with other settings is refused.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers import PreTrainedModel

from generation.distillation.continuation import Continuation, Continuator, Sampling, TopLogprobs
from generation.distillation.prompts import DistillationPrompt, fingerprint, is_held_out

Progress = Callable[[int, int], None]
"""Called with (done, all) after each shard."""


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt with the target's continuations. ``prompt_top`` has a row for every position but the last."""

    prompt: DistillationPrompt
    prompt_top: TopLogprobs
    continuations: tuple[Continuation, ...]


class DatasetMismatch(ValueError):
    """The folder holds data made with other settings."""


def generate(
    model: PreTrainedModel,
    prompts: Sequence[DistillationPrompt],
    folder: Path,
    sampling: Sampling,
    prompts_per_shard: int = 16,
    seed: int = 0,
    target: str = "",
    share: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
    goes_on: Callable[[], bool] | None = None,
) -> int:
    """Fill ``folder`` with shards; returns how many prompts this share has. Shards already there are kept.

    Prompts are shuffled (a partial set then covers every domain) and, within a window of eight shards, sorted
    by length, so that the prompts of a shard waste little padding. ``target`` is the target's fingerprint.
    ``share`` (i, n) makes only every n-th shard, beginning with the i-th: on a CPU, n processes of one thread
    each get through the work several times faster than one process of n threads. ``goes_on`` is asked before
    each shard; once it says no, the rest is left out.
    """
    settings = {
        "target": target,
        "prompts": fingerprint(prompts),
        "temperatures": list(sampling.temperatures),
        "max_new_tokens": sampling.max_new_tokens,
        "top_k": sampling.top_k,
        "prompts_per_shard": prompts_per_shard,
        "seed": seed,
    }
    folder.mkdir(parents=True, exist_ok=True)
    check_settings(folder / "dataset.json", settings)
    groups = list(enumerate(group_prompts(prompts, prompts_per_shard, seed)))[share[0] :: share[1]]
    continuator: Continuator | None = None
    for done, (index, group) in enumerate(groups, 1):
        path = folder / f"shard-{index:05d}.safetensors"
        if not path.exists():
            if goes_on is not None and not goes_on():
                break
            continuator = continuator or Continuator(model, sampling)
            tops, answers = continuator.run([prompt.token_ids for prompt in group], seed * 1_000_003 + index)
            examples = [
                Example(prompt, top, tuple(continuations))
                for prompt, top, continuations in zip(group, tops, answers, strict=True)
            ]
            write_shard(path, examples)
        if progress is not None:
            progress(done, len(groups))
    return sum(len(group) for _, group in groups)


def check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Record how the folder is made, or refuse to mix two ways (``DatasetMismatch`` names the setting)."""
    if not path.exists():
        path.write_text(json.dumps(settings, indent=1), encoding="utf-8")
        return
    known = json.loads(path.read_text(encoding="utf-8"))
    for name, value in settings.items():
        if known.get(name) != value:
            raise DatasetMismatch(
                f"{path.parent} was made with {name} = {known.get(name)!r}, not {value!r}: choose another folder."
            )


def group_prompts(
    prompts: Sequence[DistillationPrompt], size: int, seed: int
) -> list[list[DistillationPrompt]]:
    """Shards of prompts of similar length, in an order that mixes domains; the same for the same seed."""
    shuffled = sorted(prompts, key=lambda prompt: prompt.id)
    random.Random(seed).shuffle(shuffled)
    groups: list[list[DistillationPrompt]] = []
    window = size * 8
    for start in range(0, len(shuffled), window):
        part = sorted(shuffled[start : start + window], key=lambda prompt: len(prompt.token_ids))
        new = [part[at : at + size] for at in range(0, len(part), size)]
        random.Random(seed + start).shuffle(new)
        groups += new
    return groups


def write_shard(path: Path, examples: Sequence[Example]) -> None:
    """Write under another name and rename: a shard is there whole or not at all."""
    answers = [answer for example in examples for answer in example.continuations]
    largest = max(int(example.prompt_top.ids.max(initial=0)) for example in examples)
    largest = max([largest, *(int(answer.top.ids.max(initial=0)) for answer in answers)])
    id_type = np.uint16 if largest < 2**16 else np.uint32
    tensors = {
        "prompt_ids": np.concatenate(
            [np.asarray(example.prompt.token_ids, np.int32) for example in examples]
        ),
        "prompt_lengths": np.asarray([len(example.prompt.token_ids) for example in examples], np.int32),
        "prompt_top_ids": np.concatenate([example.prompt_top.ids for example in examples]).astype(id_type),
        "prompt_top_logprobs": np.concatenate([example.prompt_top.logprobs for example in examples]),
        "answer_ids": np.concatenate([np.asarray(answer.token_ids, np.int32) for answer in answers]),
        "answer_lengths": np.asarray([len(answer.token_ids) for answer in answers], np.int32),
        "answer_counts": np.asarray([len(example.continuations) for example in examples], np.int32),
        "answer_temperatures": np.asarray([answer.temperature for answer in answers], np.float32),
        "answer_top_ids": np.concatenate([answer.top.ids for answer in answers]).astype(id_type),
        "answer_top_logprobs": np.concatenate([answer.top.logprobs for answer in answers]),
    }
    names = [[example.prompt.id, example.prompt.domain, example.prompt.question] for example in examples]
    partial = path.with_suffix(f".{os.getpid()}.partial")  # another run's orphan may be at the same shard
    save_file(tensors, partial, metadata={"prompts": json.dumps(names, ensure_ascii=False)})
    partial.replace(path)


def read_shard(path: Path) -> list[Example]:
    """The examples of one shard, in the order written."""
    with safe_open(path, framework="numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        names = json.loads(file.metadata()["prompts"])
    examples = []
    prompt_at = prompt_top_at = answer_at = answer = 0
    for (prompt_id, domain, question), length, count in zip(
        names, tensors["prompt_lengths"], tensors["answer_counts"], strict=True
    ):
        ids = tuple(int(token) for token in tensors["prompt_ids"][prompt_at : prompt_at + length])
        rows = slice(prompt_top_at, prompt_top_at + length - 1)
        prompt_top = TopLogprobs(
            tensors["prompt_top_ids"][rows].astype(np.int32), tensors["prompt_top_logprobs"][rows]
        )
        prompt_at, prompt_top_at = prompt_at + length, prompt_top_at + length - 1
        continuations = []
        for _ in range(count):
            rows = slice(answer_at, answer_at + tensors["answer_lengths"][answer])
            continuations.append(
                Continuation(
                    round(float(tensors["answer_temperatures"][answer]), 4),
                    tuple(int(token) for token in tensors["answer_ids"][rows]),
                    TopLogprobs(
                        tensors["answer_top_ids"][rows].astype(np.int32), tensors["answer_top_logprobs"][rows]
                    ),
                )
            )
            answer_at, answer = rows.stop, answer + 1
        examples.append(
            Example(DistillationPrompt(prompt_id, domain, question, ids), prompt_top, tuple(continuations))
        )
    return examples


def read_dataset(folder: Path, held_out: bool | None = None) -> Iterator[Example]:
    """All examples of a folder so far; ``held_out`` keeps one side of the split."""
    for path in sorted(folder.glob("shard-*.safetensors")):
        for example in read_shard(path):
            if held_out is None or is_held_out(example.prompt.id) == held_out:
                yield example
