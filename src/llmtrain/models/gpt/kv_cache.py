"""Keys and values of the tokens so far, so that generation computes each token once."""

import torch
import torch.nn.functional as F


class LayerCache:
    """Keys and values of one block, in memory for `capacity` tokens that is allocated once."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys = self._values = torch.empty(0)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # (B, nh, T, hs) each
        """Store those of T more tokens; returns those of all tokens."""
        B, nh, T, hs = k.shape  # noqa: N806
        if self.length == 0:
            self._keys = k.new_empty(B, nh, self.capacity, hs)
            self._values = v.new_empty(B, nh, self.capacity, hs)
        end = self.length + T
        self._keys[:, :, self.length : end] = k
        self._values[:, :, self.length : end] = v
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def select_rows(self, rows: torch.Tensor) -> None:
        self._keys = self._keys[rows]
        self._values = self._values[rows]


class KVCache:
    def __init__(self, n_layers: int, capacity: int) -> None:
        self.layers = [LayerCache(capacity) for _ in range(n_layers)]

    @property
    def length(self) -> int:
        """Number of tokens in it."""
        return self.layers[0].length

    def select_rows(self, rows: torch.Tensor) -> None:
        """Row i becomes a copy of the former row rows[i]: several texts that begin alike share what is in it."""
        for layer in self.layers:
            layer.select_rows(rows)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0, cache: LayerCache | None = None
) -> torch.Tensor:
    """Causal attention: (B, nh, T, hs), and twice (B, kv heads, T, hs) -> (B, nh, T, hs). With a cache, the T tokens
    follow those in it."""
    is_grouped = q.shape[1] != k.shape[1]
    if cache is None or cache.length == 0:
        if cache is not None:
            cache.append(k, v)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=is_grouped)
    T = q.shape[2]  # noqa: N806
    k, v = cache.append(k, v)
    mask = None  # a single token sees all before it
    if T > 1:
        mask = torch.ones(T, k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=is_grouped)
