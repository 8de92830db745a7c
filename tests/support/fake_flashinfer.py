"""What flashinfer-python 0.7.2 documents of `BatchPrefillWithPagedKVCacheWrapper`, by plain torch; its own needs a GPU.

Layout "HND": pages [pages, kv_heads, page_size, head_dim]. Rows of a request are the last ones of its keys. `causal`
and `window_left` (inclusive, -1 = none) are as in its documentation.
"""

from __future__ import annotations

import torch
from torch import Tensor


class BatchPrefillWithPagedKVCacheWrapper:
    """plan() once a step, run() once a layer."""

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        assert kv_layout == "HND"
        assert float_workspace_buffer.dtype == torch.uint8

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
    ) -> None:
        assert {t.dtype for t in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)} == {
            torch.int32
        }
        self.rows, self.pages = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.indices, self.last, self.page_size = paged_kv_indices.tolist(), paged_kv_last_page_len.tolist(), page_size
        self.heads, self.causal, self.window_left, self.dtype = num_qo_heads, causal, window_left, q_data_type

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        """q [rows, heads, head_dim] -> like q."""
        assert q.dtype == self.dtype
        return torch.cat([self._request(n, q, *paged_kv_cache) for n in range(len(self.last))])

    def _request(self, n: int, q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        rows = q[self.rows[n] : self.rows[n + 1]]
        pages = self.indices[self.pages[n] : self.pages[n + 1]]
        count = (len(pages) - 1) * self.page_size + self.last[n]
        k, v = (torch.cat(list(cache[pages]), dim=1)[:, :count] for cache in (k_pages, v_pages))
        groups = self.heads // k.shape[0]
        k, v = k.repeat_interleave(groups, dim=0), v.repeat_interleave(groups, dim=0)
        at = torch.arange(count - len(rows), count)[:, None]
        keys = torch.arange(count)
        seen = torch.ones(len(rows), count, dtype=torch.bool)
        if self.causal:
            seen &= keys <= at
        if self.window_left >= 0:
            seen &= keys >= at - self.window_left
        scores = torch.einsum("rhd,hkd->hrk", rows, k) * rows.shape[-1] ** -0.5
        return torch.einsum("hrk,hkd->rhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)
