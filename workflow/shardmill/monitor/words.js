"use strict";

// Elements and values in words: what the parts of the page are made of.

const GIB = 2 ** 30;

const $ = (id) => document.getElementById(id);

/** An element with text and children. Never innerHTML: excerpts of prompts are anybody's text. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const number = (value, digits = 0) =>
  value === null || value === undefined
    ? "–"
    : value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const share = (value, digits = 0) => (value === null || value === undefined ? "–" : number(100 * value, digits) + " %");
const dollars = (value) => (value === null || value === undefined ? "–" : "$" + number(value, 2));
const gib = (value) => (value === null || value === undefined ? "–" : number(value / GIB, 1) + " GiB");
const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

function bytes(value) {
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6]]) {
    if (value >= size) return number(value / size, 1) + " " + unit;
  }
  return number(value / 1e3, 1) + " kB";
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const minutes = Math.floor(seconds / 60);
  const hours = Math.floor(seconds / 3600);
  if (minutes < 1) return Math.max(0, Math.floor(seconds)) + " s";
  if (hours < 1) return minutes + " min";
  if (hours < 48) return `${hours} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function clock(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const moment = new Date(seconds * 1000);
  const today = moment.toDateString() === new Date().toDateString();
  const time = moment.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  return today ? time : moment.toLocaleDateString() + " " + time;
}

function table(target, head, rows) {
  const cell = (tag, value) => {
    const [text, kind] = Array.isArray(value) ? value : [value, ""];
    return make(tag, kind ? { class: kind } : {}, text);
  };
  const lines = rows.map((row) => make("tr", {}, ...row.map((value) => cell("td", value))));
  const heading = head ? make("thead", {}, make("tr", {}, ...head.map((name) => cell("th", name)))) : null;
  target.replaceChildren(...[heading, make("tbody", {}, ...lines)].filter((part) => part !== null));
}
