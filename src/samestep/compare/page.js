// The step cursor of a comparison's charts: one for all of them, moved by pointer, touch or arrow keys.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const steps = data.steps;
  const charts = data.charts.map((chart) => ({ ...chart, element: document.getElementById(`chart-${chart.id}`) }));
  let at = steps.length - 1;

  const percent = (value, low, high) => (high > low ? ((value - low) / (high - low)) * 100 : 50);
  const across = (step) => percent(step, data.first, data.last);

  // Where a value is drawn, in percent from the top; null where it is not drawn.
  function down(chart, value) {
    if (value === null) return null;
    if (!chart.log) return 100 - percent(value, chart.low, chart.high);
    if (value <= 0) return 100;
    return 100 - percent(Math.log10(value), chart.low, chart.high);
  }

  function shown(chart, value) {
    if (value === undefined || value === null) return "–";
    if (chart.log) return value === 0 ? "0 (equal)" : value.toExponential(2);
    return value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(3) : value.toFixed(4);
  }

  function place(index) {
    at = Math.max(0, Math.min(steps.length - 1, index));
    for (const chart of charts) {
      const said = [];
      const x = `${across(steps[at])}%`;
      const line = chart.element.querySelector(".cursor");
      line.setAttribute("x1", x);
      line.setAttribute("x2", x);
      chart.element.querySelector(".at").textContent = `at step ${steps[at]}`;
      for (const series of chart.series) {
        const value = series.values[at];
        const y = down(chart, value);
        const dot = chart.element.querySelector(`.dot[data-series="${series.index}"]`);
        dot.setAttribute("cx", x);
        dot.setAttribute("cy", `${y ?? 0}%`);
        dot.setAttribute("visibility", y === null ? "hidden" : "visible");
        chart.element.querySelector(`button[data-series="${series.index}"] .value`).textContent = shown(chart, value);
        said.push(`${series.name} ${shown(chart, value)}`);
      }
      const plot = chart.element.querySelector(".plot");
      plot.setAttribute("aria-valuenow", steps[at]);
      plot.setAttribute("aria-valuetext", `step ${steps[at]}: ${said.join(", ")}`);
    }
  }

  function nearest(plot, event) {
    const box = plot.getBoundingClientRect();
    const share = Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
    const wanted = data.first + share * (data.last - data.first);
    let low = 0;
    let high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] < wanted) low = middle;
      else high = middle;
    }
    return Math.abs(steps[low] - wanted) <= Math.abs(steps[high] - wanted) ? low : high;
  }

  function key(event) {
    const far = Math.max(1, Math.round(steps.length / 10));
    const moves = {
      ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1,
      PageDown: at - far, PageUp: at + far, Home: 0, End: steps.length - 1,
    };
    if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    place(moves[event.key]);
  }

  function toggle(index) {
    const hidden = document.querySelector(`button[data-series="${index}"]`).getAttribute("aria-pressed") === "true";
    for (const button of document.querySelectorAll(`button[data-series="${index}"]`)) {
      button.setAttribute("aria-pressed", String(!hidden));
    }
    for (const mark of document.querySelectorAll(`.plot [data-series="${index}"]`)) {
      mark.classList.toggle("off", hidden);
    }
  }

  for (const chart of charts) {
    const plot = chart.element.querySelector(".plot");
    plot.addEventListener("pointermove", (event) => place(nearest(plot, event)));
    plot.addEventListener("pointerdown", (event) => place(nearest(plot, event)));
    plot.addEventListener("keydown", key);
    for (const button of chart.element.querySelectorAll("button")) {
      button.addEventListener("click", () => toggle(button.dataset.series));
    }
  }
  if (steps.length) place(at);
})();
