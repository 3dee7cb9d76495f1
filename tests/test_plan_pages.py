"""The pictures in a real browser, Chromium without a window: what pointing at a rank shows, and that no word is cut off."""

import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hydra_parallelism.plan import cli

webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium, which the extra 'test' has")
By, Keys, Select = (
    pytest.importorskip(f"selenium.webdriver.{module}", reason="needs selenium").__dict__[name]
    for module, name in (("common.by", "By"), ("common.keys", "Keys"), ("support.ui", "Select"))
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("browser"),
    pytest.mark.timeout(120),
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=f"needs chromium ({CHROMIUM}) and chromedriver ({DRIVER})"),
]

HSDP = ("parallelism=hsdp", "world.nodes=2", "parallelism.dp_replicate=2", "parallelism.dp_shard=4", "parallelism.tp_size=2")
SIZES = {"dp_replicate": 2, "dp_shard": 4, "tp": 2}
LARGE = (
    "world.nodes=128",
    "parallelism.pp_size=4",
    "parallelism.dp_replicate=4",
    "parallelism.dp_shard=32",
    "parallelism.tp_size=2",
)
LARGE_SIZES = {"pp": 4, "dp_replicate": 4, "dp_shard": 32, "tp": 2}
MODEL = tuple(f"model.{size}" for size in ("hidden=64", "layers=4", "heads=4", "ffn=128", "vocab=96", "sequence=8"))
MADE_OF = {
    "dp": ("dp_replicate", "dp_shard"),
    "fsdp": ("dp_shard",),
    "dp_replicate": ("dp_replicate",),
    "tp": ("tp",),
    "pp": ("pp",),
}


