"""One prompt with all its continuations in one training sequence, the prompt computed once.

The sequence is prompt, continuation 1, continuation 2, …; an attention mask lets each continuation see the
prompt and itself only, and its position ids go on from the prompt's end. Several examples of a batch are
padded to one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from generation.distillation.dataset import Example


@dataclass(frozen=True, slots=True)
class HeadIndex:
    """From vocabulary id to row of a trimmed head, -1 where the head lacks the id."""

    rows: Tensor

    @classmethod
    def of(cls, id_map: Tensor | None, vocabulary: int) -> HeadIndex:
        if id_map is None:
            return cls(torch.arange(vocabulary))
        rows = torch.full((vocabulary,), -1, dtype=torch.long)
        rows[id_map.cpu()] = torch.arange(len(id_map))
        return cls(rows)


class PackingCollator:
    """Turns examples into one batch of tensors (see ``__call__``).

    ``prompt_positions``: how many prompt positions of an example are trained on, drawn anew each time.
    """

    def __init__(self, index: HeadIndex, prompt_positions: int = 256) -> None:
        self._index = index
        self._prompt_positions = prompt_positions

    def __call__(self, examples: Sequence[Example]) -> dict[str, Any]:
        """``input_ids``, ``position_ids`` ``[B, S]``; ``attention_mask`` ``[B, 1, S, S]`` (True: may look);
        for the N trained positions of all examples: ``flat_positions`` (row x S + column), ``top_rows``,
        ``top_logprobs`` ``[N, k]`` and ``is_prompt`` ``[N]``.
        """
        laid = [self._lay(example) for example in examples]
        length = max(len(part["input_ids"]) for part in laid)
        batch = len(laid)
        input_ids = torch.zeros(batch, length, dtype=torch.long)
        position_ids = torch.zeros(batch, length, dtype=torch.long)
        segments = torch.full((batch, length), -1, dtype=torch.long)
        for row, part in enumerate(laid):
            size = len(part["input_ids"])
            input_ids[row, :size] = part["input_ids"]
            position_ids[row, :size] = part["position_ids"]
            segments[row, :size] = part["segments"]
        tops = torch.cat([part["top_ids"] for part in laid]).long()
        return {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "attention_mask": visible(segments),
            "flat_positions": torch.cat([part["trained"] + row * length for row, part in enumerate(laid)]),
            "top_rows": self._index.rows[tops],
            "top_logprobs": torch.cat([part["top_logprobs"] for part in laid]),
            "is_prompt": torch.cat([part["is_prompt"] for part in laid]),
        }

    def _lay(self, example: Example) -> dict[str, Tensor]:
        prompt = example.prompt.token_ids
        ids, positions, segments = (
            [np.asarray(prompt)],
            [np.arange(len(prompt))],
            [np.zeros(len(prompt), int)],
        )
        kept = self._kept_prompt_positions(example)
        trained = [kept]
        tops = [(example.prompt_top.ids[kept], example.prompt_top.logprobs[kept])]
        at = len(prompt)
        for number, answer in enumerate(example.continuations, 1):
            size = len(answer.token_ids)
            # The last id predicts nothing that is known, so it is not fed.
            ids.append(np.asarray(answer.token_ids[:-1]))
            positions.append(np.arange(size - 1) + len(prompt))
            segments.append(np.full(size - 1, number))
            trained.append(np.concatenate([[len(prompt) - 1], np.arange(at, at + size - 1)]))
            tops.append((answer.top.ids, answer.top.logprobs))
            at += size - 1
        is_prompt = np.concatenate([np.ones(len(kept), bool), np.zeros(sum(map(len, trained[1:])), bool)])
        return {
            "input_ids": torch.from_numpy(np.concatenate(ids)),
            "position_ids": torch.from_numpy(np.concatenate(positions)),
            "segments": torch.from_numpy(np.concatenate(segments)),
            "trained": torch.from_numpy(np.concatenate(trained)),
            "top_ids": torch.from_numpy(np.concatenate([ids for ids, _ in tops])),
            "top_logprobs": torch.from_numpy(
                np.concatenate([logprobs for _, logprobs in tops]).astype(np.float32)
            ),
            "is_prompt": torch.from_numpy(is_prompt),
        }

    def _kept_prompt_positions(self, example: Example) -> np.ndarray[Any, np.dtype[np.int64]]:
        count = len(example.prompt_top.ids)
        if count <= self._prompt_positions:
            return np.arange(count)
        # torch's own generator: the trainer keeps its state in every checkpoint.
        chosen = torch.randperm(count)[: self._prompt_positions]
        return chosen.sort().values.numpy()


def visible(segments: Tensor) -> Tensor:
    """``[B, 1, S, S]``: may query position i look at key position j?

    ``segments`` ``[B, S]``: 0 for the prompt, the continuation's number after it, -1 for padding. Looking
    back within the own segment and at the prompt is allowed; padding sees itself, lest a row be empty.
    """
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    same = segments[:, :, None] == segments[:, None, :]
    to_prompt = (segments[:, None, :] == 0) & (segments[:, :, None] > 0)
    return ((same | to_prompt) & causal)[:, None]
