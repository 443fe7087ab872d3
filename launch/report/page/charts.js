// Charts of all plans: where the time goes, time against memory, predicted against measured.

const PARTS = [
  ["compute_s", "compute", "compute"], ["host_s", "host", "host"], ["bubble_s", "bubble", "bubble"],
  ["tensor_s", "exposed tp", "tensor"], ["message_s", "exposed p2p", "message"],
  ["sync_s", "exposed dp", "sync"], ["update_s", "update", "update"],
];
const CONFIG = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

const narrow = matchMedia("(max-width: 640px)"); // a chart then has no room for names of plans and long titles

// The title of an axis, near its numbers, so that nothing of it is cut off.
const titled = (text) => ({ text, standoff: 8 });

function layout(more = {}) {
  const axis = { gridcolor: colour("grid"), linecolor: colour("line"), zerolinecolor: colour("line"), automargin: true };
  const { xaxis = {}, yaxis = {}, ...rest } = more;
  return {
    paper_bgcolor: colour("back"), plot_bgcolor: colour("back"), hovermode: "closest",
    font: { color: colour("text"), family: "system-ui, DejaVu Sans, sans-serif", size: 12 },
    margin: { l: 60, r: 20, t: 30, b: 56 },
    hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("line"), font: { color: colour("text") }, align: "left" },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal" },
    xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, ...rest,
  };
}

function empty(id, text) {
  const place = byId(id);
  place.replaceChildren(text);
  place.classList.add("empty");
  place.removeAttribute("tabindex");
}

// Points that the keyboard reaches: n and p step through them, Enter picks the plan of one.
function readable(id, points, onPick) {
  const place = byId(id), readout = byId(id.replace("-chart", "-readout"));
  place.points = points;
  if (place.readable) return;
  place.readable = true;
  let at = -1;
  place.addEventListener("keydown", (event) => {
    const step = { n: 1, p: -1 }[event.key];
    if (step && place.points.length) {
      at = (at + step + place.points.length) % place.points.length;
      const point = place.points[at];
      readout.textContent = point.text;
      Plotly.Fx.hover(place, [{ curveNumber: point.curve, pointNumber: point.number }]);
      event.preventDefault();
    } else if (event.key === "Enter" && at >= 0 && onPick) onPick(place.points[at].row);
  });
}

function pickable(id, onPick) {
  const place = byId(id);
  if (place.pickable) return;
  place.pickable = true;
  place.on("plotly_click", (event) => {
    const row = event.points[0].data.meta?.rows?.[event.points[0].pointNumber];
    if (row !== undefined) onPick(row);
  });
  place.on("plotly_hover", (event) => {
    const row = event.points[0].data.meta?.rows?.[event.points[0].pointNumber];
    if (row !== undefined) byId(id.replace("-chart", "-readout")).textContent = words(row);
  });
}

function words(number) {
  const row = report.rows[number];
  const texts = [`${number + 1}: ${row.name}`];
  if (row.measured_s !== null) texts.push(`measured ${seconds(row.measured_s)}`);
  if (row.predicted_s !== null) texts.push(`predicted ${seconds(row.predicted_s)}`);
  if (row.error !== null) texts.push(`error ${percent(row.error)}`);
  if (row.measured_peak !== null) texts.push(`measured peak ${bytes(row.measured_peak)}`);
  if (row.predicted_peak !== null) texts.push(`predicted peak ${bytes(row.predicted_peak)}`);
  return texts.join(", ");
}

const lines = (number) => label(words(number)).replace(/, /g, "<br>");

