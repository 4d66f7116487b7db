"""Keys and values of the tokens so far, so that generation computes each token once.

`KVCache` grows by any number of tokens. `StaticCache` takes one token at a position that is a tensor: every step then
runs the same kernels on the same memory, which a CUDA graph can replay (decoding.py).
"""

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
            # Zeros, because a StaticCache multiplies places without a token by 0, and memory may contain NaN.
            self._keys = k.new_zeros(B, nh, self.capacity, hs)
            self._values = v.new_zeros(B, nh, self.capacity, hs)
        end = self.length + T
        self._keys[:, :, self.length : end] = k
        self._values[:, :, self.length : end] = v
        self.length = end
        return self.first(end)

    def first(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first places, in the memory of the cache."""
        return self._keys[:, :, :count], self._values[:, :, :count]

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

    def add_one(self) -> None:
        """Count a token that a StaticCache has stored."""
        for layer in self.layers:
            layer.length += 1

    def select_rows(self, rows: torch.Tensor) -> None:
        """Row i becomes a copy of the former row rows[i]: several texts that begin alike share what is in it."""
        for layer in self.layers:
            layer.select_rows(rows)


class Place:
    """The place of the token of a step in a cache, and what all blocks need to know of it."""

    is_here: torch.Tensor
    """(span, 1): whether this is the place."""
    mask: torch.Tensor
    """(1, 1, 1, span): what is added to the scores, 0 up to the token and -inf after it. Not boolean, because each
    block would convert that."""

    def __init__(self, span: int, keys: torch.Tensor) -> None:
        self.position = torch.zeros(1, dtype=torch.int64, device=keys.device)
        self._places = torch.arange(span, device=keys.device)
        self._allowed = keys.new_zeros(())
        self._excluded = keys.new_full((), float("-inf"))

    def start_step(self) -> None:
        """Follow the position."""
        self.is_here = (self._places == self.position)[:, None]
        self.mask = torch.where(self._places <= self.position, self._allowed, self._excluded).view(1, 1, 1, -1)


class StaticLayer:
    """Keys and values of one block, (B, kv heads, span, hs) each."""

    def __init__(self, place: Place, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._place = place
        self._keys = keys
        self._values = values

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store keys and values of the token, and attend to all tokens up to it."""
        # Not index_copy_, which in deterministic mode waits for the GPU to check the index: no graph can contain that.
        torch.where(self._place.is_here, k, self._keys, out=self._keys)
        torch.where(self._place.is_here, v, self._values, out=self._values)
        B, nh, _, hs = q.shape  # noqa: N806
        # The heads that share keys and values become the queries of one head: fused kernels with a mask know no groups.
        grouped = q.reshape(B, k.shape[1], -1, hs)
        y = F.scaled_dot_product_attention(grouped, self._keys, self._values, attn_mask=self._place.mask)
        return y.reshape(B, nh, 1, hs)


class StaticCache:
    """The first `span` places of a KV cache that has tokens, for steps of one token. Copies nothing."""

    def __init__(self, cache: KVCache, span: int) -> None:
        keys, _ = cache.layers[0].first(span)
        self.place = Place(span, keys)
        self.layers = []
        for layer in cache.layers:
            self.layers.append(StaticLayer(self.place, *layer.first(span)))


AnyCache = KVCache | StaticCache
AnyLayer = LayerCache | StaticLayer


def of_positions(table: torch.Tensor, count: int, cache: AnyCache | None) -> torch.Tensor:
    """The rows of a table of positions for the next `count` tokens."""
    if isinstance(cache, StaticCache):
        return table.index_select(0, cache.place.position)
    start = cache.length if cache else 0
    return table[start : start + count]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout: float = 0.0,
    cache: AnyLayer | None = None,
) -> torch.Tensor:
    """Causal attention: (B, nh, T, hs), and twice (B, kv heads, T, hs) -> (B, nh, T, hs). With a cache, the T tokens
    follow those in it."""
    if isinstance(cache, StaticLayer):
        return cache.attend(q, k, v)
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
