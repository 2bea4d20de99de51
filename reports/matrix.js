"use strict";
// Filter and keys. Without this script the page shows everything, and a cell still opens its panel.
(() => {
  const $ = (id) => document.getElementById(id);
  const rows = [...document.querySelectorAll(".row[data-state]")];
  const groups = [...document.querySelectorAll(".group")];
  const text = $("text"), level = $("level"), state = $("state"), differs = $("differs");
  let last = null; // the cell that has, or last had, the focus

  document.body.classList.add("live");
  const tools = document.querySelector(".filter"); // the head of the table sticks below it
  new ResizeObserver(() => document.body.style.setProperty("--tools", `${tools.offsetHeight}px`)).observe(tools);

  const cellsOf = (row) => [...row.querySelectorAll("a.c")];
  const open = () => {
    let name = location.hash.slice(1);
    try {
      name = decodeURIComponent(name);
    } catch {
      // no encoded name: taken as it is
    }
    return name.includes("@") ? document.querySelector(`a.c[href="#${CSS.escape(name)}"]`) : null;
  };

  function filter() {
    const wanted = text.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const fits = wanted.every((word) => row.dataset.text.includes(word))
        && (!level.value || row.dataset.level === level.value)
        && (!state.value || row.dataset.state.split("|").includes(state.value))
        && (!differs.checked || row.dataset.differs === "yes");
      row.hidden = !fits;
      shown += fits;
    }
    for (const group of groups) group.hidden = !group.querySelector(".row[data-state]:not([hidden])");
    $("shown").textContent = `${shown} of ${rows.length} promises`;
    $("nothing").hidden = shown > 0;
    if (!last || last.closest("[hidden]")) reach(cellsOf(rows.find((row) => !row.hidden) || rows[0])[0]);
  }

  function reach(cell) { // the one cell that the Tab key stops at
    if (last) last.tabIndex = -1;
    last = cell;
    if (last) last.tabIndex = 0;
  }

  function neighbour(cell, key) {
    const here = cellsOf(cell.closest(".row")), at = here.indexOf(cell);
    if (key === "ArrowLeft" || key === "ArrowRight") return here[at + (key === "ArrowRight" ? 1 : -1)];
    if (key === "Home" || key === "End") return here[key === "Home" ? 0 : here.length - 1];
    const visible = rows.filter((row) => !row.hidden);
    const next = visible[visible.indexOf(cell.closest(".row")) + (key === "ArrowDown" ? 1 : -1)];
    return next && cellsOf(next)[at];
  }

  function close() {
    const cell = open(), top = scrollY;
    location.hash = ""; // ends :target, which replaceState does not
    history.replaceState(null, "", location.pathname + location.search);
    scrollTo({ top, behavior: "instant" });
    if (cell && !cell.closest("[hidden]")) cell.focus({ preventScroll: true });
  }

  function opened() {
    const cell = open();
    document.body.classList.toggle("reading", !!cell);
    for (const one of document.querySelectorAll("a.c[aria-expanded=true]")) one.setAttribute("aria-expanded", "false");
    if (!cell) return;
    cell.setAttribute("aria-expanded", "true");
    reach(cell);
    const panel = $(cell.getAttribute("href").slice(1));
    panel.scrollTop = 0;
    panel.focus({ preventScroll: true });
  }

  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const field = event.target.closest("input, select");
    if (event.key === "Escape") {
      if (open()) close();
      else if (field === text) { text.value = ""; filter(); text.blur(); }
      return;
    }
    if (field) return;
    if (event.key === "/") { event.preventDefault(); text.focus(); return; }
    const shown = open(), cell = shown || event.target.closest("a.c");
    if (!cell || !["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) return;
    if (shown && !["ArrowLeft", "ArrowRight"].includes(event.key)) return; // these scroll the panel
    event.preventDefault();
    const next = neighbour(cell, event.key);
    if (!next) return;
    if (shown) location.replace(next.hash);
    else next.focus();
  });

  document.addEventListener("click", (event) => {
    if (!event.target.closest(".close, .shade")) return;
    event.preventDefault();
    close();
  });
  document.addEventListener("focusin", (event) => { if (event.target.matches("a.c")) reach(event.target); });
  for (const kind of ["input", "change"]) $("promises").addEventListener(kind, filter);
  addEventListener("hashchange", opened);
  for (const row of rows) for (const cell of cellsOf(row)) cell.tabIndex = -1;
  filter();
  opened();
})();
