"""The adaptive window on machines whose cost is known: it must find the window that a table would give."""

from __future__ import annotations

import random

import pytest

from vllm_sjd_pac.engine.adaptive import WindowController

SURVIVAL = 0.85  # a draft at depth d is accepted with probability SURVIVAL**d


def expected_tokens(drafts: int) -> float:
    return 1 + sum(SURVIVAL**d for d in range(1, drafts + 1))


def draw_accepted(rng: random.Random, requests: int, drafts: int, survival: float) -> list[int]:
    """Accepted drafts of each request, every further one with probability `survival`; none without drafts."""
    counts = []
    for _ in range(requests if drafts else 0):
        counts.append(0)
        while counts[-1] < drafts and rng.random() < survival:
            counts[-1] += 1
    return counts


def simulate(
    controller: WindowController, sequences: int, cost: tuple[float, float, float], steps: int, seed: int
) -> list[int]:
    """Windows chosen over `steps` steps of a machine with `cost` seconds per step, token and sequence."""
    rng = random.Random(seed)
    chosen = []
    for _ in range(steps):
        drafts = controller.choose(sequences)
        chosen.append(drafts)
        tokens = sequences * (drafts + 1)
        seconds = (cost[0] + cost[1] * tokens + cost[2] * sequences) * rng.uniform(0.9, 1.2)
        accepted = draw_accepted(rng, sequences, drafts, SURVIVAL)
        controller.observe(tokens, sequences, seconds, accepted)
    return chosen


@pytest.mark.parametrize("sequences", [1, 4, 16, 64])
@pytest.mark.parametrize(
    "cost",
    [(0.02, 1e-5, 1e-4), (0.005, 2e-4, 1e-4), (0.002, 2e-3, 1e-4), (0.001, 5e-5, 5e-3)],
    ids=["memory-bound", "balanced", "compute-bound", "overhead-bound"],
)
def test_throughput_is_close_to_the_best_window(sequences: int, cost: tuple[float, float, float]) -> None:
    controller = WindowController(63)
    chosen = simulate(controller, sequences, cost, 900, seed=sequences)[450:]

    def rate(drafts: int) -> float:
        return expected_tokens(drafts) / (cost[0] + cost[1] * sequences * (drafts + 1) + cost[2] * sequences)

    best = max(rate(drafts) for drafts in controller.ladder)
    seconds = sum(expected_tokens(d) / rate(d) for d in chosen)
    achieved = sum(expected_tokens(d) for d in chosen) / seconds
    assert achieved >= 0.9 * best
    assert achieved >= 0.95 * rate(0)


@pytest.mark.parametrize("sequences", [2, 16])
def test_a_window_is_judged_by_its_own_acceptance(sequences: int) -> None:
    """Longer windows accept more at every depth, as Jacobi iteration does: judging a long window by what a short one
    accepts would never leave the short one again."""
    rng = random.Random(sequences)
    controller = WindowController(63)
    cost = (0.02, 2e-5, 1e-4)
    gains = {drafts: (drafts + 1) ** 0.42 for drafts in controller.ladder}
    chosen = []
    for _ in range(400):
        drafts = controller.choose(sequences)
        chosen.append(drafts)
        survival = 1 - 1 / gains[drafts]  # geometric, with the mean that the window has
        accepted = draw_accepted(rng, sequences, drafts, survival)
        tokens = sequences * (drafts + 1)
        seconds = (cost[0] + cost[1] * tokens + cost[2] * sequences) * rng.uniform(0.9, 1.2)
        controller.observe(tokens, sequences, seconds, accepted)
    rates = {
        drafts: gains[drafts] / (cost[0] + cost[1] * sequences * (drafts + 1) + cost[2] * sequences)
        for drafts in controller.ladder
    }
    achieved = sum(gains[d] for d in chosen[100:]) / sum(gains[d] / rates[d] for d in chosen[100:])
    assert achieved >= 0.9 * max(rates.values())


def test_a_window_is_judged_when_it_has_filled() -> None:
    """Just after a change, requests accept what the old window prepared: a short one looks good after a long one, and a
    long one bad after a short one."""
    rng = random.Random(0)
    controller = WindowController(63)
    gains = {drafts: (drafts + 1) ** 0.42 for drafts in controller.ladder}
    times = {0: 3.0, 3: 3.5, 7: 4.6, 15: 5.6, 31: 6.6, 63: 7.4}  # milliseconds; the best window is 63
    gain, chosen = 1.0, []
    for _ in range(1500):
        drafts = controller.choose(2)
        chosen.append(drafts)
        gain += (gains[drafts] - gain) * min(1.0, gain / max(drafts, 1))  # a window is new after as many tokens
        accepted = draw_accepted(rng, 1, drafts, 1 - 1 / gain)
        controller.observe(2 * (drafts + 1), 2, times[drafts] / 1000 * rng.uniform(0.9, 1.2), accepted)
    late = chosen[500:]
    assert late.count(63) > 0.75 * len(late)


def test_a_burst_is_met_at_once() -> None:
    """From one picture to 32: steps with the full window would take ten times as long as the best ones."""
    controller = WindowController(63)
    cost = (0.003, 3e-5, 1e-4)
    for sequences in (64, 2, 64):
        calm = simulate(controller, 2, cost, 200, seed=sequences)
        burst = simulate(controller, sequences, cost, 200, seed=1)
    assert calm[-1] >= 15
    assert max(burst) <= 7


def test_kernels_compiled_for_a_new_shape_are_no_property_of_it() -> None:
    """The first two steps of a shape take three times as long; the shortest window, the best, is first met in them."""
    rng = random.Random(1)
    controller = WindowController(63)
    gains = {drafts: (drafts + 1) ** 0.42 for drafts in controller.ladder}
    seen: dict[int, int] = {}
    chosen = []
    for _ in range(400):
        drafts = controller.choose(16)
        chosen.append(drafts)
        seen[drafts] = seen.get(drafts, 0) + 1
        seconds = (0.006 + 1e-4 * 16 * (drafts + 1)) * rng.uniform(0.95, 1.1) * (3 if seen[drafts] <= 2 else 1)
        accepted = draw_accepted(rng, 8, drafts, 1 - 1 / gains[drafts])
        controller.observe(16 * (drafts + 1), 16, seconds, accepted)
    assert chosen[100:].count(3) > 0.7 * len(chosen[100:])


def test_a_lull_changes_nothing() -> None:
    controller = WindowController(63)
    cost = (0.003, 3e-5, 1e-4)
    simulate(controller, 64, cost, 600, seed=0)
    before = controller.drafts
    assert set(simulate(controller, 8, cost, 7, seed=1)) == {before}
    assert max(simulate(controller, 8, cost, 400, seed=2)[-100:]) > before


def test_it_comes_back_when_the_load_goes() -> None:
    controller = WindowController(63)
    cost = (0.02, 1e-4, 1e-4)
    busy = simulate(controller, 128, cost, 300, seed=1)
    idle = simulate(controller, 1, cost, 300, seed=2)
    assert sum(busy[-100:]) < 0.7 * sum(idle[-100:])
    assert max(set(idle[-100:]), key=idle[-100:].count) >= 15


def test_cost_is_fitted() -> None:
    controller = WindowController(63)
    rng = random.Random(0)
    for _ in range(300):
        sequences = rng.randint(1, 20)
        tokens = sequences * rng.choice([1, 8, 32, 64])
        controller.observe(tokens, sequences, 0.01 + 3e-5 * tokens + 2e-4 * sequences, [])
    assert controller.cost == pytest.approx((0.01, 3e-5, 2e-4), rel=0.05)