def mates(sizes: dict[str, int], axis: str, rank: int) -> list[int]:
    """A group by enumeration: the ranks whose coordinates differ from this one's only along the axis."""
    places = list(itertools.product(*map(range, sizes.values())))
    fixed = [number for number, name in enumerate(sizes) if name not in MADE_OF[axis]]
    return [other for other, at in enumerate(places) if all(at[number] == places[rank][number] for number in fixed)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1440,900"):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(30)
    driver.set_script_timeout(30)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    assert cli.main(["plan", *HSDP, *MODEL, "--output", str(folder / "small.html")]) == 0
    assert cli.main(["plan", *LARGE, "--output", str(folder / "large.html")]) == 0
    return folder


@pytest.fixture
def small(browser: Any, pages: Path) -> Iterator[Any]:
    browser.get((pages / "small.html").as_uri())
    yield browser
    assert browser.get_log("browser") == []


@pytest.fixture
def large(browser: Any, pages: Path) -> Iterator[Any]:
    browser.get((pages / "large.html").as_uri())
    yield browser
    assert browser.get_log("browser") == []


def colour_by(browser: Any, axis: str) -> None:
    Select(browser.find_element(By.ID, "axis")).select_by_visible_text(axis)


def point_at(browser: Any, rank: int) -> None:
    cell = browser.find_element(By.CSS_SELECTOR, f".cell[data-rank='{rank}'] rect")
    webdriver.ActionChains(browser, duration=0).scroll_to_element(cell).move_to_element(cell).perform()


def press(browser: Any, *keys: str) -> None:
    webdriver.ActionChains(browser, duration=0).send_keys(*keys).perform()


def lit(browser: Any) -> list[int]:
    """Ranks that look as members do: outlined and at full strength, by computed style."""
    return browser.execute_script(  # type: ignore[no-any-return]
        """return [...document.querySelectorAll('.cell')].filter(cell => {
             const look = getComputedStyle(cell.querySelector('rect'));
             return look.opacity === '1' && look.stroke !== 'none';
           }).map(cell => Number(cell.dataset.rank))"""
    )


def panel(browser: Any) -> str:
    return str(browser.find_element(By.ID, "panel").text)


@pytest.mark.parametrize("axis", ["fsdp", "dp", "tp"])
def test_pointing_at_a_rank_lights_its_group(small: Any, axis: str) -> None:
    colour_by(small, axis)
    assert lit(small) == []
    for rank in range(16):
        point_at(small, rank)
        assert lit(small) == mates(SIZES, axis, rank)
        assert panel(small).startswith(f"rank {rank} on node {rank // 8}\n")


def test_the_panel_lists_every_axis(small: Any) -> None:
    point_at(small, 9)
    assert panel(small).splitlines() == [
        "rank 9 on node 1",
        "dp_replicate=1, dp_shard=0, tp=1; dp_rank 4",
        "axis size ranks nodes",
        "dp_replicate 2 1, 9 crosses 0, 1",
        "dp_shard 4 9-15 by 2 inside 1",
        "tp 2 8, 9 inside 1",
        "dp 8 1-15 by 2 crosses 0, 1",
        "fsdp 4 9-15 by 2 inside 1",
        "dp_cp 8 1-15 by 2 crosses 0, 1",
        "efsdp 8 8-15 inside 1",
    ]
    webdriver.ActionChains(small, duration=0).move_to_element(small.find_element(By.TAG_NAME, "h1")).perform()
    assert lit(small) == []
    assert panel(small).startswith("No rank chosen\n")


def test_a_click_keeps_a_rank_while_the_pointer_and_the_axis_move(small: Any) -> None:
    point_at(small, 5)
    webdriver.ActionChains(small, duration=0).click().perform()
    point_at(small, 8)
    assert lit(small) == mates(SIZES, "fsdp", 5)
    colour_by(small, "dp_replicate")
    assert lit(small) == [5, 13]
    press(small, Keys.ESCAPE)
    assert lit(small) == []


def test_the_keyboard_does_what_the_pointer_does(small: Any) -> None:
    small.execute_script("document.getElementById('axis').focus()")
    press(small, Keys.TAB, Keys.TAB)  # the choice of colours, then the picture
    assert lit(small) == mates(SIZES, "fsdp", 0)
    press(small, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)  # over the border of the node
    assert panel(small).startswith("rank 8 on node 1\n")
    press(small, Keys.ARROW_DOWN, Keys.ARROW_DOWN)  # the last row
    assert lit(small) == mates(SIZES, "fsdp", 12)
    press(small, Keys.ENTER, Keys.HOME)
    assert lit(small) == mates(SIZES, "fsdp", 12)
    press(small, Keys.ESCAPE, Keys.END)
    assert lit(small) == mates(SIZES, "fsdp", 15)
    reached = small.execute_script("return document.activeElement.getAttribute('aria-label')")
    assert reached == "rank 15: dp_replicate=1, dp_shard=3, tp=1"


def test_colours_follow_the_choice_and_the_key_says_what_they_are(small: Any) -> None:
    fills = "return [...document.querySelectorAll('.cell rect')].map(cell => cell.getAttribute('fill'))"
    colour_by(small, "dp_replicate")
    found = small.execute_script(fills)
    assert all(
        (found[one] == found[other]) == (other in mates(SIZES, "dp_replicate", one)) for one in range(16) for other in range(16)
    )
    small.find_element(By.CSS_SELECTOR, "input[value=index]").click()
    found = small.execute_script(fills)
    assert len(set(found[:8])) == len(set(found[8:])) == 1
    assert found[0] != found[8]
    key = small.find_element(By.ID, "legend").text.split("\n")
    assert key[0] == "dp_replicate: one colour for each index in a group, 0 to 1; 8 groups"
    assert key[-2:] == ["dp_replicate 0", "dp_replicate 1"]


def test_the_page_says_what_was_typed_and_what_it_costs(small: Any) -> None:
    assert small.title == "dp_replicate=2 * dp_shard=4 * tp_size=2 = 16 ranks, on 2 nodes of 8"
    assert small.find_element(By.CLASS_NAME, "command").text == f"hydra-parallelism plan {' '.join((*HSDP, *MODEL))}"
    assert "memory of the fullest rank" in small.find_element(By.ID, "estimates").text
    source = small.page_source
    assert not re.search(r"(src|href)=|url\(|@import|fetch\(", source)


@pytest.mark.parametrize(("axis", "ranks"), [("fsdp", (0, 299, 1023)), ("pp", (300,)), ("dp_replicate", (640,)), ("tp", (77,))])
def test_a_thousand_ranks(large: Any, axis: str, ranks: tuple[int, ...]) -> None:
    colour_by(large, axis)
    for rank in ranks:
        point_at(large, rank)
        assert lit(large) == mates(LARGE_SIZES, axis, rank)
        assert panel(large).startswith(f"rank {rank} on node {rank // 8}\n")


def test_the_page_fits_a_window_in_width(large: Any) -> None:
    assert large.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert large.execute_script("const box = document.getElementById('picture'); return box.scrollWidth <= box.clientWidth")


MANY = [
    f"parallelism.{key}=2"
    for key in ("pp_size", "dp_replicate", "dp_shard", "context_parallel.ring_degree", "tp_size", "ep_size")
]


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallelism.dp_shard=1"],
        ["parallelism.dp_shard=4", "parallelism.tp_size=2"],
        [*MANY, "world.per_node=4"],
        [*MANY, "parallelism.dp_shard=8", "world.per_node=1", "--colour", "pp"],
        ["parallelism.dp_shard=36", "parallelism.tp_size=4", "world.per_node=72"],
        list(LARGE),
        ["parallelism.dp_shard=2048"],
    ],
)
def test_words_overlap_nothing_and_are_not_cut_off(browser: Any, tmp_path: Path, overrides: list[str]) -> None:
    assert cli.main(["plan", *overrides, "--output", str(tmp_path / "plan.svg")]) == 0
    browser.get((tmp_path / "plan.svg").as_uri())
    boxes = browser.execute_script(
        """const box = one => { const b = one.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; };
           const inside = (a, b) => a[0] >= b[0] && a[1] >= b[1] - 1 && a[2] <= b[2] && a[3] <= b[3] + 1;
           const page = box(document.querySelector('.page'));
           const cells = [...document.querySelectorAll('.cell')];
           const out = [...document.querySelectorAll('text, rect')].filter(one => !inside(box(one), page));
           const leaves = c => [...c.querySelectorAll('text')].some(t => !inside(box(t), box(c.querySelector('rect'))));
           const over = cells.filter(leaves);
           const names = [...document.querySelectorAll('.nodes > g')].filter(n =>
             !inside(box(n.querySelector('text')), box(n.querySelector('rect'))) ||
             box(n.querySelector('text'))[3] > box(n.querySelector('.cell rect'))[1] + 2);
           const words = [...document.querySelectorAll('svg > g:not(.nodes) > *')].map(box);
           const meet = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] + 3 < b[3] && b[1] + 3 < a[3];
           const twice = words.filter((a, i) => words.some((b, j) => i < j && meet(a, b)));
           return [out.length, over.length, names.length, twice.length, cells.length, page];"""
    )
    assert boxes[:4] == [0, 0, 0, 0], boxes
    assert boxes[4] > 0
