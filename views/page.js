"use strict";
// Makes the tables searchable, sortable and complete, and reads the heat map. Every cell arrives as the text it shows
// and is only ever set as text, so nothing in a report can become markup.

const FAILED = "✗";
const LONG = 48;
const MORE = 500; // rows; thousands at once take seconds to lay out
const WORST_FIRST = { low: 1, high: -1 };

const make = (tag, text = "", properties = {}) =>
  Object.assign(document.createElement(tag), { textContent: text }, properties);

// Module paths may be broken after a dot or underscore; copying them still gives the path alone.
function breakable(element, text) {
  element.replaceChildren(...text.split(/(?<=[._])/).flatMap((part, i) => (i ? [make("wbr"), part] : [part])));
  return element;
}

const failed = (kind, text) => kind !== "text" && text.startsWith(FAILED);
const failing = (view, row) => row.some((text, i) => failed(view.kinds[i], text));
const look = (kind, text) => (kind === "text" && text.length > LONG ? " long" : failed(kind, text) ? " bad" : "");
const cell = (kind, text) => make("td", text, { className: kind + look(kind, text) });

// The number behind a cell; words such as NaN count as the worst of their column.
function magnitude(text, kind) {
  if (text === "equal" || text === "inf") return Infinity;
  if (text === "-inf") return -Infinity;
  const number = Number(text.replace(FAILED, ""));
  return Number.isNaN(number) ? -WORST_FIRST[kind] * Infinity || Infinity : number;
}

// What was not measured stays last in either direction.
function compare(a, b, kind, sign) {
  const words = kind === "text" || kind === "verdict";
  const [x, y] = words ? [a, b] : [magnitude(a, kind), magnitude(b, kind)];
  return (a === "") - (b === "") || sign * ((x > y) - (x < y));
}

class Grid {
  constructor(root) {
    const { first, views, drawn } = JSON.parse(root.querySelector("script").textContent);
    Object.assign(this, { root, views, drawn, view: views[0], limit: first, sort: null, open: new Set() });
    this.table = root.querySelector("table");
    this.count = Object.assign(root.querySelector(".count"), { ariaLive: "polite" });
    this.follows = root.classList.contains("follow");
    this.build();
    this.draw();
  }

  build() {
    const oninput = () => this.draw();
    const ariaLabel = `search: ${this.table.caption.textContent}`;
    this.search = make("input", "", { type: "search", placeholder: "search", ariaLabel, oninput });
    this.only = make("input", "", { type: "checkbox", oninput });
    this.choice = make("select", "", { ariaLabel: "what to show", oninput: () => this.show(this.choice.selectedIndex) });
    this.choice.append(...this.views.map((view) => make("option", view.label)));
    const only = make("label");
    only.append(this.only, " failing only");
    const anyFailing = this.views.some((view) => view.rows.some((row) => failing(view, row)));
    const useful = [[this.choice, this.views.length > 1], [this.search, this.view.rows.length > 5], [only, anyFailing]];
    this.root.querySelector(".tools").append(...useful.filter(([, use]) => use).map(([tool]) => tool));
  }

  show(index, search = this.search.value) {
    this.view = this.views[index];
    this.choice.selectedIndex = index;
    this.search.value = search;
    this.sort = null;
    this.draw();
  }

  sortBy(column) {
    const again = this.sort?.column === column;
    this.sort = { column, sign: again ? -this.sort.sign : (WORST_FIRST[this.view.kinds[column]] ?? 1) };
    this.draw();
    this.table.tHead.rows[0].cells[column].firstChild.focus();
  }

