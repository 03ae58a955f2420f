"""Two gloo ranks, each with half of every batch, beside one process with the whole."""

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing as mp

from tests.core.toys import TinyNet, halves, make_batch, make_observer, observe, weights

STEPS = 3
VARIANTS = {"plain": {}, "fused": {"fused": True}, "heun": {"projection": "heun"}}


def train(settings, rank=None):
    """A few steps on the whole batch, or on one rank's half of it."""
    observer, net = make_observer(**settings), TinyNet()
    for i in range(STEPS):
        batch, s = make_batch(observer.schedule, n=16, seed=i)
        if rank is not None:  # halves of 8 hold whole groups of 4, as the batch of 16 does
            batch, s = halves(batch)[rank], s.chunk(2)[rank]
        observe(observer, batch, net, s=s)
        observer.step(1.0)
    return observer


def skip(rank):
    """The weights before and after a step whose gradient is not finite on rank 1 only."""
    observer, net = make_observer(), TinyNet()
    batch, s = make_batch(observer.schedule)
    if rank == 1:
        batch["x_0"][0] = float("nan")
    before = weights(observer.D)
    observe(observer, batch, net, s=s)
    observer.step(1.0)
    return before, weights(observer.D), observer.stats()["skipped"]


def work(rank, store, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        result = {}
        for name, settings in VARIANTS.items():
            observer = train(settings, rank)
            result[name] = weights(observer.D)
        result["steps"], result["t"] = observer.steps, observer.per_sample["t"]
        result["skip"] = skip(rank)
        # Ranks that disagree about the seed begin with rank 0's weights all the same.
        result["seed"] = weights(make_observer(seed=10 + rank).D)
        observer = make_observer()
        batch, _ = make_batch(observer.schedule)
        batch["t"] = torch.full((8,), 1000)
        observe(observer, batch, TinyNet())
        result["s"] = observer._pending[0].d_args[1]
        torch.save(result, f"{out}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch was built without gloo")
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, (folder / "store", folder), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_end_with_the_discriminator_of_one_process(ranks, variant):
    whole = weights(train(VARIANTS[variant]).D)
    start = weights(make_observer(**VARIANTS[variant]).D)
    for ours, theirs, first in zip(ranks[0][variant], whole, start, strict=True):
        # Adam moves a weight by up to the learning rate a step: far more than the tolerance.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
        assert float((theirs - first).abs().max()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_agree_to_the_bit(ranks, variant):
    for a, b in zip(ranks[0][variant], ranks[1][variant], strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_each_rank_saw_its_own_half(ranks):
    assert not torch.equal(ranks[0]["t"], ranks[1]["t"])
    assert ranks[0]["steps"] == ranks[1]["steps"] == STEPS


@pytest.mark.slow
def test_what_is_not_finite_on_one_rank_is_skipped_on_all(ranks):
    for rank in ranks:
        before, after, skipped = rank["skip"]
        assert skipped == 1
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.slow
def test_ranks_begin_alike_even_with_different_seeds(ranks):
    for a, b, c in zip(ranks[0]["seed"], ranks[1]["seed"], weights(make_observer(seed=10).D), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.slow
def test_ranks_draw_their_own_lookahead(ranks):
    assert not torch.equal(ranks[0]["s"], ranks[1]["s"])
