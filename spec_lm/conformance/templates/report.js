
"use strict";
// Filters the clauses of all sections; the page reads without this.
const form = document.getElementById("filters");
const clauses = [...document.querySelectorAll("details.clause")];
const toggle = document.getElementById("toggle");
const cells = new Map([...document.querySelectorAll(".cells a")].map(cell => [cell.getAttribute("href").slice(1), cell]));
const words = new Map(clauses.map(clause => [clause, clause.textContent.toLowerCase()]));

function filter() {
  const asked = new FormData(form);
  const outcomes = asked.getAll("outcome"), text = asked.get("text").trim().toLowerCase();
  let shown = 0;
  for (const clause of clauses) {
    const {outcome, level, operator} = clause.dataset;
    const matches = outcomes.includes(outcome) && [level, ""].includes(asked.get("level"))
      && [operator, ""].includes(asked.get("operator")) && words.get(clause).includes(text);
    clause.hidden = !matches;
    cells.get(clause.querySelector(".body").id).classList.toggle("off", !matches);
    shown += matches;
  }
  for (const kind of [".group", ".part"])
    for (const part of document.querySelectorAll(kind))
      part.hidden = !part.querySelector("details.clause:not([hidden])");
  document.getElementById("shown").textContent = `${shown} of ${clauses.length} shown`;
}

// A cell of the matrix leads to its clause, even where filters hide it, and once more when it was there before.
function reveal(hash) {
  const target = document.getElementById(decodeURIComponent(hash.slice(1)));
  const clause = target && target.closest("details.clause");
  if (!clause) return;
  if (clause.hidden) { form.reset(); filter(); }
  clause.open = true;
  clause.scrollIntoView();
}

form.addEventListener("input", filter);
form.addEventListener("submit", event => event.preventDefault());
toggle.addEventListener("click", () => {
  const open = toggle.textContent === "Open all";
  for (const clause of clauses) if (!clause.hidden) clause.open = open;
  toggle.textContent = open ? "Close all" : "Open all";
});
for (const cell of cells.values()) cell.addEventListener("click", () => reveal(cell.hash));
window.addEventListener("hashchange", () => reveal(location.hash));
form.hidden = false;
filter();
reveal(location.hash);
