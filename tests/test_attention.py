"""Attention over shared sequences, and the cut itself: against one process, and against a definition of its own."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import worlds
from apps import attend
from hydra_parallelism import attention, parallel_context, shard_sequence, unshard_sequence
from hydra_parallelism.config import ParallelismConfig
from hydra_parallelism.context_parallel.kernels import Efficient, FlashCPU, Plain, choose
from hydra_parallelism.context_parallel.layout import Layout
from hydra_parallelism.context_parallel.shards import cut, join
from hydra_parallelism.context_parallel.ulysses import spread

LAYOUTS = [(size, ring, ulysses) for size, degrees in attend.LAYOUTS.items() for ring, ulysses in degrees]
layouts = st.builds(Layout, ring=st.integers(1, 9), ulysses=st.integers(1, 9), load_balance=st.booleans())


def _marked(size: int, ring: int, ulysses: int) -> Any:
    return pytest.param(size, ring, ulysses, marks=worlds.MARKS, id=f"{ring}x{ulysses}")


over_layouts = pytest.mark.parametrize(("size", "ring", "ulysses"), [_marked(*layout) for layout in LAYOUTS])


def _reports(size: int, ring: int, ulysses: int) -> list[dict[str, Any]]:
    return [report["attention"][f"{ring}x{ulysses}"] for report in worlds.reports(size)]


@over_layouts
def test_it_is_the_attention_of_one_process(size: int, ring: int, ulysses: int) -> None:
    """Heads 4, 8, 12; 1, 2 and 4 of them for each key head; causal or not; both orders; blocks of 3."""
    names = {str(case) for case in attend.cases(ulysses)}
    for report in _reports(size, ring, ulysses):
        assert set(report["errors"]) == names
        for name, errors in report["errors"].items():
            assert len(errors) == 4, name
            assert max(errors) < (1e-10 if name.endswith("float64") else 1e-5), name


@over_layouts
@pytest.mark.parametrize("kind", ["causal", "full"])
def test_what_is_sent(size: int, ring: int, ulysses: int, kind: str) -> None:
    """Counted where torch calls its process groups: nothing but the blocks around the ring and the trades."""
    for report in _reports(size, ring, ulysses):
        sent = report["sent"][kind]
        spread_kv = math.lcm(4, ulysses) // 4 * sent["kv"]  # 8 heads share 4 key heads
        block = ["send", sent["kv"] if ulysses == 1 else spread_kv]
        query, half = ["alltoall_base_", sent["q"]], ["alltoall_base_", spread_kv // 2]
        hops, many = [block] * (ring - 1), ulysses > 1
        assert sent["forward"] == [*[query, half, half] * many, *hops, *[query] * many]
        back = sorted([*[half, half] * many, *[query] * many, *hops, *hops])
        assert sorted(sent["backward"][many:]) == back
        assert sent["backward"][:many] == [query] * many


@over_layouts
def test_whole_sequences_come_back(size: int, ring: int, ulysses: int) -> None:
    for report in _reports(size, ring, ulysses):
        assert len(report["round trip"]) == 4
        assert all(report["round trip"].values())


@over_layouts
def test_what_must_not_matter(size: int, ring: int, ulysses: int) -> None:
    for report in _reports(size, ring, ulysses):
        uses = report["uses"]
        for name in ("checkpointed", "strided", "no_grad", "one gradient", "scale", "wide values"):
            assert uses.pop(name) < 1e-5, name
        assert uses.pop("one tensor thrice") < 5e-5  # gradients of squares: ten times as large
        assert uses.pop("bfloat16") < 0.06
        assert uses.pop("autocast") < 0.03
        assert not uses


@pytest.mark.parametrize(("size", "ring", "ulysses"), [_marked(4, 4, 1), _marked(4, 1, 4), _marked(4, 2, 2)])
def test_what_is_refused(size: int, ring: int, ulysses: int) -> None:
    first, *others = (report["refusals"] for report in _reports(size, ring, ulysses))
    assert all(first == other for other in others)
    key, ranks = "parallelism.context_parallel", f"ring_degree={ring} * ulysses_degree={ulysses} = 4 ranks share each sequence"
    off = f"{key}.ring_degree=1 {key}.ulysses_degree=1"
    shapes = "query (8, 6, 4), key (8, 6, 4), value (8, 6, 4)"
    assert first.pop("mask") == (
        f"attention() takes no attn_mask where {ranks}: it would have to be cut for every block\n"
        f"  try: is_causal=True for a causal mask, and padding at the end of a causal sequence, or {off}"
    )
    assert first.pop("dropout") == (
        f"attention() takes no dropout where {ranks}: dropout_p=0.1 would not be drawn as on one process\n"
        f"  try: dropout_p=0.0, or {off}"
    )
    assert first.pop("cross") == (
        "attention() shares query, key and value alike, so cross attention is refused: 6 local queries, 4 local keys\n"
        "  try: self-attention over both in one sequence, each cut by shard_sequence, or degrees of 1"
    )
    assert first.pop("key heads") == (
        "attention() needs query heads in whole groups for each key head: heads=8 % key heads=3 = 2, not 0"
    )
    assert first.pop("no gqa") == "attention() got 8 query heads and 4 key heads\n  try: enable_gqa=True"
    assert first.pop("three dims") == (
        f"attention() needs (batch, heads, local sequence, width) where sequences are shared, not {shapes}\n"
        "  try: query.unsqueeze(1) for one head, and so for key and value, then squeeze(1) of the result"
    )
    assert first.pop("dtypes") == (
        "attention() needs query, key and value of one dtype on one device, "
        "not torch.float32 on cpu, torch.float64 on cpu, torch.float32 on cpu"
    )
    assert first.pop("integers") == "attention() needs floating point numbers, not torch.int64"
    assert first.pop("batches") == (
        "attention() needs shapes that agree (nothing is broadcast), "
        "not query (2, 8, 6, 4), key (1, 8, 6, 4), value (1, 8, 6, 4)"
    )
    assert first.pop("lengths") == "shard_sequence() needs sequences of one length, not 16, 32 (dim=1)"
    assert first.pop("dim") == "shard_sequence(dim=2): a tensor of shape (2, 16) has no such dim"
    assert first.pop("nothing") == "unshard_sequence() was given no tensor"
    assert first["uncut"].startswith(
        f"attention() got 4 positions where {ranks}, but the pieces that shard_sequence has cut have"
    )
    assert first.pop("uncut").endswith(
        "6\n  try: tokens = hydra_parallelism.shard_sequence(tokens), and so for all that has a sequence, before the model"
    )
    assert first.pop("meta") == "no refusal: (2, 8, 6, 4) on meta"
    _check_by_layout(first, ring, ulysses)
    assert not first


def _check_by_layout(found: dict[str, str], ring: int, ulysses: int) -> None:
    key = "parallelism.context_parallel"
    if ulysses == 1:
        assert found.pop("heads") == "no refusal: (2, 7, 6, 4) on cpu"
        terms, multiple = "ring_degree=4 * lcm(2, ulysses_degree=1)", 8
        assert found.pop("length") == (
            f"{key} cannot share 20 tokens (4 ranks with 5 each): 20 % ({terms}) = 20 % 8 = 4, not 0\n"
            "  try: pad or cut the sequence to 16 or 24"
        )
    else:
        assert found.pop("heads") == (
            f"{key}.ulysses_degree={ulysses} cannot share the heads evenly: heads=7 % {ulysses} = {7 % ulysses}, not 0\n"
            f"  try: {key}.ulysses_degree=1 {key}.ring_degree=4"
        )
        terms = "ring_degree=2 * lcm(2, ulysses_degree=2)" if ring == 2 else "ring_degree=1 * ulysses_degree=4"
        multiple = 4
        assert found.pop("length").startswith("attention() got 5 positions where ")
    nearest = f"  try: pad or cut the sequence to {multiple}"
    nothing = f"0 tokens (4 ranks with 0 each): 0 % ({terms}) = 0 % {multiple} = 0, but it must be more than 0\n{nearest}"
    assert found.pop("empty") == f"{key} cannot share {nothing}"
    assert found.pop("unshard") == f"{key} cannot have cut {nothing}"
    below = 29 // multiple * multiple
    assert found.pop("shard") == (
        f"{key} cannot share 29 tokens: 29 % ({terms}) = 29 % {multiple} = {29 % multiple}, not 0\n"
        f"  try: pad or cut the sequence to {below} or {below + multiple}"
    )


def test_alone_it_is_torch_s_attention() -> None:
    torch.manual_seed(0)
    query, mask = torch.randn(2, 4, 5, 8), torch.randn(5, 5)
    with parallel_context(ParallelismConfig()):
        found = [attention(query, query, query, mask, scale=0.2), attention(query[0], query[0], query[0], None, 0.0, True)]
        torch.manual_seed(1)
        found.append(attention(query, query[:, :2], query[:, :2], dropout_p=0.5, enable_gqa=True))
        ids = torch.arange(7)
        assert shard_sequence(ids, dim=0) is ids
        assert torch.equal(unshard_sequence(ids, dim=0), ids)
        assert not unshard_sequence(query.clone().requires_grad_()).requires_grad
        assert [len(shard_sequence(query, query)), len(unshard_sequence(query, query))] == [2, 2]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    torch.manual_seed(1)
    dropped = sdpa(query, query[:, :2], query[:, :2], dropout_p=0.5, enable_gqa=True)
    wanted = [sdpa(query, query, query, mask, scale=0.2), sdpa(query[0], query[0], query[0], is_causal=True), dropped]
    assert all(map(torch.equal, found, wanted))


def _defined(length: int, layout: Layout) -> list[list[int]]:
    """Token numbers of each rank of ``cp``, token by token: deal chunks to ring ranks there and back, cut each hand."""
    hands: list[list[int]] = [[] for _ in range(layout.ring)]
    zigzag = layout.load_balance and layout.ring > 1
    chunks = 2 * layout.ring if zigzag else layout.ring
    for token in range(length):
        chunk = token * chunks // length
        hands[chunk if chunk < layout.ring else chunks - 1 - chunk].append(token)
    share = length // layout.ring // layout.ulysses
    return [hand[i * share : (i + 1) * share] for hand in hands for i in range(layout.ulysses)]


@given(layouts, st.integers(1, 4))
@settings(deadline=None)
def test_the_cut_is_the_definition_and_comes_together_again(layout: Layout, blocks: int) -> None:
    length = layout.multiple * blocks
    assert layout.fits(length)
    whole = torch.arange(length * 2).view(2, length)
    parts = [cut(whole, layout, rank, -1) for rank in range(layout.cp)]
    assert [part[0].tolist() for part in parts] == _defined(length, layout)
    assert torch.equal(join(parts, layout, -1), whole)
    assert all(a < b for rank in range(layout.cp) for a, b in pairwise(parts[rank][0].tolist()))


@given(layouts, st.integers(0, 500))
def test_the_nearest_lengths_that_fit(layout: Layout, length: int) -> None:
    fitting = [n for n in range(1, length + layout.multiple + 1) if layout.fits(n)]
    assert layout.fits(length) == (length in fitting)
    if length not in fitting:
        nearest = [*[n for n in fitting if n < length][-1:], next(n for n in fitting if n > length)]
        assert layout.misfit(length).endswith(f"to {' or '.join(map(str, nearest))}")


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 8), st.integers(1, 3))
def test_a_query_head_keeps_its_key_head(key_heads: int, group: int, ulysses: int, times: int) -> None:
    """Whatever rank it ends up on."""
    heads = math.lcm(key_heads * group, ulysses) * times
    keys = spread(torch.arange(key_heads).view(1, -1, 1, 1), ulysses).flatten().tolist()
    for rank in range(ulysses):
        mine = range(heads)[rank * heads // ulysses : (rank + 1) * heads // ulysses]
        here = keys[rank * len(keys) // ulysses : (rank + 1) * len(keys) // ulysses]
        assert [here[i * len(here) // len(mine)] for i in range(len(mine))] == [head * key_heads // heads for head in mine]


def test_kernels_agree() -> None:
    """The plain one, which CUDA and others may fall back to, and torch's for CPU."""
    torch.manual_seed(0)
    for causal in (False, True):
        query, grad = torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 8)
        key, value = torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
        assert isinstance(choose(query, key, value, causal), FlashCPU)
        plain, flash = (kernel.forward(query, key, value, causal, 0.4) for kernel in (Plain(), FlashCPU()))
        back = [kernel.backward(grad, query, key, value, *flash, causal, 0.4) for kernel in (Plain(), FlashCPU())]
        for found, wanted in zip((*plain, *back[0]), (*flash, *back[1]), strict=True):
            torch.testing.assert_close(found, wanted)


