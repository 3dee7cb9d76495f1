"""The picture of a layout as SVG: every rank once, in its node and colour. How it looks in a browser: test_plan_pages."""

import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings

from hydra_parallelism import ConfigurationError, Topology
from hydra_parallelism.config import ParallelismConfig
from hydra_parallelism.plan import cli
from hydra_parallelism.plan.case import Case
from hydra_parallelism.plan.colours import ALONE, PALETTE, kinds, shades
from hydra_parallelism.plan.composition import compose, resolve_case
from hydra_parallelism.plan.drawing import STYLE, draw, judge
from hydra_parallelism.plan.grid import arrange
from hydra_parallelism.plan.machine import MachineConfig, read_machine
from hydra_parallelism.topology import AXES, resolve
from test_topology_properties import layouts

SVG = "{http://www.w3.org/2000/svg}"
HSDP = Topology(dp_replicate=2, dp_shard=4, tp=2)


def drawn(topology: Topology, axis: str, by: str = "group", nodes: int | None = None) -> ET.Element:
    machine = read_machine(MachineConfig(nodes=nodes), topology.world_size)
    return ET.fromstring(draw(Case(topology, machine, ParallelismConfig(), True), axis, by))


def nodes_of(picture: ET.Element) -> list[ET.Element]:
    return picture.findall(f"{SVG}g[@class='nodes']/{SVG}g")


def cells(picture: ET.Element) -> dict[int, tuple[str, str, str]]:
    """Rank -> node, coordinate, colour."""
    found: dict[int, tuple[str, str, str]] = {}
    for node in nodes_of(picture):
        name = node.findtext(f"{SVG}text") or ""
        for cell in node.findall(f"{SVG}g"):
            match = re.fullmatch(r"rank (\d+): (.*)", cell.findtext(f"{SVG}title") or "")
            square = cell.find(f"{SVG}rect")
            assert match is not None
            assert square is not None
            assert int(match[1]) not in found
            found[int(match[1])] = (name, match[2], square.attrib["fill"])
    return found


def by_colour(picture: ET.Element) -> list[list[int]]:
    found = defaultdict(list)
    for rank, (_, _, fill) in sorted(cells(picture).items()):
        found[fill].append(rank)
    return list(found.values())


def texts(picture: ET.Element) -> list[str]:
    return [text.text or "" for text in picture.iter(f"{SVG}text")]


def test_one_colour_for_each_group() -> None:
    picture = drawn(HSDP, "dp_shard")
    found = cells(picture)
    assert sorted(found) == list(range(16))
    assert found[11][:2] == ("node 1", "dp_replicate=1, dp_shard=1, tp=1")
    assert by_colour(picture) == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert texts(picture)[:7] == [
        "dp_replicate=2 * dp_shard=4 * tp_size=2 = 16 ranks, on 2 nodes of 8",
        "dp_shard: one colour for each of 4 groups of 4",
        "small numbers: the index along dp_shard",
        "0-6 by 2", "1-7 by 2", "8-14 by 2", "9-15 by 2",
    ]  # fmt: skip
    assert {"15", "at 3"} <= set(texts(picture))


def test_one_colour_for_each_index() -> None:
    picture = drawn(HSDP, "dp_shard", "index")
    assert by_colour(picture) == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    assert texts(picture)[1] == "dp_shard: one colour for each index in a group, 0 to 3; 4 groups"
    assert texts(picture)[3:7] == ["dp_shard 0", "dp_shard 1", "dp_shard 2", "dp_shard 3"]


def test_ranks_that_are_alone_are_grey() -> None:
    picture = drawn(HSDP, "pp")
    assert {fill for _, _, fill in cells(picture).values()} == {PALETTE[ALONE]}
    assert texts(picture)[1] == "pp: every rank is alone"
    assert texts(drawn(Topology(), "fsdp"))[0] == "1 rank, on 1 node of 8"
    assert texts(drawn(Topology(dp_shard=8, ep=4), "fsdp"))[:2] == [
        "dp_shard=8 = 8 ranks, ep_size=4, on 1 node of 8",
        "fsdp: one group of all 8 ranks",
    ]


@pytest.mark.parametrize("ranks", [1, 12, 1024, 4104])
def test_every_rank_lies_inside_the_picture_and_on_no_other(ranks: int) -> None:
    picture = drawn(Topology(dp_shard=ranks), "fsdp")
    assert len(cells(picture)) == ranks
    width, height = (float(picture.attrib[name]) for name in ("width", "height"))
    corners = set()
    for node in nodes_of(picture):
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


