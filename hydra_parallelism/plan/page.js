"use strict";
// What is known of the layout was worked out where the page was made; here it is only shown.
const layout = JSON.parse(document.getElementById("layout").textContent);
const svg = document.querySelector("#picture svg");
const cells = [...svg.querySelectorAll(".cell")];
const picker = document.getElementById("axis");
const members = {}; // axis -> group -> its ranks, in order
let shown = null; // the rank whose groups are shown
let pinned = false; // whether it stays when the pointer leaves

for (const [name, axis] of Object.entries(layout.axes)) {
  members[name] = [];
  axis.groups.forEach((group, rank) => (members[name][group] ??= []).push(rank));
}

const groupOf = (name, rank) => members[name][layout.axes[name].groups[rank]];
const indexOf = (name, rank) => groupOf(name, rank).indexOf(rank);
const by = () => document.querySelector("input[name=by]:checked").value;

function make(kind, text, className) {
  const made = document.createElement(kind);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// Colours.

function paint() {
  const name = picker.value;
  const axis = layout.axes[name];
  if (axis) {
    for (const group of members[name]) {
      group.forEach((rank, index) => {
        const kind = by() === "index" ? index : axis.groups[rank];
        cells[rank].querySelector("rect").setAttribute("fill", layout.palette[axis.shades[by()][kind]]);
        const small = cells[rank].querySelector(".at");
        if (small) small.textContent = `at ${index}`;
      });
    }
    explain(name, axis);
  }
  show(shown);
}

function explain(name, axis) {
  const lines = axis.key[by()].map((text) => make("li", text));
  const shades = axis.shades[by()];
  if (shades.length <= layout.palette.length - 1) {
    shades.forEach((shade, kind) => {
      const line = make("li");
      const patch = make("i");
      patch.style.background = layout.palette[shade];
      line.append(patch, by() === "index" ? `${name} ${kind}` : axis.ranks[kind]);
      lines.push(line);
    });
  }
  document.getElementById("legend").replaceChildren(...lines);
}

// The chosen rank.

function show(rank) {
  for (const cell of svg.querySelectorAll(".on, .it")) cell.classList.remove("on", "it");
  for (const cell of svg.querySelectorAll("[aria-pressed=true]")) cell.setAttribute("aria-pressed", "false");
  shown = rank;
  svg.classList.toggle("chosen", rank !== null);
  if (rank === null) return forget();
  const mates = layout.axes[picker.value] ? groupOf(picker.value, rank) : [rank];
  for (const mate of mates) cells[mate].classList.add("on");
  cells[rank].classList.add("it");
  cells[rank].setAttribute("aria-pressed", String(pinned));
  describe(rank);
}

function ranges(words, before = "") {
  const cell = make("td", before);
  words.split(", ").forEach((word, place) => cell.append(place ? ", " : "", make("span", word, "whole")));
  return cell;
}

function describe(rank) {
  const dp = layout.axes.dp ? indexOf("dp", rank) : 0;
  document.getElementById("who").textContent = `rank ${rank} on node ${Math.floor(rank / layout.perNode)}`;
  document.getElementById("where").textContent =
    `${cells[rank].dataset.place}; dp_rank\u00a0${dp}${pinned ? " (kept: Esc or a click lets go)" : ""}`;
  const table = make("table");
  const head = make("tr");
  head.append(make("th", "axis"), make("th", "size", "number"), make("th", "ranks"), make("th", "nodes"));
  table.createTHead().append(head);
  const body = table.createTBody();
  for (const [name, axis] of Object.entries(layout.axes)) {
    const group = axis.groups[rank];
    const row = make("tr", undefined, name === picker.value ? "chosen" : "");
    const inside = !/\D/.test(axis.nodes[group]);
    row.append(make("th", name), make("td", String(members[name][group].length), "number"), ranges(axis.ranks[group]),
      ranges(axis.nodes[group], inside ? "inside " : "crosses "));
    body.append(row);
  }
  document.getElementById("groups").replaceChildren(table);
}

const hint = document.getElementById("where").textContent;

function forget() {
  document.getElementById("who").textContent = "No rank chosen";
  document.getElementById("where").textContent = hint;
  document.getElementById("groups").replaceChildren();
}

function pin(rank) {
  pinned = !(pinned && shown === rank);
  show(rank);
}

function letGo() {
  pinned = false;
  show(null);
}

// Pointer and keyboard.

const rankAt = (target) => {
  const cell = target.closest(".cell");
  return cell ? Number(cell.dataset.rank) : null;
};

svg.addEventListener("pointerover", (event) => {
  if (pinned) return;
  const rank = rankAt(event.target);
  // Between two cells of a node the last one stays, so that the picture does not flicker.
  if (rank !== null) show(rank);
  else if (event.target === svg) show(null);
});
svg.addEventListener("pointerleave", () => pinned || show(null));
svg.addEventListener("click", (event) => {
  const rank = rankAt(event.target);
  if (rank === null) return;
  reach(rank);
  pin(rank);
});
svg.addEventListener("focusin", (event) => {
  const rank = rankAt(event.target);
  if (rank !== null && !pinned) show(rank);
});
svg.addEventListener("focusout", () => pinned || show(null));

// One cell is in the order of Tab; arrow keys go from it to its neighbours in the picture.
function reach(rank) {
  for (const cell of svg.querySelectorAll("[tabindex='0']")) cell.setAttribute("tabindex", "-1");
  cells[rank].setAttribute("tabindex", "0");
  cells[rank].focus({ preventScroll: false });
}

const rows = Math.ceil(layout.perNode / layout.wide);

function beside(rank, right, down) {
  const [node, place] = [Math.floor(rank / layout.perNode), rank % layout.perNode];
  const column = (node % layout.across) * layout.wide + (place % layout.wide) + right;
  const row = Math.floor(node / layout.across) * rows + Math.floor(place / layout.wide) + down;
  const inNode = (row % rows) * layout.wide + (column % layout.wide);
  const found = (Math.floor(row / rows) * layout.across + Math.floor(column / layout.wide)) * layout.perNode + inNode;
  const outside = row < 0 || column < 0 || column >= layout.across * layout.wide || inNode >= layout.perNode;
  return outside || found >= cells.length ? rank : found;
}

const steps = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };

svg.addEventListener("keydown", (event) => {
  const rank = rankAt(event.target);
  if (rank === null) return;
  if (event.key in steps) reach(beside(rank, ...steps[event.key]));
  else if (event.key === "Home") reach(0);
  else if (event.key === "End") reach(cells.length - 1);
  else if (event.key === "Enter" || event.key === " ") pin(rank);
  else return;
  event.preventDefault();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && letGo());

// A title would lie over the neighbours of a cell; here its words are the cell's label.
cells.forEach((cell, rank) => {
  const title = cell.querySelector("title");
  cell.dataset.rank = rank;
  cell.dataset.place = title.textContent.replace(/^[^:]*: /, "");
  cell.setAttribute("role", "button");
  cell.setAttribute("aria-label", title.textContent);
  cell.setAttribute("aria-pressed", "false");
  cell.setAttribute("tabindex", rank ? "-1" : "0");
  title.remove();
});

picker.addEventListener("change", paint);
for (const choice of document.querySelectorAll("input[name=by]")) {
  choice.checked = choice.value === layout.by;
  choice.addEventListener("change", paint);
}
paint();
