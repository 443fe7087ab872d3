// The table of all plans: sorted by a heading, filtered by words and comparisons.

const spent = timeUnit(report.rows.map((row) => row.measured_s ?? row.predicted_s));
const held = memoryUnit(report.rows.map((row) => row.measured_peak ?? row.predicted_peak));
const wasMeasured = report.rows.some((row) => row.measured_s !== null);

const COLUMNS = [
  { key: "engine", head: "engine", how: "system that trains", text: true },
  { key: "dp", head: "dp", how: "data-parallel degree", always: true },
  { key: "tp", head: "tp", how: "tensor-parallel degree", always: true },
  { key: "pp", head: "pp", how: "pipeline depth", always: true },
  { key: "micro_batch_size", head: "micro-\nbatch", how: "samples per micro-batch", always: true },
  { key: "schedule", head: "schedule", how: "pipeline schedule", text: true, always: true },
  { key: "recompute", head: "recom-\nputed", how: "fraction of all operations that are recomputed" },
  { key: "partition", head: "partition", how: "method that cuts the stages", text: true },
  { key: "placement", head: "placement", how: "order of ranks on devices", text: true },
  { key: "more", head: "more", how: "unusual choices", text: true },
  { key: "measured_s", head: `measured\n(${spent.name})`, how: "measured: seconds per iteration", unit: spent.size },
  { key: "spread_s", head: `spread\n(${spent.name})`, how: "measured: slowest minus fastest iteration", unit: spent.size },
  { key: "predicted_s", head: `predicted\n(${spent.name})`, how: "predicted by the cost model", unit: spent.size },
  { key: "corrected_s", head: `corrected\n(${spent.name})`, how: "predicted, corrected by the trials of the other plans",
    unit: spent.size },
  { key: "error", head: "error\n(%)", how: "predicted / measured − 1", unit: 0.01, decimals: 1, signed: true },
  { key: "samples_per_s", head: "samples\nper s", how: "global batch / time of an iteration" },
  { key: "tokens_per_s", head: "tokens\nper s", how: "tokens of the global batch / time of an iteration" },
  { key: "model_flops_per_s_per_device", head: "TFLOP/s\nper device", how: "FLOPs that the model needs, without recomputation",
    unit: 1e12 },
  { key: "hardware_flops_per_s_per_device", head: "with recom-\nputation", how: "TFLOP/s per device, with what is recomputed",
    unit: 1e12 },
  { key: "mfu", head: "MFU\n(%)", how: "model FLOPs utilisation: FLOP/s without recomputation / peak of the devices", unit: 0.01,
    decimals: 1 },
  { key: "measured_peak", head: `peak,\nmeasured (${held.name})`, how: "measured: fullest rank", unit: held.size },
  { key: "predicted_peak", head: `peak,\npredicted (${held.name})`, how: "predicted by the cost model: fullest device",
    unit: held.size },
  { key: "trials", head: "trials", how: "trials of this plan" },
  { key: "status", head: "status", how: "ok: measured; predicted: not run", text: true, always: true },
];

const recomputes = (row) => row.hardware_flops_per_s_per_device !== row.model_flops_per_s_per_device;
const isRate = (column) => ["samples_per_s", "tokens_per_s"].includes(column.key);

// A column in which all plans agree says nothing.
function shownColumns() {
  return COLUMNS.filter((column) => {
    const values = new Set(report.rows.map((row) => row[column.key]));
    if (column.always) return true;
    if (column.key === "hardware_flops_per_s_per_device" && !report.rows.some(recomputes)) return false;
    if (values.size === 1 && (values.has(null) || values.has("") || values.has("none") || values.has("auto3d"))) return false;
    return values.size > 1 || "unit" in column || isRate(column);
  });
}

function cellText(column, value) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value !== "number") return String(value);
  if (!("shown" in column)) return String(value);
  const text = fixed(Math.abs(value) / (column.unit ?? 1), column.shown);
  return value < 0 ? `−${text}` : column.signed ? `+${text}` : text;
}

const COMPARED = {
  dp: "dp", tp: "tp", pp: "pp", mb: "micro_batch_size", "micro-batch": "micro_batch_size", schedule: "schedule",
  engine: "engine", recompute: "recompute", partition: "partition", placement: "placement", status: "status", trials: "trials",
};
const COMPARISONS = {
  "=": (a, b) => a === b, "!=": (a, b) => a !== b, "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b,
  ">=": (a, b) => a >= b,
};

