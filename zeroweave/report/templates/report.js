"use strict";
(() => {
  const chart = document.getElementById("chart");
  const wide = document.getElementById("wide");
  const readout = document.getElementById("readout");
  const most = 256;
  let zoom = 1;
  let chosen = null;
  document.documentElement.classList.add("js");

  const start = (bar) => bar.x.baseVal.valueInSpecifiedUnits;
  const end = (bar) => start(bar) + bar.width.baseVal.valueInSpecifiedUnits;
  const bars = (lane) => [...lane.querySelectorAll("rect")];
  const lanes = () => [...chart.querySelectorAll(".lane")].filter((lane) => lane.getClientRects().length);

  function show(share) {
    const left = (share / 100) * wide.clientWidth;
    if (left < chart.scrollLeft || left > chart.scrollLeft + 0.9 * chart.clientWidth) {
      chart.scrollLeft = left - chart.clientWidth / 3;
    }
  }

  // Bars that are in sight, and long enough for it, carry the name of their call or bucket.
  function label() {
    for (const text of chart.querySelectorAll(".lane text")) text.remove();
    const each = wide.clientWidth / 100;
    const [left, right] = [chart.scrollLeft / each, (chart.scrollLeft + chart.clientWidth) / each];
    for (const lane of lanes()) {
      for (const bar of lane.querySelectorAll("rect:not(.wait, .other)")) {
        if (end(bar) < left || start(bar) > right) continue;
        const name = bar.querySelector("title").textContent.split(/[ :]/)[1];
        if ((end(bar) - start(bar)) * each < 7 * name.length + 6) continue;
        const text = document.createElementNS(lane.namespaceURI, "text");
        text.setAttribute("x", `${start(bar)}%`);
        text.setAttribute("dx", 3);
        text.setAttribute("y", 13);
        text.textContent = name;
        lane.append(text);
      }
    }
  }

  let due = 0;
  function soon() {
    cancelAnimationFrame(due);
    due = requestAnimationFrame(label);
  }

  function magnify(factor) {
    const middle = (chart.scrollLeft + chart.clientWidth / 2) / wide.clientWidth;
    zoom = factor === 0 ? 1 : Math.min(most, Math.max(1, zoom * factor));
    wide.style.width = `${100 * zoom}%`;
    chart.dataset.level = zoom >= 16 ? 2 : zoom >= 4 ? 1 : 0;
    document.getElementById("zoom").textContent = `× ${zoom}`;
    chart.scrollLeft = middle * wide.clientWidth - chart.clientWidth / 2;
    if (chosen) show(start(chosen));
    soon();
  }

  function choose(bar) {
    if (!bar) return;
    if (chosen) chosen.classList.remove("on");
    chosen = bar;
    bar.classList.add("on");
    const lane = bar.closest(".lane");
    const course = bar.closest(".picture").dataset.course;
    readout.textContent = `${course}, ${lane.dataset.lane}: ${bar.querySelector("title").textContent}`;
    show(start(bar));
  }

  function nearest(lane, share) {
    let best = null;
    let distance = Infinity;
    for (const bar of bars(lane)) {
      const away = Math.max(start(bar) - share, share - end(bar), 0);
      if (away < distance) [best, distance] = [bar, away];
    }
    return best;
  }

  function along(step) {
    const visible = chosen && chosen.getClientRects().length;
    const all = bars(visible ? chosen.parentElement : lanes()[0]);
    choose(visible ? all[all.indexOf(chosen) + step] : all[0]);
  }

  function across(step) {
    const all = lanes();
    const at = chosen ? all.indexOf(chosen.closest(".lane")) : -1;
    if (at < 0) choose(bars(all[0])[0]);
    else if (all[at + step]) choose(nearest(all[at + step], (start(chosen) + end(chosen)) / 2));
  }

  function row() {
    if (!chosen) return;
    const line = document.getElementById(`i${chosen.dataset.i}`);
    line.closest("details").open = true;
    line.focus();
    line.scrollIntoView({ block: "center" });
  }

  const keys = {
    ArrowRight: () => along(1),
    ArrowLeft: () => along(-1),
    ArrowDown: () => across(1),
    ArrowUp: () => across(-1),
    Home: () => choose(chosen && bars(chosen.parentElement)[0]),
    End: () => choose(chosen && bars(chosen.parentElement).at(-1)),
    "+": () => magnify(2),
    "=": () => magnify(2),
    "-": () => magnify(0.5),
    0: () => magnify(0),
    Enter: row,
  };
  chart.addEventListener("keydown", (event) => {
    const action = event.ctrlKey || event.metaKey || event.altKey ? undefined : keys[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  chart.addEventListener("click", (event) => {
    if (event.target.dataset.i) choose(event.target);
  });
  chart.addEventListener("scroll", soon);
  addEventListener("resize", soon);
  for (const pick of document.querySelectorAll(".picks input")) pick.addEventListener("change", soon);
  soon();
  document.getElementById("more").addEventListener("click", () => magnify(2));
  document.getElementById("less").addEventListener("click", () => magnify(0.5));
  document.getElementById("whole").addEventListener("click", () => magnify(0));
})();
