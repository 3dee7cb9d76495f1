"""Models on pieces of a sequence: what is refused because it would be wrong without a word, what is not, and the example.

That whole models train as one process does is in test_parity.py and test_transformers.py, attention alone in test_attention.py.
"""

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import worlds
from processes import ROOT, clean_environment, run

ASKED = "parallelism.context_parallel.ring_degree=2, but the forward of Around"
INSTEAD = "or parallelism.context_parallel.ring_degree=1"
PIECE = "over the 4 positions of this rank's piece, which are not the first 4 of the sequence nor all of it\n  at FILE:LINE"
INSTEAD_OF_WATCHED = f"{INSTEAD}; if that is a width which happens to be 4, another length"
STEP = f"that step outside the model, on what hydra_parallelism.unshard_sequence gives back, {INSTEAD_OF_WATCHED}"
TRIED = (
    "parallelism.context_parallel.ring_degree=2, but what the forward of Around makes of a position depends on others, or on "
    "where in this rank's piece it stands, by other means than attention\n"
    "  try: positions cut with the tokens (hydra_parallelism.shard_sequence), what mixes positions outside the model, "
    f"{INSTEAD}"
)


@cache
def told() -> list[dict[str, Any]]:
    """What tests/apps/context_models.py found, by rank."""
    return [rank["context"] for rank in worlds.reports(2)]


def mark_worlds(test: Any) -> Any:
    """All that reads what a world has done."""
    for mark in worlds.MARKS:
        test = mark(test)
    return test


@mark_worlds
@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "counts",
            f"{ASKED} counts positions (arange) {PIECE}\n  try: positions as an argument of the model, cut with the tokens: "
            f"hydra_parallelism.shard_sequence(tokens, positions), {INSTEAD_OF_WATCHED}",
        ),
        *(
            (
                name,
                f"{ASKED} counts positions ({call}) {PIECE}\n  try: positions as an argument of the model, cut with the "
                f"tokens: hydra_parallelism.shard_sequence(tokens, positions), {INSTEAD_OF_WATCHED}",
            )
            for name, call in (("table", "__getitem__"), ("wide table", "__getitem__"), ("narrow", "narrow"))
        ),
        (
            "written out",
            f"{ASKED} writes attention out (softmax) {PIECE}\n  try: F.scaled_dot_product_attention or "
            f"hydra_parallelism.attention in its place, {INSTEAD_OF_WATCHED}",
        ),
        (
            "module",
            f"{ASKED} writes attention out (multi_head_attention_forward) {PIECE}\n  try: F.scaled_dot_product_attention or "
            f"hydra_parallelism.attention in its place, {INSTEAD_OF_WATCHED}",
        ),
        (
            "fast path",
            f"{ASKED} writes attention out (multi_head_attention_forward) {PIECE}\n  try: F.scaled_dot_product_attention or "
            f"hydra_parallelism.attention in its place, {INSTEAD_OF_WATCHED}",
        ),
        ("mean", f"{ASKED} looks along the sequence (mean) {PIECE}\n  try: {STEP}"),
        ("first", f"{ASKED} looks along the sequence (__getitem__) {PIECE}\n  try: {STEP}"),
        ("shift", f"{ASKED} looks along the sequence (roll) {PIECE}\n  try: {STEP}"),
        ("cumsum", f"{ASKED} looks along the sequence (cumsum) {PIECE}\n  try: {STEP}"),
        ("convolution", f"{ASKED} looks along the sequence (conv1d) {PIECE}\n  try: {STEP}"),
        *((name, TRIED) for name in ("recurrent", "zeros before", "linear attention", "counted", "pooled", "later")),
        (
            "nothing",
            f"{ASKED} calls no attention, so each rank would see its own piece of the sequence only\n  try: "
            f"F.scaled_dot_product_attention or hydra_parallelism.attention in the model, {INSTEAD}",
        ),
    ],
)
def test_what_would_be_wrong_on_a_piece_is_refused(name: str, text: str) -> None:
    assert [re.sub(r"at context_models.py:\d+", "at FILE:LINE", rank[name]) for rank in told()] == [text, text]


@mark_worlds
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mask", "attn_mask"),
        ("dropout", "dropout_p=0.5"),
        ("positions", "counts positions (arange)"),
        (
            "half windows",
            "attention() got 2 positions where ring_degree=2 * ulysses_degree=1 = 2 ranks share each sequence, but the",
        ),
        (
            "uncut",
            "attention() got 8 positions where ring_degree=2 * ulysses_degree=1 = 2 ranks share each sequence, but the pieces",
        ),
        ("stranger", "Around was parallelized in a context that has ended"),
        ("padding by place", "attention_mask hides positions, and attention over pieces of a sequence takes no mask"),
        ("generation", "generate() would let each rank go on writing at the end of its own piece"),
        ("rows", "no rank has whole rows of attention"),
        ("roberta", "RobertaForCausalLM counts positions from its padding token on"),
        ("hybrid", "Lfm2ForCausalLM has layers of type conv, which would see a piece for the whole"),
        ("padding", "attention_mask hides positions, and attention over pieces of a sequence takes no mask"),
        ("packed", "position_ids are not those of this rank's piece of one whole sequence; packed sequences attend across"),
        (
            "labels",
            "labels are shifted by one inside the model, and the piece's last token does not know the next piece's first",
        ),
        ("window", "MistralAttention asks for sliding_window=3, which attention over pieces of a sequence does not do"),
    ],
)
def test_what_attention_over_pieces_does_not_do_is_refused(name: str, said: str) -> None:
    for rank in told():
        assert said in rank[name]
        assert "\n  try: " in rank[name]
        assert "context_parallel" in rank[name] or "shard_sequence" in rank[name]


@mark_worlds
@pytest.mark.parametrize(
    "name", ["rerouted", "called", "features", "shared config", "recomputed", "eager", "flux", "flux gradients"]
)
def test_what_is_right_on_a_piece_is_left_alone(name: str) -> None:
    assert all(rank[name] <= 1e-5 for rank in told()), [rank[name] for rank in told()]


SHORT = ("model.seq_len=512", "train.batch_size=2", "hydra.sweep.dir=.")


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_the_example_has_the_same_loss_on_pieces(tmp_path: Path) -> None:
    script = ROOT / "examples/long_context.py"
    losses = {}
    for sweep in ("ring_degree=1,2", "ulysses_degree=2"):
        folder = tmp_path / sweep
        folder.mkdir()
        command = [sys.executable, script, "-m", f"parallelism.context_parallel.{sweep}", *SHORT]
        outcome = run(command, folder, deadline=140, env=clean_environment())
        assert outcome.code == 0, outcome.text
        assert "rank(s) share a sequence; MB for model and activations by rank: " in outcome.text
        losses |= {str(log): log.read_text().split("step 2/2 loss ")[1].split()[0] for log in folder.glob("*/ranks/0.log")}
    assert len(losses) >= 2
    assert len(set(losses.values())) == 1, losses