@given(layouts())
@settings(max_examples=15, deadline=None, derandomize=True)
def test_colours_tell_groups_apart_where_they_meet(case: tuple[dict[str, Any], int]) -> None:
    degrees, world = case
    nested = {name: degrees.pop(name) for name in ("ring_degree", "ulysses_degree")}
    topology = resolve({**degrees, "context_parallel": nested, "inference": True}, world)
    machine = read_machine(MachineConfig(), topology.world_size)
    neighbours = list(arrange(machine, topology.world_size).neighbours(topology.world_size))
    for axis in AXES:
        of_rank = kinds(list(topology.groups(axis)), "group")
        colour = shades(of_rank, neighbours)
        assert len(set(colour)) == min(len(colour), ALONE)
        apart = [(of_rank[one], of_rank[other]) for one, other in neighbours if of_rank[one] != of_rank[other]]
        assert sum(colour[one] == colour[other] for one, other in apart) <= len(apart) // 50


def test_neighbours_are_side_by_side_or_one_above_the_other() -> None:
    grid = arrange(read_machine(MachineConfig(), 16), 16)
    beside: defaultdict[int, set[int]] = defaultdict(set)
    for one, other in grid.neighbours(16):
        beside[one].add(other)
        beside[other].add(one)
    assert beside[3] == {2, 7, 8}  # the last one is on the node to the right
    assert beside[13] == {9, 12, 14}


def luminance(colour: str) -> float:
    """Relative luminance of ``#rgb`` or ``#rrggbb`` (WCAG 2.2)."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_words_can_be_read_in_the_light_and_in_the_dark() -> None:
    assert len(set(PALETTE)) == 9
    assert min(contrast("#1f2933", colour) for colour in PALETTE) > 4.5
    for theme in STYLE.split("@media"):
        fills = dict(re.findall(r"\.(\w+)\{fill:(#\w+)", theme))
        assert contrast(fills["word"], fills["page"]) > 7
        assert min(contrast(fills["soft"], fills[ground]) for ground in ("page", "node")) > 4.5


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "parallelism.dp_shard=4", "parallelism.tp_size=2"]
    assert cli.main([*words, "--format", "svg", "--colour", "tp"]) == 0
    assert "tp: one colour for each of 4 groups of 2" in capsys.readouterr().out
    assert cli.main([*words, "--format", "svg", "--by", "index"]) == 0
    assert "fsdp: one colour for each index in a group, 0 to 3" in capsys.readouterr().out
    assert cli.main(["plan", "parallelism.dp_replicate=8", "--format", "svg"]) == 0
    assert "dp: one group of all 8 ranks" in capsys.readouterr().out
    assert cli.main([*words, "--format", "svg", "--colour", "tp_size"]) == 1
    assert "no axis 'tp_size'; did you mean 'tp'?" in capsys.readouterr().err
    assert cli.main([*words, "--colour", "tp"]) == 1
    assert capsys.readouterr().err == "--colour tp is for pictures\n  try: --format svg --colour tp\n"
    assert cli.main([*words, "--by", "index", "--format", "json"]) == 1
    assert capsys.readouterr().err == "--by index is for pictures\n  try: --format svg --by index\n"


def test_more_ranks_than_a_picture_holds() -> None:
    with pytest.raises(ConfigurationError, match=r"65,536 ranks are more than the 16,384 that a picture can hold\n  try: "):
        drawn(Topology(dp_shard=65536), "fsdp")


@pytest.mark.parametrize(
    ("overrides", "instead"),
    [
        (["parallelism=hsdp", "world.nodes=8192"], "parallelism.dp_replicate=2048 world.nodes=2048"),
        (["parallelism.dp_shard=65536"], "parallelism.dp_shard=16384"),
        (
            ["parallelism.tp_size=8", "parallelism.dp_shard=3072", "parallelism.ep_size=24", "parallelism.world_size=24576"],
            "parallelism.dp_shard=1536 parallelism.world_size=12288",
        ),
    ],
)
def test_what_to_type_instead(overrides: list[str], instead: str) -> None:
    message = rf"\n  try: {re.escape(instead)} \(the same pattern, fewer times\), or --format text$"
    with pytest.raises(ConfigurationError, match=message):
        draw(resolve_case(compose(overrides)), "fsdp")
    case = resolve_case(compose([*overrides, *instead.split()]))
    judge(case, "fsdp")
    assert case.topology.world_size > 8192


def test_the_largest_page_is_of_some_megabytes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "parallelism.tp_size=8", "parallelism.dp_replicate=16", "--format", "html"]
    assert cli.main([*words, "parallelism.dp_shard=256"]) == 1
    assert "32,768 ranks are more than the 16,384 that a picture can hold" in capsys.readouterr().err
    assert cli.main([*words, "parallelism.dp_shard=128"]) == 0
    assert 16384 * 100 < len(capsys.readouterr().out) < 4_000_000
