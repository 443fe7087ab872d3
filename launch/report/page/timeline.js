// The timeline of one plan above the memory of its devices; both share the time axis.

const KINDS = {
  F: ["forward", 0], R: ["recomputation", 1], B: ["backward", 2], I: ["backward, input half", 2],
  W: ["backward, weight half", 1], S: ["start of a gradient sync", 3], U: ["update", 3],
};
const KIND_COLOURS = { F: "#77aadd", R: "#99ddff", B: "#ee8866", I: "#ee8866", W: "#eedd88", S: "#b03060", U: "#44bb99" };
const WITHOUT_BATCH = "SU"; // kinds that belong to no micro-batch
const LIGHTNESS = [78, 70, 56];
const GOLDEN = 137.508; // degrees between the hues of neighbouring numbers
const LABELLED = 600; // most operations with a label inside

let shownDetail = null;
let wholeRange = [0, 1];

const detailOf = (row) => JSON.parse(byId(`detail-${row}`).textContent);

function operationColour(operations, index, mode) {
  const kind = operations.kind[index];
  if (WITHOUT_BATCH.includes(kind) || mode === "kind") return KIND_COLOURS[kind];
  const number = { micro: operations.micro_batch, stage: operations.stage, pipe: operations.pipe }[mode][index];
  return `hsl(${(210 + number * GOLDEN) % 360}, 58%, ${LIGHTNESS[KINDS[kind][1]]}%)`;
}

function operationWords(detail, index) {
  const { kind, stage, pipe, label: numbers, start, duration, exposed, device } = detail.operations;
  const batch = numbers[index] ? ` of micro-batch ${numbers[index]}` : "";
  const pipes = detail.operations.pipe.some((one) => one > 0) ? `, pipe ${pipe[index]}` : "";
  const hidden = exposed[index] > 0 ? `, with ${seconds(exposed[index])} of exposed tensor-parallel collectives` : "";
  return `device ${device[index]}: ${KINDS[kind[index]][0]}${batch}, stage ${stage[index]}${pipes}: ` +
    `${seconds(duration[index])}, from ${seconds(start[index])} to ${seconds(start[index] + duration[index])}${hidden}`;
}

function timelineTraces(detail, unit, mode) {
  const operations = detail.operations, count = operations.start.length;
  const place = new Map(detail.devices.map((device, number) => [device, number]));
  const bars = {
    type: "bar", orientation: "h", name: "operations", width: 0.78, base: operations.start.map((time) => time / unit.size),
    x: operations.duration.map((time) => time / unit.size), y: operations.device.map((device) => place.get(device)),
    marker: {
      color: operations.start.map((_, index) => operationColour(operations, index, mode)),
      line: { width: count > LABELLED ? 0 : 0.5, color: colour("back") },
    },
    customdata: operations.start.map((_, index) => label(operationWords(detail, index)).replace(": ", "<br>").replaceAll(", ", "<br>")),
    hovertemplate: "%{customdata}<extra></extra>", showlegend: false,
  };
  if (count <= LABELLED) {
    Object.assign(bars, {
      text: operations.label, textposition: "inside", insidetextanchor: "middle", textangle: 0,
      textfont: { color: colour("op-text"), size: 11 }, constraintext: "none",
    });
  }
  const traces = [bars];
  const exposed = operations.exposed.map((time, index) => [time, index]).filter(([time]) => time > 0);
  if (exposed.length) {
    traces.push({
      type: "bar", orientation: "h", name: "exposed tp", width: 0.78, hoverinfo: "skip", showlegend: false,
      base: exposed.map(([time, index]) => (operations.start[index] + operations.duration[index] - time) / unit.size),
      x: exposed.map(([time]) => time / unit.size), y: exposed.map(([, index]) => place.get(operations.device[index])),
      marker: { color: colour("tensor") },
    });
  }
  if (detail.syncs.length) {
    traces.push({
      type: "bar", orientation: "h", name: "gradient sync", width: 0.14, showlegend: false,
      base: detail.syncs.map((sync) => sync.start / unit.size), x: detail.syncs.map((sync) => sync.duration / unit.size),
      y: detail.syncs.map((sync) => place.get(sync.device) + 0.46), marker: { color: colour("sync") },
      customdata: detail.syncs.map((sync) =>
        `gradient sync of stage ${sync.stage}<br>${seconds(sync.duration)}<br>from ${seconds(sync.start)}`),
      hovertemplate: "%{customdata}<extra></extra>",
    });
  }
  return traces;
}