function drawParts(chosen, onPick) {
  const detailed = report.detailed;
  if (!detailed.length) return empty("parts-chart", "No plan has a prediction.");
  const rows = detailed.map(({ row }) => row);
  const unit = timeUnit(rows.map((row) => report.rows[row].predicted_s));
  const places = rows.map((_, place) => place);
  const traces = PARTS.map(([key, name, shade]) => ({
    type: "bar", orientation: "h", name, y: places, x: detailed.map(({ parts }) => parts[key] / unit.size),
    marker: { color: colour(shade) }, meta: { rows },
    text: detailed.map(({ row, parts }) => `${label(`${row + 1}: ${report.rows[row].name}`)}<br>${name} ${seconds(parts[key])}`),
    textposition: "none", hovertemplate: "%{text}<extra></extra>",
  })).filter((trace) => trace.x.some((value) => value !== 0));
  const measured = places.filter((place) => report.rows[rows[place]].measured_s !== null);
  if (measured.length) {
    traces.push({
      type: "scatter", mode: "markers", name: "measured", y: measured,
      x: measured.map((place) => report.rows[rows[place]].measured_s / unit.size), meta: { rows: measured.map((place) => rows[place]) },
      marker: { symbol: "diamond", size: 9, color: colour("text"), line: { width: 1, color: colour("back") } },
      text: measured.map((place) => lines(rows[place])), hovertemplate: "%{text}<extra></extra>",
    });
  }
  byId("parts-chart").style.height = `${110 + 24 * rows.length}px`;
  Plotly.react("parts-chart", traces, layout({
    barmode: "relative", bargap: 0.25,
    xaxis: { title: titled(`time of an iteration (${unit.name})`), rangemode: "tozero" },
    yaxis: {
      autorange: "reversed", tickvals: places, fixedrange: true, showgrid: false, zeroline: false,
      ticktext: rows.map((row) => {
        const name = narrow.matches ? `${row + 1}` : label(`${row + 1}: ${report.rows[row].name}`);
        return row === chosen ? `<b>${name}</b>` : name;
      }),
    },
  }), CONFIG);
  readable("parts-chart", places.map((place) => ({
    curve: 0, number: place, row: rows[place],
    text: `${words(rows[place])}; ` + PARTS.map(([key, name]) => `${name} ${seconds(detailed[place].parts[key])}`).join(", "),
  })), onPick);
  pickable("parts-chart", onPick);
  byId("parts-note").textContent =
    "Predicted, not measured: the parts of one iteration on the pipeline that takes longest. Compute: the busiest device, " +
    "with recomputation. Exposed: what compute does not hide of tensor-parallel collectives (tp), messages between stages " +
    "(p2p) and gradient syncs (dp), each found by predicting again without it. Bubble: time that devices wait for each " +
    `other. The ${counted(rows.length, "plan")} with a timeline are shown${measured.length ? "; ◆ is the measured time" : ""}. ` +
    "Keys: n, p: next and previous plan, Enter: draw it.";
}

function drawMemory(basis, chosen, onPick) {
  const [time, size] = basis === "measured" ? ["measured_s", "measured_peak"] : ["predicted_s", "predicted_peak"];
  const known = report.rows.map((_, number) => number)
    .filter((number) => report.rows[number][time] !== null && report.rows[number][size] !== null);
  if (!known.length) {
    return empty("memory-chart", basis === "measured" ? "No plan has a measured time and a measured peak memory." : "No plan has a prediction.");
  }
  const front = report.fronts[basis], on = new Set(front);
  const unit = timeUnit(known.map((row) => report.rows[row][time]));
  const memory = memoryUnit(known.map((row) => report.rows[row][size]));
  const fullest = basis === "measured" ? "rank" : "device";
  const points = (rows, more) => ({
    type: "scatter", mode: "markers", x: rows.map((row) => report.rows[row][size] / memory.size),
    y: rows.map((row) => report.rows[row][time] / unit.size), meta: { rows }, text: rows.map(lines),
    hovertemplate: "%{text}<extra></extra>", ...more,
  });
  const others = known.filter((row) => !on.has(row));
  const traces = [
    points(others, { name: "other plans", marker: { color: colour("bubble"), size: 7 } }),
    points(front, { name: "Pareto front", mode: "lines+markers", line: { shape: "hv", color: colour("update"), width: 1.5 },
      marker: { color: colour("update"), size: 9 } }),
  ];
  if (known.includes(chosen)) {
    traces.push(points([chosen], { name: "plan drawn above", marker: { symbol: "circle-open", size: 16, color: colour("accent"), line: { width: 2.5 } } }));
  }
  Plotly.react("memory-chart", traces, layout({
    xaxis: { title: titled(`peak memory${narrow.matches ? "" : ` of the fullest ${fullest}`} (${memory.name}), ${basis}`) },
    yaxis: { title: titled(`time of an iteration (${unit.name}), ${basis}`) },
  }), CONFIG);
  readable("memory-chart", [...front.map((row, number) => ({ curve: 1, number, row, text: `on the front: ${words(row)}` })),
    ...others.map((row, number) => ({ curve: 0, number, row, text: words(row) }))], onPick);
  pickable("memory-chart", onPick);
  byId("memory-note").textContent =
    `${basis === "measured" ? "Measured" : "Predicted, not measured"}: ${counted(known.length, "plan")}. On the Pareto front: ` +
    `${counted(front.length, "plan")} that no other plan beats in both time and memory. Keys: n, p: step through the plans, ` +
    "those on the front first; Enter: draw one.";
}

