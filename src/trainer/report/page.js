// The page of tools.watch: fetches `state` from its server every two seconds.
let version = -1;
const main = document.getElementById("main"), notice = document.getElementById("notice");
const label = (item) => item.firstChild.textContent.replace(/[0-9,]/g, "");
async function refresh() {
  try {
    const answer = await fetch("state?version=" + version, { cache: "no-store" });
    const state = await answer.json();
    notice.textContent = state.notice;
    notice.classList.toggle("late", state.is_late);
    if (state.body !== null) {
      const open = new Set([...main.querySelectorAll("details[open]")].map(label));
      main.innerHTML = state.body;
      main.querySelectorAll("details").forEach((item) => { item.open = open.has(label(item)); });
      version = state.version;
      arrange();
    }
  } catch (error) {
    notice.textContent = "The watch command does not answer. Start it again to see new steps.";
    notice.classList.add("late");
  }
  setTimeout(refresh, 2000);
}

// The list of runs: a click on a heading sorts it. Called for each new list.
const order = { column: -1, falls: false };
function arrange() {
  const table = document.querySelector(".runs");
  if (!table) return;
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
  sort();
}
refresh();