  matching() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = this.view.rows.filter((row) => {
      const text = row.join("\n").toLowerCase();
      return words.every((word) => text.includes(word)) && (!this.only.checked || failing(this.view, row));
    });
    if (!this.sort) return rows;
    const { column, sign } = this.sort;
    return rows.sort((a, b) => compare(a[column], b[column], this.view.kinds[column], sign));
  }

  draw() {
    const [rows, total] = [this.matching(), this.view.rows.length];
    const shown = rows.slice(0, this.limit);
    this.table.tHead.replaceChildren(this.head());
    this.table.tBodies[0].replaceChildren(...shown.flatMap((row) => this.row(row)));
    const matches = rows.length < total ? `${rows.length} of ${total} rows match` : "";
    this.count.textContent = shown.length < rows.length ? `${shown.length} of ${rows.length} rows ` : matches;
    if (shown.length === rows.length) return;
    const onclick = () => {
      this.limit += MORE;
      this.draw();
    };
    const more = Math.min(MORE, rows.length - shown.length);
    this.count.append(make("button", `show ${more} more`, { type: "button", onclick }));
  }

  head() {
    const row = make("tr");
    this.view.heads.forEach((label, i) => {
      const sorted = this.sort?.column === i ? (this.sort.sign > 0 ? "ascending" : "descending") : "none";
      const heading = make("th", "", { scope: "col", className: this.view.kinds[i], ariaSort: sorted });
      heading.append(make("button", label, { type: "button", onclick: () => this.sortBy(i) }));
      row.append(heading);
    });
    return row;
  }

  row(cells) {
    const row = make("tr");
    const name = make("th", "", { scope: "row" });
    row.append(name, ...cells.slice(1).map((text, i) => cell(this.view.kinds[i + 1], text)));
    if (!this.follows) {
      name.append(breakable(make("span"), cells[0]));
      return [row];
    }
    const key = this.view.heads[1] === "value" ? cells[1] : cells[0];
    name.append(this.opener(key, cells[0]));
    return this.open.has(key) ? [row, this.detail(key)] : [row];
  }

  opener(key, text) {
    const onclick = () => {
      if (!this.open.delete(key)) this.open.add(key);
      this.draw();
      this.table.querySelector(`[data-key="${CSS.escape(key)}"]`).focus();
    };
    const state = { type: "button", className: "open", ariaExpanded: String(this.open.has(key)), onclick };
    const button = breakable(make("button", "", state), text);
    button.dataset.key = key;
    return button;
  }

  // Everything each stage measured about a value, or about all values of a module: a column for what several stages
  // measured, and below it in words what remains. What was merged into another value goes on with that one.
  detail(key) {
    const { heads: names, rows } = byValue();
    const into = names.indexOf("merged into");
    const held = (row) => (into < 0 || !row[into] ? [row[1]] : [row[1], row[into]]);
    const values = new Set(rows.filter((row) => row.slice(0, 2).includes(key)).flatMap(held));
    const found = stages.flatMap(({ root, view }) => view.rows.filter((row) => values.has(row[1])).map((row) => ({
      stage: root.dataset.stage,
      cells: view.heads.map((head, i) => ({ head, kind: view.kinds[i], text: row[i] }))
        .filter(({ head, text }) => text && head !== "layer" && head !== "order"),
    })));
    const heads = columns(found);
    const table = make("table");
    table.createTHead().insertRow().append(...["stage", ...heads].map((head) => make("th", head, { scope: "col" })));
    const body = table.createTBody();
    for (const { stage, cells } of found) {
      const own = heads.map((head) => cells.find((c) => c.head === head));
      const rest = cells.filter((c) => !own.includes(c)).map(({ head, text }) => `${head} ${text}`).join(" · ");
      const shown = own.map((c) => (c ? cell(c.kind, c.text) : make("td")));
      shown.filter(({ className }) => className === "text").forEach((td) => breakable(td, td.textContent));
      body.insertRow().append(make("th", stage, { scope: "row" }), ...shown);
      if (!rest) continue;
      const also = Object.assign(body.insertRow(), { className: "also" });
      also.append(make("td"), make("td", rest, { colSpan: heads.length }));
    }
    const row = make("tr", "", { className: "detail" });
    const scroll = make("div", "", { className: "scroll" });
    scroll.append(table);
    const concerns = (value, module) => values.has(value) || module === key;
    const ofLayer = ({ value, module }) => concerns(value, module);
    const pictures = [...channels(this.drawn.channels.filter(({ value }) => values.has(value))), ...this.drawn.histograms.filter(ofLayer).map(histogram)];
    Object.assign(row.insertCell(), { colSpan: this.view.heads.length }).append(scroll, ...quantised(concerns), ...pictures);
    return row;
  }
}

// How the values of a layer, and the values that it reads, are quantised: a sentence each.
function quantised(concerns) {
  const { heads, rows } = grids.find(({ root }) => root.dataset.table === "quantized")?.view ?? { heads: [], rows: [] };
  const [value, module] = [heads.indexOf("value"), heads.indexOf("module")];
  return rows.filter((row) => concerns(row[value], row[module])).map((row) => {
    const told = heads.flatMap((head, i) => (i !== value && row[i] ? [`${head} ${row[i]}`] : []));
    return make("p", `${row[value]}: ${told.join(" · ")}`);
  });
}

// The channels that make the greatest part of a layer's own error; a bar is the channel's share of it.
function channels(rows) {
  if (!rows.length) return [];
  const figure = make("figure", "", { className: "channels" });
  figure.append(make("figcaption", "channels, by their share of the layer's own error; own dB"));
  const max = Math.max(...rows.map(({ share }) => share));
  for (const { channel, share, own } of rows) {
    const line = make("label");
    line.append(make("span", channel), make("progress", "", { max, value: share }), `${(100 * share).toFixed(1)} %; ${own}`);
    figure.append(line);
  }
  return [figure];
}

