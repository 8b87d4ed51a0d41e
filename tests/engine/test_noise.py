"""The noise of the stock samplers, reproduced."""

from __future__ import annotations

import torch
import vllm._custom_ops  # noqa: F401  (loads the stock CPU operators)

from vllm_sjd_pac.engine.noise import CPUStockNoise, ExponentialStockNoise, SeedStreams, derived_seed


def test_a_stream_draws_what_the_stock_sampler_draws_token_by_token() -> None:
    generator = torch.Generator().manual_seed(11)
    one_by_one = [int(torch.randint(0, 2**31, (1,), generator=generator)) for _ in range(300)]
    streams = SeedStreams()
    keys = [streams.open(seed, greedy=False) for seed in (11, 12)]
    for position in (5, 250, 0, 299):
        assert streams.integers(torch.tensor(keys[0]), torch.tensor(position)).item() == one_by_one[position]
    streams.close(keys[0])
    again = streams.open(11, greedy=False)
    assert streams.integers(torch.tensor([again] * 300), torch.arange(300)).tolist() == one_by_one


def test_cpu_noise_decides_as_the_stock_operator() -> None:
    tokens = torch.arange(700)
    streams = SeedStreams()
    key = streams.open(5, greedy=False)
    noise = CPUStockNoise(streams, tokens)
    noise.self_check()
    positions = torch.arange(400).unsqueeze(0)
    rows = torch.randn(400, 700, generator=torch.Generator().manual_seed(1)) * 3
    seeds = streams.integers(torch.tensor([[key]]), positions)[0]
    ours = (rows + noise.gumbel(torch.tensor([key]), positions)[0]).argmax(-1)
    assert torch.equal(ours, torch.ops._C.fused_gumbel_argmax(rows, seeds))


def test_greedy_requests_have_no_noise() -> None:
    streams = SeedStreams()
    keys = torch.tensor([streams.open(1, greedy=True), streams.open(1, greedy=False)])
    noise = CPUStockNoise(streams, torch.arange(8)).gumbel(keys, torch.zeros(2, 3, dtype=torch.long))
    assert bool((noise[0] == 0).all())
    assert bool((noise[1] != 0).any())


def test_exponential_noise_decides_as_the_stock_sampler_elsewhere() -> None:
    """The native sampler: probabilities divided by a row of exponentials from the request's generator."""
    vocab, columns = 50, torch.arange(10, 40)
    streams = SeedStreams()
    key = streams.open(3, greedy=False)
    noise = ExponentialStockNoise(streams, columns, vocab, torch.device("cpu"))
    noise.open(key, 3)
    generator = torch.Generator().manual_seed(3)
    rows = torch.full((20, vocab), float("-inf"))
    rows[:, columns] = torch.randn(20, len(columns), generator=torch.Generator().manual_seed(4))
    stock = []
    for row in rows:
        exponentials = torch.empty(vocab).exponential_(generator=generator)
        stock.append(int((row.softmax(-1) / exponentials).argmax()))
    ahead = noise.gumbel(torch.tensor([key]), torch.arange(12).unsqueeze(0))[0]
    after_preemption = noise.gumbel(torch.tensor([key]), torch.arange(4, 20).unsqueeze(0))[0]
    everything = torch.cat([ahead[:4], after_preemption])
    assert columns[(rows[:, columns] + everything).argmax(-1)].tolist() == stock


def test_requests_without_a_seed_get_one_that_all_ranks_agree_on() -> None:
    assert derived_seed(0, "a") == derived_seed(0, "a")
    assert len({derived_seed(s, r) for s in (0, 1) for r in ("a", "b")}) == 4
