"use strict";
// Numbers with units, and elements made of text: nothing that the page shows is read as HTML.

const report = JSON.parse(document.getElementById("report").textContent);
const byId = (id) => document.getElementById(id);

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "scope") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

// Plotly reads some tags in its labels; these characters then are text.
const label = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function unitOf(values, units) {
  const known = values.filter((value) => value > 0).sort((a, b) => a - b);
  const middle = known.length ? known[Math.floor(known.length / 2)] : 1;
  return units.find(([size]) => middle >= size) ?? units[units.length - 1];
}

const TIME_UNITS = [[1e-1, 1, "s"], [1e-4, 1e-3, "ms"], [0, 1e-6, "µs"]];
const MEMORY_UNITS = [[2 ** 31, 2 ** 30, "GiB"], [2 ** 20, 2 ** 20, "MiB"], [0, 2 ** 10, "KiB"]];
const timeUnit = (values) => { const [, size, name] = unitOf(values, TIME_UNITS); return { size, name }; };
const memoryUnit = (values) => { const [, size, name] = unitOf(values, MEMORY_UNITS); return { size, name }; };

// Decimals that show `digits` significant digits of the smallest value.
function decimalsOf(values, digits = 3) {
  const known = values.filter((value) => Number.isFinite(value) && value !== 0).map(Math.abs);
  if (!known.length) return 0;
  return Math.max(0, Math.min(6, digits - 1 - Math.floor(Math.log10(Math.min(...known)))));
}

const formats = new Map(); // decimals -> format; making one is slow
function fixed(value, decimals) {
  if (!formats.has(decimals)) {
    formats.set(decimals, new Intl.NumberFormat("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }));
  }
  return formats.get(decimals).format(value);
}

const significant = (value, digits = 3) => fixed(value, value === 0 ? 0 : decimalsOf([value], digits));

function seconds(value) {
  if (value === null || value === undefined) return "unknown";
  const unit = timeUnit([Math.abs(value)]);
  return `${significant(value / unit.size)} ${unit.name}`;
}

function bytes(value) {
  if (value === null || value === undefined) return "unknown";
  const unit = memoryUnit([Math.abs(value)]);
  return `${significant(value / unit.size)} ${unit.name}`;
}

const percent = (value) => `${value < 0 ? "−" : "+"}${fixed(Math.abs(value) * 100, 1)} %`;
const counted = (count, one, many = `${one}s`) => `${count.toLocaleString("en-US")} ${count === 1 ? one : many}`;
const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function figure(list, term, value, small = "") {
  list.append(element("div", {}, element("dt", { textContent: term }),
    element("dd", {}, value, small ? element("small", { textContent: small }) : "")));
}
