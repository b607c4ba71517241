"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent.trim();
    const isNumber = head.classList.contains("n");
    const rows = [...table.tBodies[0].rows].map((row) => [key(row), row]);
    rows.sort(([a], [b]) => {
      if (a === "" || b === "") return (a === "") - (b === "");
      const order = isNumber ? Number(a) - Number(b) || 0 : a.localeCompare(b, "en", { numeric: true });
      return up ? order : -order;
    });
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }));
}
const show = () => {
  const found = location.hash && document.getElementById(location.hash.slice(1));
  if (found && found.tagName === "DETAILS") { found.open = true; found.scrollIntoView(); }
};
addEventListener("hashchange", show);
show();
addEventListener("beforeprint", () => {
  const all = document.querySelectorAll("details");
  if (all.length <= 60) for (const one of all) one.open = true;
});
