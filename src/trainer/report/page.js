// Shows the values of all curves at the pointer. A page that is made again while it is open needs it only once.
const readable = (x) => x.toLocaleString("en", { maximumSignificantDigits: 5 });
function read(event) {
  const figure = event.target.closest?.("figure"), [line, text] = figure ? figure.querySelectorAll("i, span") : [];
  document.querySelectorAll("figure.read").forEach((other) => other.classList.remove("read"));
  if (!figure) return;
  const frame = figure.getBoundingClientRect(), size = [...figure.querySelectorAll("source")]
    .findIndex((source) => matchMedia(source.media).matches);
  const x = (event.clientX - frame.left) / frame.width, y = (event.clientY - frame.top) / frame.height;
  figure.areas ??= JSON.parse(figure.dataset.values);
  for (const area of figure.areas) {
    const [left, top, right, bottom] = area.boxes.at(size), [low, high] = area.limits;
    if (x < left || x > right || y < top || y > bottom) continue;
    let at = low + (x - left) / (right - left) * (high - low);
    const points = area.curves.filter((curve) => curve[1] == "default").flatMap((curve) => curve[2]);
    const near = (xs) => xs.reduce((a, b) => b !== null && Math.abs(b - at) < Math.abs(a - at) ? b : a, Infinity);
    const reach = (high - low) / Math.min(100, points.length || 1), close = near(points);
    if (Math.abs(close - at) <= reach) at = close;
    const rows = [`${area.label}: ${readable(at)}`];
    for (const [name, style, xs, ys] of area.curves) {
      let index = xs.indexOf(near(xs));
      if (style == "steps-post") index = xs.findLastIndex((one) => one !== null && one <= at);
      else if (style == "steps-pre") index = xs.findIndex((one) => one >= at);
      else if (Math.abs(xs[index] - at) > reach) index = -1;
      if (index >= 0 && ys[index] !== null) rows.push(`${name}: ${readable(ys[index])}`);
    }
    text.textContent = rows.join("\n");
    const place = left + (at - low) / (high - low) * (right - left);
    line.style.cssText = `left:${100 * place}%;top:${100 * top}%;height:${100 * (bottom - top)}%`;
    const [side, share] = place > 0.5 ? ["right", 1 - place] : ["left", place];
    text.style.cssText = `top:${100 * top}%;${side}:calc(${100 * share}% + 8px)`;
    figure.classList.add("read");
  }
}
for (const kind of ["pointermove", "pointerdown"]) document.addEventListener(kind, read);

// The list of runs: a click on a heading sorts it, and boxes choose the runs to compare. Called for each new list.
const chosen = new Set(), order = { column: -1, falls: false };
function arrange() {
  const table = document.querySelector(".runs"), compare = document.querySelector("button.compare");
  if (!table) return;
  const shown = () => { compare.disabled = chosen.size < 2; };
  for (const row of table.tBodies[0].rows) {
    const box = document.createElement("input");
    Object.assign(box, { type: "checkbox", checked: chosen.has(row.dataset.run), ariaLabel: "compare " + row.dataset.run });
    box.onchange = () => { chosen[box.checked ? "add" : "delete"](row.dataset.run); shown(); };
    row.cells[0].prepend(box);
  }
  const sort = () => {
    const key = (row) => row.cells[order.column]?.dataset.key ?? "";
    const before = (x, y) => isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
    if (order.column < 0) return;
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      return x === "" || y === "" ? (x === "") - (y === "") : before(x, y) * (order.falls ? -1 : 1);
    }));
    [...table.tHead.rows[0].cells].forEach((cell, column) => {
      cell.ariaSort = column != order.column ? null : order.falls ? "descending" : "ascending";
    });
  };
  table.tHead.onclick = (event) => {
    const column = event.target.closest("th")?.cellIndex ?? -1;
    order.falls = column == order.column && !order.falls;
    order.column = column;
    sort();
  };
  compare.onclick = () => { location.search = new URLSearchParams([...chosen].map((run) => ["run", run])); };
  shown();
  sort();
}