function memoryTraces(detail, unit, memory) {
  const many = Math.max(1, detail.memory.length - 1);
  return detail.memory.map((curve, number) => ({
    type: "scatter", mode: "lines", name: `device ${curve.device}`, yaxis: "y2", showlegend: false,
    x: curve.times.map((time) => time / unit.size), y: curve.held.map((size) => size / memory.size),
    line: { shape: "hv", width: 1.6, color: `hsl(${205 + (130 * number) / many}, 60%, 55%)` },
    customdata: curve.held.map((size, index) => `device ${curve.device}<br>${bytes(size)}<br>from ${seconds(curve.times[index])}`),
    hovertemplate: "%{customdata}<extra></extra>",
  }));
}

function drawTimeline(row, mode, toCapacity, keepRange = false) {
  if (!shownDetail || shownDetail.row !== row) shownDetail = detailOf(row);
  const detail = shownDetail, place = byId("timeline");
  const unit = timeUnit([detail.makespan]), memory = memoryUnit(detail.peaks);
  const largest = Math.max(...detail.peaks), capacities = detail.capacity.filter((size) => size !== null);
  const least = capacities.length ? Math.min(...capacities) : null;
  const end = (detail.gap ? detail.gap[0] : detail.makespan) / unit.size;
  wholeRange = [0, (detail.makespan / unit.size) * 1.005];
  const kept = keepRange && place.layout ? place.layout.xaxis.range : [0, end * 1.005];
  const devices = detail.devices.length;
  const top = Math.max(largest, toCapacity && least !== null ? Math.max(...capacities) : 0) / memory.size;
  const shapes = [], annotations = [];
  if (least !== null && (toCapacity || least <= largest * 1.1)) {
    for (const size of new Set(capacities)) {
      shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, yref: "y2", y0: size / memory.size, y1: size / memory.size,
        line: { color: colour("bad"), width: 1.5, dash: "dash" } });
      annotations.push({ xref: "paper", x: 1, xanchor: "right", yref: "y2", y: size / memory.size, yanchor: "top", showarrow: false,
        text: `capacity ${bytes(size)}`, font: { color: colour("bad"), size: 11 } });
    }
  }
  if (detail.gap) {
    const [from, to] = detail.gap.map((time) => time / unit.size);
    shapes.push({ type: "rect", xref: "x", x0: from, x1: to, yref: "paper", y0: 0, y1: 1, line: { width: 0 }, fillcolor: colour("panel") });
    annotations.push({ xref: "x", x: (from + to) / 2, yref: "paper", y: 0.7, showarrow: false, text: "not drawn" });
  }
  byId("timeline").style.height = `${Math.min(1000, 330 + 40 * devices)}px`;
  const split = 190 / (330 + 40 * devices - 80); // the part of the height that memory takes
  const grid = { gridcolor: colour("grid"), linecolor: colour("line"), zerolinecolor: colour("line") };
  Plotly.react("timeline", [...timelineTraces(detail, unit, mode), ...memoryTraces(detail, unit, memory)], layout({
    barmode: "overlay", dragmode: "pan", shapes, annotations, margin: { l: 90, r: 20, t: 10, b: 56 },
    uniformtext: { mode: "hide", minsize: 9 },
    xaxis: { title: titled(`time (${unit.name}), simulated`), range: kept, anchor: "y2", showgrid: false },
    yaxis: {
      domain: [split + 0.06, 1], range: [devices - 0.4, -0.6], fixedrange: true, showgrid: false, zeroline: false,
      tickvals: detail.devices.map((_, number) => number), ticktext: detail.devices.map((device) => `device ${device}`),
    },
    yaxis2: { ...grid, domain: [0, split], range: [0, top * 1.12], title: titled(`memory (${memory.name})`), fixedrange: true, automargin: true },
  }), { ...CONFIG, scrollZoom: true });
  describe(detail, mode, least, memory);
}

