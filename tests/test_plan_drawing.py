"""The picture of a layout. What it looks like is for eyes; here: that every rank is there once, in its node and colour."""

import re
import xml.etree.ElementTree as ET
from collections import defaultdict

import pytest

from hydra_parallelism import ConfigurationError, Topology
from hydra_parallelism.config import ParallelismConfig
from hydra_parallelism.plan import cli
from hydra_parallelism.plan.composition import Case
from hydra_parallelism.plan.drawing import colour, draw
from hydra_parallelism.plan.machine import MachineConfig, read_machine

SVG = "{http://www.w3.org/2000/svg}"


def drawn(topology: Topology, axis: str, nodes: int | None = None) -> ET.Element:
    machine = read_machine(MachineConfig(nodes=nodes), topology.world_size)
    return ET.fromstring(draw(Case(topology, machine, ParallelismConfig(), True), axis))


def cells(picture: ET.Element) -> dict[int, tuple[str, str, str]]:
    """Rank -> node, coordinate, colour."""
    found: dict[int, tuple[str, str, str]] = {}
    for node in picture.findall(f"{SVG}g/{SVG}g"):
        name = node.findtext(f"{SVG}text") or ""
        for cell in node.findall(f"{SVG}g"):
            match = re.fullmatch(r"rank (\d+): (.*)", cell.findtext(f"{SVG}title") or "")
            square = cell.find(f"{SVG}rect")
            assert match is not None
            assert square is not None
            found[int(match[1])] = (name, match[2], square.attrib["fill"])
    return found


def test_two_nodes() -> None:
    topology = Topology(dp_replicate=2, dp_shard=4, tp=2)
    picture = drawn(topology, "dp_shard")
    found = cells(picture)
    assert sorted(found) == list(range(16))
    assert found[11] == ("node 1", "dp_replicate=1, dp_shard=1, tp=1", found[2][2])
    by_colour = defaultdict(list)
    for rank, (_, _, fill) in sorted(found.items()):
        by_colour[fill].append(rank)
    assert list(by_colour.values()) == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert texts[0] == "dp_replicate=2 * dp_shard=4 * tp=2 = 16 rank(s) on 2 node(s) of 8, coloured by dp_shard (4)"
    assert {"15", "at 3"} <= set(texts)


@pytest.mark.parametrize("ranks", [1, 12, 1024, 4104])
def test_every_rank_lies_inside_the_picture_and_on_no_other(ranks: int) -> None:
    picture = drawn(Topology(dp_shard=ranks), "fsdp")
    assert len(cells(picture)) == ranks
    width, height = (float(picture.attrib[name]) for name in ("width", "height"))
    corners = set()
    for node in picture.findall(f"{SVG}g/{SVG}g"):
        x, y = map(float, re.findall(r"[\d.]+", node.attrib["transform"]))
        for square in node.iter(f"{SVG}rect"):
            at = square.attrib
            right, bottom = (x + float(at.get("x", 0)) + float(at["width"]), y + float(at.get("y", 0)) + float(at["height"]))
            assert right <= width
            assert bottom <= height
            corners.add((right, bottom))
    assert len(corners) == -(-ranks // 8) * 9  # every place of a node, and the node itself
    assert 0.4 < width / height < 4 or ranks < 64


def test_empty_places_are_dashed() -> None:
    picture = drawn(Topology(dp_shard=12), "fsdp", nodes=2)
    assert sum("stroke-dasharray" in square.attrib for square in picture.iter(f"{SVG}rect")) == 4


def test_neighbours_have_colours_of_their_own() -> None:
    for size in (2, 4, 12, 24):
        assert len({colour(index, size) for index in range(size)}) == size


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "parallelism.dp_shard=4", "parallelism.tp_size=2"]
    assert cli.main([*words, "--format", "svg", "--colour", "tp"]) == 0
    assert "coloured by tp (2)" in capsys.readouterr().out
    assert cli.main([*words, "--format", "svg", "--colour", "tp_size"]) == 1
    assert "no axis 'tp_size'; did you mean 'tp'?" in capsys.readouterr().err
    assert cli.main([*words, "--colour", "tp"]) == 1
    assert capsys.readouterr().err == "--colour tp is for pictures\n  try: --format svg --colour tp\n"


def test_more_ranks_than_a_picture_holds() -> None:
    with pytest.raises(ConfigurationError, match=r"65,536 ranks are more than the 16,384 that can be drawn"):
        drawn(Topology(dp_shard=65536), "fsdp")
