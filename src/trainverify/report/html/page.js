"use strict";
(() => {
  const PAGE = 200;
  const all = JSON.parse(document.getElementById("data").textContent);
  const lists = [];
  for (const root of document.querySelectorAll(".filtered")) {
    const { texts, rows } = all[Number(root.dataset.report)];
    const body = root.querySelector("tbody");
    const search = root.querySelector("input[type=search]");
    const boxes = [...root.querySelectorAll("input[data-status]")];
    const count = root.querySelector(".count");
    const more = root.querySelector("button.more");
    let shown = PAGE;
    const draw = () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const states = new Set(boxes.filter((b) => b.checked).map((b) => b.dataset.status));
      const found = rows.filter((r) => {
        const text = (r[0] + " " + r[1]).toLowerCase();
        return states.has(texts[r[3]]) && words.every((w) => text.includes(w));
      });
      body.replaceChildren(...found.slice(0, shown).map((r) => {
        const row = document.createElement("tr");
        row.className = texts[r[3]].replace(/\W+/g, "-");
        for (const value of [texts[r[3]], r[0], r[1], r[2], texts[r[4]], texts[r[5]]]) {
          row.insertCell().textContent = value;
        }
        return row;
      }));
      count.textContent = found.length === rows.length ? `${rows.length} in all` : `${found.length} of ${rows.length}`;
      more.hidden = found.length <= shown;
    };
    const again = () => { shown = PAGE; draw(); };
    search.addEventListener("input", again);
    for (const b of boxes) b.addEventListener("change", again);
    more.addEventListener("click", () => { shown += 5 * PAGE; draw(); });
    lists.push({ root, search, boxes, again });
    draw();
  }
  const nearest = () => lists.find((l) => l.root.getBoundingClientRect().bottom > 0) || lists[lists.length - 1];
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !lists.length) return;
    const typing = event.target.matches("input[type=search], textarea");
    const list = nearest();
    if (event.key === "Escape") {
      for (const l of lists) { l.search.value = ""; for (const b of l.boxes) b.checked = true; l.search.blur(); l.again(); }
    } else if (!typing && event.key === "/") {
      event.preventDefault();
      list.search.focus();
      list.root.scrollIntoView({ block: "nearest" });
    } else if (!typing && event.key === "d") {
      for (const b of list.boxes) b.checked = b.dataset.status === "different" || !list.boxes.some((x) => x.dataset.status === "different");
      list.again();
      list.root.scrollIntoView({ block: "nearest" });
    }
  });
})();