def test_the_efficient_kernel_is_given_whole_32s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not torch's own, for which there is no device here: what goes in and out of it."""
    from hydra_parallelism import _compat

    given_: list[torch.Tensor] = []

    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float) -> Any:
        out, lse = Plain().forward(query, key, value, causal, scale)
        return out, torch.nn.functional.pad(lse, (0, -lse.size(2) % 32), value=math.inf)

    def backward(*arguments: Any) -> Any:
        given_.append(arguments[5])
        return Plain().backward(*arguments[:5], arguments[5][:, :, :7], *arguments[6:])

    monkeypatch.setattr(_compat, "efficient_forward", forward)
    monkeypatch.setattr(_compat, "efficient_backward", backward)
    torch.manual_seed(0)
    query, grad = torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 8)
    key, value = torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    found, wanted = (kernel.forward(query, key, value, True, 0.4) for kernel in (Efficient(), Plain()))
    pairs = zip(found, wanted, strict=True)
    grads = [kernel.backward(grad, query, key, value, *wanted, True, 0.4) for kernel in (Efficient(), Plain())]
    for a, b in (*pairs, *zip(*grads, strict=True)):
        torch.testing.assert_close(a, b)
    assert given_[0].shape == (2, 4, 32)
    assert bool(given_[0][:, :, 7:].isinf().all())
