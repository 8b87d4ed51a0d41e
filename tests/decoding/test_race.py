"""`race` gives the tokens of plain sampling with the same noise, whatever the tree, mode, window and drafts."""

from __future__ import annotations

import pytest
import torch
from toys import SEQUENCES, Toy, p_value, toys

from vllm_sjd_pac.decoding import (
    CounterNoise,
    DraftTree,
    RaceRule,
    TableNoise,
    default_tree,
    jacobi_decode,
    simulate,
)
from vllm_sjd_pac.decoding.randomness import first_argmax

TOYS = toys()
TREES = [
    DraftTree.chain(2),
    DraftTree.chain(5),
    DraftTree.full(13, width=2, depth=3),
    DraftTree.full(15, width=3, depth=3),
    DraftTree.full(11, width=4, depth=2),
    DraftTree.comb(12, siblings=(3, 2, 1)),
    DraftTree.comb(14, siblings=(2, 1), tail=2),
]


def table_noise(toy: Toy, sequences: int, seed: int = 0) -> TableNoise:
    """Gumbel noise that does not come from the package."""
    generator = torch.Generator().manual_seed(seed)
    clocks = torch.empty(sequences, toy.length, toy.vocab).exponential_(generator=generator)
    return TableNoise(-clocks.log())


def plain(toy: Toy, noise: TableNoise) -> torch.Tensor:
    """Plain sampling, one token after the other."""
    count = noise.table.shape[0]
    code = torch.zeros(count, dtype=torch.long)
    tokens = []
    for position in range(toy.length):
        tokens.append((toy.level(position)[code] + noise.table[:, position]).argmax(-1))
        code = code * toy.vocab + tokens[-1]
    return torch.stack(tokens, 1)


@pytest.mark.parametrize("toy", TOYS, ids=repr)
def test_plain_sampling_with_the_noise_follows_the_law(toy):
    """With the equality below this is the law of every `race` setting."""
    noise = table_noise(toy, SEQUENCES)
    assert p_value(toy.code(plain(toy, noise)), toy.joint()) > 1e-3


@pytest.mark.parametrize("toy", TOYS, ids=repr)
def test_counter_noise_follows_the_law(toy):
    rule = RaceRule(CounterNoise(toy.vocab))
    result = simulate(toy.batch, SEQUENCES, toy.length, rule, TREES[5], vocab_size=toy.vocab)
    assert p_value(toy.code(result.tokens), toy.joint()) > 1e-3


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.family)
@pytest.mark.parametrize(
    "options",
    [
        {"smoothing": 0.25},
        {"mode": "ac"},
        {"smoothing": 0.0, "memory": 0},
        {"smoothing": 0.6, "keep_noise": False},
        {"proposal": lambda positions: torch.tensor([1.0, 2.0, 0.5])},
    ],
    ids=["smoothed", "ac", "bare", "noise asked again", "proposal"],
)
def test_tokens_equal_plain_sampling(tree, options):
    for toy in TOYS:
        if "proposal" in options and toy.vocab != 3:
            continue
        noise = table_noise(toy, 2000, seed=3)
        result = simulate(toy.batch, 2000, toy.length, RaceRule(noise, **options), tree, vocab_size=toy.vocab)
        assert torch.equal(result.tokens, plain(toy, noise))
        assert (result.accepted.sum(0) == toy.length).all()
        if tree.width > 1:
            assert int(result.branched.sum()) > 100
        assert result.tokens_per_forward.mean() > 1.2


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.family)
def test_one_request_alone_takes_the_steps_that_it_takes_in_a_batch(tree):
    toy = TOYS[1]
    noise = table_noise(toy, 40, seed=9)
    together = simulate(toy.batch, 40, toy.length, RaceRule(noise), tree, vocab_size=toy.vocab)
    for key in range(40):
        keys = torch.tensor([key])
        alone = simulate(toy.batch, 1, toy.length, RaceRule(noise), tree, vocab_size=toy.vocab, keys=keys)
        steps = alone.accepted.shape[0]
        assert torch.equal(alone.tokens[0], together.tokens[key])
        assert torch.equal(alone.accepted[:, 0], together.accepted[:steps, key])
        assert torch.equal(alone.branched[:, 0], together.branched[:steps, key])
        assert not together.accepted[steps:, key].any()