function drawAccuracy(chosen, onPick) {
  const known = report.rows.map((_, number) => number).filter((number) => report.rows[number].error !== null);
  if (!known.length) return empty("accuracy-chart", "No plan has both a predicted and a measured time.");
  const unit = timeUnit(known.map((row) => report.rows[row].measured_s));
  const both = known.flatMap((row) => [report.rows[row].measured_s, report.rows[row].predicted_s].map((value) => value / unit.size));
  const [low, high] = [Math.min(...both) * 0.9, Math.max(...both) * 1.1];
  const logarithmic = high / low > 20;
  const line = (factor, name, dash) => ({
    type: "scatter", mode: "lines", x: [low, high], y: [low * factor, high * factor], name, hoverinfo: "skip",
    line: { color: colour("soft"), width: 1, dash }, showlegend: name !== "",
  });
  const points = (rows, more) => ({
    type: "scatter", mode: "markers", x: rows.map((row) => report.rows[row].measured_s / unit.size),
    y: rows.map((row) => report.rows[row].predicted_s / unit.size), meta: { rows }, text: rows.map(lines),
    hovertemplate: "%{text}<extra></extra>", ...more,
  });
  const traces = [
    points(known, { name: "plans", marker: { color: colour("compute"), size: 8 } }),
    line(1, "predicted = measured", "solid"), line(1.1, "± 10 %", "dot"), line(0.9, "", "dot"),
  ];
  if (known.includes(chosen)) {
    traces.push(points([chosen], { name: "plan drawn above", marker: { symbol: "circle-open", size: 16, color: colour("accent"), line: { width: 2.5 } } }));
  }
  const range = logarithmic ? [Math.log10(low), Math.log10(high)] : [low, high];
  const type = logarithmic ? "log" : "linear";
  Plotly.react("accuracy-chart", traces, layout({
    xaxis: { title: titled(`measured time of an iteration (${unit.name})`), range, type },
    yaxis: { title: titled(`predicted time (${unit.name})`), range, type },
  }), CONFIG);
  readable("accuracy-chart", known.map((row, number) => ({ curve: 0, number, row, text: words(row) })), onPick);
  pickable("accuracy-chart", onPick);
  const errors = known.map((row) => Math.abs(report.rows[row].error));
  const mean = errors.reduce((sum, error) => sum + error, 0) / errors.length;
  byId("accuracy-note").textContent =
    `${counted(known.length, "plan")}: mean absolute error ${fixed(mean * 100, 1)} %, largest ${fixed(Math.max(...errors) * 100, 1)} %. ` +
    "Predicted by the cost model before any correction by these measurements. Keys: n, p: next and previous plan, Enter: draw it.";
}