// A function of a row and its text that says whether the row is shown.
function filterOf(text) {
  const tests = text.trim().toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const found = /^([a-z-]+)(<=|>=|!=|=|<|>)(.+)$/.exec(word);
    if (!found || !(found[1] in COMPARED || found[1] === "time" || found[1] === "error")) return (row, all) => all.includes(word);
    const [, name, sign, wanted] = found;
    return (row) => {
      let value = row[COMPARED[name]];
      if (name === "time") value = row.measured_s ?? row.predicted_s;
      if (name === "error") value = row.error === null ? null : Math.abs(row.error) * 100;
      if (value === null) return false;
      const numeric = typeof value === "number" || (value !== "" && !Number.isNaN(Number(value)));
      return COMPARISONS[sign](numeric ? Number(value) : String(value).toLowerCase(), numeric ? Number(wanted) : wanted);
    };
  });
  return (row, all) => tests.every((test) => test(row, all));
}

function makeTable(onPick) {
  const table = byId("table"), columns = shownColumns();
  for (const column of columns) {
    if ("unit" in column || isRate(column)) {
      const values = report.rows.map((row) => row[column.key]).filter((value) => value !== null);
      column.shown = column.decimals ?? decimalsOf(values.map((value) => value / (column.unit ?? 1)));
      if (column.key === "spread_s") column.shown = columns.find((one) => one.key === "measured_s").shown;
    }
  }
  const head = element("tr", {}, element("th", { scope: "col", className: "text" }, "#"));
  const body = element("tbody");
  const fronts = new Set(report.fronts[wasMeasured ? "measured" : "predicted"]);
  const detailed = new Set(report.detailed.map(({ row }) => row));
  const lines = report.rows.map((row, number) => {
    const line = element("tr", { className: fronts.has(number) ? "front" : "" });
    const name = String(number + 1);
    const first = detailed.has(number)
      ? element("button", { type: "button", className: "pick", textContent: name, "aria-label": `Draw plan ${name}: ${row.name}` })
      : name;
    line.append(element("td", { className: "text" }, first));
    for (const column of columns) {
      const cell = element("td", { className: column.text ? "text" : "", textContent: cellText(column, row[column.key]) });
      if (column.key === "predicted_s" && row.place_assumed) {
        cell.textContent += " ~";
        cell.title = "with half or twice the bandwidth of the assumed links, the plan changes places with a neighbour";
      }
      if (column.key === "corrected_s" && row.corrected_s !== null) {
        const [low, high] = row.corrected_interval_s.map((value) => fixed(value / spent.size, column.shown));
        cell.textContent += ` (${low} to ${high})`;
        cell.title = "four of five measurements lie between these times, by how much the ratios of the other plans differ";
      }
      if (column.key === "status" && row.problem) {
        cell.title = row.problem;
        cell.classList.add("bad");
      }
      line.append(cell);
    }
    if (detailed.has(number)) {
      line.classList.add("pickable");
      line.addEventListener("click", () => onPick(number));
    } else {
      line.title = "No timeline: only the best plans and those on the Pareto front have one.";
    }
    body.append(line);
    return { number, row, line, all: `${row.name} ${line.textContent}`.toLowerCase() };
  });
  let sorted = { key: null, down: false };

  function sortBy(column, heading) {
    const down = sorted.key === column.key && !sorted.down;
    sorted = { key: column.key, down };
    for (const other of head.children) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const factor = down ? -1 : 1;
    lines.sort((a, b) => {
      const [x, y] = [a.row[column.key], b.row[column.key]];
      if (x === null || y === null) return (x === null) - (y === null) || a.number - b.number; // unknown values come last
      const compared = typeof x === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
      return factor * compared || a.number - b.number;
    });
    body.append(...lines.map(({ line }) => line));
  }

  for (const column of columns) {
    const heading = element("th", { scope: "col", className: column.text ? "text" : "", title: column.how });
    const button = element("button", { type: "button", textContent: column.head });
    button.addEventListener("click", () => sortBy(column, heading));
    heading.append(button);
    head.append(heading);
  }
  table.append(element("thead", {}, head), body);

  function filter() {
    const shows = filterOf(byId("filter").value);
    let shown = 0;
    for (const { row, line, all } of lines) {
      line.hidden = !shows(row, all);
      shown += !line.hidden;
    }
    byId("count").textContent = shown === lines.length ? counted(shown, "plan")
      : `${shown.toLocaleString("en-US")} of ${counted(lines.length, "plan")}`;
  }
  byId("filter").addEventListener("input", filter);
  filter();
  const basis = wasMeasured ? "the measured time where there is one, else the predicted time" : "the predicted time";
  byId("table-note").textContent =
    `Times are per iteration. Throughput: by ${basis}. ${report.rates} ${report.measured} ${sentence(report.predicted)} ` +
    "Predicted peak: weights, gradients, optimizer state, activations and messages, by the cost model. Green edge: on the " +
    `Pareto front of ${wasMeasured ? "measured" : "predicted"} time against memory.`;
  return (number) => {
    for (const one of lines) {
      one.line.classList.toggle("chosen", one.number === number);
      const button = one.line.querySelector("button.pick");
      if (button) button.setAttribute("aria-pressed", one.number === number);
    }
  };
}
