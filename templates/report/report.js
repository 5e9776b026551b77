"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  // ---------------------------------------------------------------- tables sort by their columns

  const valueOf = (row, column) => {
    const cell = row.cells[column];
    if (!cell) return "";
    const number = cell.dataset.v === undefined ? NaN : Number(cell.dataset.v);
    return Number.isNaN(number) ? cell.textContent.trim() : number;
  };

  const compare = (a, b) => {
    const numbers = typeof a === "number" && typeof b === "number";
    return numbers ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
  };

  for (const table of all("table.sortable")) {
    all("thead th", table).forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        all("thead th", table).forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const body = table.tBodies[0];
        const rows = [...body.rows].map((row) => [valueOf(row, column), row]);
        rows.sort(([a], [b]) => (up ? compare(a, b) : compare(b, a)));
        body.append(...rows.map(([, row]) => row));
      });
    });
  }

  // ---------------------------------------------------------------- a step and its lines

  const walk = document.getElementById("walk");
  const said = document.getElementById("walk-text");
  let lines = [];
  let place = -1;

  const clear = () => {
    all(".on, .by, .here").forEach((found) => found.classList.remove("on", "by", "here"));
    lines = [];
    place = -1;
    walk.hidden = true;
  };

  const tell = (name) => {
    const count = lines.length === 1 ? "1 line makes it" : `${lines.length} lines make it`;
    const at = place < 0 ? "" : `, at ${place + 1} of ${lines.length}`;
    said.textContent = `${name}: ${lines.length ? count : "no line of a kernel carries its name alone"}${at}`;
  };

  let name = "";
  const choose = (id) => {
    clear();
    const row = document.getElementById(id);
    if (!row) return;
    all(`[data-near~="${id}"]`).forEach((found) => found.classList.add("by"));
    all(`[data-of~="${id}"]`).forEach((found) => found.classList.add("on"));
    lines = all(`.line[data-of~="${id}"]`).filter((line) => /k\d+s\d+$/.test(line.id));
    name = row.cells[0].textContent.trim();
    walk.hidden = false;
    tell(name);
  };

  const step = (by) => {
    if (!lines.length) return;
    all(".here").forEach((found) => found.classList.remove("here"));
    place = place < 0 && by < 0 ? lines.length - 1 : (place + by + lines.length) % lines.length;
    const line = lines[place];
    line.classList.add("here");
    line.tabIndex = -1;
    line.focus({ preventScroll: true });
    line.scrollIntoView({ block: "center", inline: "nearest" });
    line.parentElement.scrollLeft = 0;
    tell(name);
  };

  const chosen = () => {
    const id = location.hash.slice(1);
    if (/^c\d+i\d+$/.test(id)) choose(id);
  };

  document.getElementById("walk-on").addEventListener("click", () => step(1));
  document.getElementById("walk-back").addEventListener("click", () => step(-1));
  document.getElementById("walk-off").addEventListener("click", clear);
  addEventListener("hashchange", chosen);
  addEventListener("click", (event) => {
    const link = event.target.closest("a[href^='#c']");
    if (link && link.getAttribute("href") === location.hash) chosen();  // the same step once more
  });
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || walk.hidden) return;
    if (event.key === "n") step(1);
    else if (event.key === "p") step(-1);
    else if (event.key === "Escape") clear();
  });
  chosen();

  // ---------------------------------------------------------------- contents take no room on a small screen

  if (matchMedia("(max-width: 60rem)").matches) all(".contents > details").forEach((found) => { found.open = false; });
})();