@pytest.mark.parametrize("siblings", [(1,) * 20, (12, 5)], ids=str)
@pytest.mark.parametrize("options", [{}, {"memory": 0}, {"memory": 2}, {"smoothing": 0.3}], ids=str)
def test_one_request_alone_equals_a_batch_in_long_windows(siblings, options):
    """More levels of siblings than positions that are matched by context, and fewer remembered drafts than siblings."""
    vocab, length, batch = 20, 90, 6
    tree = DraftTree.comb(64, siblings=siblings)
    logits = 1.5 * torch.randn(length, vocab, vocab, generator=torch.Generator().manual_seed(2))

    def target(committed, position, trees, tokens, sequences):
        depth = (position.unsqueeze(1) + trees.depths).clamp(max=length - 1)
        return logits[depth, tokens.clamp(min=0)]

    def decode(keys):
        rule = RaceRule(CounterNoise(vocab), **options)
        return simulate(target, len(keys), length, rule, tree, vocab_size=vocab, keys=keys, max_window=63)

    together = decode(torch.arange(batch))
    assert int(together.branched.sum()) > 10
    for key in range(batch):
        alone = decode(torch.tensor([key]))
        steps = alone.accepted.shape[0]
        assert torch.equal(alone.tokens[0], together.tokens[key])
        assert torch.equal(alone.accepted[:, 0], together.accepted[:steps, key])
        assert torch.equal(alone.branched[:, 0], together.branched[:steps, key])


@pytest.mark.parametrize("toy", TOYS, ids=repr)
def test_changing_window_and_tree_midway_changes_nothing(toy):
    noise = table_noise(toy, 20_000, seed=4)
    trees = [*TREES, DraftTree.chain(1)]
    for shift in range(4):
        result = simulate(
            toy.batch,
            20_000,
            toy.length,
            RaceRule(noise),
            lambda step, shift=shift: trees[(3 * step + shift) % len(trees)],
            vocab_size=toy.vocab,
            max_window=8,
        )
        assert torch.equal(result.tokens, plain(toy, noise))


def test_greedy_is_the_race_without_noise():
    toy = TOYS[1]
    noise = TableNoise(torch.zeros(50, toy.length, toy.vocab))
    result = simulate(toy.batch, 50, toy.length, RaceRule(noise), TREES[3], vocab_size=toy.vocab)
    assert torch.equal(result.tokens, plain(toy, noise))
    assert (result.tokens == result.tokens[0]).all()


def test_jacobi_decode_gives_the_same_tokens_in_every_mode():
    toy = TOYS[1]
    total, plain_total = 0, 0
    for seed in range(60):
        tokens = {}
        for mode in ("ar", "sjd", "ac", "pd", "pac"):
            result = jacobi_decode(
                toy.single,
                [0],
                toy.length,
                vocab_size=toy.vocab,
                mode=mode,
                tree=TREES[seed % len(TREES)],
                generator=torch.Generator().manual_seed(seed),
            )
            tokens[mode] = result.tokens
            assert sum(result.accepted) == len(result.tokens) == toy.length
            assert result.forwards == len(result.accepted)
        assert len({tuple(value) for value in tokens.values()}) == 1
        total, plain_total = total + result.forwards, plain_total + toy.length
    assert total < 0.8 * plain_total


def test_whole_trees_of_the_default_size_decode_a_long_sequence():
    """A 200-token sequence, vocabulary 1,280: every node of the default tree in play."""
    vocab, length = 1280, 200
    generator = torch.Generator().manual_seed(0)
    picture, mixing = 2.5 * torch.randn(length, vocab, generator=generator), torch.randn(vocab, 8, generator=generator)

    def target(prefix, tokens, parents):
        depth = torch.zeros_like(parents)
        for node in range(1, len(parents)):
            depth[node] = depth[parents[node]] + 1
        return picture[(len(prefix) - 1 + depth).clamp(max=length - 1)] + 0.5 * mixing[tokens] @ mixing.T

    runs = {}
    for mode in ("ar", "pac"):
        generator = torch.Generator().manual_seed(7)
        runs[mode] = jacobi_decode(
            target, [1, 2], length, vocab_size=vocab, mode=mode, tree=default_tree(64), generator=generator
        )
    assert runs["ar"].tokens == runs["pac"].tokens
    assert runs["pac"].forwards < length / 1.5


@pytest.mark.parametrize("shape", [(3, 5, 1280), (2, 4096), (4, 1000), (1, 1, 8192)])
def test_first_argmax_is_argmax(shape):
    scores = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).mul(4).round()  # many ties
    assert torch.equal(first_argmax(scores), scores.argmax(-1))
    scores[..., 7] = float("-inf")
    assert torch.equal(first_argmax(scores), scores.argmax(-1))


def test_noise_is_gumbel_and_addressed_by_key_and_position():
    noise = CounterNoise(64)
    keys, positions = torch.arange(400), torch.arange(8).expand(400, 8)
    values = noise.gumbel(keys, positions)
    assert torch.equal(noise.gumbel(keys[5:7], positions[5:7, 3:5]), values[5:7, 3:5])
    flat = values.flatten().double()
    assert flat.mean() == pytest.approx(0.5772, abs=0.01)
    assert flat.var() == pytest.approx(1.6449, abs=0.03)
    uniform = torch.exp(-torch.exp(-flat))
    histogram = torch.histc(uniform, bins=50, min=0, max=1)
    expected = len(flat) / 50
    assert float(((histogram - expected) ** 2 / expected).sum()) < 100
    columns = values.reshape(-1, 64).T.double()
    assert torch.corrcoef(columns).fill_diagonal_(0).abs().max() < 0.09