// The magnitudes of a value in calibration, and where its range ends; drawn into a copy of the page's template.
function histogram({ value, range, end, profile }) {
  const figure = document.getElementById("histogram").content.cloneNode(true);
  const edge = (384 * range) / end;
  const bars = { bar: "", bad: "" };
  [...profile].forEach((digit, i) => {
    const height = (parseInt(digit, 36) * 5) / 3;
    bars[6 * i + 3 > edge ? "bad" : "bar"] += `M${6 * i} 60v-${height}h5v${height}z`;
  });
  figure.querySelector(".bar").setAttribute("d", bars.bar);
  figure.querySelector(".bad").setAttribute("d", bars.bad);
  figure.querySelector(".border").setAttribute("d", `M${edge} 0V60`);
  figure.querySelector(".to").textContent = end.toPrecision(3);
  figure.querySelector("b").textContent = value;
  figure.querySelector("i").textContent = range.toPrecision(3);
  return figure;
}

// What is comparable between records: names, verdicts, and what more than one stage measured where there are more.
function columns(records) {
  const all = new Set(records.map(({ stage }) => stage));
  const having = new Map();
  // The record with most cells gives their order.
  for (const { stage, cells } of [...records].sort((a, b) => b.cells.length - a.cells.length))
    for (const { head, kind } of cells)
      if (["value", "op"].includes(head) || !["text", "number"].includes(kind))
        having.set(head, (having.get(head) ?? new Set()).add(stage));
  const isName = (head) => ["value", "op", "verdict", "own dB"].includes(head);
  return [...having].filter(([head, by]) => isName(head) || by.size > 1 || all.size === 1).map(([head]) => head);
}

document.querySelectorAll(".stages a").forEach((link) => breakable(link, link.textContent));
const grids = [...document.querySelectorAll(".grid")].map((root) => new Grid(root));
const stages = grids.filter(({ root }) => root.dataset.stage);
const follow = grids.find(({ follows }) => follows);
const byValue = () => follow.views.find((view) => view.heads[1] === "value");

// report.html#layer=layer1.1.conv2 opens that module or value: for links in the page and from elsewhere.
function visit() {
  const [, wanted] = /^#layer=(.*)$/.exec(location.hash) ?? [];
  if (!wanted || !follow) return;
  const layer = decodeURIComponent(wanted);
  const isModule = follow.views[0].rows.some((row) => row[0] === layer);
  follow.only.checked = false;
  follow.open.add(layer);
  follow.show(isModule ? 0 : follow.views.indexOf(byValue()), layer);
  document.getElementById("follow").scrollIntoView();
}
addEventListener("hashchange", visit);
visit();

// Pointing at the heat map, or the arrow keys on it, read one layer in all stages; a click or Enter follows it.
function readHeatMap(svg) {
  const { slots, height } = svg.dataset;
  const { heads, rows } = follow.views[0];
  const width = svg.viewBox.baseVal.width / slots;
  const merged = heads.indexOf("merged into");
  const isStage = (column) => column > 1 && column !== merged && column < heads.indexOf("op");
  const measured = rows.filter((row) => row.some((text, column) => text && isStage(column)));
  const inOrder = measured.sort((a, b) => a.at(-1) - b.at(-1));
  let at = -1;
  const read = (slot) => {
    at = Math.min(slots - 1, Math.max(0, slot));
    const [layer, , ...cells] = inOrder[at];
    const texts = heads.slice(2, heads.indexOf("op")).flatMap((stage, i) => (cells[i] ? [`${stage} ${cells[i]}`] : []));
    svg.querySelector(".cursor").setAttribute("d", `M${(at + 0.5) * width} 20V${height}`);
    svg.closest("section").querySelector(".reading").textContent = `${layer}: ${texts.join(" · ")}`;
  };
  const go = () => (location.hash = `#layer=${encodeURIComponent(inOrder[at][0])}`);
  svg.onpointermove = ({ clientX, clientY }) => {
    const { x } = new DOMPoint(clientX, clientY).matrixTransform(svg.getScreenCTM().inverse());
    read(Math.floor(x / width));
  };
  svg.onclick = (event) => {
    svg.onpointermove(event);
    go();
  };
  svg.tabIndex = 0;
  svg.onkeydown = ({ key }) => {
    if (key === "ArrowLeft" || key === "ArrowRight") read(at + (key === "ArrowLeft" ? -1 : 1));
    if (key === "Enter" && at >= 0) go();
  };
}
document.querySelectorAll("#heat svg").forEach(readHeatMap);