function describe(detail, mode, least, memory) {
  const legend = byId("timeline-legend"), operations = detail.operations;
  const shown = Object.keys(KINDS).filter((kind) => operations.kind.includes(kind));
  legend.replaceChildren(...shown.map((kind) => {
    const shade = WITHOUT_BATCH.includes(kind) || mode === "kind" ? KIND_COLOURS[kind] : `hsl(210, 58%, ${LIGHTNESS[KINDS[kind][1]]}%)`;
    return swatch(shade, KINDS[kind][0]);
  }));
  if (mode !== "kind") legend.append(element("span", {}, `hue: ${{ micro: "micro-batch", stage: "stage", pipe: "pipe" }[mode]}`));
  if (operations.exposed.some((time) => time > 0)) legend.append(swatch(colour("tensor"), "exposed tensor-parallel collectives"));
  if (detail.syncs.length) legend.append(swatch(colour("sync"), "gradient sync (thin)"));
  const texts = ["Simulated by the cost model, not measured: one pipeline, the one that takes longest."];
  if (detail.iterations > 1) texts.push(`The schedule overlaps iterations: ${detail.iterations} of them are shown.`);
  if (detail.devices.length < detail.total_devices) texts.push(`${detail.devices.length} of ${detail.total_devices} devices are drawn.`);
  if (operations.start.length < detail.total_operations) {
    texts.push(`${operations.start.length.toLocaleString("en-US")} of ${counted(detail.total_operations, "operation")} are in this page.`);
  }
  if (detail.gap) texts.push(`Those from ${seconds(detail.gap[0])} to ${seconds(detail.gap[1])} are not.`);
  texts.push("Memory: activations come and go; weights, gradients, optimizer state, messages and workspace count at their peak.");
  texts.push(least === null
    ? "The capacity of the devices is not known: cluster.memory_gib sets it."
    : `A process may fill ${bytes(least)} (cluster.memory_gib, or the accelerator's file).`);
  texts.push("Wheel or + and −: zoom; drag or ← →: move; 0: whole; n, p: next and previous operation.");
  byId("timeline-note").textContent = texts.join(" ");
}

const swatch = (shade, text) => {
  const box = element("i");
  box.style.background = shade;
  return element("span", {}, box, text);
};

function zoom(how) {
  const place = byId("timeline"), [from, to] = place.layout.xaxis.range, width = to - from;
  const ranges = {
    in: [from + width / 4, to - width / 4], out: [from - width / 2, to + width / 2],
    left: [from - width / 4, to - width / 4], right: [from + width / 4, to + width / 4], all: wholeRange,
  };
  Plotly.relayout(place, { "xaxis.range": ranges[how] });
}

function timelineKeys() {
  const place = byId("timeline");
  let at = -1;
  place.addEventListener("keydown", (event) => {
    const how = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all" }[event.key];
    const step = { n: 1, p: -1 }[event.key];
    if (how) zoom(how);
    else if (step) {
      const count = shownDetail.operations.start.length;
      at = (at + step + count) % count;
      byId("timeline-readout").textContent = operationWords(shownDetail, at);
      Plotly.Fx.hover(place, [{ curveNumber: 0, pointNumber: at }]);
    } else return;
    event.preventDefault();
  });
  place.on("plotly_hover", (event) => {
    const point = event.points[0];
    if (point.curveNumber === 0) {
      at = point.pointNumber;
      byId("timeline-readout").textContent = operationWords(shownDetail, at);
    }
  });
  for (const button of document.querySelectorAll("[data-zoom]")) button.addEventListener("click", () => zoom(button.dataset.zoom));
}
