// The page: its head, what is chosen, its theme.

function head() {
  document.title = `${report.recipe}: auto3d report`;
  byId("title").textContent = report.recipe;
  byId("subject").textContent = report.subject;
  const tried = report.rows.filter((row) => row.trials > 0);
  const emulated = tried.some((row) => row.emulated);
  const source = byId("source");
  source.classList.toggle("predicted", !tried.length);
  source.textContent = tried.length
    ? `${emulated ? "Emulated" : "Measured"}: ${counted(tried.length, "plan")} of the last ${report.verb}. ` +
      `Predicted: the same plans${report.verb === "tune" ? " and the others of its search" : ""}. Page written ${report.written}.`
    : `Predicted only: this page is the result of a search, and nothing on it was measured. Page written ${report.written}.`;
  byId("remarks").hidden = !report.remarks.length;
  byId("remarks").append(...report.remarks.map((remark) => element("li", { textContent: remark })));
  const best = report.rows[0], list = byId("figures");
  if (best) {
    const measured = best.measured_s !== null;
    figure(list, `Fastest plan, ${measured ? "measured" : "predicted"}`, best.name);
    figure(list, "Time of an iteration", seconds(measured ? best.measured_s : best.predicted_s), measured ? "measured" : "predicted");
    if (best.samples_per_s !== null) figure(list, "Throughput", `${significant(best.samples_per_s)} samples/s`, perDevice(best) || (measured ? "measured" : "predicted"));
    const errors = report.rows.filter((row) => row.error !== null).map((row) => Math.abs(row.error));
    if (errors.length) {
      const mean = errors.reduce((sum, error) => sum + error, 0) / errors.length;
      figure(list, "Mean error of predictions", `${fixed(mean * 100, 1)} %`, `over ${counted(errors.length, "plan")}`);
    }
  }
  const refused = report.refused.reduce((sum, reason) => sum + reason.count, 0);
  figure(list, "Refused", counted(refused, "candidate"), counted(report.refused.length, "reason"));
}

function refusals() {
  if (!report.refused.length) {
    byId("refused-note").textContent = "None were refused.";
    byId("refusals").parentElement.hidden = true;
    return;
  }
  const most = Math.max(...report.refused.map((reason) => reason.count));
  const columns = element("tr", {}, ...["candidates", "", "reason of the example", "example"].map((text, place) =>
    element("th", { scope: "col", className: place ? "text" : "", textContent: text })));
  const body = element("tbody", {}, ...report.refused.map((reason) => {
    const bar = element("span", { className: "bar", "aria-hidden": "true" });
    bar.style.width = `${(8 * reason.count) / most}rem`;
    return element("tr", {}, element("td", { textContent: reason.count.toLocaleString("en-US") }),
      element("td", { className: "text" }, bar), element("td", { className: "text wrap", textContent: reason.reason }),
      element("td", { className: "text wrap", textContent: reason.example }));
  }));
  byId("refusals").append(element("thead", {}, columns), body);
  byId("refused-note").textContent = "Reasons that differ only in their numbers count as one; the first candidate met is the example.";
}

function commands() {
  for (const { purpose, command } of report.commands) {
    const code = element("code", { textContent: command });
    const button = element("button", { type: "button", textContent: "Copy", "aria-label": `Copy: ${command}` });
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(command);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code); // the browser forbids it: the user can copy the selection
        button.textContent = "Selected";
      }
    });
    byId("commands").append(element("div", {}, element("dt", { textContent: purpose }), element("dd", {}, code, button)));
  }
}

// TFLOP/s of one device and the part of its peak, in words; empty if the FLOPs are not known.
function perDevice(row) {
  if (row.model_flops_per_s_per_device === null) return "";
  const again = recomputes(row) ? `, ${significant(row.hardware_flops_per_s_per_device / 1e12)} with recomputation` : "";
  return `${significant(row.model_flops_per_s_per_device / 1e12)} TFLOP/s per device${again}` +
    (row.mfu === null ? "" : `; MFU ${fixed(row.mfu * 100, 1)} %`);
}

