"""Shards are whole, resumable, and never mixed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from generation.distillation.continuation import Continuator
from generation.distillation.dataset import DatasetMismatch, generate, group_prompts, read_dataset
from generation.distillation.prompts import is_held_out
from tests.generation.distillation.conftest import SAMPLING, make_prompts, make_target


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*.safetensors"))}


def test_a_killed_run_resumes_to_the_same_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = make_prompts(20)
    generate(make_target(), prompts, tmp_path / "whole", SAMPLING, prompts_per_shard=6)
    whole = _files(tmp_path / "whole")
    assert len(whole) == 4

    run, calls = Continuator.run, 0

    def dies(self: Continuator, *args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return run(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Continuator, "run", dies)
    with pytest.raises(KeyboardInterrupt):
        generate(make_target(), prompts, tmp_path / "cut", SAMPLING, prompts_per_shard=6)
    assert len(_files(tmp_path / "cut")) == 2
    generate(make_target(), prompts, tmp_path / "cut", SAMPLING, prompts_per_shard=6)
    assert calls == 3 + 2  # the two finished shards were not made again
    assert _files(tmp_path / "cut") == whole


def test_two_workers_make_what_one_makes(tmp_path: Path) -> None:
    prompts = make_prompts(20)
    generate(make_target(), prompts, tmp_path / "one", SAMPLING, prompts_per_shard=6)
    for index in range(2):
        generate(make_target(), prompts, tmp_path / "two", SAMPLING, prompts_per_shard=6, share=(index, 2))
    assert _files(tmp_path / "one") == _files(tmp_path / "two")


def test_what_is_read_is_what_was_made(tmp_path: Path) -> None:
    prompts = make_prompts(20)
    generate(make_target(), prompts, tmp_path, SAMPLING, prompts_per_shard=6)
    examples = list(read_dataset(tmp_path))
    assert {example.prompt for example in examples} == set(prompts)
    for example in examples:
        assert example.prompt_top.ids.shape == (len(example.prompt.token_ids) - 1, 16)
        assert [answer.temperature for answer in example.continuations] == [0.0, 0.7]
        for answer in example.continuations:
            assert answer.top.ids.shape == (len(answer.token_ids), 16)
            assert (np.diff(answer.top.logprobs.astype(float), axis=1) <= 0).all()
    greedy = [example.continuations[0] for example in examples]
    assert all(answer.token_ids == tuple(answer.top.ids[:, 0]) for answer in greedy)
    held = list(read_dataset(tmp_path, held_out=True))
    assert {example.prompt.id for example in held} == {p.id for p in prompts if is_held_out(p.id)}


def test_another_setting_is_refused_by_name(tmp_path: Path) -> None:
    generate(make_target(), make_prompts(4), tmp_path, SAMPLING, target="one")
    with pytest.raises(DatasetMismatch, match="target"):
        generate(make_target(), make_prompts(4), tmp_path, SAMPLING, target="other")
    with pytest.raises(DatasetMismatch, match="prompts"):
        generate(make_target(), make_prompts(5), tmp_path, SAMPLING, target="one")


def test_groups_hold_every_prompt_once_and_mix_domains() -> None:
    prompts = make_prompts(100)
    groups = group_prompts(prompts, 8, seed=1)
    assert sorted(prompt.id for group in groups for prompt in group) == sorted(p.id for p in prompts)
    assert groups == group_prompts(list(reversed(prompts)), 8, seed=1)
    assert len({prompt.domain for group in groups[:2] for prompt in group}) == 2
