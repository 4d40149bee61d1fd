"""A cache that evicts tokens, by plain loops in float64, with the whole matrix of weights.

It shares no code with the library. A row of the batch and a key head has a list of tokens: of each
its slot, key, value, and the attention that it has received.
"""

import math

import torch

AT_ONCE = 16


def softmax(scores):
    top = max(scores, default=-math.inf)
    if top == -math.inf:
        return [0.0 for _ in scores]
    powers = [math.exp(each - top) for each in scores]
    return [each / sum(powers) for each in powers]


class Loop:
    """One row of the batch of one layer: `heads` query heads over `key_heads`.

    `visible(query, key)` is the mask over slots; `score` names one of `SCORES`.
    """

    def __init__(self, heads, key_heads, score, budget, sinks, recent, visible=None, scale=None):
        self.group, self.key_heads, self.score = heads // key_heads, key_heads, score
        self.budget, self.sinks, self.recent, self.scale = budget, sinks, recent, scale
        self.visible = visible or (lambda query, key: key <= query)
        self.tokens = [[] for _ in range(key_heads)]  # [slot, key, value, received]
        self.queries = []  # of all tokens, [H][D]
        self.length = 0

    def call(self, q, k, v):
        """The outputs `[H, L, Dv]` for queries `[H, L, D]`, keys and values `[G, L, D]`."""
        new = q.shape[1]
        for at in range(new):
            for head in range(self.key_heads):
                self.tokens[head].append([self.length + at, k[head, at], v[head, at], 0.0])
            self.queries.append(q[:, at])
        first, self.length = self.length, self.length + new
        out = torch.zeros(q.shape[0], new, v.shape[-1], dtype=torch.float64)
        for at in range(new):
            for head in range(q.shape[0]):
                tokens = self.tokens[head // self.group]
                weights = self.weights(first + at, head)
                for weight, token in zip(weights, tokens, strict=True):
                    out[head, at] += weight * token[2]
                    token[3] += weight / self.group
        self.evict()
        return out

    def weights(self, query, head):
        """The attention weights of one query of one head over the tokens held."""
        q = self.queries[query][head]
        scale = q.shape[0] ** -0.5 if self.scale is None else self.scale
        return softmax(
            [
                float(q @ key) * scale if self.visible(query, slot) else -math.inf
                for slot, key, _, _ in self.tokens[head // self.group]
            ]
        )

    @property
    def most(self):
        if isinstance(self.budget, int):
            return self.budget
        return max(int(self.budget * self.length), self.sinks + self.recent + 1)

    def evict(self):
        if len(self.tokens[0]) <= self.most:
            return
        count = self.most + 1 - max(1, self.most // AT_ONCE)
        scores = [
            SCORES[self.score[0]](self, head, *self.score[1:]) for head in range(self.key_heads)
        ]
        if self.score[0] == "tova":
            scores = [[sum(column) for column in zip(*scores, strict=True)]] * self.key_heads
        for head, its in enumerate(scores):
            tokens, ranked = self.tokens[head], []
            seen = [at for at, each in enumerate(tokens) if self.visible(self.length - 1, each[0])]
            for at, token in enumerate(tokens):
                value = its[at]
                if at in seen[: self.sinks] or token[0] >= self.length - self.recent:
                    value = math.inf
                if at not in seen:
                    value = -math.inf
                ranked.append((value, at))
            kept = sorted(at for _, at in sorted(ranked, reverse=True)[:count])
            self.tokens[head] = [tokens[at] for at in kept]


def _last(loop, head, window):
    """The mean weights of the last queries and the heads of the group."""
    first = max(0, loop.length - window)
    total = [0.0] * len(loop.tokens[head])
    heads = range(head * loop.group, (head + 1) * loop.group)
    for query in range(first, loop.length):
        for each in heads:
            total = [a + b for a, b in zip(total, loop.weights(query, each), strict=True)]
    return [each / loop.group / (loop.length - first) for each in total]


def snapkv(loop, head, window, kernel):
    weights, half = _last(loop, head, window), kernel // 2
    around = [weights[max(0, at - half) : at + half + 1] for at in range(len(weights))]
    return [sum(each) / len(each) for each in around]


def expected(loop, head, window):
    total = [0.0] * len(loop.tokens[head])
    for each in range(head * loop.group, (head + 1) * loop.group):
        queries = torch.stack([q[each] for q in loop.queries[-window:]])
        mean = queries.mean(0)
        covariance = sum(torch.outer(q - mean, q - mean) for q in queries) / len(queries)
        scale = mean.shape[0] ** -0.5 if loop.scale is None else loop.scale
        logits = [
            float(mean @ key) * scale + float(key @ covariance @ key) * scale**2 / 2
            if loop.visible(loop.length - 1, slot)
            else -math.inf
            for slot, key, _, _ in loop.tokens[head]
        ]
        total = [a + b for a, b in zip(total, softmax(logits), strict=True)]
    values = [float(token[2].norm()) for token in loop.tokens[head]]
    return [a * b for a, b in zip(total, values, strict=True)]


def keydiff(loop, head):
    units = [
        key / key.norm() if loop.visible(loop.length - 1, slot) else 0 * key
        for slot, key, _, _ in loop.tokens[head]
    ]
    anchor = sum(units)
    return [-float(each @ anchor / anchor.norm()) for each in units]


SCORES = {
    "streaming": lambda loop, head: [float(token[0]) for token in loop.tokens[head]],
    "snapkv": snapkv,
    "tova": lambda loop, head: _last(loop, head, 1),
    "h2o": lambda loop, head: [token[3] for token in loop.tokens[head]],
    "expected": expected,
    "keydiff": keydiff,
}
