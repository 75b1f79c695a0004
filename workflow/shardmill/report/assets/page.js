"use strict";
// Draws every plot in the page's own colours, and again when the theme or the width changes.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 640px)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function axis(own) {
    const tick = { color: colour("--muted") };
    return {
      automargin: true, gridcolor: colour("--line"), linecolor: colour("--line"), zerolinecolor: colour("--line"),
      tickfont: tick, ...own, title: { ...(own || {}).title, font: { size: 12, color: colour("--muted") } },
    };
  }

  function draw(place) {
    const figure = figures[place.dataset.figure];
    const own = figure.layout;
    const layout = {
      margin: { l: 8, r: 8, t: 22, b: 8 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("--ink") },
      hoverlabel: { bgcolor: colour("--panel"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
      legend: { orientation: "h", y: narrow.matches ? -0.3 : -0.18 }, bargap: 0.05, dragmode: false,
      ...own, xaxis: axis({ fixedrange: true, ...own.xaxis }), yaxis: axis({ fixedrange: true, ...own.yaxis }),
    };
    layout.shapes = (own.shapes || []).map((shape) => ({ ...shape, line: { ...shape.line, color: colour("--muted") } }));
    layout.annotations = (own.annotations || []).map((note) => ({ ...note, font: { size: 11, color: colour("--muted") } }));
    if (own.height) place.style.height = `${own.height}px`;
    return Plotly.react(place, figure.data, layout, { responsive: true, displayModeBar: false });
  }

  const drawAll = () => Promise.all([...document.querySelectorAll("[data-figure]")].map(draw));
  drawAll().then(() => { document.documentElement.dataset.drawn = "yes"; });
  dark.addEventListener("change", drawAll);
  narrow.addEventListener("change", drawAll);
})();