function planFigures(row) {
  const one = report.rows[row], list = byId("plan-figures");
  list.replaceChildren();
  if (one.measured_s !== null) {
    figure(list, one.emulated ? "Emulated" : "Measured", seconds(one.measured_s), `${counted(one.trials, "trial")}, spread ${seconds(one.spread_s)}`);
  }
  figure(list, "Predicted", seconds(one.predicted_s), one.error === null ? "not measured" : `error ${percent(one.error)}`);
  const iterations = shownDetail.iterations, rest = one.predicted_s - shownDetail.makespan / iterations;
  figure(list, iterations > 1 ? `Timeline, ${iterations} iterations` : "Timeline", seconds(shownDetail.makespan),
    Math.abs(rest) > 0.001 * one.predicted_s ? `the prediction has ${seconds(Math.abs(rest))} ${rest > 0 ? "more" : "less"} per iteration` : "simulated");
  if (one.measured_peak !== null) figure(list, "Peak, measured", bytes(one.measured_peak), "fullest rank");
  const peaks = shownDetail.peaks, [low, high] = [Math.min(...peaks), Math.max(...peaks)];
  figure(list, "Peak, predicted", bytes(high), low < high ? `fullest device; emptiest: ${bytes(low)}` : "each device");
  if (one.samples_per_s !== null) {
    const tokens = one.tokens_per_s === null ? "" : `${significant(one.tokens_per_s)} tokens/s; `;
    figure(list, "Throughput", `${significant(one.samples_per_s)} samples/s`, `${tokens}${perDevice(one)}`);
  }
  figure(list, "Pipeline", `${counted(one.pp, "device")}, ${counted(one.micro_batches, "micro-batch", "micro-batches")}`,
    `${counted(one.ranks, "rank")}: dp ${one.dp} × tp ${one.tp} × pp ${one.pp}`);
}

function savePlan() {
  const address = URL.createObjectURL(new Blob([shownDetail.plan], { type: "application/json" }));
  const link = element("a", { href: address, download: "plan.json" });
  link.click();
  URL.revokeObjectURL(address);
}

function main() {
  head();
  refusals();
  commands();
  let chosen = report.detailed.length ? report.detailed[0].row : null, markChosen = () => {};
  const basis = byId("basis");

  const charts = {
    "parts-chart": () => drawParts(chosen, pick),
    "memory-chart": () => drawMemory(basis.value, chosen, pick),
    "accuracy-chart": () => drawAccuracy(chosen, pick),
  };
  const seen = new Set(); // a chart is drawn when the reader comes near it
  function see(id) {
    if (!seen.has(id)) {
      seen.add(id);
      charts[id]();
    }
  }
  function drawAll() {
    for (const id of seen) charts[id]();
  }
  function drawPlan(keepRange = false) {
    if (chosen === null) return;
    drawTimeline(chosen, byId("colours").value, byId("capacity").checked, keepRange);
    planFigures(chosen);
    byId("plan").value = String(chosen);
    byId("save").disabled = !shownDetail.plan;
    byId("save").title = shownDetail.plan ? "" : "This plan cannot be saved: `auto3d tune` makes it ready to run.";
    byId("timeline").setAttribute("aria-label", `Timeline and memory of plan ${chosen + 1}: ${report.rows[chosen].name}`);
    markChosen(chosen);
  }
  function pick(row) {
    if (row === chosen || !report.detailed.some((detail) => detail.row === row)) return;
    chosen = row;
    byId("timeline-readout").textContent = "";
    drawPlan();
    drawAll();
  }

  const measured = report.rows.some((row) => row.measured_s !== null && row.measured_peak !== null);
  basis.value = measured ? "measured" : "predicted";
  if (!measured) basis.disabled = true;
  basis.addEventListener("change", drawAll);
  markChosen = makeTable(pick);
  byId("plan").append(...report.detailed.map(({ row }) => element("option", { value: String(row), textContent: `${row + 1}: ${report.rows[row].name}` })));
  byId("plan").addEventListener("change", () => pick(Number(byId("plan").value)));
  byId("colours").addEventListener("change", () => drawPlan(true));
  byId("capacity").addEventListener("change", () => drawPlan(true));
  byId("save").addEventListener("click", savePlan);

  const theme = makeTheme(() => { drawPlan(true); drawAll(); });
  theme();
  if (chosen === null) empty("timeline", "No plan has a prediction, so there is no timeline.");
  else {
    drawPlan();
    timelineKeys();
  }
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) see(entry.target.id);
    document.documentElement.dataset.ready = "yes";
  }, { rootMargin: "300px" });
  for (const id of Object.keys(charts)) observer.observe(byId(id));
  narrow.addEventListener("change", drawAll);
  addEventListener("beforeprint", () => Object.keys(charts).forEach(see));
}

// The theme of the system until the reader chooses one, which the browser remembers.
function makeTheme(redraw) {
  const system = matchMedia("(prefers-color-scheme: dark)"), button = byId("theme"), key = "auto3d-report-theme";
  const remembered = () => { try { return localStorage.getItem(key); } catch { return null; } };
  function apply() {
    const name = remembered() ?? (system.matches ? "dark" : "light");
    document.documentElement.dataset.theme = name;
    button.textContent = name === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Use ${name === "dark" ? "light" : "dark"} colours`);
  }
  button.addEventListener("click", () => {
    try { localStorage.setItem(key, document.documentElement.dataset.theme === "dark" ? "light" : "dark"); } catch { return; }
    apply();
    redraw();
  });
  system.addEventListener("change", () => { apply(); redraw(); });
  return apply;
}

main();
